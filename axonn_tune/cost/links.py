"""The bandwidth and the latency that the groups of an axis get from the links of a machine.

The links of a machine form levels: GPUs in a node, nodes in a cluster, and so on. `axis_links`
finds bandwidth and latency of an axis with a given stride and size, in this order:

1. For each level, the number of rings of the axis that cross the boundary of a unit at the same
   time (`rings_through_boundary`). Its bandwidth is shared by them (`ring_share`), and the smallest
   share of all levels is the bandwidth of a ring. A tree passes a boundary as often as
   `tree_passes` and `chain_passes` say, and the level where this takes longest bounds it.
2. For each level, the hops of a ring, or of a tree, that cross this level and none beyond. Their
   number follows from the units that a group visits (`units_visited`); each hop costs the level's
   latency.
3. What was measured: bandwidths of rings inside the node, steps of rings, and times of whole
   collectives, which replace bandwidth and latency.
4. For each level, how long a byte occupies its busiest boundary. Collectives of several axes that
   run at once cannot be faster than the boundaries that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from axonn_tune.cost.boundaries import rings_through_boundary, units_visited
from axonn_tune.cost.collectives import (
    chain_passes,
    moved_fraction,
    rings_worth,
    tree_passes,
)
from axonn_tune.cost.curve import Curve, used_curves
from axonn_tune.cost.stepped import HopDelays, SteppedLinks, SteppedTrees
from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.links import LinkLevel, Steps
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import KINDS, RING_KINDS, Array
from axonn_tune.spec.points import LinkPoint

# This stride stands for all strides of groups on a switch.
_ANY_STRIDE = 0


@dataclass(frozen=True, eq=False)
class KindLinks:
    """Holds bandwidth and latency of one kind of collective over an axis, arrays of shape (P,).

    bandwidth_bytes_per_s
        Bandwidth of each ring while all groups communicate at once.
    bounding_level
        Index of the level that bounds the bandwidth, -1 for a group of one rank.
    ring_seconds
        Latency of a chunk's way once around the ring (size - 1 hops); of one hop for an all-to-all.
    tree_seconds
        Latency of a way up, or down, a binary tree.
    tree_s_per_byte
        Time for which each byte of the buffer occupies the busiest link of a tree, up and down.
    least_tree_s_per_byte
        Time that the library expects for each byte of a large buffer on a tree at least.
    curve
        Index of the measured curve that replaces the others, -1 where there is none.
    curves
        Measured curves.
    ring, tree
        Measured steps of rings and of trees, which replace bandwidth and latency.
    delays
        Extra time of the hops of rings beyond this latency, for each inner level with measured
        steps.
    """

    bandwidth_bytes_per_s: Array
    bounding_level: Ints
    ring_seconds: Array
    tree_seconds: Array
    tree_s_per_byte: Array
    least_tree_s_per_byte: Array
    curve: Ints
    curves: tuple[Curve, ...]
    ring: SteppedLinks
    tree: SteppedTrees
    delays: tuple[HopDelays, ...]

    def take(self, rows: Ints) -> KindLinks:
        """Return the same for the groups of these rows."""
        return KindLinks(
            self.bandwidth_bytes_per_s[rows],
            self.bounding_level[rows],
            self.ring_seconds[rows],
            self.tree_seconds[rows],
            self.tree_s_per_byte[rows],
            self.least_tree_s_per_byte[rows],
            self.curve[rows],
            self.curves,
            self.ring.take(rows),
            self.tree.take(rows),
            tuple(delay.take(rows) for delay in self.delays),
        )

    def around_seconds(self, nbytes: Array) -> Array:
        """Return the latency once around the ring of chunks of these bytes, with delays, (P,)."""
        return sum((delay.seconds(nbytes) for delay in self.delays), start=self.ring_seconds)

    @cached_property
    def measured(self) -> list[tuple[Curve, Ints]]:
        """Each measured curve that holds for at least one group, with the rows of its groups."""
        return used_curves(self.curve, self.curves)


@dataclass(frozen=True, eq=False)
class AxisLinks:
    """Holds bandwidth and latency of the groups of one axis, arrays of shape (P,).

    level
        Index of the outermost link level that the groups cross, -1 for a group of one rank.
    kinds
        Bandwidth and latency of each kind of collective.
    occupied_s_per_byte
        Time for which the busiest boundary of each level is occupied for every byte that each
        ring of the axis carries, shape (levels, P).
    all_reduce_passes
        The least number of times that the buffer of an all-reduce leaves a unit of each level, on a
        ring or on trees, shape (levels, P).
    """

    level: Ints
    kinds: Mapping[str, KindLinks]
    occupied_s_per_byte: Array
    all_reduce_passes: Array

    def take(self, rows: Ints) -> AxisLinks:
        """Return the same for the groups of these rows."""
        return AxisLinks(
            self.level[rows],
            _MadeKinds(lambda kind: self.kinds[kind].take(rows)),
            self.occupied_s_per_byte.take(rows, axis=1),
            self.all_reduce_passes.take(rows, axis=1),
        )


class _MadeKinds(Mapping[str, KindLinks]):
    """The links of each kind, made when the kind is first asked for.

    Few programs send messages of every kind.
    """

    def __init__(self, make: Callable[[str], KindLinks]) -> None:
        self._make = make
        self._made: dict[str, KindLinks] = {}

    def __getitem__(self, kind: str) -> KindLinks:
        if kind not in self._made:
            self._made[kind] = self._make(kind)
        return self._made[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(KINDS)

    def __len__(self) -> int:
        return len(KINDS)


class _Rates(NamedTuple):
    """What the bytes of one kind of collective meet on their way, arrays of shape (P,).

    The fields are those of `KindLinks`.
    """

    bandwidth_bytes_per_s: Array
    bounding_level: Ints
    tree_s_per_byte: Array
    curve: Ints
    curves: tuple[Curve, ...]


def axis_links(
    machine: Machine,
    stride: Ints,
    size: Ints,
    sent_once: Experts | None = None,
    n_ranks: Ints | None = None,
) -> AxisLinks:
    """Return bandwidth and latency of the groups with these strides and sizes, shape (P,).

    Their jobs have `n_ranks` ranks, shape (P,), or fill whole units where that is None.

    The bandwidth is the minimum, over the crossed levels l, of what each of the rings that share
    a unit's boundary gets: beta_l / rings where that was not measured. A ring bandwidth that the
    profile lists for groups inside the node replaces the formula. The latency follows NCCL's
    decomposition (its tuner sums intra-node and inter-node hops): the hops of a ring that cross
    level l but no level beyond it cost alpha_l each; a tree takes log2 of the units that are
    joined at each level. An all-to-all sends to all ranks at once, so that it takes one hop over
    the outermost level (NCCL runs up to eight messages of each channel together: NVIDIA/nccl
    5067397, src/enqueue.cc, `NCCL_MAX_DEV_WORK_P2P_PER_BATCH`; measured on one node, 8 GPUs take
    0 to 5 us longer than 2).

    With `sent_once` the all-to-alls carry tokens to these experts, each once to every unit of a
    level that holds any of them, where it is forwarded within the unit.
    """
    ways = _ways(machine, stride, size, n_ranks)
    rates = {kind: _rates(machine, kind, ways, stride, sent_once) for kind in KINDS}
    return AxisLinks(
        ways.level,
        _MadeKinds(lambda kind: _kind_links(machine, kind, ways, rates[kind])),
        _occupied_s_per_byte(machine, ways, rates),
        np.minimum(
            np.stack(ways.tree_passes), moved_fraction("all_reduce", size.astype(np.float64))
        ),
    )


def _rates(
    machine: Machine, kind: str, ways: _Ways, stride: Ints, sent_once: Experts | None
) -> _Rates:
    """Return what the bytes of one kind of collective meet on their way."""
    bandwidth, bounding_level = _bandwidth(machine, kind, ways, sent_once)
    tree_s_per_byte = _tree_s_per_byte(machine, kind, ways, ways.tree_passes)
    in_node = ways.level < machine.node_level
    for ring in machine.ring_bandwidths:
        is_listed = in_node & (stride == ring.stride) & (ways.size == ring.size)
        bandwidth[is_listed] = ring.bandwidth_bytes_per_s.value
        tree_s_per_byte[is_listed] = 2.0 / ring.bandwidth_bytes_per_s.value
    curve, curves = _curves(machine, kind, stride, ways.size)
    return _Rates(bandwidth, bounding_level, tree_s_per_byte, curve, curves)


def _kind_links(machine: Machine, kind: str, ways: _Ways, rates: _Rates) -> KindLinks:
    """Return bandwidth, latency and measured times of one kind of collective."""
    ring_seconds = _latency(machine, kind, ways.hops(kind))
    tree_seconds = _latency(machine, kind, ways.tree_hops)
    ring_curves = _step_curves([(link.ring_steps, ways.size) for link in machine.links], kind, ways)
    n_steps = ways.size.astype(np.float64) - 1.0
    return KindLinks(
        rates.bandwidth_bytes_per_s,
        rates.bounding_level,
        ring_seconds,
        tree_seconds,
        rates.tree_s_per_byte,
        _least_tree_s_per_byte(machine, ways),
        curve=rates.curve,
        curves=rates.curves,
        ring=SteppedLinks(n_steps, ring_seconds, ways.n_sharing, *ring_curves),
        tree=_stepped_trees(machine, kind, ways, tree_seconds, rates.tree_s_per_byte),
        delays=_hop_delays(machine, kind, ways),
    )


class _Ways(NamedTuple):
    """The paths of rings and trees through the levels of a machine, arrays of shape (P,).

    size
        Number of ranks of each group.
    crossing
        For each level, the number of rings that leave a unit of it at the same time.
    n_units
        For each level, the number of its units that a group visits.
    ring_hops, tree_hops
        For each level, the hops that cross it and none beyond.
    tree_passes
        For each level, how many times the buffer of an all-reduce on trees leaves a unit of it.
    level
        Index of the outermost level that the groups cross, -1 for a group of one rank.
    n_sharing
        Number of rings that leave a unit of that level at the same time.
    n_climbed
        Levels of a tree over the units of that level.
    """

    size: Ints
    crossing: list[Ints]
    n_units: list[Array]
    ring_hops: list[Array]
    tree_hops: list[Array]
    tree_passes: list[Array]
    level: Ints
    n_sharing: Ints
    n_climbed: Array

    def hops(self, kind: str) -> list[Array]:
        """Return the hops of a collective's latency on each level."""
        if kind != "all_to_all":
            return self.ring_hops
        return [(self.level == index).astype(np.float64) for index in range(len(self.crossing))]


