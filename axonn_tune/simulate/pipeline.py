"""The schedule of a pipeline: 1F1B, or interleaved with virtual stages, for all candidates at once.

The schedule is that of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", SC21, section 2.2. It is played in these steps:

1. `rank_order` lists the forward and backward passes of a rank in the fixed order in which the rank
   runs them. A pass starts when the rank's previous pass has ended and the result that it needs
   from the neighbouring stage (`source_of`) has arrived.
2. `_schedule` sorts the passes of all ranks into levels, so that each pass depends on passes of
   earlier levels only. This does not depend on durations, so that all candidates share it.
3. `_played` computes when the passes end, one level after another, for many candidates at once.
4. `pipeline_seconds` plays as many micro-batches as it takes until the schedule repeats, and adds
   the period for the others. `passes` plays one candidate and returns every pass.

The duration of a pass depends on its direction and on whether its stage is the first, a middle or
the last one; `kind_of` numbers these combinations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import Array

FORWARD = 0
BACKWARD = 1
# Number of rounds of `n_stages` micro-batches that are played to see whether they repeat.
ROUNDS_PLAYED = 6
# Number of the last rounds that may belong to the drain of the pipeline.
ROUNDS_OF_DRAIN = 2
# Rounds count as equal if their passes shift alike up to this fraction of the whole time.
ROUND_TOLERANCE = 1e-12
# Number of entries of the table of ends that is held at once.
CHUNK_ENTRIES = 4_000_000

IntOrInts = TypeVar("IntOrInts", int, Ints)
# The direction (FORWARD or BACKWARD), the virtual stage of the rank, and the micro-batch.
Pass: TypeAlias = tuple[int, int, int]


def rank_order(rank: int, n_stages: int, n_virtual: int, n_micro: int) -> list[Pass]:
    """Return the passes of one rank in the order in which Megatron-LM runs them."""
    return [tuple(each) for each in _orders(n_stages, n_virtual, n_micro)[:, rank].T.tolist()]


def _orders(n_stages: int, n_virtual: int, n_micro: int) -> Ints:
    """Return direction, virtual stage and micro-batch of each pass, shape (3, ranks, passes).

    After a warm-up of forward passes, one forward and one backward pass alternate; the remaining
    backward passes follow. Groups of `n_stages` micro-batches pass through one virtual stage after
    the other.
    """
    total = n_micro * n_virtual
    rank = np.arange(n_stages)[:, None]
    warmup = n_stages - rank - 1
    if n_virtual > 1:
        warmup = 2 * warmup + (n_virtual - 1) * n_stages
    warmup = np.minimum(warmup, total)
    number = np.arange(total)
    group, within = np.divmod(number, n_stages * n_virtual)
    chunk, micro = np.divmod(within, n_stages)
    micro += group * n_stages
    orders = np.empty((3, n_stages, 2 * total), dtype=np.int64)
    forward_place = number + np.maximum(number - warmup, 0)
    backward_place = number + np.minimum(number + warmup + 1, total)
    for place, direction, stage in (
        (forward_place, FORWARD, chunk),
        (backward_place, BACKWARD, n_virtual - 1 - chunk),
    ):
        identity = np.stack([np.full_like(micro, direction), stage, micro])
        orders[:, rank, place] = identity[:, None]
    return orders


@dataclass(frozen=True)
class PlayedPass:
    """A pass of one rank, with its start and end.

    rank
        Rank of the pipeline.
    stage
        Number of the virtual stage, counted through all ranks.
    direction
        `FORWARD` or `BACKWARD`.
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
    n_stages: int, n_virtual: int, n_micro: int, seconds: Array, transfer_seconds: float
) -> list[PlayedPass]:
    """Return every pass of one candidate, rank by rank in the order in which each rank runs them.

    Parameters
    ----------
    seconds : array, shape (N_KINDS,)
        Durations of passes, by `kind_of`.
    transfer_seconds : float
        Time of a transfer to the next stage, which is a part of every pass.
    """
    schedule = _schedule(n_stages, n_virtual, n_micro)
    duration = seconds + transfer_seconds
    starts = np.zeros(schedule.n_passes + 1)
    ends = np.zeros(schedule.n_passes + 1)
    kinds = np.zeros(schedule.n_passes + 1, dtype=np.int64)
    for level in schedule.levels:
        start = np.maximum(ends[level.previous], ends[level.needed])
        starts[level.passes] = start
        ends[level.passes] = start + duration[level.kinds]
        kinds[level.passes] = level.kinds
    identities = (
        (rank, chunk * n_stages + rank, direction, micro)
        for rank in range(n_stages)
        for direction, chunk, micro in rank_order(rank, n_stages, n_virtual, n_micro)
    )
    return [
        PlayedPass(*identity, int(kind), float(start), float(end))
        for identity, kind, start, end in zip(
            identities, kinds[1:], starts[1:], ends[1:], strict=True
        )
    ]


