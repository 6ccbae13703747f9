"""Latency, bandwidth and sharing of link levels, fitted to timed collectives."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from typing import TypeAlias

import numpy as np

from axonn_tune.calibration.fit.robust import fit_affine, robust_spread_fraction
from axonn_tune.calibration.fit.steps import (
    LEAST_RING_FRACTION,
    fitted_hop_steps,
    fitted_ring_steps,
    fitted_tree_steps,
)
from axonn_tune.cost.collectives import (
    LARGEST_TREE_SHARE,
    moved_fraction,
    rings_worth,
    tree_passes,
    tree_share,
)
from axonn_tune.errors import InputError
from axonn_tune.spec.links import LinkLevel, RingShare, Steps, TreeLimits
from axonn_tune.spec.plan import KINDS
from axonn_tune.spec.points import LinkPoint
from axonn_tune.spec.quantity import Quantity

# The first of these that was measured gives the numbers of a level; others are relative to it.
BASE_KINDS = ("all_reduce", *KINDS)
# Groups that fill a unit, and smaller ones, count as equally fast up to this factor.
SAME_BANDWIDTH_FACTOR = 1.2
# Bytes take at least this share of the time of the largest message: noise hides what is less.
_LEAST_SHARE_OF_BYTES = 0.01
_LIMIT_SOURCE = (
    "all-reduces over two nodes took as long as two gathers, so that trees are no faster"
)
_STEPS_SOURCE = "fit of collectives over consecutive ranks, of several numbers of ranks"


# Kind, stride, size and number of rings of groups, and whether all of them were timed at once.
_Group: TypeAlias = tuple[str, int, int, int, bool]


@dataclass(frozen=True)
class LevelShape:
    """The links between units of `unit_ranks` ranks, before they are measured."""

    name: str
    unit_ranks: int


@dataclass(frozen=True)
class _FittedLine:
    """A line that is fitted to messages of many sizes over the same groups.

    Parameters
    ----------
    fills_unit : bool
        Whether the groups fill the unit in which the level lies.
    n_rings : int
        Number of rings through one boundary.
    latency_seconds : float
        Latency of a hop. [s]
    bandwidth_bytes_per_s : float
        Bandwidth of a ring. [bytes/s]
    """

    kind: str
    fills_unit: bool
    n_rings: int
    latency_seconds: float
    latency_spread: float
    bandwidth_bytes_per_s: float
    bandwidth_spread: float


def fitted_levels(
    shapes: Sequence[LevelShape], points: Sequence[LinkPoint], ranks_per_node: int
) -> list[LinkLevel]:
    """Fit the levels, innermost first, each to the groups whose hops are all its own.

    Raises
    ------
    InputError
        No group crosses a level, or each was measured with one size of message only.
    """
    outer_units = outer_unit_ranks(shapes)
    levels = []
    for shape, outer in zip(shapes, outer_units, strict=True):
        level = fitted_level(shape, outer, points, ranks_per_node)
        levels.append(with_hop_steps(with_steps(level, outer, points), outer, points))
    return levels


def fitted_level(
    shape: LevelShape, outer_unit: int | None, points: Sequence[LinkPoint], ranks_per_node: int
) -> LinkLevel:
    """Fit one level.

    Where groups that fill their unit were measured, smaller ones count only if they are as fast: a
    pair behind a switch may reach less than eight GPUs do, and without one it has fewer links.

    Parameters
    ----------
    outer_unit : int or None
        Number of ranks of the unit in which the level lies; None for the outermost level.
    ranks_per_node : int
        Number of ranks in a node; trees join nodes, and no other units.

    Raises
    ------
    InputError
        No group crosses the level, or each was measured with one size of message only.
    """
    level_points = points_of_level(shape.unit_ranks, outer_unit, points)
    joins_nodes = shape.unit_ranks == ranks_per_node
    lines = _fitted_lines(shape.unit_ranks, outer_unit, joins_nodes, level_points)
    if not lines:
        inside = f"inside units of {outer_unit}" if outer_unit else "across all ranks"
        raise InputError(
            f"link level '{shape.name}' was not measured: it takes messages of at least two sizes "
            f"between units of {shape.unit_ranks} ranks, {inside}"
        )
    alike: dict[tuple[str, int], list[_FittedLine]] = defaultdict(list)
    for line in lines:
        alike[line.kind, line.n_rings].append(line)
    lines_by_kind: dict[str, list[_FittedLine]] = defaultdict(list)
    for (kind, _), own in alike.items():
        lines_by_kind[kind] += _as_fast_as_whole_units(own)
    base = next(kind for kind in BASE_KINDS if kind in lines_by_kind)
    bandwidths = {kind: _boundary_bandwidth(kind, own) for kind, own in lines_by_kind.items()}
    latencies = {kind: _latency(kind, own) for kind, own in lines_by_kind.items()}
    ring_shares = [_ring_shares(kind, own) for kind, own in lines_by_kind.items()]
    others = [kind for kind in lines_by_kind if kind != base]
    return LinkLevel(
        name=shape.name,
        unit_ranks=shape.unit_ranks,
        bandwidth_bytes_per_s=bandwidths[base],
        latency_seconds=latencies[base],
        kind_fraction={kind: _relative(bandwidths[kind], bandwidths[base]) for kind in others},
        kind_latency_seconds={kind: latencies[kind] for kind in others},
        ring_shares=tuple(chain.from_iterable(ring_shares)),
        tree_limits=_tree_limits(shape.unit_ranks, level_points, bandwidths)
        if joins_nodes
        else None,
    )


def points_of_level(
    unit_ranks: int, outer_unit: int | None, points: Sequence[LinkPoint]
) -> list[LinkPoint]:
    """Return the points of groups that cross this level and no level further out.

    Groups whose hops all cross it, because each rank is in a unit of its own, are preferred.
    """
    crossing = _crossing(unit_ranks, outer_unit, points)
    pure = [p for p in crossing if p.stride % unit_ranks == 0]
    return pure or crossing


def _crossing(
    unit_ranks: int, outer_unit: int | None, points: Sequence[LinkPoint]
) -> list[LinkPoint]:
    """Return the points of groups that cross this level and no level further out."""
    return [
        p
        for p in points
        if p.stride * p.size > unit_ranks
        and (outer_unit is None or outer_unit % (p.stride * p.size) == 0)
    ]


def with_steps(level: LinkLevel, outer_unit: int | None, points: Sequence[LinkPoint]) -> LinkLevel:
    """Return the level with steps of rings and trees, where groups of several sizes were timed.

    Parameters
    ----------
    outer_unit : int or None
        Number of ranks of the unit in which the level lies; None for the outermost level.
    """
    crossing = _crossing(level.unit_ranks, outer_unit, points)
    rings = fitted_ring_steps(crossing)
    if not rings:
        return level
    trees = fitted_tree_steps(crossing, rings, level.unit_ranks)
    return replace(
        level,
        ring_steps=Steps("measured", _STEPS_SOURCE, rings),
        tree_steps=Steps("measured", _STEPS_SOURCE, trees) if trees else None,
    )


def with_hop_steps(
    level: LinkLevel, outer_unit: int | None, points: Sequence[LinkPoint]
) -> LinkLevel:
    """Return the level with steps of hops, if it joins ranks and rings of two sizes were timed.

    Parameters
    ----------
    outer_unit : int or None
        Number of ranks of the unit in which the level lies; None for the outermost level, which no
        ring leaves.
    """
    if level.unit_ranks > 1 or outer_unit is None:
        return level
    hop_steps = fitted_hop_steps(_crossing(level.unit_ranks, outer_unit, points))
    if not hop_steps:
        return level
    return replace(level, hop_steps=Steps("measured", _STEPS_SOURCE, hop_steps))


def hops(kind: str, n_units: int) -> float:
    """Return the number of latencies in the time of a small message among units.

    A small all-reduce takes a tree, an all-to-all sends to all ranks at once, and other collectives
    take a ring, as in `cost.collectives` and `cost.links`.
    """
    if kind == "all_reduce":
        return 2.0 * math.log2(n_units)
    if kind in ("send_recv", "all_to_all"):
        return 1.0
    return n_units - 1.0


def _fitted_lines(
    unit_ranks: int, outer_unit: int | None, joins_nodes: bool, points: Sequence[LinkPoint]
) -> list[_FittedLine]:
    groups = _by_group(points)
    lines = []
    for group, members in groups.items():
        kind, stride, size, n_rings, _ = group
        if len({p.nbytes for p in members}) < 2:
            continue
        # Where several ranks of a group share a unit, the hops inside it are short and left out.
        # Over two nodes with several ranks each, an all-reduce runs on trees if it is the faster.
        n_units = _n_units(unit_ranks, stride, size)
        on_trees = (
            joins_nodes and _may_take_trees(unit_ranks, group) and not _takes_rings(groups, group)
        )
        passes = tree_passes(n_units) if on_trees else moved_fraction(kind, size)
        work = [float(p.nbytes / tree_share(p.nbytes)) if on_trees else p.nbytes for p in members]
        fit = fit_affine(work, [p.seconds for p in members])
        rates = [p.seconds / w for p, w in zip(members, work, strict=True) if w == max(work)]
        least_slope = _LEAST_SHARE_OF_BYTES * max(rates)
        lines.append(
            _FittedLine(
                kind,
                stride * size == outer_unit,
                min(unit_ranks, n_rings),
                fit.intercept_seconds / hops(kind, n_units),
                fit.intercept_spread_fraction,
                float(passes * rings_worth(kind, size, n_units))
                / max(fit.seconds_per_unit, least_slope),
                fit.slope_spread_fraction,
            )
        )
    return lines


def _by_group(points: Sequence[LinkPoint]) -> dict[_Group, list[LinkPoint]]:
    groups: dict[_Group, list[LinkPoint]] = defaultdict(list)
    for p in points:
        groups[p.series].append(p)
    return groups


def _n_units(unit_ranks: int, stride: int, size: int) -> int:
    """Return the number of units in which a group has ranks."""
    return size if stride >= unit_ranks else stride * size // unit_ranks


def _may_take_trees(unit_ranks: int, group: _Group) -> bool:
    """Return whether an all-reduce is over two units with several ranks each."""
    kind, stride, size, *_ = group
    return kind == "all_reduce" and _n_units(unit_ranks, stride, size) == 2 < size


def _takes_rings(groups: Mapping[_Group, Sequence[LinkPoint]], group: _Group) -> bool:
    """Return whether an all-reduce takes as long as two all-gathers of as many bytes.

    The largest message for which both were timed decides; without one the answer is no.
    """
    _, stride, size, n_rings, everywhere = group
    gathers = groups.get(("all_gather", stride, size, n_rings, everywhere), [])
    seconds_of = {p.nbytes: p.seconds for p in gathers}
    gathered = [p for p in groups[group] if p.nbytes in seconds_of]
    if not gathered:
        return False
    largest = max(gathered, key=lambda p: p.nbytes)
    return largest.seconds >= LEAST_RING_FRACTION * 2.0 * seconds_of[largest.nbytes]


def _tree_limits(
    unit_ranks: int, points: Sequence[LinkPoint], bandwidths: Mapping[str, Quantity]
) -> TreeLimits | None:
    """Return limits that make trees no faster than rings, if two nodes were seen to use rings.

    Without them other groups over two nodes would be predicted on trees, which pass the network
    once. Over more nodes a tree passes it twice, which these limits do not lengthen.
    """
    groups = _by_group(points)
    of_two = [group for group in groups if _may_take_trees(unit_ranks, group)]
    bandwidth = bandwidths.get("all_reduce")
    if bandwidth is None or not of_two or not all(_takes_rings(groups, each) for each in of_two):
        return None
    limit = replace(bandwidth.scaled(LARGEST_TREE_SHARE), source=_LIMIT_SOURCE)
    return TreeLimits(limit, limit)


def _boundary_bandwidth(kind: str, lines: Sequence[_FittedLine]) -> Quantity:
    """Return the bandwidth of all rings together, where most rings were measured at once."""
    most = max(line.n_rings for line in lines)
    return _ring_bandwidth(kind, lines, most).scaled(most)


def _ring_bandwidth(kind: str, lines: Sequence[_FittedLine], n_rings: int) -> Quantity:
    """Return the bandwidth of one ring where `n_rings` share a boundary."""
    chosen = [line for line in lines if line.n_rings == n_rings]
    spreads = [line.bandwidth_spread for line in chosen]
    what = f"{kind}, {n_rings} at once" if n_rings > 1 else kind
    return _combined([line.bandwidth_bytes_per_s for line in chosen], spreads, what)


def _latency(kind: str, lines: Sequence[_FittedLine]) -> Quantity:
    spreads = [line.latency_spread for line in lines]
    return _combined([line.latency_seconds for line in lines], spreads, kind)


def _as_fast_as_whole_units(lines: Sequence[_FittedLine]) -> list[_FittedLine]:
    """Return the lines of one kind and number of rings that are as fast as groups that fill a unit.

    Without such groups all lines are returned.
    """
    whole = [line.bandwidth_bytes_per_s for line in lines if line.fills_unit]
    if not whole:
        return list(lines)
    low, high = median(whole) / SAME_BANDWIDTH_FACTOR, median(whole) * SAME_BANDWIDTH_FACTOR
    return [line for line in lines if low <= line.bandwidth_bytes_per_s <= high]


def _ring_shares(kind: str, lines: Sequence[_FittedLine]) -> list[RingShare]:
    counts = sorted({line.n_rings for line in lines})
    if len(counts) == 1:
        return []
    return [RingShare(kind, n, _ring_bandwidth(kind, lines, n)) for n in counts]


def _combined(values: Sequence[float], spreads: Sequence[float], what: str) -> Quantity:
    """Return the median of fitted values.

    Its spread combines the error of a fit with the disagreement between the fits.
    """
    between = robust_spread_fraction(values) if len(values) > 1 else 0.0
    spread = math.hypot(median(spreads), between)
    source = f"fit of {what} over {len(values)} choices of groups"
    return Quantity(float(np.median(values)), "measured", source, min(spread, 1.0))


def _relative(value: Quantity, base: Quantity) -> Quantity:
    return Quantity(value.value / base.value, "measured", value.source, value.spread_fraction)


def level_shapes(levels: Sequence[LinkLevel]) -> list[LevelShape]:
    """Return the shapes of levels that are known already."""
    return [LevelShape(level.name, level.unit_ranks) for level in levels]


def outer_unit_ranks(shapes: Sequence[LevelShape]) -> list[int | None]:
    """Return the ranks of the unit in which each level lies; None for the outermost level."""
    return [*(shape.unit_ranks for shape in shapes[1:]), None]