def _ways(machine: Machine, stride: Ints, size: Ints, n_ranks: Ints | None) -> _Ways:
    """Return the paths of groups with these strides and sizes.

    A job that fits in a unit does not leave it, even if its groups would not divide a full unit.
    """
    units = [link.unit_ranks for link in machine.links]
    crossing = [rings_through_boundary(stride, size, unit_ranks) for unit_ranks in units]
    n_units = [units_visited(stride, size, unit_ranks) for unit_ranks in units[1:]]
    if n_ranks is not None:
        crossing = [
            np.where(unit_ranks < n_ranks, rings, 0)
            for unit_ranks, rings in zip(units, crossing, strict=True)
        ]
        n_units = [
            np.where(unit_ranks < n_ranks, visited, 1.0)
            for unit_ranks, visited in zip(units[1:], n_units, strict=True)
        ]
    n_units = [size.astype(np.float64), *n_units, np.ones(size.shape)]
    level = np.full(size.shape, -1)
    n_sharing = np.zeros(size.shape, dtype=size.dtype)
    n_climbed = np.zeros(size.shape)
    ring_hops, tree_hops = [], []
    for index, (rings, (units_here, units_above)) in enumerate(
        zip(crossing, pairwise(n_units), strict=True)
    ):
        ring_hops.append(np.maximum(units_here - units_above, 0.0))
        tree_hops.append(np.log2(np.maximum(units_here / units_above, 1.0)))
        level = np.where(rings > 0, index, level)
        n_sharing = np.where(rings > 0, rings, n_sharing)
        n_climbed = np.where(rings > 0, tree_hops[-1], n_climbed)
    return _Ways(
        size,
        crossing,
        n_units[:-1],
        ring_hops,
        tree_hops,
        _passes_of_trees(n_units, machine.node_level),
        level,
        n_sharing,
        n_climbed,
    )


