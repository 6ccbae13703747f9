"""The order in which the slots of all ranks of a pipeline can be played, without their durations.

`orders.ordered_passes` lists what a rank runs, in a fixed order. A slot, which holds one pass or
two, starts when the rank's previous slot has ended and the results that it needs from neighbouring
stages (`source_of`) have arrived. Where ranks stand still together while one hands a result to the
other, that takes a slot of both (`handovers`).

`pipeline_schedule` sorts the slots of all ranks into levels, so that each depends on slots of
earlier levels only. This does not depend on durations, so that all candidates share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from axonn_tune.simulate.durations import (
    ALONE,
    FILLING,
    FIRST,
    LAST,
    MIDDLE,
    USUAL,
    IntOrInts,
    kind_of,
    row_of_handover,
    row_of_nothing,
    row_of_pass,
)
from axonn_tune.simulate.handovers import NO_HANDOVERS, with_handovers
from axonn_tune.simulate.orders import (
    BACKWARD,
    FORWARD,
    INPUT,
    N_DIRECTIONS,
    WEIGHT,
    Pass,
    n_warmup_passes,
    ordered_passes,
)
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.schedule import DUALPIPE, ONE_F_ONE_B

# A round is `n_stages` micro-batches. With virtual stages or two flows, at most this many rounds
# belong to the start of the pipeline, and as many to its drain; other schedules have one of each.
ROUNDS_OF_START = {ONE_F_ONE_B: 2, DUALPIPE: 4}


@dataclass(frozen=True)
class PipelineShape:
    """The stages of a pipeline, and the schedule in which its ranks run them.

    n_stages, n_virtual
        Number of ranks, and of virtual stages of each rank.
    schedule
        One of `SCHEDULES`.
    places
        The place of each virtual stage, counted through all ranks; by default all but the first and
        the last are `MIDDLE`.
    """

    n_stages: int
    n_virtual: int = 1
    schedule: str = ONE_F_ONE_B
    places: tuple[int, ...] = ()

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
        """How many micro-batches may belong to the pipeline's start; as many may to its drain."""
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

    def per_flow(self, n_micro: IntOrInts) -> IntOrInts:
        """Return the number of micro-batches that enter at one end of the pipeline."""
        return n_micro // self.n_flows

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


class Level(NamedTuple):
    """Slots that follow each other and depend on slots of earlier levels only.

    start, end
        Index of the first slot, and of the one after the last.
    sources
        Indices of the slots on which each slot depends: the one that the same rank runs before it,
        then those whose results its passes need. Each array has the shape (slots of the level,).
    """

    start: int
    end: int
    sources: tuple[np.ndarray, ...]


@dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """The order in which the slots of a pipeline can be played, without their durations.

    rank, slot, place, direction, stage, micro, kind, setting, row
        Rank, index of the slot, place in the slot, direction, virtual stage, micro-batch, kind,
        setting (`USUAL`, `ALONE` or `FILLING`), and row in the table of durations of each pass, the
        passes of one rank after those of another.
    rows
        Rows in the table of durations of the passes of each slot, or of its hand-over, shape
        (passes of a slot, slots + 1).
    is_steady
        Whether each slot is one of those in which forward and backward passes alternate, so that
        its result may travel beside the next one, shape (slots + 1,).
    levels
        Levels in the order in which they are played.
    travels
        Whether the result that each pass of a slot needs may travel beside the passes, shape
        (passes of a slot, slots + 1).
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
    setting: Ints
    row: Ints
    rows: Ints
    is_steady: np.ndarray
    levels: tuple[Level, ...]
    travels: np.ndarray
    last_of_rank: Ints
    steady: tuple[Ints, Ints]


@lru_cache(maxsize=256)
def pipeline_schedule(
    shape: PipelineShape, n_micro: int, has_handovers: bool = False
) -> PipelineSchedule:
    """Return the schedule of a pipeline.

    Parameters
    ----------
    n_micro
        Number of micro-batches that enter at one end.
    has_handovers
        Whether ranks stand still together while one hands a result to the other.
    """
    n_stages = shape.n_stages
    orders = [
        ordered_passes(shape.schedule, rank, n_stages, shape.n_virtual, n_micro)
        for rank in range(n_stages)
    ]
    ends = np.cumsum([order[0, -1] + 1 for order in orders])
    handovers = NO_HANDOVERS
    if has_handovers:
        orders, handovers = with_handovers(orders, n_micro)
        ends += np.cumsum(np.bincount(handovers.rank, minlength=n_stages))
    starts = np.array([0, *ends[:-1]])
    rank = np.repeat(np.arange(n_stages), [order.shape[1] for order in orders])
    number, place, direction, chunk, micro = np.concatenate(orders, axis=1)
    slot = 1 + number + starts[rank]
    stage = shape.stage_of(rank, chunk)
    index_of = np.zeros((N_DIRECTIONS, shape.n_flows * (shape.last + 1), n_micro), dtype=np.int64)
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
    is_filling = _is_filling(shape, direction, stage, micro, n_micro)
    setting = np.where(is_filling, FILLING, np.where(is_alone, ALONE, USUAL))
    row = row_of_pass(shape.n_kinds, kind, place, setting)
    rows = np.full((place.max() + 1, n_slots + 1), row_of_nothing(shape.n_kinds))
    rows[place, slot] = row
    rows[0, number[handed]] = row_of_handover(shape.n_kinds, handovers.kind)
    is_steady = np.zeros(n_slots + 1, dtype=bool)
    is_steady[slot] = ~is_alone
    needed = sources[1:]
    bounds = (1 + np.cumsum([0, *map(len, levels)])).tolist()
    drain_start = n_micro - shape.micro_of_start

    def state_before(end: int) -> Ints:
        played = index_of[:, :, max(end - shape.micro_of_state, 0) : max(end, 0)].ravel()
        return played[played > 0]

    return PipelineSchedule(
        rank,
        slot,
        place,
        direction,
        stage,
        micro,
        kind,
        setting,
        row,
        rows,
        is_steady,
        levels=tuple(
            Level(start, end, tuple(sources[:, start:end])) for start, end in pairwise(bounds)
        ),
        travels=is_steady[needed] & (rank_of[needed] != rank_of),
        last_of_rank=number[ends],
        steady=(state_before(drain_start), state_before(drain_start - shape.period)),
    )


def _is_alone(shape: PipelineShape, rank: Ints, n_micro: int) -> np.ndarray:
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


def _is_filling(
    shape: PipelineShape, direction: Ints, stage: Ints, micro: Ints, n_micro: int
) -> np.ndarray:
    """Return which passes fill or drain the pipeline on ranks between the first and the last.

    The last rank waits for the first micro-batch to come through all ranks before it, and the step
    for the gradient of the last one to come back. The slowest GPU may be in one of these ranks,
    which is taken to be the first. With DualPipe no pass counts as such.
    """
    is_between = (stage > 0) & (stage < shape.n_stages - 1) & (shape.schedule != DUALPIPE)
    fills = (direction == FORWARD) & (micro == 0)
    drains = np.isin(direction, (BACKWARD, INPUT)) & (micro == n_micro - 1)
    return is_between & (fills | drains)


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
