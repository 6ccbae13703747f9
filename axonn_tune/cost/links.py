"""Which links a group's ring runs over, how many rings share them, and its latency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.spec.candidates import Ints, Placements
from axonn_tune.spec.machine import LinkLevel, Machine
from axonn_tune.spec.plan import KINDS, Array


def rings_through_boundary(stride: Ints, size: Ints, unit_ranks: int) -> Ints:
    """Rings of one axis that leave a unit at the same time; 0 if every ring stays inside.

    The groups of an axis are the ranks ``b + r + i * stride`` for i < size, with b a
    multiple of ``stride * size`` and r < stride. A unit is a run of `unit_ranks` ranks.
    Where blocks and units are aligned this is the published law min(U, stride)
    (Singh et al., arXiv 2502.08145, section on the performance model); otherwise, as with
    three ranks on nodes of four, the busiest unit counts.

    Parameters
    ----------
    stride, size : arrays of int, shape (P,)
    """
    span = stride * size
    aligned = (span % unit_ranks == 0) & ((stride % unit_ranks == 0) | (unit_ranks % stride == 0))
    inside = (unit_ranks % span == 0) | (size == 1)
    rings = np.where(inside, 0, np.minimum(unit_ranks, stride))
    for row in np.flatnonzero(~aligned & ~inside):
        rings[row] = _busiest_unit(int(stride[row]), int(size[row]), unit_ranks)
    return rings


def _busiest_unit(stride: int, size: int, unit_ranks: int) -> int:
    """Rings that leave the busiest unit, over every offset between blocks and units."""
    span = stride * size
    busiest = 0
    for start in range(0, span, gcd(unit_ranks, span)):
        leaving, first = 0, -start
        while first < unit_ranks:
            low, high = max(first, 0), min(first + span, unit_ranks)
            ring_of = np.arange(low - first, high - first) % stride
            members = np.bincount(ring_of, minlength=1)
            leaving += int(((members > 0) & (members < size)).sum())
            first += span
        busiest = max(busiest, leaving)
    return busiest


def units_visited(stride: Ints, size: Ints, unit_ranks: int) -> Array:
    """Units in which the most spread group of an axis has ranks, shape (P,).

    A group's first rank stands at a multiple of gcd(stride * size, U) from the start of a
    unit, plus up to stride - 1. Where the stride is at most U, no unit between the first and
    the last rank is left out; where it is larger, every rank has a unit of its own.
    """
    step = np.gcd(stride * size, unit_ranks)
    latest_start = unit_ranks - step + np.minimum(stride, step) - 1
    spanned = (latest_start + (size - 1) * stride) // unit_ranks + 1
    visited: Array = np.minimum(size, spanned).astype(np.float64)
    return visited


@dataclass(frozen=True, eq=False)
class Curve:
    """Seconds of one kind of collective over one choice of groups, by full buffer."""

    nbytes: Array
    seconds: Array


@dataclass(frozen=True, eq=False)
class KindLinks:
    """What one kind of collective gets over the groups of an axis, arrays of shape (P,).

    bandwidth_bytes_per_s: of each ring with all groups at once. bounding_level: index of the
    level that bounds it, -1 for a group of one rank. ring_seconds: latency of a chunk's way once
    around the ring (size - 1 hops). tree_seconds: latency of a way up or down a binary tree.
    curves: measured times that replace these, by index in `curve`; -1 where there are none.
    """

    bandwidth_bytes_per_s: Array
    bounding_level: Ints
    ring_seconds: Array
    tree_seconds: Array
    curve: Ints
    curves: tuple[Curve, ...] = ()


@dataclass(frozen=True, eq=False)
class AxisLinks:
    """What the groups of one axis get, arrays of shape (P,).

    level: index of the outermost link level crossed, -1 for a group of one rank.
    kinds: by kind of collective.
    occupied_s_per_byte: for each level how long its busiest boundary is occupied for each
    byte that every ring of the axis carries, shape (levels, P).
    """

    level: Ints
    kinds: dict[str, KindLinks]
    occupied_s_per_byte: Array


def axis_links(machine: Machine, stride: Ints, size: Ints) -> AxisLinks:
    """Bandwidth and latency of the groups with these strides and sizes, shape (P,).

    Bandwidth: min over the crossed levels l of what each of the rings that share a unit's
    boundary gets, beta_l / rings where that was not measured; a ring bandwidth listed for
    groups inside the node wins over the formula. Latency: NCCL's decomposition (its tuner sums
    intra-node and inter-node hops): of the hops of a ring those that cross level l but none
    beyond cost alpha_l each; a tree takes log2 of the units joined at each level.
    """
    level = np.full(size.shape, -1)
    crossing, ring_hops, tree_hops = [], [], []
    units_here = size.astype(np.float64)  # units of this level that the group visits
    for index, link in enumerate(machine.links):
        rings = rings_through_boundary(stride, size, link.unit_ranks)
        crossing.append(rings)
        level = np.where(rings > 0, index, level)
        outermost = index + 1 == len(machine.links)
        units_above = (
            np.ones(size.shape)
            if outermost
            else units_visited(stride, size, machine.links[index + 1].unit_ranks)
        )
        ring_hops.append(np.maximum(units_here - units_above, 0.0))
        tree_hops.append(np.log2(np.maximum(units_here / units_above, 1.0)))
        units_here = units_above
    in_node = level < machine.node_level
    kinds = {}
    for kind in KINDS:
        bandwidth, bounding = _bandwidth(machine, kind, crossing)
        for ring in machine.ring_bandwidths:
            listed = in_node & (stride == ring.stride) & (size == ring.size)
            bandwidth[listed] = ring.bandwidth_bytes_per_s.value
        curve, curves = _curves(machine, kind, stride, size)
        ring_seconds, tree_seconds = (
            _latency(machine, kind, hops, size.shape) for hops in (ring_hops, tree_hops)
        )
        kinds[kind] = KindLinks(bandwidth, bounding, ring_seconds, tree_seconds, curve, curves)
    occupied = _occupied_s_per_byte(machine, crossing, kinds, size)
    return AxisLinks(level, kinds, occupied)


def _latency(machine: Machine, kind: str, hops: Sequence[Array], shape: tuple[int, ...]) -> Array:
    seconds = np.zeros(shape)
    for link, of_level in zip(machine.links, hops, strict=True):
        alpha = link.kind_latency_seconds.get(kind, link.latency_seconds).value
        seconds += alpha * of_level
    return seconds


def _curves(
    machine: Machine, kind: str, stride: Ints, size: Ints
) -> tuple[Ints, tuple[Curve, ...]]:
    """Which measured curve each group has, and the curves."""
    of_groups: dict[tuple[int, int], dict[int, float]] = {}
    for p in machine.link_points:
        if p.kind == kind and p.is_of_whole_axis:
            of_groups.setdefault((p.stride, p.size), {})[p.nbytes] = p.seconds
    index = np.full(size.shape, -1)
    curves = []
    for number, ((of_stride, of_size), known) in enumerate(of_groups.items()):
        index[(stride == of_stride) & (size == of_size)] = number
        nbytes, seconds = np.array(sorted(known.items()), dtype=np.float64).T
        curves.append(Curve(nbytes, seconds))
    return index, tuple(curves)


def _occupied_s_per_byte(
    machine: Machine, crossing: list[Ints], kinds: Mapping[str, KindLinks], size: Ints
) -> Array:
    """Rings through the boundary over its bandwidth, but no more than a ring was measured at."""
    measured = 1.0 / np.maximum.reduce([links.bandwidth_bytes_per_s for links in kinds.values()])
    for kind, links in kinds.items():
        for number, curve in enumerate(links.curves):
            rows = links.curve == number
            moved = moved_fraction(kind, size[rows])[:, None] * curve.nbytes
            measured[rows] = np.minimum(measured[rows], (curve.seconds / moved).min(axis=1))
    occupied = []
    for link, rings in zip(machine.links, crossing, strict=True):
        fastest = max([1.0, *(fraction.value for fraction in link.kind_fraction.values())])
        by_law = rings / (link.bandwidth_bytes_per_s.value * fastest)
        occupied.append(np.minimum(by_law, measured))
    return np.stack(occupied)


def _bandwidth(machine: Machine, kind: str, crossing: list[Ints]) -> tuple[Array, Ints]:
    """The smallest share of a crossed boundary, and its level; infinite and -1 for one rank."""
    bandwidth = np.full(crossing[0].shape, np.inf)
    bounding = np.full(crossing[0].shape, -1)
    for index, (link, rings) in enumerate(zip(machine.links, crossing, strict=True)):
        share = ring_share(link, kind, rings)
        slower = (rings > 0) & (share < bandwidth)
        bandwidth = np.where(slower, share, bandwidth)
        bounding = np.where(slower, index, bounding)
    return bandwidth, bounding


def ring_share(link: LinkLevel, kind: str, rings: Ints) -> Array:
    """What each of so many rings through one boundary gets, shape (P,).

    Between measured numbers of rings the logarithms are interpolated. Fewer rings than were
    measured get what the fewest got: they cannot get less, and whether one ring can use links
    that several share is unknown. More share what the most got together.
    """
    shares = sorted((s for s in link.ring_shares if s.kind == kind), key=lambda s: s.n_rings)
    rings = np.maximum(rings, 1)
    if not shares:
        fraction = link.kind_fraction[kind].value if kind in link.kind_fraction else 1.0
        law: Array = link.bandwidth_bytes_per_s.value * fraction / rings
        return law
    counts = np.array([share.n_rings for share in shares], dtype=np.float64)
    logs = np.log([share.bandwidth_bytes_per_s.value for share in shares])
    each: Array = np.exp(np.interp(np.log(rings), np.log(counts), logs))
    each *= np.minimum(counts[-1] / rings, 1.0)
    return each


def placement_links(machine: Machine, placements: Placements) -> dict[str, AxisLinks]:
    """`AxisLinks` of each group for every placement, shape (P,)."""
    return {
        group: axis_links(machine, placements.stride(group), placements.size(group))
        for group in placements.axes.groups
    }
