"""Measure computation: all ranks at once, as they will compute in training."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from axonn_tune.calibration import selection
from axonn_tune.calibration.measure.kernels import (
    KernelPoint,
    Workload,
    time_copy,
    time_step,
    time_strided,
)
from axonn_tune.calibration.measure.shapes import settled_rates, time_attention, time_gemm
from axonn_tune.calibration.measure.timing import Timing
from axonn_tune.calibration.measure.together import MeasuringRanks, gathered, least
from axonn_tune.spec.calibration import RankSpeed
from axonn_tune.spec.points import AttentionPoint, GemmPoint, MemoryPoint


@dataclass(frozen=True)
class TimedProducts:
    """Holds timed matrix products, the speed of each rank, and remarks for the reader."""

    points: tuple[GemmPoint, ...] = ()
    speeds: tuple[RankSpeed, ...] = ()
    notes: tuple[str, ...] = ()


def measure_products(ranks: MeasuringRanks) -> TimedProducts:
    """Time matrix products once the clocks have settled."""
    request = ranks.request
    extent = request.extent
    grid = selection.gemm_shapes(extent, request.dtypes)
    shapes = list(dict.fromkeys([*request.gemm_shapes, *grid]))
    ranks.progress.expect(len(shapes) + 1)

    def settle() -> list[float]:
        rates = settled_rates(request.dtypes[0], ranks.device, extent.sustain_seconds)
        return [least(rate, ranks.device) for rate in rates]

    first_rate, settled_rate = ranks.ledger.result("clocks", settle)
    ranks.progress.restart()
    notes = [
        f"products were measured after {extent.sustain_seconds:g} s of products, in which their "
        f"rate changed by {100 * (settled_rate / first_rate - 1):+.1f} %"
    ]
    points = []
    seconds_by_rank = []
    for shape in shapes:
        if shape.flops / settled_rate > extent.longest_seconds:
            ranks.progress.expect(-1)
            continue
        time_here = partial(time_gemm, shape, ranks.device, ranks.sampling)
        timings = ranks.time_on_all(f"gemm {shape}", time_here)
        typical = _median_timing(timings)
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
        seconds_by_rank.append([timing.seconds for timing in timings])
    if request.n_shapes_left_out:
        notes.append(
            f"of the products of the search {request.n_shapes_left_out} were left out, those of "
            "the least likely grids"
        )
    return TimedProducts(tuple(points), _speeds(ranks, seconds_by_rank), tuple(notes))


def measure_attention(ranks: MeasuringRanks) -> list[AttentionPoint]:
    """Time fused attention in the shapes that were asked for."""
    shapes = ranks.request.attention_shapes
    ranks.progress.expect(2 * len(shapes))
    points = []
    for shape, backward in itertools.product(shapes, (False, True)):
        key = f"attention {shape} {'backward' if backward else 'forward'}"
        time_here = partial(time_attention, shape, backward, ranks.device, ranks.sampling)
        typical = _median_timing(ranks.time_on_all(key, time_here))
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
class TimedKernels:
    """Holds timed kernels, and the time of the host between two of them.

    Parameters
    ----------
    gap_seconds : float or None
        None where no kernels were timed. [s]
    """

    points: tuple[KernelPoint, ...] = ()
    gap_seconds: float | None = None


def measure_kernels(ranks: MeasuringRanks) -> TimedKernels:
    """Time all kernels but products, as small models run them, and plain copies.

    On GPUs, one kernel is timed, too, that handles one element at a time.
    """
    request = ranks.request
    on_gpu = ranks.device.type == "cuda"
    workloads = selection.workloads(request.extent, request.dtypes, request.models, on_gpu)
    copies = selection.copy_sizes(request.extent, ranks.memory_bytes)
    strided = copies[-1:] if on_gpu else []
    ranks.progress.expect(len(workloads) + len(copies) + len(strided))
    points: list[KernelPoint] = []
    gaps: list[float] = []
    for workload in workloads:
        records = ranks.ledger.result(
            f"step of {workload}", partial(_step_records, ranks, workload)
        )
        points += [_POINT_CLASSES[name](**values) for name, values in records["points"]]
        gaps.append(records["gap_seconds"])
    for kernel, dtype, time, what, sizes in (
        ("copy", "fp32", time_copy, "copy", copies),
        ("strided", "bf16", time_strided, "product with one row", strided),
    ):
        for nbytes in sizes:
            time_here = partial(time, nbytes, ranks.device, ranks.sampling)
            name = f"{what} that moves {nbytes} bytes"
            typical = _median_timing(ranks.time_on_all(name, time_here))
            spread = typical.spread_fraction
            points.append(MemoryPoint(kernel, dtype, nbytes, typical.seconds, spread))
    return TimedKernels(tuple(points), min(gaps, default=None))


_POINT_CLASSES = {point.__name__: point for point in (AttentionPoint, MemoryPoint)}


def _step_records(ranks: MeasuringRanks, workload: Workload) -> dict[str, Any]:
    """Return the median over the ranks of each kernel and of the gap, as plain data."""
    n_steps = ranks.request.extent.n_kernel_steps
    steps = gathered(time_step(workload, ranks.device, n_steps, ranks.share_cores))
    points_by_kernel = zip(*(step.points for step in steps), strict=True)
    typical = [_median_point(points) for points in points_by_kernel]
    return {
        "points": [(type(point).__name__, asdict(point)) for point in typical],
        "gap_seconds": median(step.gap_seconds for step in steps),
    }


def _median_point(points: Sequence[KernelPoint]) -> KernelPoint:
    typical = _median_timing([Timing(point.seconds, point.spread_fraction) for point in points])
    return replace(points[0], seconds=typical.seconds, spread_fraction=typical.spread_fraction)


def _median_timing(timings: Sequence[Timing]) -> Timing:
    return Timing(
        median(timing.seconds for timing in timings),
        median(timing.spread_fraction for timing in timings),
    )


def _speeds(
    ranks: MeasuringRanks, seconds_by_rank: Sequence[Sequence[float]]
) -> tuple[RankSpeed, ...]:
    """Return the rate of each rank relative to the median rank, as the median over all products.

    Parameters
    ----------
    seconds_by_rank : for each product, its time on each rank
    """
    ratios = [[median(times) / seconds for seconds in times] for times in seconds_by_rank]
    return tuple(
        RankSpeed(rank, location.node, median(ratio[rank] for ratio in ratios))
        for rank, location in enumerate(ranks.locations)
    )
