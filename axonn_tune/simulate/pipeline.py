"""The passes of a pipeline, played in the order of its schedule for all candidates at once.

They are played in these steps:

1. `orders.slots` lists what a rank runs, in a fixed order. A slot, which holds one pass or two,
   starts when the rank's previous slot has ended and the results that it needs from neighbouring
   stages (`source_of`) have arrived.
2. `_schedule` sorts the slots of all ranks into levels, so that each depends on slots of
   earlier levels only. This does not depend on durations, so that all candidates share it.
3. `_played` computes when the passes end, one level after another, for many candidates at once.
4. `pipeline_seconds` plays as many micro-batches as it takes until the schedule repeats, and adds
   the period for the others. `passes` plays one candidate and returns every pass.

The duration of a pass depends on its direction and on whether its stage is the first, a middle or
the last one; `kind_of` numbers these combinations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from axonn_tune.simulate.orders import BACKWARD, FORWARD, INPUT, WEIGHT, Pass, Slot, slots
from axonn_tune.spec.plan import Array
from axonn_tune.spec.schedule import DUALPIPE, ONE_F_ONE_B

# Number of rounds of `n_stages` micro-batches that are played to see whether they repeat.
ROUNDS_PLAYED = 10
# Number of the last rounds that may belong to the drain of the pipeline.
ROUNDS_OF_DRAIN = 4
# Rounds count as equal if their passes shift alike up to this fraction of the whole time.
ROUND_TOLERANCE = 1e-12
# Number of entries of the table of ends that is held at once.
CHUNK_ENTRIES = 4_000_000


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
    start_seconds, end_seconds
        Times since the start of the first pass.
    """

    rank: int
    stage: int
    direction: int
    micro_batch: int
    kind: int
    start_seconds: float
    end_seconds: float


