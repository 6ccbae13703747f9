"""The passes of a pipeline, played in the order of its schedule for all candidates at once.

They are played in these steps:

1. `orders.ordered_passes` lists what a rank runs, in a fixed order. A slot, which holds one pass or
   two, starts when the rank's previous slot has ended and the results that it needs from
   neighbouring stages (`source_of`) have arrived. Where ranks stand still together while one
   hands a result to the other, that takes a slot of both (`handovers`).
2. `_schedule` sorts the slots of all ranks into levels, so that each depends on slots of
   earlier levels only. This does not depend on durations, so that all candidates share it.
3. `_played` computes when the passes end, one level after another, for many candidates at once.
4. `pipeline_seconds` plays more and more micro-batches until the schedule repeats, and adds the
   period for the others. `passes` plays one candidate and returns every pass.

The duration of a pass depends on its direction and on whether its stage is the first, a middle or
the last one; `kind_of` numbers these combinations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from axonn_tune.simulate.handovers import NO_HANDOVERS, handover_durations, with_handovers
from axonn_tune.simulate.orders import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Pass,
    n_warmup_passes,
    ordered_passes,
)
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import NO_HANDOVER, Array
from axonn_tune.spec.schedule import DUALPIPE, ONE_F_ONE_B, ZB_H1

# A round is `n_stages` micro-batches. With virtual stages or two flows, at most this many rounds
# belong to the start of the pipeline, and as many to its drain; other schedules have one of each.
ROUNDS_OF_START = {ONE_F_ONE_B: 2, DUALPIPE: 4}
# If the rounds that were played do not repeat yet, more micro-batches are played, by this factor.
GROWTH = 4
# Rounds count as equal if their passes shift alike up to this fraction of the whole time.
ROUND_TOLERANCE = 1e-12
# Number of entries of the table of ends that is held at once.
CHUNK_ENTRIES = 4_000_000

IntOrInts = TypeVar("IntOrInts", int, Ints)


@dataclass(frozen=True)
class PlayedPass:
    """A pass of one rank, with its start and end.

    rank
        Rank of the pipeline.
    stage
        Number of the virtual stage, counted through all ranks.
    direction
        `FORWARD`, `BACKWARD`, or `INPUT` or `WEIGHT` for a part of the backward pass.
    micro_batch
        Number of the micro-batch.
    kind
        Kind of the pass, as `kind_of` numbers it.
    is_alone
        Whether it belongs to the warm-up or the drain of a pipeline with virtual stages, so that no
        other pass can run beside it.
    start_seconds, end_seconds
        Times since the start of the first pass.
    arrival_seconds
        When the neighbour has its result: at its end, unless the result travels beside the passes.
    """

    rank: int
    stage: int
    direction: int
    micro_batch: int
    kind: int
    is_alone: bool
    start_seconds: float
    end_seconds: float
    arrival_seconds: float

    @property
    def part(self) -> tuple[int, bool]:
        """The kind of the pass, and whether no other pass can run beside it."""
        return self.kind, self.is_alone

    @property
    def is_sent_beside(self) -> bool:
        """Whether its result travels while the rank runs its next pass."""
        return self.arrival_seconds > self.end_seconds


def passes(
    n_stages: int,
    n_virtual: int,
    n_micro: int,
    seconds: Array,
    transfer_seconds: float,
    schedule: str = ONE_F_ONE_B,
    places: tuple[int, ...] = (),
    beside_seconds: float = 0.0,
    alone: Array | None = None,
    handover_seconds: tuple[float, float] = NO_HANDOVER,
) -> list[PlayedPass]:
    """Return every pass of one candidate, rank by rank in the order in which each rank runs them.

    Where two passes run together, the forward pass is said to come first.

    Parameters
    ----------
    seconds : array, shape (kinds,)
        Durations of passes, by `kind_of`.
    transfer_seconds : float
        Time of a transfer to the next stage, which is a part of every pass.
    alone : array, shape (kinds,)
        Durations of passes of the warm-up and of the drain; by default those of all others.
    schedule, places, beside_seconds, handover_seconds
        They are those of `pipeline_seconds`.
    """
    shape = _Shape(schedule, n_stages, n_virtual, places, any(handover_seconds))
    order = _schedule(shape, _per_flow(schedule, n_micro))
    beside = np.full(1, beside_seconds)
    each, each_alone = (
        of_kinds[: shape.n_kinds, None]
        for of_kinds in (seconds, seconds if alone is None else alone)
    )
    transfer = np.full(1, transfer_seconds)
    duration = _durations(each, transfer, beside, each_alone, handover_seconds)
    is_second = order.place > 0
    length = duration[order.row, 0]
    of_slot = np.bincount(order.slot, weights=length)[order.slot]
    start = _ends(order, duration, beside)[order.slot, 0] - of_slot
    start += is_second * (of_slot - length)
    end = start + length
    arrival = end + beside_seconds * order.is_steady[order.slot]
    stage, micro = order.stage, order.micro
    if schedule == DUALPIPE:
        micro = micro + (stage >= n_stages) * (n_micro // 2)
        stage = stage % n_stages
    identity = order.rank, stage, order.direction, micro, order.kind
    columns = *identity, order.is_alone, start, end, arrival
    return [
        PlayedPass(*each) for each in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _per_flow(schedule: str, n_micro: IntOrInts) -> IntOrInts:
    """Return the number of micro-batches that enter at one end of the pipeline."""
    return n_micro // 2 if schedule == DUALPIPE else n_micro


@dataclass(frozen=True)
class _Shape:
    """The stages of a pipeline, and the schedule in which its ranks run them.

    schedule, n_stages, n_virtual, places
        They are those of `pipeline_seconds`.
    has_handovers
        Whether ranks stand still together while one hands a result to the other.
    """

    schedule: str
    n_stages: int
    n_virtual: int
    places: tuple[int, ...]
    has_handovers: bool = False

    @property
    def last(self) -> int:
        """The number of the last stage through which a micro-batch passes."""
        return self.n_stages * self.n_virtual - 1

    @property
    def period(self) -> int:
        """The number of micro-batches after which the order of a rank's passes repeats.

        It is one where a rank has one stage; the other schedules are taken to repeat after a round.
        """
        return 1 if self._has_one_stage else self.n_stages

    @property
    def micro_of_start(self) -> int:
        """How many micro-batches may belong to the start of the pipeline; as many to its drain."""
        return self.n_stages * (1 if self._has_one_stage else ROUNDS_OF_START[self.schedule])

    @property
    def micro_of_state(self) -> int:
        """The number of micro-batches whose latest ends determine all that comes later.

        With virtual stages, the forward passes of a round alternate with backward passes of the
        round before and of the one before that.
        """
        has_one_round = self._has_one_stage or self.schedule == DUALPIPE
        return self.n_stages * (1 if has_one_round else 2)

    @property
    def _has_one_stage(self) -> bool:
        """Whether each rank has one stage."""
        return self.schedule != DUALPIPE and self.n_virtual == 1

    @property
    def n_kinds(self) -> int:
        """The number of kinds of passes."""
        return kind_of(FORWARD, max((LAST, *self.places)) + 1)

    @property
    def n_flows(self) -> int:
        """The number of ends at which micro-batches enter."""
        return 2 if self.schedule == DUALPIPE else 1

    def stage_of(self, rank: Ints, chunk: Ints) -> Ints:
        """Return the numbers of ranks' virtual stages, counted through all ranks.

        With two directions the stages of the second one are counted after all of the first one.
        """
        if self.schedule == DUALPIPE:
            return np.where(chunk > 0, 2 * self.n_stages - 1 - rank, rank)
        return chunk * self.n_stages + rank

    def kind(self, direction: Ints, stage: Ints) -> Ints:
        """Return the kinds of passes."""
        last = self.last
        usual = [MIDDLE] * (last + 1)
        usual[0], usual[last] = FIRST, LAST
        return kind_of(direction, np.array(self.places or usual)[stage % (last + 1)])


class _Level(NamedTuple):
    """Slots that follow each other and depend on slots of earlier levels only.

    start, end
        Index of the first slot, and of the one after the last.
    sources
        Indices of the slots on which each slot depends: the one that the same rank runs before it,
        then those whose results its passes need. Each array has the shape (slots of the level,).
    travels
        Whether each of these results may travel beside the passes, as bools in place of indices.
    """

    start: int
    end: int
    sources: tuple[np.ndarray, ...]
    travels: tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class _Schedule:
    """The order in which the slots of a pipeline can be played, without their durations.

    rank, slot, place, direction, stage, micro, kind, is_alone, row
        Rank, index of the slot, place in the slot, direction, virtual stage, micro-batch, kind,
        whether no other pass can run beside it, and row of `_durations` of each pass, the passes of
        one rank after those of another.
    rows
        Rows of `_durations` of the passes of each slot, or of its hand-over, shape (passes of a
        slot, slots + 1).
    is_steady
        Whether each slot is one of those in which forward and backward passes alternate, so that
        its result may travel beside the next one, shape (slots + 1,).
    levels
        Levels in the order in which they are played.
    last_of_rank
        Index of the last slot of each rank.
    steady
        Indices of the slots of the last micro-batches before the drain, which determine all that
        comes later, and of those a period before them.

    Slots are counted from 1 in the order of the levels. Index 0 stands for no slot, and has its end
    at time zero.
    """

    rank: Ints
    slot: Ints
    place: Ints
    direction: Ints
    stage: Ints
    micro: Ints
    kind: Ints
    is_alone: np.ndarray
    row: Ints
    rows: Ints
    is_steady: np.ndarray
    levels: tuple[_Level, ...]
    last_of_rank: Ints
    steady: tuple[Ints, Ints]


FIRST, MIDDLE, LAST = range(3)
_N_DIRECTIONS = 4
N_KINDS = 3 * _N_DIRECTIONS


def kind_of(direction: IntOrInts, place: IntOrInts) -> IntOrInts:
    """Return the index of a pass's duration; `place` is `FIRST`, `MIDDLE`, `LAST` or later."""
    return place * _N_DIRECTIONS + direction


