"""The passes of micro-batches through a pipeline, and the time that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from axonn_tune.simulate.durations import N_KINDS, PassSeconds, kind_of
from axonn_tune.simulate.orders import FORWARD
from axonn_tune.simulate.pipeline import pipeline_seconds
from axonn_tune.simulate.pipeline_bound import least_pipeline_seconds
from axonn_tune.simulate.pipeline_schedule import PipelineShape
from axonn_tune.spec.candidates import Ints, distinct
from axonn_tune.spec.plan import Array, Pipeline, Size, Stage, StepPlan

if TYPE_CHECKING:
    from axonn_tune.simulate.step import PaceAmong, PlayPart, PriceCollective


@dataclass(frozen=True, eq=False)
class Passes:
    """The passes of micro-batches through a pipeline, arrays of shape (C,).

    n_stages, n_virtual
        Number of stages, and of virtual stages of each rank.
    schedule, places
        Schedule and places of the stages, as for `PipelineShape`.
    n_micro
        Number of micro-batches.
    durations
        Durations of passes, shape (kinds, C) each.
    transfer_seconds, beside_seconds
        Time of a transfer to the next stage where ranks wait for it, and where they do not.
    handover_seconds
        How long two stages stand still together for what is handed forward, and backward.
    sync_seconds
        Time that the synchronising micro-batch adds, and what other micro-batches run beside.
    work_seconds
        Time of all passes of a rank of the last stage, without its waits for others.
    """

    n_stages: Ints
    n_virtual: Ints
    schedule: str
    places: tuple[int, ...]
    n_micro: Ints
    durations: PassSeconds
    transfer_seconds: Array
    beside_seconds: Array
    handover_seconds: tuple[float, float]
    sync_seconds: Array
    work_seconds: Array

    def seconds(self) -> Array:
        """Return the time from the first forward to the last backward pass of all ranks."""
        seconds = np.empty(self.n_micro.shape)
        first, alike = distinct(self.n_stages, self.n_virtual)
        for number, row in enumerate(first):
            rows = np.flatnonzero(alike == number)
            n_stages, n_virtual = int(self.n_stages[row]), int(self.n_virtual[row])
            seconds[rows] = pipeline_seconds(
                PipelineShape(n_stages, n_virtual, self.schedule, self.places),
                self.n_micro[rows],
                self.durations.take(rows),
                self.transfer_seconds[rows],
                self.beside_seconds[rows],
                self.handover_seconds,
            )
        return seconds

    def least_seconds(self) -> Array:
        """Return a time below which `seconds` cannot be."""
        stages = (self.n_stages, self.n_virtual, self.n_micro)
        places = (self.schedule, self.places)
        return least_pipeline_seconds(*stages, self.durations, self.transfer_seconds, *places)

    def joined(self, other: Passes) -> Passes:
        """Return these passes, followed by those of other candidates in the same stages."""
        return replace(
            self,
            n_stages=np.concatenate([self.n_stages, other.n_stages]),
            n_virtual=np.concatenate([self.n_virtual, other.n_virtual]),
            n_micro=np.concatenate([self.n_micro, other.n_micro]),
            durations=self.durations.joined(other.durations),
            transfer_seconds=np.concatenate([self.transfer_seconds, other.transfer_seconds]),
            beside_seconds=np.concatenate([self.beside_seconds, other.beside_seconds]),
            sync_seconds=np.concatenate([self.sync_seconds, other.sync_seconds]),
            work_seconds=np.concatenate([self.work_seconds, other.work_seconds]),
        )

    def take(self, rows: Ints) -> Passes:
        """Return the passes of some candidates."""
        return replace(
            self,
            n_stages=self.n_stages[rows],
            n_virtual=self.n_virtual[rows],
            n_micro=self.n_micro[rows],
            durations=self.durations.take(rows),
            transfer_seconds=self.transfer_seconds[rows],
            beside_seconds=self.beside_seconds[rows],
            sync_seconds=self.sync_seconds[rows],
            work_seconds=self.work_seconds[rows],
        )


def passes_of(
    plan: StepPlan, pipeline: Pipeline, play: PlayPart, price: PriceCollective, pace: PaceAmong
) -> tuple[Passes, Array]:
    """Play the passes of each stage; return them and their exposed communication."""
    shape = plan.n_microsteps.shape
    sync = [play(part) for part in pipeline.sync.passes]
    without_sync = [play(part) for part in pipeline.without_sync.passes]
    counts = pipeline.n_synchronised(plan.candidates)
    additional = [
        count * (synchronising.seconds - usual.seconds)
        for count, synchronising, usual in zip(counts, sync, without_sync, strict=True)
    ]
    if pipeline.beside is not None:
        beside = [play(part) for part in pipeline.beside.passes]
        first = [play(part) for part in pipeline.first.passes]
        additional += [
            pipeline.n_beside * (each.seconds - usual.seconds)
            for each, usual in zip(beside, first, strict=True)
        ]
    sync_seconds = sum(additional, start=np.zeros(shape))
    usual, lone = pipeline.stages, pipeline.alone or pipeline.stages
    own_pace = pace(pipeline.n_in_lockstep(plan.candidates))
    durations = PassSeconds(
        usual=_durations(pipeline, usual, play, shape),
        alone=_durations(pipeline, lone, play, shape),
        # Without virtual stages no pass is said to be alone, not even one that fills the pipeline.
        filling=np.where(
            plan.candidates.n_virtual > 1,
            _durations(pipeline, lone, play, shape, own_pace),
            _durations(pipeline, usual, play, shape, own_pace),
        ),
    )
    work_seconds, exposed_seconds = _work(plan, play)
    transfer_seconds = np.broadcast_to(price(pipeline.transfer), shape)
    passes = Passes(
        plan.candidates.stages,
        plan.candidates.n_virtual,
        pipeline.schedule,
        pipeline.places,
        np.rint(plan.n_microsteps).astype(np.int64),
        durations,
        np.where(pipeline.sends_beside, 0.0, transfer_seconds),
        np.where(pipeline.sends_beside, transfer_seconds, 0.0),
        pipeline.handover_seconds,
        sync_seconds,
        work_seconds,
    )
    return passes, exposed_seconds + sync_seconds


def _durations(
    pipeline: Pipeline,
    stages: Sequence[Stage],
    play: PlayPart,
    shape: tuple[int, ...],
    pace: Size = 1.0,
) -> Array:
    """Return the durations of the passes of stages at some pace, by `kind_of`, shape (kinds, C)."""
    durations = np.zeros((N_KINDS + kind_of(FORWARD, len(pipeline.others)), *shape))
    for place, stage in enumerate(stages):
        for direction, part in enumerate(pipeline.passes_of(stage)):
            durations[kind_of(direction, place)] = play(part).seconds_at(pace)
    return durations


def _work(plan: StepPlan, play: PlayPart) -> tuple[Array, Array]:
    """Return the time of all passes of a rank of the last stage, and how much of it is exposed.

    Its waits for other ranks are not counted.
    """
    played = [(times, play(part)) for times, parts in plan.work_of_last_rank for part in parts]
    seconds = sum((times * part.seconds for times, part in played), start=np.zeros(1))
    exposed = sum((times * part.exposed_seconds for times, part in played), start=np.zeros(1))
    return seconds, exposed
