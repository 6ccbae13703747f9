"""Latency, bandwidth and sharing of link levels, fitted to timed collectives."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from axonn_tune.calibrate.fit.scatter import fit_affine, robust_spread_fraction
from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.errors import InputError
from axonn_tune.spec.machine import LinkLevel, Quantity, RingShare
from axonn_tune.spec.plan import KINDS
from axonn_tune.spec.points import LinkPoint

# The kind whose numbers are the level's own; others are told relative to it.
BASE_KINDS = ("all_reduce", *KINDS)


@dataclass(frozen=True)
class LevelShape:
    """A link level before it is measured: the links between units of so many ranks."""

    name: str
    unit_ranks: int


@dataclass(frozen=True)
class _Series:
    """One fitted line: messages of many sizes over the same groups."""

    kind: str
    n_rings: int  # through one boundary
    latency_seconds: float  # of a hop
    latency_spread: float
    bandwidth_bytes_per_s: float  # of a ring
    bandwidth_spread: float


def fitted_levels(shapes: Sequence[LevelShape], points: Sequence[LinkPoint]) -> list[LinkLevel]:
    """The levels, innermost first, each from the groups whose hops are its own.

    Raises
    ------
    InputError
        No group crosses a level, or each was measured with one size of message only.
    """
    outer_units = [*(shape.unit_ranks for shape in shapes[1:]), None]
    return [
        fitted_level(shape, outer, points) for shape, outer in zip(shapes, outer_units, strict=True)
    ]


def fitted_level(
    shape: LevelShape, outer_unit: int | None, points: Sequence[LinkPoint]
) -> LinkLevel:
    """One level; `outer_unit` has the ranks of the unit in which it lies, if there is one."""
    own = points_of_level(shape.unit_ranks, outer_unit, points)
    series = _fitted_series(shape.unit_ranks, own)
    if not series:
        inside = f"inside units of {outer_unit}" if outer_unit else "across all ranks"
        raise InputError(
            f"link level '{shape.name}' was not measured: it takes messages of at least two sizes "
            f"between units of {shape.unit_ranks} ranks, {inside}"
        )
    by_kind: dict[str, list[_Series]] = defaultdict(list)
    for one in series:
        by_kind[one.kind].append(one)
    base = next(kind for kind in BASE_KINDS if kind in by_kind)
    bandwidths = {kind: _boundary_bandwidth(kind, of) for kind, of in by_kind.items()}
    latencies = {kind: _latency(kind, of) for kind, of in by_kind.items()}
    others = [kind for kind in by_kind if kind != base]
    return LinkLevel(
        name=shape.name,
        unit_ranks=shape.unit_ranks,
        bandwidth_bytes_per_s=bandwidths[base],
        latency_seconds=latencies[base],
        kind_fraction={kind: _relative(bandwidths[kind], bandwidths[base]) for kind in others},
        kind_latency_seconds={kind: latencies[kind] for kind in others},
        ring_shares=tuple(share for kind, of in by_kind.items() for share in _shares(kind, of)),
    )


def points_of_level(
    unit_ranks: int, outer_unit: int | None, points: Sequence[LinkPoint]
) -> list[LinkPoint]:
    """The points of groups that cross this level and none further out.

    Those whose hops all do, each rank in a unit of its own, if there are any.
    """
    crossing = [
        p
        for p in points
        if p.stride * p.size > unit_ranks
        and (outer_unit is None or outer_unit % (p.stride * p.size) == 0)
    ]
    pure = [p for p in crossing if p.stride % unit_ranks == 0]
    return pure or crossing


def hops(kind: str, n_units: int) -> float:
    """Latencies in the time of a small message among units, as `cost.collectives` counts them.

    Those of a ring; of an all-reduce, for which a tree then is quicker, those of a tree.
    """
    return {"all_reduce": 2.0 * math.log2(n_units), "send_recv": 1.0}.get(kind, n_units - 1.0)


def _fitted_series(unit_ranks: int, points: Sequence[LinkPoint]) -> list[_Series]:
    groups: dict[tuple[str, int, int, int, bool], list[LinkPoint]] = defaultdict(list)
    for p in points:
        groups[p.kind, p.stride, p.size, p.n_rings, p.everywhere].append(p)
    series = []
    for (kind, stride, size, n_rings, _), members in groups.items():
        if len({p.nbytes for p in members}) < 2:
            continue
        # Of a group with several ranks in a unit, the hops inside it are short beside those out.
        n_units = size if stride >= unit_ranks else stride * size // unit_ranks
        line = fit_affine([p.nbytes for p in members], [p.seconds for p in members])
        series.append(
            _Series(
                kind,
                min(unit_ranks, n_rings),
                line.intercept_seconds / hops(kind, n_units),
                line.intercept_spread_fraction,
                float(moved_fraction(kind, size)) / line.seconds_per_unit,
                line.slope_spread_fraction,
            )
        )
    return series


def _boundary_bandwidth(kind: str, series: Sequence[_Series]) -> Quantity:
    """What all rings together get, at the largest number of them."""
    most = max(one.n_rings for one in series)
    ring = _ring_bandwidth(kind, series, most)
    return ring.scaled(most)


def _ring_bandwidth(kind: str, series: Sequence[_Series], n_rings: int) -> Quantity:
    of = [one for one in series if one.n_rings == n_rings]
    spreads = [one.bandwidth_spread for one in of]
    what = f"{kind}, {n_rings} at once" if n_rings > 1 else kind
    return _combined([one.bandwidth_bytes_per_s for one in of], spreads, what)


def _latency(kind: str, series: Sequence[_Series]) -> Quantity:
    spreads = [one.latency_spread for one in series]
    return _combined([one.latency_seconds for one in series], spreads, kind)


def _shares(kind: str, series: Sequence[_Series]) -> list[RingShare]:
    counts = sorted({one.n_rings for one in series})
    if len(counts) == 1:
        return []
    return [RingShare(kind, n, _ring_bandwidth(kind, series, n)) for n in counts]


def _combined(values: Sequence[float], spreads: Sequence[float], what: str) -> Quantity:
    """Median of fitted values; spread: error of a fit, and how far the fits disagree."""
    between = robust_spread_fraction(values) if len(values) > 1 else 0.0
    spread = math.hypot(median(spreads), between)
    source = f"fit of {what} over {len(values)} choices of groups"
    return Quantity(float(np.median(values)), "measured", source, min(spread, 1.0))


def _relative(value: Quantity, base: Quantity) -> Quantity:
    return Quantity(value.value / base.value, "measured", value.source, value.spread_fraction)


def level_shapes(levels: Sequence[LinkLevel]) -> list[LevelShape]:
    """The shapes of levels that are known already."""
    return [LevelShape(level.name, level.unit_ranks) for level in levels]


def spoken_of(
    levels: Sequence[LinkLevel], points: Sequence[LinkPoint]
) -> Mapping[int, list[LinkPoint]]:
    """By index of a level, those of the points that tell of it."""
    units = [level.unit_ranks for level in levels]
    outer = [*units[1:], None]
    found = {
        i: points_of_level(unit, out, points)
        for i, (unit, out) in enumerate(zip(units, outer, strict=True))
    }
    return {i: of for i, of in found.items() if of}
