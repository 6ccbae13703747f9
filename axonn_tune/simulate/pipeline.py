"""The schedule of a pipeline: 1F1B, or interleaved with virtual stages, for all candidates at once.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC21, section 2.2. Each rank works through its forward and backward passes in a
fixed order; one starts when the rank is free and what it needs from the neighbour has arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from axonn_tune.spec.plan import Array

FORWARD, BACKWARD = 0, 1
# Rounds of `n_stages` micro-batches that are played before it is seen whether they repeat, and
# how many of the last ones may already be of the pipeline's drain.
ROUNDS_PLAYED, ROUNDS_OF_DRAIN = 10, 4
PERIODIC_TOLERANCE = 1e-12
# Entries of the table of ends that are held at once.
CHUNK_ENTRIES = 4_000_000

Pass: TypeAlias = tuple[
    int, int, int
]  # FORWARD or BACKWARD, virtual stage of the rank, micro-batch


def rank_order(rank: int, n_stages: int, n_virtual: int, n_micro: int) -> list[Pass]:
    """The passes of one rank in the order in which Megatron-LM runs them."""
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
    """Groups of `n_stages` micro-batches pass through one virtual stage after the other."""
    if n_virtual == 1:
        return FORWARD, 0, index
    group, within = divmod(index, n_stages * n_virtual)
    chunk, micro = divmod(within, n_stages)
    return FORWARD, chunk, group * n_stages + micro


@dataclass(frozen=True)
class PlayedPass:
    """A pass of one rank with its start and end.

    stage: counts through all virtual stages. kind: see `kind_of`.
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
    """Every pass of one candidate, rank by rank in the order in which each runs its own.

    Parameters
    ----------
    seconds : array, shape (N_KINDS,)
        Durations of passes; see `kind_of`. A pass takes its part in the transfer too.
    """
    schedule = _schedule(n_stages, n_virtual, n_micro)
    of_kind = seconds + transfer_seconds
    ends, starts = np.zeros((2, schedule.n_passes + 1))
    kinds = np.zeros(schedule.n_passes + 1, dtype=np.int64)
    for own, before, needed, kind in schedule.levels:
        starts[own] = np.maximum(ends[before], ends[needed])
        ends[own], kinds[own] = starts[own] + of_kind[kind], kind
    in_order = (
        (rank, chunk * n_stages + rank, direction, micro)
        for rank in range(n_stages)
        for direction, chunk, micro in rank_order(rank, n_stages, n_virtual, n_micro)
    )
    return [
        PlayedPass(*which, int(kind), float(start), float(end))
        for which, kind, start, end in zip(in_order, kinds[1:], starts[1:], ends[1:], strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Schedule:
    """Passes by level: those of one level need only those of the levels before.

    Each level holds indices of its passes, of the rank's pass before, of the neighbour's pass
    that they need (0, an end at time zero, where there is none), and the kind of each, which
    picks its duration.
    """

    n_passes: int
    levels: tuple[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], ...]
    last_of_rank: np.ndarray
    steady: tuple[np.ndarray, np.ndarray]  # passes of the last two rounds before the drain


FIRST, MIDDLE, LAST = range(3)
N_KINDS = 6


def kind_of(direction: int, place: int) -> int:
    """Index of a pass's duration; `place`: of the first, a middle or the last stage."""
    return direction * 3 + place


@lru_cache(maxsize=256)
def _schedule(n_stages: int, n_virtual: int, n_micro: int) -> _Schedule:
    last = n_stages * n_virtual - 1
    orders = [rank_order(rank, n_stages, n_virtual, n_micro) for rank in range(n_stages)]
    index: dict[tuple[int, int, int], int] = {}
    ends = [0] * n_stages
    count = 0
    for rank, order in enumerate(orders):
        for direction, chunk, micro in order:
            count += 1
            index[direction, chunk * n_stages + rank, micro] = count
        ends[rank] = count
    level = np.zeros(count + 1, dtype=np.int64)
    before, needed, kind = (np.zeros(count + 1, dtype=np.int64) for _ in range(3))
    place = [0] * n_stages  # how far each rank's passes have their level
    progress = True
    while progress:
        progress = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                direction, chunk, micro = order[place[rank]]
                stage = chunk * n_stages + rank
                own = index[direction, stage, micro]
                source = source_of(direction, stage, micro, last)
                needs = 0 if source is None else index[source]
                if needs and not level[needs]:
                    break
                previous = own - 1 if place[rank] else 0
                level[own] = 1 + max(level[previous], level[needs])
                before[own], needed[own] = previous, needs
                where = FIRST if stage == 0 else LAST if stage == last else MIDDLE
                kind[own] = kind_of(direction, where)
                place[rank] += 1
                progress = True
    by_level = np.argsort(level, kind="stable")
    cuts = np.searchsorted(level[by_level], np.arange(1, level.max() + 2))
    levels = tuple(
        (rows, before[rows], needed[rows], kind[rows])
        for start, end in pairwise(cuts)
        for rows in [by_level[start:end]]
    )
    final = n_micro - ROUNDS_OF_DRAIN * n_stages
    steady = tuple(
        np.array([i for (_, _, micro), i in index.items() if 0 <= end - micro - 1 < n_stages])
        for end in (final, final - n_stages)
    )
    return _Schedule(count, levels, np.array(ends), (steady[0], steady[1]))


def source_of(direction: int, stage: int, micro: int, last: int) -> Pass | None:
    """The pass whose result this one needs."""
    if direction == FORWARD:
        return (FORWARD, stage - 1, micro) if stage else None
    return (BACKWARD, stage + 1, micro) if stage < last else (FORWARD, last, micro)


def pipeline_seconds(
    n_stages: int, n_virtual: int, n_micro: int, seconds: Array, transfer_seconds: Array
) -> Array:
    """Time from the first forward to the last backward pass of all ranks.

    After a transient the schedule is periodic: it is played until rounds of `n_stages`
    micro-batches repeat, the rest is added.

    Parameters
    ----------
    seconds : array, shape (N_KINDS, C)
        Durations of passes; see `kind_of`.
    transfer_seconds : array, shape (C,)
        From the end of a pass to when the neighbour has its result, both waiting.

    Returns
    -------
    ndarray, shape (C,) [s]
    """
    played = ROUNDS_PLAYED * n_stages + n_micro % n_stages
    if n_micro <= 2 * played:
        return _played(n_stages, n_virtual, n_micro, seconds, transfer_seconds)[0]
    end, period, drift = _played(n_stages, n_virtual, played, seconds, transfer_seconds)
    result: Array = end + (n_micro - played) / n_stages * period
    unsettled = np.flatnonzero(drift > PERIODIC_TOLERANCE * end)
    if unsettled.size:
        result[unsettled] = _played(
            n_stages, n_virtual, n_micro, seconds[:, unsettled], transfer_seconds[unsettled]
        )[0]
    return result


def _played(
    n_stages: int, n_virtual: int, n_micro: int, seconds: Array, transfer_seconds: Array
) -> tuple[Array, Array, Array]:
    """When all ranks have ended, what the last steady round took, and by how much passes differ.

    Once each pass of a round comes as much later as any other than in the round before, all
    further rounds repeat.
    """
    schedule = _schedule(n_stages, n_virtual, n_micro)
    n_candidates = seconds.shape[1]
    end, period, drift = np.empty((3, n_candidates))
    at_once = max(CHUNK_ENTRIES // (schedule.n_passes + 1), 1)
    now, earlier = schedule.steady
    for start in range(0, n_candidates, at_once):
        rows = slice(start, start + at_once)
        of_kind = seconds[:, rows] + transfer_seconds[rows]
        ends = np.zeros((schedule.n_passes + 1, of_kind.shape[1]))
        for own, before, needed, kind in schedule.levels:
            ends[own] = np.maximum(ends[before], ends[needed]) + of_kind[kind]
        end[rows] = ends[schedule.last_of_rank].max(axis=0)
        if now.size == earlier.size > 0:
            later = ends[now] - ends[earlier]
            period[rows] = later.max(axis=0)
            drift[rows] = period[rows] - later.min(axis=0)
    return end, period, drift