def _durations(
    seconds: Array,
    transfer_seconds: Array,
    beside_seconds: Array,
    alone: Array,
    handover_seconds: tuple[float, float] = NO_HANDOVER,
) -> Array:
    """Return the durations of passes and of hand-overs, shape (3 kinds + 1 + kinds of these, C).

    First come those of a slot's first pass, with its transfer, then those of its second pass, whose
    transfer runs beside the first one's, then those of a pass of the warm-up or of the drain
    (`alone`), whose transfers run beside nothing, then nothing, and then those of hand-overs.
    Gradients of weights are not sent.
    """
    is_sent = (np.arange(len(seconds)) % _N_DIRECTIONS != WEIGHT)[:, None]
    with_transfer = seconds + is_sent * transfer_seconds
    alone_with_transfer = alone + is_sent * (transfer_seconds + beside_seconds)
    nothing = np.zeros_like(seconds[:1])
    of_handovers = handover_durations(handover_seconds, seconds.shape[1])
    return np.concatenate([with_transfer, seconds, alone_with_transfer, nothing, of_handovers])


@lru_cache(maxsize=256)
def _schedule(shape: _Shape, n_micro: int) -> _Schedule:
    """Return the schedule of a pipeline."""
    n_stages = shape.n_stages
    orders = [
        ordered_passes(shape.schedule, rank, n_stages, shape.n_virtual, n_micro)
        for rank in range(n_stages)
    ]
    ends = np.cumsum([order[0, -1] + 1 for order in orders])
    handovers = NO_HANDOVERS
    if shape.has_handovers:
        orders, handovers = with_handovers(orders, n_micro)
        ends += np.cumsum(np.bincount(handovers.rank, minlength=n_stages))
    starts = np.array([0, *ends[:-1]])
    rank = np.repeat(np.arange(n_stages), [order.shape[1] for order in orders])
    number, place, direction, chunk, micro = np.concatenate(orders, axis=1)
    slot = 1 + number + starts[rank]
    stage = shape.stage_of(rank, chunk)
    index_of = np.zeros((_N_DIRECTIONS, shape.n_flows * (shape.last + 1), n_micro), dtype=np.int64)
    index_of[direction, stage, micro] = slot
    kind = shape.kind(direction, stage)
    n_slots = int(ends[-1])
    # The slot that the same rank runs before, and those whose results each slot needs.
    sources = np.zeros((place.max() + 2, n_slots + 1), dtype=np.int64)
    sources[0] = np.arange(-1, n_slots)
    sources[0, starts + 1] = 0
    sources[1 + place, slot] = _needed(index_of, shape.n_flows)[direction, stage, micro]
    handed = 1 + handovers.number + starts[handovers.rank]
    # Both ranks wait for the one that comes later.
    sources[1, handed] = sources[0, handed[handovers.partner]]
    levels = list(_levels(sources[1:], ends))
    by_level = np.concatenate([np.zeros(1, dtype=np.int64), *levels])
    number = np.empty_like(by_level)
    number[by_level] = np.arange(n_slots + 1)
    sources = number[sources[:, by_level]]
    slot, index_of = number[slot], number[index_of]
    rank_of = np.zeros(n_slots + 1, dtype=np.int64)
    rank_of[slot] = rank
    is_alone = _is_alone(shape, rank, n_micro)
    row = kind + shape.n_kinds * np.where(place > 0, 1, 2 * is_alone)
    rows = np.full((place.max() + 1, n_slots + 1), 3 * shape.n_kinds)
    rows[place, slot] = row
    rows[0, number[handed]] = 3 * shape.n_kinds + 1 + handovers.kind
    is_steady = np.zeros(n_slots + 1, dtype=bool)
    is_steady[slot] = ~is_alone
    travels = is_steady[sources] & (rank_of[sources] != rank_of)
    bounds = (1 + np.cumsum([0, *map(len, levels)])).tolist()
    drain_start = n_micro - shape.micro_of_start

    def state_before(end: int) -> Ints:
        played = index_of[:, :, max(end - shape.micro_of_state, 0) : max(end, 0)].ravel()
        return played[played > 0]

    return _Schedule(
        rank,
        slot,
        place,
        direction,
        stage,
        micro,
        kind,
        is_alone,
        row,
        rows,
        is_steady,
        levels=tuple(
            _Level(start, end, tuple(sources[:, start:end]), tuple(travels[:, start:end]))
            for start, end in pairwise(bounds)
        ),
        last_of_rank=number[ends],
        steady=(state_before(drain_start), state_before(drain_start - shape.period)),
    )