def _passes_of_trees(n_units: Sequence[Array], node_level: int) -> list[Array]:
    """Return, for each level, how many times the buffer of an all-reduce leaves a unit on trees.

    The trees join nodes, and what lies further out has as much of them. Inside a node the ranks
    form chains, and pass on their part of what leaves it by other links. A group that stays in one
    node is taken to move the buffer twice, as NCCL counts it, and so gains by a tree only where
    latency counts.

    Parameters
    ----------
    n_units : sequence of arrays, shape (levels + 1,) of (P,)
        Units of each level that a group visits, and 1 for all that the outermost level joins.
    node_level : int
        Index of the level whose units are nodes, or the number of levels.
    """
    n_nodes = n_units[node_level]
    between = tree_passes(n_nodes)
    passes = []
    for index, units in enumerate(n_units[:-1]):
        n_inside = np.ceil(units / n_nodes)
        inside = np.maximum(chain_passes(n_inside), between / n_inside)
        passes.append(between if index >= node_level else np.where(n_nodes > 1, inside, 2.0))
    return passes


def _latency(machine: Machine, kind: str, hops: Sequence[Array]) -> Array:
    """Return the latency of a path with the given number of hops on each level."""
    seconds = np.zeros(hops[0].shape)
    for link, n_hops in zip(machine.links, hops, strict=True):
        seconds += link.latency_of(kind).value * n_hops
    return seconds