def passes(
    n_stages: int,
    n_virtual: int,
    n_micro: int,
    seconds: Array,
    transfer_seconds: float,
    schedule: str = ONE_F_ONE_B,
    places: tuple[int, ...] = (),
) -> list[PlayedPass]:
    """Return every pass of one candidate, rank by rank in the order in which each rank runs them.

    Of two passes that run together, the forward pass is said to come first.

    Parameters
    ----------
    seconds : array, shape (kinds,)
        Durations of passes, by `kind_of`.
    transfer_seconds : float
        Time of a transfer to the next stage, which is a part of every pass.
    schedule, places
        As for `pipeline_seconds`.
    """
    shape = _Shape(schedule, n_stages, n_virtual, places)
    order = _schedule(shape, _per_flow(schedule, n_micro))
    duration = _durations(seconds[:, None], np.full(1, transfer_seconds))
    ends = _ends(order, duration)[:, 0]
    played = []
    for number, (rank, slot) in enumerate(order.slots, start=1):
        kinds = [shape.kind(rank, each) for each in slot]
        lengths = [duration[kind + len(seconds) * (i > 0), 0] for i, kind in enumerate(kinds)]
        start = ends[number] - sum(lengths)
        for each, kind, length in zip(slot, kinds, lengths, strict=True):
            direction, chunk, micro = each
            stage = shape.stage_of(rank, chunk)
            if schedule == DUALPIPE:
                micro += chunk * (n_micro // 2)
                stage %= n_stages
            end = float(start + length)
            played.append(PlayedPass(rank, stage, direction, micro, kind, float(start), end))
            start = end
    return played


def _per_flow(schedule: str, n_micro: int) -> int:
    """Return the number of micro-batches that enter at one end of the pipeline."""
    return n_micro // 2 if schedule == DUALPIPE else n_micro


@dataclass(frozen=True)
class _Shape:
    """The stages of a pipeline, and the schedule in which its ranks run them.

    schedule, n_stages, n_virtual, places
        As for `pipeline_seconds`.
    """

    schedule: str
    n_stages: int
    n_virtual: int
    places: tuple[int, ...]

    @property
    def last(self) -> int:
        """The number of the last stage through which a micro-batch passes."""
        return self.n_stages * self.n_virtual - 1

    @property
    def n_kinds(self) -> int:
        """The number of kinds of passes."""
        return _N_DIRECTIONS * (max(LAST, *self.places) + 1) if self.places else N_KINDS

    def stage_of(self, rank: int, chunk: int) -> int:
        """Return the number of a rank's virtual stage, counted through all ranks.

        With two directions the stages of the second one are counted after all of the first one.
        """
        if self.schedule == DUALPIPE and chunk:
            return 2 * self.n_stages - 1 - rank
        return chunk * self.n_stages + rank

    def kind(self, rank: int, each: Pass) -> int:
        """Return the kind of a rank's pass."""
        direction, chunk, _ = each
        stage = self.stage_of(rank, chunk) % (self.last + 1)
        if self.places:
            return kind_of(direction, self.places[stage])
        place = FIRST if stage == 0 else LAST if stage == self.last else MIDDLE
        return kind_of(direction, place)

    def source(self, rank: int, each: Pass, index: Mapping[Pass, int]) -> int:
        """Return the index of the slot whose result a rank's pass needs; 0 if it needs none."""
        direction, chunk, micro = each
        stage = self.stage_of(rank, chunk)
        flow_start = stage - stage % (self.last + 1)
        source = source_of(direction, stage - flow_start, micro, self.last)
        if source is None:
            return 0
        wanted, source_stage, _ = source
        if wanted == BACKWARD and (INPUT, flow_start + source_stage, micro) in index:
            wanted = INPUT
        return index[wanted, flow_start + source_stage, micro]


class _Level(NamedTuple):
    """Slots that depend on slots of earlier levels only, arrays of shape (slots of the level,).

    slots
        Index of each slot, counted from 1.
    previous
        Index of the slot that the same rank runs before it.
    needed
        Indices of the slots whose results its passes need, an array for each pass of a slot.
    kinds
        Rows of `_durations` of its passes, likewise.

    Index 0 stands for no slot, and has its end at time zero.
    """

    slots: np.ndarray
    previous: np.ndarray
    needed: tuple[np.ndarray, ...]
    kinds: tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class _Schedule:
    """The order in which the slots of a pipeline can be played, without their durations.

    slots
        Slots of all ranks, each with its rank.
    levels
        Levels in the order in which they are played.
    last_of_rank
        Index of the last slot of each rank.
    steady
        Indices of the slots of the last round before the drain, and of the round before it.
    """

    slots: tuple[tuple[int, Slot], ...]
    levels: tuple[_Level, ...]
    last_of_rank: np.ndarray
    steady: tuple[np.ndarray, np.ndarray]


FIRST, MIDDLE, LAST = range(3)
_N_DIRECTIONS = 4
N_KINDS = 3 * _N_DIRECTIONS


def kind_of(direction: int, place: int) -> int:
    """Return the index of a pass's duration; `place` is `FIRST`, `MIDDLE`, `LAST` or later."""
    return place * _N_DIRECTIONS + direction


def _durations(seconds: Array, transfer_seconds: Array) -> Array:
    """Return the durations of passes, shape (2 kinds + 1, C).

    First come those of a slot's first pass, with its transfer, then those of its second pass, whose
    transfer runs beside the first one's, then nothing. Gradients of weights are not sent.
    """
    is_sent = np.arange(len(seconds)) % _N_DIRECTIONS != WEIGHT
    with_transfer = seconds + is_sent[:, None] * transfer_seconds
    return np.concatenate([with_transfer, seconds, np.zeros_like(seconds[:1])])


@lru_cache(maxsize=256)
def _schedule(shape: _Shape, n_micro: int) -> _Schedule:
    """Return the schedule of a pipeline; slots are numbered rank by rank in their order."""
    n_stages = shape.n_stages
    orders = [
        slots(shape.schedule, rank, n_stages, shape.n_virtual, n_micro) for rank in range(n_stages)
    ]
    numbered = tuple((rank, slot) for rank, order in enumerate(orders) for slot in order)
    index: dict[Pass, int] = {}  # its keys count virtual stages through all ranks
    for number, (rank, slot) in enumerate(numbered, start=1):
        for direction, chunk, micro in slot:
            index[direction, shape.stage_of(rank, chunk), micro] = number

    def round_before(end: int) -> np.ndarray:
        return np.array([i for (_, _, micro), i in index.items() if 0 < end - micro <= n_stages])

    drain_start = n_micro - ROUNDS_OF_DRAIN * n_stages
    return _Schedule(
        slots=numbered,
        levels=_levels(shape, orders, index),
        last_of_rank=np.cumsum([len(order) for order in orders]),
        steady=(round_before(drain_start), round_before(drain_start - n_stages)),
    )


def _levels(
    shape: _Shape, orders: Sequence[Sequence[Slot]], index: Mapping[Pass, int]
) -> tuple[_Level, ...]:
    """Return the slots sorted into levels."""
    n_stages = len(orders)
    n_slots = sum(map(len, orders))
    widest = max(len(slot) for order in orders for slot in order)
    level = np.zeros(n_slots + 1, dtype=np.int64)
    previous = np.zeros(n_slots + 1, dtype=np.int64)
    needed = np.zeros((widest, n_slots + 1), dtype=np.int64)
    kinds = np.full((widest, n_slots + 1), 2 * shape.n_kinds)
    starts = [0, *accumulate(map(len, orders))]
    n_placed = [0] * n_stages  # number of slots of each rank that have their level
    has_progress = True
    while has_progress:
        has_progress = False
        for rank, order in enumerate(orders):
            while n_placed[rank] < len(order):
                slot = order[n_placed[rank]]
                current = starts[rank] + n_placed[rank] + 1
                sources = [shape.source(rank, each, index) for each in slot]
                if any(source and not level[source] for source in sources):
                    break
                previous[current] = current - 1 if n_placed[rank] else 0
                for i, (each, source) in enumerate(zip(slot, sources, strict=True)):
                    needed[i, current] = source
                    kinds[i, current] = shape.kind(rank, each) + shape.n_kinds * (i > 0)
                level[current] = 1 + max(level[[previous[current], *sources]])
                n_placed[rank] += 1
                has_progress = True
    assert sum(n_placed) == n_slots, f"ranks of {shape.schedule} wait for one another"
    by_level = np.argsort(level, kind="stable")
    cuts = np.searchsorted(level[by_level], np.arange(1, level.max() + 2))
    runs = [by_level[start:end] for start, end in pairwise(cuts)]
    return tuple(
        _Level(run, previous[run], tuple(needed[:, run]), tuple(kinds[:, run])) for run in runs
    )


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
    n_micro: int,
    seconds: Array,
    transfer_seconds: Array,
    schedule: str = ONE_F_ONE_B,
    places: tuple[int, ...] = (),
) -> Array:
    """Return the time from the first forward to the last backward pass of all ranks.

    After a transient the schedule is periodic: it is played until rounds of `n_stages`
    micro-batches repeat, and the time of the remaining rounds is added.

    Parameters
    ----------
    seconds : array, shape (kinds, C)
        Durations of passes, by `kind_of`.
    transfer_seconds : array, shape (C,)
        Time from the end of a pass until the neighbour has its result; both ranks wait for it.
    schedule : str
        One of `SCHEDULES`.
    places : tuple of int
        The place of each virtual stage, counted through all ranks; by default all but the first
        and the last are `MIDDLE`.

    Returns
    -------
    ndarray, shape (C,) [s]
    """
    shape = _Shape(schedule, n_stages, n_virtual, places)
    duration = _durations(seconds, transfer_seconds)
    n_micro = _per_flow(schedule, n_micro)
    played = ROUNDS_PLAYED * n_stages + n_micro % n_stages
    if n_micro <= 2 * played:
        return _played(_schedule(shape, n_micro), duration)[0]
    end, period, drift = _played(_schedule(shape, played), duration)
    result = end + (n_micro - played) / n_stages * period
    unsettled = np.flatnonzero(drift > ROUND_TOLERANCE * end)
    if unsettled.size:
        result[unsettled] = _played(_schedule(shape, n_micro), duration[:, unsettled])[0]
    return result