def _is_alone(shape: _Shape, rank: Ints, n_micro: int) -> np.ndarray:
    """Return whether passes belong to the warm-up or the drain of 1F1B with virtual stages.

    The passes of each rank come in its order: the warm-up has forward passes only, and the drain as
    many backward passes.
    """
    if shape.schedule != ONE_F_ONE_B or shape.n_virtual == 1:
        return np.zeros(rank.size, dtype=bool)
    n_passes = 2 * n_micro * shape.n_virtual
    number = np.arange(rank.size) % n_passes
    n_warmup = n_warmup_passes(rank, shape.n_stages, shape.n_virtual, n_micro)
    return (number < n_warmup) | (number >= n_passes - n_warmup)


def _needed(index_of: Ints, n_flows: int) -> Ints:
    """Return the number of the slot whose result each pass needs, or 0; see `source_of`.

    Parameters
    ----------
    index_of : array of int, shape (directions, virtual stages of all ranks, micro-batches)
        Number of the slot of each pass, or 0 where there is no such pass.
    n_flows : int
        Number of directions in which micro-batches pass through the stages.
    """
    n_directions, _, n_micro = index_of.shape
    of_flows = index_of.reshape(n_directions, n_flows, -1, n_micro)
    forward = of_flows[FORWARD]
    gradient = np.maximum(of_flows[BACKWARD], of_flows[INPUT])
    needed = np.zeros_like(of_flows)
    needed[FORWARD, :, 1:] = forward[:, :-1]
    of_backward = np.concatenate([gradient[:, 1:], forward[:, -1:]], axis=1)
    needed[BACKWARD] = needed[INPUT] = of_backward
    return needed.reshape(index_of.shape)