def _curves(
    machine: Machine, kind: str, stride: Ints, size: Ints
) -> tuple[Ints, tuple[Curve, ...]]:
    """Return the index of each group's measured curve (-1 without one), and the curves.

    Measurements at a single size do not show how time grows with size, so that they make no curve.
    """
    points_by_group: dict[tuple[int, int], list[LinkPoint]] = {}
    for point in machine.link_points:
        if point.kind == kind and (group := _group_of(point, machine)):
            points_by_group.setdefault(group, []).append(point)
    on_switch = machine.switch_ranks % (stride * size) == 0
    index = np.full(size.shape, -1)
    curves: list[Curve] = []
    for (measured_stride, measured_size), points in points_by_group.items():
        nbytes = [point.nbytes for point in points]
        if len(set(nbytes)) < 2:
            continue
        is_alike = on_switch if measured_stride == _ANY_STRIDE else stride == measured_stride
        index[is_alike & (size == measured_size)] = len(curves)
        curves.append(Curve.through(nbytes, [point.seconds for point in points]))
    return index, tuple(curves)


def _group_of(point: LinkPoint, machine: Machine) -> tuple[int, int] | None:
    """Return stride and size of the groups for which a point holds; None if it holds for none.

    On a switch the stride makes no difference, nor does it matter who else communicates.
    """
    if machine.switch_ranks % (point.stride * point.size) == 0:
        return _ANY_STRIDE, point.size
    return (point.stride, point.size) if point.is_of_whole_axis else None


def _step_curves(
    steps_of_level: Sequence[tuple[Steps | None, Ints | Array]], kind: str, ways: _Ways
) -> tuple[Ints, tuple[Curve, ...]]:
    """Return the index of the curve of each group's steps (-1 without one), and the curves.

    The outermost level that a group crosses sets the pace of its steps. Beside the steps of each
    level stand the ranks by which their points are chosen: those of a ring, or for a tree, which
    joins units, those that fill the units it joins.
    """
    index = np.full(ways.size.shape, -1)
    curves: list[Curve] = []
    for number, (steps, n_ranks) in enumerate(steps_of_level):
        if steps is None or kind not in RING_KINDS:
            continue
        of_level, more = _level_curves(steps, kind, ways.n_sharing, n_ranks)
        index = np.where((ways.level == number) & (of_level >= 0), len(curves) + of_level, index)
        curves += more
    return index, tuple(curves)