def _ends(schedule: _Schedule, duration: Array) -> Array:
    """Return the end of each slot, shape (slots + 1, C), from `_durations`."""
    ends = np.zeros((len(schedule.slots) + 1, duration.shape[1]))
    for level in schedule.levels:
        free = ends[level.previous]
        for needed in level.needed:
            free = np.maximum(free, ends[needed])
        for kinds in level.kinds:
            free = free + duration[kinds]
        ends[level.slots] = free
    return ends


def _played(schedule: _Schedule, duration: Array) -> tuple[Array, Array, Array]:
    """Return the end of all ranks, the period of the last steady round, and its drift.

    The period is the largest shift of a slot against the round before, the drift the difference of
    the largest and the smallest shift. Without drift all further rounds repeat. Without two steady
    rounds period and drift are undefined.
    """
    n_candidates = duration.shape[1]
    end = np.empty(n_candidates)
    period = np.empty(n_candidates)
    drift = np.empty(n_candidates)
    n_at_once = max(CHUNK_ENTRIES // (len(schedule.slots) + 1), 1)
    final_round, earlier_round = schedule.steady
    for start in range(0, n_candidates, n_at_once):
        rows = slice(start, start + n_at_once)
        ends = _ends(schedule, duration[:, rows])
        end[rows] = ends[schedule.last_of_rank].max(axis=0)
        if final_round.size == earlier_round.size > 0:
            shift = ends[final_round] - ends[earlier_round]
            period[rows] = shift.max(axis=0)
            drift[rows] = period[rows] - shift.min(axis=0)
    return end, period, drift