def _levels(needed: Ints, ends: Ints) -> Iterator[Ints]:
    """Yield the numbers of the slots of each level, counted rank by rank from 1.

    They are the slots that would run at the same time if all took equally long.

    Parameters
    ----------
    needed : array of int, shape (passes of a slot, slots + 1)
        Numbers of the slots whose results each slot needs, or 0.
    ends : array of int, shape (ranks,)
        Number of the last slot of each rank.
    """
    # Where the last rank has run all its slots, the next one would be beyond the table.
    needed = np.pad(needed, ((0, 0), (0, 1)))
    is_done = np.zeros(needed.shape[1], dtype=bool)
    is_done[0] = True
    upcoming = np.array([0, *ends[:-1]]) + 1
    n_left = int(ends[-1])
    while n_left:
        is_ready = is_done[needed[:, upcoming]].all(axis=0) & (upcoming <= ends)
        level = upcoming[is_ready]
        assert level.size, "ranks of a pipeline wait for one another"
        yield level
        is_done[level] = True
        upcoming += is_ready
        n_left -= level.size


def source_of(direction: int, stage: int, micro: int, last: int) -> Pass | None:
    """Return the pass whose result a pass needs, or None if it needs none of another pass.

    Virtual stages are counted through all ranks; `last` is the number of the last one. Gradients of
    weights need what their rank has.
    """
    if direction == WEIGHT:
        return None
    if direction == FORWARD:
        return (FORWARD, stage - 1, micro) if stage else None
    return (BACKWARD, stage + 1, micro) if stage < last else (FORWARD, last, micro)


