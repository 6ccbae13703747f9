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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from axonn_tune.spec.plan import Array

FORWARD = 0
BACKWARD = 1
# Number of rounds of `n_stages` micro-batches that are played to see whether they repeat.
ROUNDS_PLAYED = 10
# Number of the last rounds that may belong to the drain of the pipeline.
ROUNDS_OF_DRAIN = 4
# Rounds count as equal if their passes shift alike up to this fraction of the whole time.
ROUND_TOLERANCE = 1e-12
# Number of entries of the table of ends that is held at once.
CHUNK_ENTRIES = 4_000_000

# The direction (FORWARD or BACKWARD), the virtual stage of the rank, and the micro-batch.
Pass: TypeAlias = tuple[int, int, int]


def rank_order(rank: int, n_stages: int, n_virtual: int, n_micro: int) -> list[Pass]:
    """Return the passes of one rank in the order in which Megatron-LM runs them.

    After a warm-up of forward passes, one forward and one backward pass alternate; the remaining
    backward passes follow.
    """
    total = n_micro * n_virtual
    warmup = n_stages - rank - 1
    if n_virtual > 1:
        warmup = 2 * warmup + (n_virtual - 1) * n_stages
    warmup = min(warmup, total)
    forwards = [_forward(i, n_stages, n_virtual) for i in range(total)]
    backwards = [(BACKWARD, n_virtual - 1 - chunk, micro) for _, chunk, micro in forwards]
    order = forwards[:warmup]
    for i in range(warmup, total):
        order += [forwards[i], backwards[i - warmup]]
    return order + backwards[total - warmup :]


def _forward(index: int, n_stages: int, n_virtual: int) -> Pass:
    """Return a rank's forward pass number `index`.

    Groups of `n_stages` micro-batches pass through one virtual stage after the other.
    """
    if n_virtual == 1:
        return FORWARD, 0, index
    group, within = divmod(index, n_stages * n_virtual)
    chunk, micro = divmod(within, n_stages)
    return FORWARD, chunk, group * n_stages + micro


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


def kind_of(direction: int, place: int) -> int:
    """Return the index of a pass's duration; `place` is `FIRST`, `MIDDLE` or `LAST`."""
    return direction * 3 + place


@lru_cache(maxsize=256)
def _schedule(n_stages: int, n_virtual: int, n_micro: int) -> _Schedule:
    """Return the schedule of a pipeline; passes are numbered rank by rank in their order."""
    orders = [rank_order(rank, n_stages, n_virtual, n_micro) for rank in range(n_stages)]
    index: dict[Pass, int] = {}  # its keys count virtual stages through all ranks
    last_of_rank = []
    for rank, order in enumerate(orders):
        for direction, chunk, micro in order:
            index[direction, chunk * n_stages + rank, micro] = len(index) + 1
        last_of_rank.append(len(index))

    def round_before(end: int) -> np.ndarray:
        return np.array([i for (_, _, micro), i in index.items() if 0 < end - micro <= n_stages])

    drain_start = n_micro - ROUNDS_OF_DRAIN * n_stages
    return _Schedule(
        n_passes=len(index),
        levels=_levels(orders, index, n_stages * n_virtual - 1),
        last_of_rank=np.array(last_of_rank),
        steady=(round_before(drain_start), round_before(drain_start - n_stages)),
    )


def _levels(
    orders: Sequence[Sequence[Pass]], index: Mapping[Pass, int], last: int
) -> tuple[_Level, ...]:
    """Return the passes sorted into levels; `last` is the number of the last virtual stage."""
    n_stages = len(orders)
    level = np.zeros(len(index) + 1, dtype=np.int64)
    previous = np.zeros(len(index) + 1, dtype=np.int64)
    needed = np.zeros(len(index) + 1, dtype=np.int64)
    kind = np.zeros(len(index) + 1, dtype=np.int64)
    n_placed = [0] * n_stages  # number of passes of each rank that have their level
    has_progress = True
    while has_progress:
        has_progress = False
        for rank, order in enumerate(orders):
            while n_placed[rank] < len(order):
                direction, chunk, micro = order[n_placed[rank]]
                stage = chunk * n_stages + rank
                source = source_of(direction, stage, micro, last)
                source_index = 0 if source is None else index[source]
                if source_index and not level[source_index]:
                    break
                current = index[direction, stage, micro]
                previous[current] = current - 1 if n_placed[rank] else 0
                needed[current] = source_index
                level[current] = 1 + max(level[previous[current]], level[source_index])
                place = FIRST if stage == 0 else LAST if stage == last else MIDDLE
                kind[current] = kind_of(direction, place)
                n_placed[rank] += 1
                has_progress = True
    by_level = np.argsort(level, kind="stable")
    cuts = np.searchsorted(level[by_level], np.arange(1, level.max() + 2))
    runs = [by_level[start:end] for start, end in pairwise(cuts)]
    return tuple(_Level(run, previous[run], needed[run], kind[run]) for run in runs)


def source_of(direction: int, stage: int, micro: int, last: int) -> Pass | None:
    """Return the pass whose result a pass needs, or None for the first forward pass.

    Virtual stages are counted through all ranks; `last` is the number of the last one.
    """
    if direction == FORWARD:
        return (FORWARD, stage - 1, micro) if stage else None
    return (BACKWARD, stage + 1, micro) if stage < last else (FORWARD, last, micro)


def pipeline_seconds(
    n_stages: int, n_virtual: int, n_micro: int, seconds: Array, transfer_seconds: Array
) -> Array:
    """Return the time from the first forward to the last backward pass of all ranks.

    After a transient the schedule is periodic: it is played until rounds of `n_stages`
    micro-batches repeat, and the time of the remaining rounds is added.

    Parameters
    ----------
    seconds : array, shape (N_KINDS, C)
        Durations of passes, by `kind_of`.
    transfer_seconds : array, shape (C,)
        Time from the end of a pass until the neighbour has its result; both ranks wait for it.

    Returns
    -------
    ndarray, shape (C,) [s]
    """
    played = ROUNDS_PLAYED * n_stages + n_micro % n_stages
    if n_micro <= 2 * played:
        return _played(n_stages, n_virtual, n_micro, seconds, transfer_seconds)[0]
    end, period, drift = _played(n_stages, n_virtual, played, seconds, transfer_seconds)
    result = end + (n_micro - played) / n_stages * period
    unsettled = np.flatnonzero(drift > ROUND_TOLERANCE * end)
    if unsettled.size:
        result[unsettled] = _played(
            n_stages, n_virtual, n_micro, seconds[:, unsettled], transfer_seconds[unsettled]
        )[0]
    return result


def _played(
    n_stages: int, n_virtual: int, n_micro: int, seconds: Array, transfer_seconds: Array
) -> tuple[Array, Array, Array]:
    """Return the end of all ranks, the period of the last steady round, and its drift.

    The period is the largest shift of a pass against the round before, the drift the difference of
    the largest and the smallest shift. Without drift all further rounds repeat. Without two steady
    rounds period and drift are undefined.
    """
    schedule = _schedule(n_stages, n_virtual, n_micro)
    n_candidates = seconds.shape[1]
    end = np.empty(n_candidates)
    period = np.empty(n_candidates)
    drift = np.empty(n_candidates)
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
