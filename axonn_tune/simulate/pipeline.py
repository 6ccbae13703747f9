"""The passes of a pipeline, played in the order of its schedule for all candidates at once.

`pipeline_schedule` says in which order slots can be played. `_played` computes when their passes
end, one level after another, for many candidates at once. `pipeline_seconds` plays more and more
micro-batches until the schedule repeats, and adds the period for the others. `passes` plays one
candidate and returns every pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from axonn_tune.simulate.durations import PassSeconds, table_of_durations
from axonn_tune.simulate.pipeline_schedule import (
    PipelineSchedule,
    PipelineShape,
    pipeline_schedule,
)
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import NO_HANDOVER, Array
from axonn_tune.spec.schedule import DUALPIPE

# If the rounds that were played do not repeat yet, more micro-batches are played, by this factor.
GROWTH = 4
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
    setting
        `ALONE` if it belongs to the warm-up or the drain of a pipeline with virtual stages, so that
        no other pass can run beside it, `FILLING` if the pipeline fills or drains with it, and
        `USUAL` otherwise.
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
    setting: int
    start_seconds: float
    end_seconds: float
    arrival_seconds: float

    @property
    def part(self) -> tuple[int, int]:
        """The kind of the pass, and its setting."""
        return self.kind, self.setting

    @property
    def is_sent_beside(self) -> bool:
        """Whether its result travels while the rank runs its next pass."""
        return self.arrival_seconds > self.end_seconds


def passes(
    shape: PipelineShape,
    n_micro: int,
    seconds: PassSeconds,
    transfer_seconds: float,
    beside_seconds: float = 0.0,
    handover_seconds: tuple[float, float] = NO_HANDOVER,
) -> list[PlayedPass]:
    """Return every pass of one candidate, rank by rank in the order in which each rank runs them.

    Where two passes run together, the forward pass is said to come first.

    Parameters
    ----------
    seconds : PassSeconds
        Durations of passes, shape (kinds,) each.
    transfer_seconds : float
        Time of a transfer to the next stage, which is a part of every pass.
    beside_seconds, handover_seconds
        They are those of `pipeline_seconds`.
    """
    order = pipeline_schedule(shape, shape.per_flow(n_micro), any(handover_seconds))
    beside = np.full(1, beside_seconds)
    each = PassSeconds(*(of_kinds[: shape.n_kinds, None] for of_kinds in seconds))
    transfer = np.full(1, transfer_seconds)
    duration = table_of_durations(each, transfer, beside, handover_seconds)
    is_second = order.place > 0
    length = duration[order.row, 0]
    of_slot = np.bincount(order.slot, weights=length)[order.slot]
    start = _ends(order, duration, beside)[order.slot, 0] - of_slot
    start += is_second * (of_slot - length)
    end = start + length
    arrival = end + beside_seconds * order.is_steady[order.slot]
    stage, micro = order.stage, order.micro
    if shape.schedule == DUALPIPE:
        micro = micro + (stage >= shape.n_stages) * shape.per_flow(n_micro)
        stage = stage % shape.n_stages
    identity = order.rank, stage, order.direction, micro, order.kind
    columns = *identity, order.setting, start, end, arrival
    return [
        PlayedPass(*each) for each in zip(*(column.tolist() for column in columns), strict=True)
    ]


def pipeline_seconds(
    shape: PipelineShape,
    n_micro: Ints | int,
    seconds: PassSeconds,
    transfer_seconds: Array,
    beside_seconds: Array | None = None,
    handover_seconds: tuple[float, float] = NO_HANDOVER,
) -> Array:
    """Return the time from the first forward to the last backward pass of all ranks.

    After its start the schedule is periodic: it is played until the ends that determine all later
    ones are those of a period before, shifted in time; the time of the remaining periods is added.

    Parameters
    ----------
    n_micro : array of int, shape (C,)
        Number of micro-batches.
    seconds : PassSeconds
        Durations of passes, shape (kinds, C) each.
    transfer_seconds : array, shape (C,)
        Time from the end of a pass until the neighbour has its result; both ranks wait for it.
    beside_seconds : array, shape (C,)
        Further time until the neighbour has the result of a pass, for which the rank does not wait
        while its forward and backward passes alternate; none without virtual stages.
    handover_seconds : tuple of float
        How long two neighbouring ranks stand still together while one hands the result of a
        forward pass, or of a backward pass, to the other; with 1F1B without virtual stages only.

    Returns
    -------
    ndarray, shape (C,) [s]
    """
    beside = np.zeros_like(transfer_seconds) if beside_seconds is None else beside_seconds
    each = PassSeconds(*(of_kinds[: shape.n_kinds] for of_kinds in seconds))
    duration = table_of_durations(each, transfer_seconds, beside, handover_seconds)
    n_micro = shape.per_flow(np.broadcast_to(np.asarray(n_micro), transfer_seconds.shape))
    result = np.empty(n_micro.shape)
    n_played = 2 * shape.micro_of_start + shape.micro_of_state + shape.period
    unsettled = np.arange(n_micro.size)
    while unsettled.size:
        most = np.minimum(n_micro, n_played + n_micro % shape.period)
        drifting = []
        for played, alike in _alike(most[unsettled]):
            rows = unsettled[alike]
            order = pipeline_schedule(shape, played, any(handover_seconds))
            end, period, drift = _played(order, duration[:, rows], beside[rows])
            n_more = (n_micro[rows] - played) / shape.period
            result[rows] = end + np.where(n_more > 0, n_more * period, 0.0)
            drifting.append(rows[(n_more > 0) & (drift > ROUND_TOLERANCE * end)])
        unsettled = np.concatenate(drifting)
        n_played *= GROWTH
    return result


def _alike(n_micro: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each number of micro-batches with the rows that have it."""
    for number in sorted(set(n_micro.tolist())):
        yield number, np.flatnonzero(n_micro == number)


def _ends(schedule: PipelineSchedule, duration: Array, beside_seconds: Array) -> Array:
    """Return the end of each slot, shape (slots + 1, C), from the table of durations."""
    ends = sum((duration[of_place] for of_place in schedule.rows[1:]), duration[schedule.rows[0]])
    ends[0] = 0.0
    sends_beside = beside_seconds.any()
    for start, end, (previous, *needed) in schedule.levels:
        free = ends.take(previous, axis=0)
        for number, source in enumerate(needed):
            arrival = ends.take(source, axis=0)
            if sends_beside:
                arrival += schedule.travels[number, start:end, None] * beside_seconds
            np.maximum(free, arrival, out=free)
        ends[start:end] += free
    return ends


def _played(
    schedule: PipelineSchedule, duration: Array, beside_seconds: Array
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