def pipeline_seconds(
    n_stages: int,
    n_virtual: int,
    n_micro: Ints | int,
    seconds: Array,
    transfer_seconds: Array,
    schedule: str = ONE_F_ONE_B,
    places: tuple[int, ...] = (),
    beside_seconds: Array | None = None,
    alone: Array | None = None,
    handover_seconds: tuple[float, float] = NO_HANDOVER,
) -> Array:
    """Return the time from the first forward to the last backward pass of all ranks.

    After its start the schedule is periodic: it is played until the ends that determine all later
    ones are those of a period before, shifted in time; the time of the remaining periods is added.

    Parameters
    ----------
    n_micro : array of int, shape (C,)
        Number of micro-batches.
    seconds : array, shape (kinds, C)
        Durations of passes, by `kind_of`.
    transfer_seconds : array, shape (C,)
        Time from the end of a pass until the neighbour has its result; both ranks wait for it.
    schedule : str
        One of `SCHEDULES`.
    places : tuple of int
        The place of each virtual stage, counted through all ranks; by default all but the first
        and the last are `MIDDLE`.
    beside_seconds : array, shape (C,)
        Further time until the neighbour has the result of a pass, for which the rank does not wait
        while its forward and backward passes alternate; none without virtual stages.
    alone : array, shape (kinds, C)
        Durations of passes of the warm-up and of the drain with virtual stages; by default those
        of all others.
    handover_seconds : tuple of float
        How long two neighbouring ranks stand still together while one hands the result of a
        forward pass, or of a backward pass, to the other; with 1F1B without virtual stages only.

    Returns
    -------
    ndarray, shape (C,) [s]
    """
    shape = _Shape(schedule, n_stages, n_virtual, places, any(handover_seconds))
    beside = np.zeros_like(transfer_seconds) if beside_seconds is None else beside_seconds
    usual, of_alone = (
        each[: shape.n_kinds] for each in (seconds, seconds if alone is None else alone)
    )
    duration = _durations(usual, transfer_seconds, beside, of_alone, handover_seconds)
    n_micro = _per_flow(schedule, np.broadcast_to(np.asarray(n_micro), transfer_seconds.shape))
    result = np.empty(n_micro.shape)
    n_played = 2 * shape.micro_of_start + shape.micro_of_state + shape.period
    unsettled = np.arange(n_micro.size)
    while unsettled.size:
        most = np.minimum(n_micro, n_played + n_micro % shape.period)
        drifting = []
        for played, alike in _alike(most[unsettled]):
            rows = unsettled[alike]
            order = _schedule(shape, played)
            end, period, drift = _played(order, duration[:, rows], beside[rows])
            n_more = (n_micro[rows] - played) / shape.period
            result[rows] = end + np.where(n_more > 0, n_more * period, 0.0)
            drifting.append(rows[(n_more > 0) & (drift > ROUND_TOLERANCE * end)])
        unsettled = np.concatenate(drifting)
        n_played *= GROWTH
    return result