def _level_curves(
    steps: Steps, kind: str, n_sharing: Ints, size: Ints | Array
) -> tuple[Ints, list[Curve]]:
    """Return the index of the curve of steps on one level for each group, and the curves.

    The points that hold for a group were timed with the largest number of rings not above its own;
    of these, they are the points whose `above_ranks` is the largest below the size of the group.
    Bytes are those of all rings together.
    """
    index = np.full(size.shape, -1)
    curves: list[Curve] = []
    for n_rings, points in steps.of_kind(kind).items():
        for above_ranks in sorted({point.above_ranks for point in points}):
            index[(n_sharing >= n_rings) & (size > above_ranks)] = len(curves)
            of_regime = [
                (n_rings * p.nbytes, p.seconds) for p in points if p.above_ranks == above_ranks
            ]
            curves.append(Curve.through(*zip(*of_regime, strict=True)))
    return index, curves


def _stepped_trees(
    machine: Machine, kind: str, ways: _Ways, tree_seconds: Array, tree_s_per_byte: Array
) -> SteppedTrees:
    """Return the measured steps of trees, with what the law adds to those over two units.

    Parameters
    ----------
    tree_seconds : array, shape (P,)
        Latency of a way up a tree.
    tree_s_per_byte : array, shape (P,)
        Time for which each byte of the buffer occupies the busiest link of a tree, up and down.
    """

    def curves_of(n_units: Sequence[Array]) -> tuple[Ints, tuple[Curve, ...]]:
        return _step_curves(
            [
                (link.tree_steps, link.unit_ranks * units)
                for link, units in zip(machine.links, n_units, strict=True)
            ],
            kind,
            ways,
        )

    curve, curves = curves_of(ways.n_units)
    if not curves:
        unmeasured = SteppedLinks(ways.n_climbed, tree_seconds, ways.n_sharing, curve, curves)
        return SteppedTrees(unmeasured, *np.zeros((2, *ways.size.shape)))
    of_two, _ = curves_of([np.full(ways.size.shape, 2.0)] * len(machine.links))
    is_beyond = (curve >= 0) & (curve == of_two) & (ways.n_climbed > 1.0)
    n_added = np.where(is_beyond, ways.n_climbed - 1.0, 0.0)
    hop_seconds = np.array([link.latency_of(kind).value for link in machine.links])
    added_seconds = n_added * hop_seconds[ways.level]
    over_two = [np.maximum(units / np.exp2(n_added), 1.0) for units in ways.n_units]
    passes = _passes_of_trees([*over_two, np.ones(ways.size.shape)], machine.node_level)
    added_s_per_byte = tree_s_per_byte - _tree_s_per_byte(machine, kind, ways, passes)
    steps = SteppedLinks(
        ways.n_climbed - n_added, tree_seconds - added_seconds, ways.n_sharing, curve, curves
    )
    return SteppedTrees(steps, added_seconds, np.where(is_beyond, added_s_per_byte, 0.0))


def _hop_delays(machine: Machine, kind: str, ways: _Ways) -> tuple[HopDelays, ...]:
    """Return the delays of hops on levels with measured steps, of rings that leave these levels."""
    delays = []
    for number, link in enumerate(machine.links[:-1]):
        if link.hop_steps is None or kind not in RING_KINDS:
            continue
        n_hops = np.where(ways.level > number, ways.ring_hops[number], 0.0)
        n_rings = ways.crossing[number]
        n_inside = ways.n_units[number] / ways.n_units[number + 1]
        curve, curves = _level_curves(link.hop_steps, kind, n_rings, n_inside)
        latency_seconds = link.latency_of(kind).value * n_hops
        measured = np.where(n_hops > 0, curve, -1)
        steps = SteppedLinks(n_hops, latency_seconds, n_rings, measured, tuple(curves))
        delays.append(HopDelays(steps, ring_share(link, kind, n_rings)))
    return tuple(delays)