class _Level(NamedTuple):
    """Passes that depend on passes of earlier levels only, arrays of shape (passes of the level,).

    passes
        Index of each pass, counted from 1.
    previous
        Index of the pass that the same rank runs before it.
    needed
        Index of the pass whose result it needs.
    kinds
        Kind of each pass, as `kind_of` numbers it.

    Index 0 stands for no pass, and has its end at time zero.
    """

    passes: np.ndarray
    previous: np.ndarray
    needed: np.ndarray
    kinds: np.ndarray


@dataclass(frozen=True, eq=False)
class _Schedule:
    """The order in which the passes of a pipeline can be played, without their durations.

    n_passes
        Number of passes of all ranks.
    levels
        Levels in the order in which they are played.
    last_of_rank
        Index of the last pass of each rank.
    steady
        Indices of the passes of the last round before the drain, and of the round before it.
    """

    n_passes: int
    levels: tuple[_Level, ...]
    last_of_rank: np.ndarray
    steady: tuple[np.ndarray, np.ndarray]


FIRST, MIDDLE, LAST = range(3)
N_KINDS = 6


def kind_of(direction: IntOrInts, place: IntOrInts) -> IntOrInts:
    """Return the index of a pass's duration; `place` is `FIRST`, `MIDDLE` or `LAST`."""
    return direction * 3 + place


@lru_cache(maxsize=256)
def _schedule(n_stages: int, n_virtual: int, n_micro: int) -> _Schedule:
    """Return the schedule of a pipeline; passes are numbered rank by rank in their order."""
    direction, chunk, micro = _orders(n_stages, n_virtual, n_micro)
    index = 1 + np.arange(direction.size).reshape(direction.shape)
    stage = chunk * n_stages + np.arange(n_stages)[:, None]
    last = n_stages * n_virtual - 1
    index_of = np.empty((2, last + 1, n_micro), dtype=np.int64)
    index_of[direction, stage, micro] = index
    needed = _needed(index_of)[direction, stage, micro]
    previous = np.where(np.arange(index.shape[1]) > 0, index - 1, 0)
    place = np.where(stage == 0, FIRST, np.where(stage == last, LAST, MIDDLE))
    columns = np.stack([index, previous, needed, kind_of(direction, place)])
    levels = _levels(needed)
    in_levels = columns.reshape(len(columns), -1)[:, np.concatenate(levels) - 1]
    ends = np.cumsum([level.size for level in levels])
    drain_start = n_micro - ROUNDS_OF_DRAIN * n_stages

    def round_before(end: int) -> Ints:
        return index_of[:, :, max(end - n_stages, 0) : max(end, 0)].ravel()

    return _Schedule(
        n_passes=direction.size,
        levels=tuple(_Level(*in_levels[:, start:end]) for start, end in pairwise([0, *ends])),
        last_of_rank=index[:, -1],
        steady=(round_before(drain_start), round_before(drain_start - n_stages)),
    )


def _needed(index_of: Ints) -> Ints:
    """Return the index of the pass whose result each pass needs, or 0; see `source_of`.

    Parameters
    ----------
    index_of : array of int, shape (2, virtual stages of all ranks, micro-batches)
        Index of each pass.
    """
    forward, backward = index_of
    of_forward = np.concatenate([np.zeros_like(forward[:1]), forward[:-1]])
    return np.stack([of_forward, np.concatenate([backward[1:], forward[-1:]])])


def _levels(needed: Ints) -> list[Ints]:
    """Return the indices of the passes of each level.

    They are the passes that would run at the same time if all took equally long.

    Parameters
    ----------
    needed : array of int, shape (ranks, passes)
        Index of the pass whose result each pass needs, or 0.
    """
    n_ranks, n_each = needed.shape
    never = needed.size + 1  # what a rank needs after its last pass
    needed = np.append(needed, np.full((n_ranks, 1), never), axis=1).ravel()
    is_done = np.zeros(never + 1, dtype=bool)
    is_done[0] = True
    upcoming = (n_each + 1) * np.arange(n_ranks)  # of each rank, as a position in `needed`
    levels: list[Ints] = []
    while True:
        ready = np.flatnonzero(is_done[needed[upcoming]])
        if not ready.size:
            return levels
        level = upcoming[ready] - ready + 1
        is_done[level] = True
        upcoming[ready] += 1
        levels.append(level)


