"""A hardware profile from what was measured, and from another profile for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean, stdev

from axonn_tune.calibrate.findings import Findings
from axonn_tune.calibrate.fit import compute as compute_fit
from axonn_tune.calibrate.fit.links import (
    LevelShape,
    fitted_level,
    fitted_levels,
    level_shapes,
    spoken_of,
)
from axonn_tune.errors import InputError
from axonn_tune.spec.calibration import Calibration
from axonn_tune.spec.machine import (
    GemmRates,
    KernelRates,
    LinkLevel,
    Machine,
    MemoryReserve,
    Quantity,
)
from axonn_tune.spec.plan import MODES
from axonn_tune.spec.points import GemmPoint, LinkPoint

# Blocks that a caching allocator cannot use for lack of a fitting request.
FRAGMENTATION = Quantity(0.05, "assumed", "caching allocator; grows with changing shapes")
LONE_JITTER = Quantity(0.03, "assumed", "one rank was measured; as found on Perlmutter")
_UNFITTED = Quantity(1.0, "assumed", "stands until the fit")


def machine_of(
    findings: Findings,
    name: str,
    calibration: Calibration,
    presets: Sequence[Machine],
    base: Machine | None = None,
) -> Machine:
    """The profile that fits what was measured.

    Parameters
    ----------
    presets : machines
        If the device is the GPU of one of them, that one's published figures serve.
    base : Machine, optional
        Says what was not measured.

    Raises
    ------
    InputError
        Something was not measured and there is no base; or too little of it was.
    """
    parts = {
        "products (gemm)": findings.gemm_points,
        "kernels (memory)": findings.memory_points,
        "links": findings.link_points,
    }
    missing = [part for part, points in parts.items() if not points]
    if missing and base is None:
        raise InputError(
            f"{' and '.join(missing)} were not measured; give --machine, a profile that has them"
        )
    known = compute_fit.known_gpu(findings.device_name, findings.memory_bytes, presets)
    machine = base or _unfitted(findings, known)
    if findings.gemm_points and findings.memory_points:
        machine = replace(machine, gpu=compute_fit.gpu_of(findings, known))
    if findings.memory_points:
        machine = _with_kernels(machine, findings)
    if findings.gemm_points:
        dtype = findings.gemm_points[0].dtype
        machine = compute_fit.with_fitted_curve(machine, findings.gemm_points, dtype)
    if findings.link_points:
        machine = _with_links(machine, findings)
    return replace(
        machine,
        name=name,
        description=f"calibrated on {findings.n_ranks} x {findings.device_name}",
        jitter_fraction=_jitter(findings) if findings.speeds else machine.jitter_fraction,
        calibration=calibration,
    )


def with_link_points(machine: Machine, points: Sequence[LinkPoint]) -> Machine:
    """The machine with more collectives; the levels of which they tell are fitted anew.

    A level of which they tell too little for that, messages of one size, stays as it is.
    """
    new = {_key(point): point for point in points}
    kept = [point for point in machine.link_points if _key(point) not in new]
    everything = (*kept, *points)
    shapes = level_shapes(machine.links)
    outer_units = [*(shape.unit_ranks for shape in shapes[1:]), None]
    levels = list(machine.links)
    for index in spoken_of(machine.links, points):
        with suppress(InputError):
            levels[index] = fitted_level(shapes[index], outer_units[index], everything)
    return replace(machine, links=tuple(levels), link_points=everything)


def with_gemm_points(machine: Machine, points: Sequence[GemmPoint]) -> Machine:
    """The machine with more products, which correct its efficiency curve."""
    new = {(p.m, p.n, p.k, p.mode, p.dtype) for p in points}
    kept = [p for p in machine.gemm.points if (p.m, p.n, p.k, p.mode, p.dtype) not in new]
    return replace(machine, gemm=replace(machine.gemm, points=(*kept, *points)))


def _key(point: LinkPoint) -> tuple[object, ...]:
    return (point.kind, point.stride, point.size, point.n_rings, point.everywhere, point.nbytes)


def _unfitted(findings: Findings, known: Machine | None) -> Machine:
    """A machine of the right shape whose rates are still to be fitted."""
    n_multiprocessors = findings.n_multiprocessors
    tiles = compute_fit.GPU_TILES if n_multiprocessors > 1 else compute_fit.CPU_TILES
    return Machine(
        name="unfitted",
        gpu=compute_fit.gpu_of(findings, known),
        ranks_per_node=findings.n_per_node,
        gemm=GemmRates(
            sustained_fraction=_UNFITTED,
            k_overhead=_UNFITTED,
            tiles=known.gemm.tiles if known else tiles,
            mode_fraction=dict.fromkeys(MODES, _UNFITTED),
        ),
        kernels=KernelRates(_UNFITTED, _UNFITTED, _UNFITTED, _UNFITTED, _UNFITTED),
        links=(LinkLevel("unfitted", 1, _UNFITTED, _UNFITTED),),
        memory_reserve=MemoryReserve(
            Quantity(findings.idle_bytes, "measured", "what a rank holds without training"),
            FRAGMENTATION,
        ),
        jitter_fraction=LONE_JITTER,
    )


def _with_kernels(machine: Machine, findings: Findings) -> Machine:
    copies, launch = compute_fit.copy_rates(findings.memory_points)
    advertised = machine.gpu.memory_bandwidth_bytes_per_s.value
    peak = machine.gpu.peak_flops_per_s
    return replace(
        machine,
        kernels=replace(
            machine.kernels,
            flash_forward_fraction=compute_fit.flash_fraction(
                findings.attention_points, False, peak
            ),
            flash_backward_fraction=compute_fit.flash_fraction(
                findings.attention_points, True, peak
            ),
            memory_fraction=copies.scaled(1.0 / advertised),
            launch_seconds=launch,
            gap_seconds=_gap(findings) or machine.kernels.gap_seconds,
            attention_points=findings.attention_points,
            memory_points=findings.memory_points,
        ),
    )


def _gap(findings: Findings) -> Quantity | None:
    if findings.gap_seconds is None:
        return None
    return Quantity(findings.gap_seconds, "measured", "steps of small models, the least of them")


def _with_links(machine: Machine, findings: Findings) -> Machine:
    shapes = [
        LevelShape(name, unit)
        for name, unit in zip(findings.level_names, (1, *findings.units), strict=True)
    ]
    of_gemm, of_collective = zip(*findings.slowdowns, strict=True)
    kernels = replace(
        machine.kernels,
        slowdown_fraction=_mean(of_gemm, "a product beside an all-reduce"),
        collective_slowdown_fraction=_mean(of_collective, "an all-reduce beside products"),
    )
    return replace(
        machine,
        ranks_per_node=findings.n_per_node,
        links=tuple(fitted_levels(shapes, findings.link_points)),
        link_points=findings.link_points,
        ring_bandwidths=(),
        kernels=kernels,
    )


def _mean(values: Sequence[float], what: str) -> Quantity:
    mean = fmean(values)
    spread = stdev(values) / mean if len(values) > 1 and mean > 0 else 0.0
    source = f"{what}, mean of {len(values)} rounds"
    return Quantity(mean, "measured", source, min(spread, 1.0))


def _jitter(findings: Findings) -> Quantity:
    """Spread of the ranks' speeds."""
    if len(findings.speeds) < 2:
        return LONE_JITTER
    speeds = [speed.speed_fraction for speed in findings.speeds]
    source = f"products of {len(speeds)} ranks, all at once"
    return Quantity(min(stdev(speeds) / fmean(speeds), 1.0), "measured", source)