def _occupied_s_per_byte(machine: Machine, ways: _Ways, rates: Mapping[str, _Rates]) -> Array:
    """Return how long a byte of every ring occupies the boundary of each level, (levels, P).

    This is the number of rings over the bandwidth of the boundary, but no more than the time in
    which a ring was measured to move a byte.
    """
    measured = 1.0 / np.maximum.reduce([rate.bandwidth_bytes_per_s for rate in rates.values()])
    for kind, rate in rates.items():
        for number, curve in enumerate(rate.curves):
            rows = rate.curve == number
            moved = moved_fraction(kind, ways.size[rows])[:, None] * curve.nbytes
            measured[rows] = np.minimum(measured[rows], (curve.seconds / moved).min(axis=1))
    occupied = []
    for link, rings in zip(machine.links, ways.crossing, strict=True):
        fastest = max([1.0, *(fraction.value for fraction in link.kind_fraction.values())])
        by_law = rings / (link.bandwidth_bytes_per_s.value * fastest)
        occupied.append(np.minimum(by_law, measured))
    return np.stack(occupied)


def _bandwidth(
    machine: Machine, kind: str, ways: _Ways, sent_once: Experts | None
) -> tuple[Array, Ints]:
    """Return the smallest share of a crossed boundary, and its level.

    They are infinite and -1 for a group of one rank. If a group sends as many bytes through the
    boundary as several rings, its bandwidth is the share of one ring over that number.
    """
    n_ranks = ways.size.astype(np.float64)
    bandwidth = np.full(n_ranks.shape, np.inf)
    bounding_level = np.full(n_ranks.shape, -1)
    for index, link in enumerate(machine.links):
        rings = ways.crossing[index]
        worth = rings_worth(kind, n_ranks, ways.n_units[index], sent_once)
        share = ring_share(link, kind, rings) / worth
        is_slower = (rings > 0) & (share < bandwidth)
        bandwidth = np.where(is_slower, share, bandwidth)
        bounding_level = np.where(is_slower, index, bounding_level)
    return bandwidth, bounding_level


def _tree_s_per_byte(
    machine: Machine, kind: str, ways: _Ways, tree_passes: Sequence[Array]
) -> Array:
    """Return how long a byte of the buffer occupies the busiest link of a tree, shape (P,).

    It leaves a unit of each level so many times.
    """
    seconds = np.zeros(ways.size.shape)
    for link, rings, passes in zip(machine.links, ways.crossing, tree_passes, strict=True):
        occupied = passes / ring_share(link, kind, rings)
        seconds = np.where(rings > 0, np.maximum(seconds, occupied), seconds)
    return seconds


def _least_tree_s_per_byte(machine: Machine, ways: _Ways) -> Array:
    """Return how long the library expects a byte of a buffer on a tree to take at least, (P,)."""
    seconds = np.zeros(ways.size.shape)
    for link, rings, n_units in zip(machine.links, ways.crossing, ways.n_units, strict=True):
        if (limits := link.tree_limits) is not None:
            two, more = limits.two_units_bytes_per_s, limits.more_units_bytes_per_s
            limit = np.where(n_units > 2, more.value, two.value)
            seconds = np.maximum(seconds, np.where(n_units > 1, 2.0 * rings / limit, 0.0))
    return seconds


def ring_share(link: LinkLevel, kind: str, rings: Ints) -> Array:
    """Return the bandwidth of each ring where `rings` rings cross one boundary, shape (P,).

    Between measured numbers of rings the logarithms are interpolated. Fewer rings than were
    measured get what the smallest measured number got: they cannot get less, and whether one
    ring can use links that several share is unknown. More rings than were measured share what
    the largest measured number got together.
    """
    shares = sorted((s for s in link.ring_shares if s.kind == kind), key=lambda s: s.n_rings)
    rings = np.maximum(rings, 1)
    if not shares:
        fraction = link.kind_fraction[kind].value if kind in link.kind_fraction else 1.0
        return link.bandwidth_bytes_per_s.value * fraction / rings
    counts = np.array([share.n_rings for share in shares], dtype=np.float64)
    logs = np.log([share.bandwidth_bytes_per_s.value for share in shares])
    bandwidth = np.exp(np.interp(np.log(rings), np.log(counts), logs))
    return bandwidth * np.minimum(counts[-1] / rings, 1.0)