def source_of(direction: int, stage: int, micro: int, last: int) -> Pass | None:
    """Return the pass whose result a pass needs, or None for the first forward pass.

    Virtual stages are counted through all ranks; `last` is the number of the last one.
    """
    if direction == FORWARD:
        return (FORWARD, stage - 1, micro) if stage else None
    return (BACKWARD, stage + 1, micro) if stage < last else (FORWARD, last, micro)


def pipeline_seconds(
    n_stages: int, n_virtual: int, n_micro: Ints | int, seconds: Array, transfer_seconds: Array
) -> Array:
    """Return the time from the first forward to the last backward pass of all ranks.

    After a transient the schedule is periodic: it is played until rounds of `n_stages`
    micro-batches repeat, and the time of the remaining rounds is added.

    Parameters
    ----------
    n_micro : array of int, shape (C,)
        Number of micro-batches.
    seconds : array, shape (N_KINDS, C)
        Durations of passes, by `kind_of`.
    transfer_seconds : array, shape (C,)
        Time from the end of a pass until the neighbour has its result; both ranks wait for it.

    Returns
    -------
    ndarray, shape (C,) [s]
    """
    n_micro = np.broadcast_to(np.asarray(n_micro), transfer_seconds.shape)
    result = np.empty(n_micro.shape)
    for played, rows in _alike(np.minimum(n_micro, ROUNDS_PLAYED * n_stages + n_micro % n_stages)):
        end, period, drift = _played(
            n_stages, n_virtual, played, seconds[:, rows], transfer_seconds[rows]
        )
        n_more = (n_micro[rows] - played) / n_stages
        result[rows] = end + np.where(n_more > 0, n_more * period, 0.0)
        unsettled = rows[(n_more > 0) & (drift > ROUND_TOLERANCE * end)]
        for whole, drifting in _alike(n_micro[unsettled]):
            late = unsettled[drifting]
            result[late] = _played(
                n_stages, n_virtual, whole, seconds[:, late], transfer_seconds[late]
            )[0]
    return result


def least_pipeline_seconds(
    n_stages: int, n_virtual: int, n_micro: Ints | int, seconds: Array, transfer_seconds: Array
) -> Array:
    """Return a time below which `pipeline_seconds` of the same arguments cannot be, shape (C,).

    A rank does all its passes one after another. Before its first forward pass, the ranks before it
    have done one each, and after its last backward pass they do one each. The bound is the largest
    such sum of the first, of the last, and of the rank before the last.
    """
    duration = seconds + transfer_seconds
    forward, backward = duration[:3], duration[3:]
    first, middle, last = forward + backward
    others = (n_virtual - 1) * middle
    least = np.maximum(
        n_micro * (first + others), first + (n_stages - 2) * middle + n_micro * (last + others)
    )
    if n_stages > 2:
        before_last = first + (n_stages - 3) * middle + n_micro * n_virtual * middle
        np.maximum(least, before_last, out=least)
    return least


def _alike(n_micro: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each number of micro-batches with the rows that have it."""
    for number in np.unique(n_micro):
        yield int(number), np.flatnonzero(n_micro == number)


def _played(
    n_stages: int, n_virtual: int, n_micro: int, seconds: Array, transfer_seconds: Array
) -> tuple[Array, Array, Array]:
    """Return the end of all ranks, the period of the last steady round, and its drift.

    The period is the largest shift of a pass against the round before, the drift the difference of
    the largest and the smallest shift. Without drift all further rounds repeat. Without two steady
    rounds both are zero.
    """
    schedule = _schedule(n_stages, n_virtual, n_micro)
    n_candidates = seconds.shape[1]
    end = np.empty(n_candidates)
    period, drift = np.zeros((2, n_candidates))
    n_at_once = max(CHUNK_ENTRIES // (schedule.n_passes + 1), 1)
    final_round, earlier_round = schedule.steady
    for start in range(0, n_candidates, n_at_once):
        rows = slice(start, start + n_at_once)
        duration = seconds[:, rows] + transfer_seconds[rows]
        ends = np.zeros((schedule.n_passes + 1, duration.shape[1]))
        for level in schedule.levels:
            free = np.maximum(ends[level.previous], ends[level.needed])
            ends[level.passes] = free + duration[level.kinds]
        end[rows] = ends[schedule.last_of_rank].max(axis=0)
        if final_round.size == earlier_round.size > 0:
            shift = ends[final_round] - ends[earlier_round]
            period[rows] = shift.max(axis=0)
            drift[rows] = period[rows] - shift.min(axis=0)
    return end, period, drift
