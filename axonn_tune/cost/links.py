"""Which links a group's ring runs over, how many rings share them, and its latency."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import numpy as np

from axonn_tune.spec.grid import AXES, Ints, Placements
from axonn_tune.spec.machine import Machine
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
class AxisLinks:
    """What the groups of one axis get, arrays of shape (P,).

    level: index of the outermost link level crossed, -1 for a group of one rank.
    bounding_level: index of the level that bounds the bandwidth, -1 likewise.
    bandwidth_bytes_per_s: by kind of collective, of each ring with all groups at once.
    ring_seconds: latency of a chunk's way once around the ring (size - 1 hops).
    tree_seconds: latency of a way up or down a binary tree.
    occupied_s_per_byte: for each level how long its busiest boundary is occupied for each
    byte that every ring of the axis carries, shape (levels, P).
    """

    level: Ints
    bounding_level: Ints
    bandwidth_bytes_per_s: dict[str, Array]
    ring_seconds: Array
    tree_seconds: Array
    occupied_s_per_byte: Array


def axis_links(machine: Machine, stride: Ints, size: Ints) -> AxisLinks:
    """Bandwidth and latency of the groups with these strides and sizes, shape (P,).

    Bandwidth: min over the crossed levels l of beta_l / (rings that share a unit's
    boundary); a ring bandwidth measured inside the node wins over the formula.
    Latency: NCCL's decomposition (its tuner sums intra-node and inter-node hops): of the
    hops of a ring those that cross level l but none beyond cost alpha_l each; a tree
    takes log2 of the units joined at each level.
    """
    level = np.full(size.shape, -1)
    ring_seconds = np.zeros(size.shape)
    tree_seconds = np.zeros(size.shape)
    crossing = []
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
        alpha = link.latency_seconds.value
        ring_seconds += alpha * np.maximum(units_here - units_above, 0.0)
        tree_seconds += alpha * np.log2(np.maximum(units_here / units_above, 1.0))
        units_here = units_above
    in_node = level < machine.node_level
    bandwidths, bounding = {}, np.full(size.shape, -1)
    for kind in KINDS:
        bandwidths[kind], bounding = _bandwidth(machine, kind, crossing)
        for ring in machine.ring_bandwidths:
            listed = in_node & (stride == ring.stride) & (size == ring.size)
            bandwidths[kind][listed] = ring.bandwidth_bytes_per_s.value
    occupied = _occupied_s_per_byte(machine, crossing, bandwidths)
    return AxisLinks(level, bounding, bandwidths, ring_seconds, tree_seconds, occupied)


def _occupied_s_per_byte(
    machine: Machine, crossing: list[Ints], bandwidths: Mapping[str, Array]
) -> Array:
    """Rings through the boundary over its bandwidth, but no more than a ring was measured at."""
    measured = 1.0 / np.maximum.reduce(list(bandwidths.values()))
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
        fraction = link.kind_fraction[kind].value if kind in link.kind_fraction else 1.0
        share = link.bandwidth_bytes_per_s.value * fraction / np.maximum(rings, 1)
        slower = (rings > 0) & (share < bandwidth)
        bandwidth = np.where(slower, share, bandwidth)
        bounding = np.where(slower, index, bounding)
    return bandwidth, bounding


def placement_links(machine: Machine, placements: Placements) -> dict[str, AxisLinks]:
    """`AxisLinks` of each axis for every placement, shape (P,)."""
    strides = placements.strides
    return {
        axis: axis_links(machine, strides[i], placements.sizes[i]) for i, axis in enumerate(AXES)
    }
