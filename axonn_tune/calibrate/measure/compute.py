"""Measure computation: all ranks at once, as they will compute in training."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from axonn_tune.calibrate import plan
from axonn_tune.calibrate.ledger import gathered, least
from axonn_tune.calibrate.measure.attention import time_attention
from axonn_tune.calibrate.measure.gemm import settled_rates, time_gemm
from axonn_tune.calibrate.measure.kernels import KernelPoint, Workload, time_copy, time_step
from axonn_tune.calibrate.measure.timing import Timing
from axonn_tune.calibrate.setting import Setting
from axonn_tune.spec.calibration import RankSpeed
from axonn_tune.spec.points import AttentionPoint, GemmPoint, MemoryPoint


@dataclass(frozen=True)
class Products:
    """Timed products, each rank's speed, and what a reader should know of them."""

    points: tuple[GemmPoint, ...] = ()
    speeds: tuple[RankSpeed, ...] = ()
    notes: tuple[str, ...] = ()


def measure_products(setting: Setting) -> Products:
    """Products once the clocks have settled."""
    request, extent, device = setting.request, setting.extent, setting.device
    grid = plan.gemm_shapes(extent, request.dtypes)
    shapes = list(dict.fromkeys([*request.gemm_shapes, *grid]))
    setting.progress.expect(len(shapes) + 1)

    def settle() -> list[float]:
        rates = settled_rates(request.dtypes[0], device, extent.sustain_seconds)
        return [least(rate, device) for rate in rates]

    first, settled = setting.ledger.result("clocks", settle)
    setting.progress.restart()
    note = (
        f"products were measured after {extent.sustain_seconds:g} s of products, in which their "
        f"rate changed by {100 * (settled / first - 1):+.1f} %"
    )
    points, by_rank = [], []
    for shape in shapes:
        if shape.flops / settled > extent.longest_seconds:
            setting.progress.expect(-1)
            continue
        timings = setting.on_all(f"gemm {shape}", partial(time_gemm, shape, device, setting.effort))
        typical = _typical(timings)
        points.append(
            GemmPoint(
                shape.m,
                shape.n,
                shape.k,
                shape.mode,
                shape.dtype,
                typical.seconds,
                typical.spread_fraction,
            )
        )
        by_rank.append([timing.seconds for timing in timings])
    notes = [note]
    if request.n_shapes_left_out:
        notes.append(
            f"of the products of the search {request.n_shapes_left_out} were left out, those of "
            "the least likely grids"
        )
    return Products(tuple(points), _speeds(setting, by_rank), tuple(notes))


def measure_attention(setting: Setting) -> list[AttentionPoint]:
    """Fused attention in the shapes that were asked for."""
    shapes = setting.request.attention_shapes
    setting.progress.expect(2 * len(shapes))
    points = []
    for shape, backward in itertools.product(shapes, (False, True)):
        key = f"attention {shape} {'backward' if backward else 'forward'}"
        time_own = partial(time_attention, shape, backward, setting.device, setting.effort)
        timings = setting.on_all(key, time_own)
        typical = _typical(timings)
        points.append(
            AttentionPoint(
                shape.n_sequences,
                shape.n_heads,
                shape.seq_len,
                shape.head_dim,
                backward,
                True,
                shape.dtype,
                typical.seconds,
                typical.spread_fraction,
            )
        )
    return points


@dataclass(frozen=True)
class Kernels:
    """Timed kernels, and the host's time between two of them; None where none were timed."""

    points: tuple[KernelPoint, ...] = ()
    gap_seconds: float | None = None


def measure_kernels(setting: Setting) -> Kernels:
    """Everything but products: as small models run it, and plain copies."""
    request, extent, device = setting.request, setting.extent, setting.device
    loads = plan.workloads(extent, request.dtypes, request.models, device.type == "cuda")
    copies = plan.copy_sizes(extent, setting.memory_bytes)
    setting.progress.expect(len(loads) + len(copies))
    points: list[KernelPoint] = []
    gaps: list[float] = []
    for load in loads:
        found = setting.ledger.result(f"step of {load}", partial(_step_records, setting, load))
        points += [_POINTS[name](**values) for name, values in found["points"]]
        gaps.append(found["gap_seconds"])
    for nbytes in copies:
        time_own = partial(time_copy, nbytes, device, setting.effort)
        timings = setting.on_all(f"copy that moves {nbytes} bytes", time_own)
        typical = _typical(timings)
        points.append(MemoryPoint("copy", "fp32", nbytes, typical.seconds, typical.spread_fraction))
    return Kernels(tuple(points), min(gaps, default=None))


_POINTS = {point.__name__: point for point in (AttentionPoint, MemoryPoint)}


def _step_records(setting: Setting, load: Workload) -> dict[str, Any]:
    """Each kernel and size, and the gap, with its median over the ranks, as plain data."""
    own = time_step(load, setting.device, setting.extent.n_kernel_steps, setting.is_shared)
    steps = gathered(own)
    typical = [_median_point(points) for points in zip(*(s.points for s in steps), strict=True)]
    return {
        "points": [(type(point).__name__, asdict(point)) for point in typical],
        "gap_seconds": median(step.gap_seconds for step in steps),
    }


def _median_point(points: Sequence[KernelPoint]) -> KernelPoint:
    typical = _typical([Timing(point.seconds, point.spread_fraction) for point in points])
    return replace(points[0], seconds=typical.seconds, spread_fraction=typical.spread_fraction)


def _typical(timings: Sequence[Timing]) -> Timing:
    """Median over the ranks."""
    return Timing(
        median(timing.seconds for timing in timings),
        median(timing.spread_fraction for timing in timings),
    )


def _speeds(setting: Setting, by_rank: Sequence[Sequence[float]]) -> tuple[RankSpeed, ...]:
    """Each rank's rate relative to the median rank, in the middle of all products."""
    ratios = [[median(times) / own for own in times] for times in by_rank]
    return tuple(
        RankSpeed(rank, station.node, median(ratio[rank] for ratio in ratios))
        for rank, station in enumerate(setting.stations)
    )
