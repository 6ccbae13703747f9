"""Assemble a hardware profile from what was measured and from another profile for the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean, stdev

from axonn_tune.calibration.fit.hops import with_hops_that_hold
from axonn_tune.calibration.fit.links import (
    LevelShape,
    fitted_level,
    fitted_levels,
    level_shapes,
    outer_unit_ranks,
    points_of_level,
    with_hop_steps,
    with_steps,
)
from axonn_tune.calibration.fit.rates import (
    CPU_TILES,
    GPU_TILES,
    copy_rates,
    fitted_gpu,
    flash_fraction,
    known_gpu,
    strided_rate,
    with_fitted_curve,
)
from axonn_tune.calibration.measured_cluster import MeasuredCluster
from axonn_tune.errors import InputError
from axonn_tune.spec.calibration import Calibration
from axonn_tune.spec.gpu import GemmRates, KernelRates
from axonn_tune.spec.links import LinkLevel
from axonn_tune.spec.machine import Machine, MemoryReserve
from axonn_tune.spec.plan import KINDS, MODES
from axonn_tune.spec.points import GemmPoint, LinkPoint
from axonn_tune.spec.quantity import Quantity

# A caching allocator holds blocks that it cannot use for lack of a fitting request.
FRAGMENTATION = Quantity(0.05, "assumed", "caching allocator; grows with changing shapes")
LONE_JITTER = Quantity(0.03, "assumed", "one rank was measured; as found on Perlmutter")
_UNFITTED = Quantity(1.0, "assumed", "stands until the fit")


def fitted_machine(
    cluster: MeasuredCluster,
    name: str,
    calibration: Calibration,
    presets: Sequence[Machine],
    base: Machine | None = None,
) -> Machine:
    """Return the profile that fits what was measured.

    Parameters
    ----------
    presets : sequence of Machine
        Where the device is the GPU of one of them, the published figures of that GPU are taken.
    base : Machine, optional
        The profile from which all that was not measured is taken.

    Raises
    ------
    InputError
        A part was not measured and there is no base, or too little of it was measured.
    """
    parts = {
        "products (gemm)": cluster.gemm_points,
        "kernels (memory)": cluster.memory_points,
        "links": cluster.link_points,
    }
    missing = [part for part, points in parts.items() if not points]
    if missing and base is None:
        raise InputError(
            f"{' and '.join(missing)} were not measured; give --machine, a profile that has them"
        )
    known = known_gpu(cluster.device_name, cluster.memory_bytes, cluster.n_multiprocessors, presets)
    machine = base or _unfitted(cluster, known)
    if cluster.gemm_points and cluster.memory_points:
        machine = replace(machine, gpu=fitted_gpu(cluster, known))
    if cluster.memory_points:
        machine = _with_kernels(machine, cluster)
    if cluster.gemm_points:
        dtype = cluster.gemm_points[0].dtype
        machine = with_fitted_curve(machine, cluster.gemm_points, dtype)
    if cluster.link_points:
        machine = _with_links(machine, cluster)
    return replace(
        machine,
        name=name,
        description=f"calibrated on {cluster.n_ranks} x {cluster.device_name}",
        jitter_fraction=_jitter(cluster) if cluster.speeds else machine.jitter_fraction,
        calibration=calibration,
    )


def with_link_points(machine: Machine, points: Sequence[LinkPoint]) -> Machine:
    """Return the machine with more collectives; the levels that they cross are fitted anew.

    A level stays as it is where its collectives do not tell latency from bandwidth. A kind of
    collective that was not measured keeps what the profile said of it. Between the sizes that were
    measured over a group, no point of the profile is kept.
    """
    sizes: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for point in points:
        sizes[point.series].append(point.nbytes)
    kept = [
        point
        for point in machine.link_points
        if (new := sizes.get(point.series)) is None or not min(new) <= point.nbytes <= max(new)
    ]
    all_points = (*kept, *points)
    shapes = level_shapes(machine.links)
    levels = list(machine.links)
    for index, outer_unit in enumerate(outer_unit_ranks(shapes)):
        unit = shapes[index].unit_ranks
        if measured := points_of_level(unit, outer_unit, points):
            with suppress(InputError):
                fitted = fitted_level(shapes[index], outer_unit, all_points, machine.ranks_per_node)
                levels[index] = _with_unmeasured(fitted, levels[index], measured)
            # Inside a node, new groups and those of the profile may have been timed on different
            # switches, and tell no step together.
            level = with_steps(levels[index], outer_unit, points if outer_unit else all_points)
            levels[index] = with_hop_steps(level, outer_unit, points)
    return replace(machine, links=tuple(levels), link_points=all_points)


def _with_unmeasured(
    fitted: LinkLevel, before: LinkLevel, points: Sequence[LinkPoint]
) -> LinkLevel:
    """Return a fitted level; kinds of collectives that were not fitted keep their numbers.

    A kind is fitted where its points have messages of two sizes or more. The steps of hops stay as
    they were, too, and so do the limits of trees if there were any.
    """
    fractions = dict(fitted.kind_fraction)
    latencies = dict(fitted.kind_latency_seconds)
    for kind in KINDS:
        if len({point.nbytes for point in points if point.kind == kind}) > 1:
            continue
        factor = before.bandwidth_bytes_per_s.value / fitted.bandwidth_bytes_per_s.value
        known = before.kind_fraction.get(kind, replace(before.bandwidth_bytes_per_s, value=1.0))
        fractions[kind] = known.scaled(factor)
        latencies[kind] = before.latency_of(kind)
    return replace(
        fitted,
        kind_fraction=fractions,
        kind_latency_seconds=latencies,
        hop_steps=before.hop_steps,
        tree_limits=before.tree_limits or fitted.tree_limits,
        is_switch=before.is_switch,
    )


def with_gemm_points(machine: Machine, points: Sequence[GemmPoint]) -> Machine:
    """Return the machine with more products, which correct its efficiency curve."""
    new_keys = {(p.m, p.n, p.k, p.mode, p.dtype) for p in points}
    kept = [p for p in machine.gemm.points if (p.m, p.n, p.k, p.mode, p.dtype) not in new_keys]
    return replace(machine, gemm=replace(machine.gemm, points=(*kept, *points)))


def _unfitted(cluster: MeasuredCluster, known: Machine | None) -> Machine:
    """Return a machine of the right shape whose rates are still to be fitted."""
    tiles = GPU_TILES if cluster.n_multiprocessors > 1 else CPU_TILES
    return Machine(
        name="unfitted",
        gpu=fitted_gpu(cluster, known),
        ranks_per_node=cluster.n_per_node,
        gemm=GemmRates(
            sustained_fraction=_UNFITTED,
            k_overhead=_UNFITTED,
            tiles=known.gemm.tiles if known else tiles,
            mode_fraction=dict.fromkeys(MODES, _UNFITTED),
        ),
        kernels=KernelRates(_UNFITTED, _UNFITTED, _UNFITTED, _UNFITTED, _UNFITTED),
        links=(LinkLevel("unfitted", 1, _UNFITTED, _UNFITTED),),
        memory_reserve=MemoryReserve(
            Quantity(cluster.idle_bytes, "measured", "what a rank holds without training"),
            FRAGMENTATION,
        ),
        jitter_fraction=LONE_JITTER,
    )


def _with_kernels(machine: Machine, cluster: MeasuredCluster) -> Machine:
    copies, launch = copy_rates(cluster.memory_points)
    advertised = machine.gpu.memory_bandwidth_bytes_per_s.value
    peak, kernels = machine.gpu.peak_flops_per_s, machine.kernels
    return replace(
        machine,
        kernels=replace(
            kernels,
            flash_forward_fraction=flash_fraction(cluster.attention_points, False, peak),
            flash_backward_fraction=flash_fraction(cluster.attention_points, True, peak),
            memory_fraction=replace(copies, value=min(copies.value / advertised, 1.0)),
            launch_seconds=launch,
            strided_bytes_per_s=strided_rate(cluster.memory_points) or kernels.strided_bytes_per_s,
            gap_seconds=_gap(cluster) or kernels.gap_seconds,
            attention_points=cluster.attention_points,
            memory_points=cluster.memory_points,
        ),
    )


def _gap(cluster: MeasuredCluster) -> Quantity | None:
    if cluster.gap_seconds is None:
        return None
    return Quantity(cluster.gap_seconds, "measured", "steps of small models, the least of them")


def _with_links(machine: Machine, cluster: MeasuredCluster) -> Machine:
    shapes = [
        LevelShape(name, unit)
        for name, unit in zip(cluster.level_names, (1, *cluster.units), strict=True)
    ]
    product_slowdowns, collective_slowdowns = zip(*cluster.slowdowns, strict=True)
    kernels = replace(
        machine.kernels,
        slowdown_fraction=_mean(product_slowdowns, "a product beside an all-reduce"),
        collective_slowdown_fraction=_mean(collective_slowdowns, "an all-reduce beside products"),
    )
    fitted = replace(
        machine,
        ranks_per_node=cluster.n_per_node,
        links=tuple(fitted_levels(shapes, cluster.link_points, cluster.n_per_node)),
        link_points=cluster.link_points,
        ring_bandwidths=(),
        kernels=kernels,
    )
    return with_hops_that_hold(fitted)


def _mean(values: Sequence[float], what: str) -> Quantity:
    mean = fmean(values)
    spread = stdev(values) / mean if len(values) > 1 and mean > 0 else 0.0
    source = f"{what}, mean of {len(values)} rounds"
    return Quantity(mean, "measured", source, min(spread, 1.0))


def _jitter(cluster: MeasuredCluster) -> Quantity:
    """Return the spread of the speeds of the ranks."""
    if len(cluster.speeds) < 2:
        return LONE_JITTER
    speeds = [speed.speed_fraction for speed in cluster.speeds]
    source = f"products of {len(speeds)} ranks, all at once"
    return Quantity(min(stdev(speeds) / fmean(speeds), 1.0), "measured", source)