def least_pipeline_seconds(
    n_stages: Ints | int,
    n_virtual: Ints | int,
    n_micro: Ints | int,
    seconds: Array,
    transfer_seconds: Array,
    schedule: str = ONE_F_ONE_B,
    places: tuple[int, ...] = (),
) -> Array:
    """Return a time below which `pipeline_seconds` of the same arguments cannot be, shape (C,).

    The numbers of stages may be those of each candidate, shape (C,).

    A rank does all its passes one after another. Before its first forward pass, the ranks before it
    have done one each. With 1F1B, they do one more each after its last backward pass. The bound is
    the largest such sum of the first, of the last, and of the rank before the last. Where stages
    between the first and the last differ, it is the longest time of any rank's own passes, and zero
    with two flows.
    """
    if schedule == DUALPIPE and places:
        return np.zeros(transfer_seconds.shape)
    if schedule == DUALPIPE:
        return _least_of_two_flows(n_stages, n_micro, seconds)
    backward = (INPUT, WEIGHT) if schedule == ZB_H1 else (BACKWARD,)
    alone = (FORWARD,) if schedule == ZB_H1 else (FORWARD, BACKWARD)

    def seconds_of(directions: tuple[int, ...], place: int) -> Array:
        n_sent = sum(direction != WEIGHT for direction in directions)
        each = (seconds[kind_of(direction, place)] for direction in directions)
        return sum(each, start=n_sent * transfer_seconds)

    if places:
        n_ranks = int(np.max(n_stages))
        by_place = [seconds_of((FORWARD, *backward), p) for p in range(max(places) + 1)]
        of_ranks = [
            sum((by_place[p] for p in places[rank::n_ranks]), start=np.zeros(1))
            for rank in range(n_ranks)
        ]
        return n_micro * np.maximum.reduce(of_ranks)
    first, middle, last = (seconds_of((FORWARD, *backward), p) for p in (FIRST, MIDDLE, LAST))
    before_first, before_middle = seconds_of(alone, FIRST), seconds_of(alone, MIDDLE)
    others = (n_virtual - 1) * middle
    of_last = before_first + (n_stages - 2) * before_middle + n_micro * (last + others)
    of_middle = before_first + (n_stages - 3) * before_middle + n_micro * n_virtual * middle
    least = np.maximum(n_micro * (first + others), of_last)
    return np.where(np.asarray(n_stages) > 2, np.maximum(least, of_middle), least)


def _least_of_two_flows(n_stages: Ints | int, n_micro: Ints | int, seconds: Array) -> Array:
    """Return the bound of `least_pipeline_seconds` for DualPipe.

    The first and the last rank do the passes of both their stages for half of the micro-batches
    each. A rank of the middle starts when those between it and the nearer end have done one forward
    pass. Transfers of passes that run together overlap, and do not count.
    """
    first, middle, last = (
        seconds[kind_of(FORWARD, place)]
        + np.minimum(
            seconds[kind_of(BACKWARD, place)],
            seconds[kind_of(INPUT, place)] + seconds[kind_of(WEIGHT, place)],
        )
        for place in (FIRST, MIDDLE, LAST)
    )
    start = np.minimum(seconds[kind_of(FORWARD, FIRST)], seconds[kind_of(FORWARD, MIDDLE)])
    of_ends = n_micro / 2 * (first + last)
    of_middle = (np.asarray(n_stages) // 2 - 1) * start + n_micro * middle
    return np.where(np.asarray(n_stages) > 2, np.maximum(of_ends, of_middle), of_ends)


def _alike(n_micro: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each number of micro-batches with the rows that have it."""
    for number in sorted(set(n_micro.tolist())):
        yield number, np.flatnonzero(n_micro == number)


def _ends(schedule: _Schedule, duration: Array, beside_seconds: Array) -> Array:
    """Return the end of each slot, shape (slots + 1, C), from `_durations`."""
    ends = sum((duration[of_place] for of_place in schedule.rows[1:]), duration[schedule.rows[0]])
    ends[0] = 0.0
    sends_beside = beside_seconds.any()
    for start, end, (previous, *needed), (_, *travels) in schedule.levels:
        free = ends.take(previous, axis=0)
        for source, each_travels in zip(needed, travels, strict=True):
            arrival = ends.take(source, axis=0)
            if sends_beside:
                arrival += each_travels[:, None] * beside_seconds
            np.maximum(free, arrival, out=free)
        ends[start:end] += free
    return ends


def _played(
    schedule: _Schedule, duration: Array, beside_seconds: Array
) -> tuple[Array, Array, Array]:
    """Return the end of all ranks, the time of the last steady period, and its drift.

    The time is the largest shift of a slot against the one a period before, the drift the
    difference of the largest and the smallest shift. Without drift all further periods repeat.
    Without two steady periods both are zero.
    """
    n_candidates = duration.shape[1]
    end = np.empty(n_candidates)
    period, drift = np.zeros((2, n_candidates))
    n_at_once = max(CHUNK_ENTRIES // schedule.rows.shape[1], 1)
    final, earlier = schedule.steady
    for start in range(0, n_candidates, n_at_once):
        rows = slice(start, start + n_at_once)
        ends = _ends(schedule, duration[:, rows], beside_seconds[rows])
        end[rows] = ends[schedule.last_of_rank].max(axis=0)
        if final.size == earlier.size > 0:
            shift = ends[final] - ends[earlier]
            period[rows] = shift.max(axis=0)
            drift[rows] = period[rows] - shift.min(axis=0)
    return end, period, drift
