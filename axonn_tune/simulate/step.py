"""The time of a step from the times of its parts.

Micro-steps run one after another, or micro-batches pass through a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from axonn_tune.simulate.orders import FORWARD
from axonn_tune.simulate.pipeline import (
    FIRST,
    N_KINDS,
    kind_of,
    least_pipeline_seconds,
    pipeline_seconds,
)
from axonn_tune.simulate.player import Played
from axonn_tune.spec.candidates import Ints, distinct
from axonn_tune.spec.plan import Array, Collective, Part, Pipeline, StepPlan

# Functions from a part of a plan, and from a collective, to their times.
PlayPart: TypeAlias = Callable[[Part], Played]
PriceCollective: TypeAlias = Callable[[Collective], Array]


@dataclass(frozen=True, eq=False)
class PlayedStep:
    """The played parts of a step, arrays of shape (C,).

    seconds, exposed_seconds
        Time of all parts that run one after another, and of the exposed communication in the step.
    passes
        Passes of the micro-batches where they overlap in a pipeline.
    """

    seconds: Array
    exposed_seconds: Array
    passes: Passes | None = None

    def least_seconds(self) -> Array:
        """Return a time below which no step can be, without playing its pipeline."""
        if self.passes is None:
            return self.seconds
        return self.passes.least_seconds() + self.passes.sync_seconds + self.seconds

    def times(self) -> tuple[Array, Array, Array]:
        """Return the time of a step, of its exposed communication and of its bubble."""
        if self.passes is None:
            return self.seconds, self.exposed_seconds, np.zeros(self.seconds.shape)
        seconds = self.passes.seconds()
        bubble = seconds - self.passes.work_seconds
        return seconds + self.passes.sync_seconds + self.seconds, self.exposed_seconds, bubble

    def joined(self, other: PlayedStep) -> PlayedStep:
        """Return the parts of these candidates, followed by those of others in the same stages."""
        passes = None
        if self.passes is not None and other.passes is not None:
            passes = self.passes.joined(other.passes)
        seconds = np.concatenate([self.seconds, other.seconds])
        exposed = np.concatenate([self.exposed_seconds, other.exposed_seconds])
        return PlayedStep(seconds, exposed, passes)

    def take(self, rows: Ints) -> PlayedStep:
        """Return the parts of some candidates."""
        passes = None if self.passes is None else self.passes.take(rows)
        return PlayedStep(self.seconds[rows], self.exposed_seconds[rows], passes)


@dataclass(frozen=True, eq=False)
class Passes:
    """The passes of micro-batches through a pipeline, arrays of shape (C,).

    n_stages, n_virtual
        Number of stages, and of virtual stages of each rank.
    schedule, places
        Schedule and places of the stages, as for `pipeline_seconds`.
    n_micro
        Number of micro-batches.
    durations
        Durations of passes by `kind_of`, shape (kinds, C).
    transfer_seconds, beside_seconds
        Time of a transfer to the next stage where ranks wait for it, and where they do not.
    sync_seconds
        Time that the synchronising micro-batch adds.
    work_seconds
        Time of all passes of a rank of the last stage, without its waits for others.
    """

    n_stages: Ints
    n_virtual: Ints
    schedule: str
    places: tuple[int, ...]
    n_micro: Ints
    durations: Array
    transfer_seconds: Array
    beside_seconds: Array
    sync_seconds: Array
    work_seconds: Array

    def seconds(self) -> Array:
        """Return the time from the first forward to the last backward pass of all ranks."""
        seconds = np.empty(self.n_micro.shape)
        first, alike = distinct(self.n_stages, self.n_virtual)
        for number, row in enumerate(first):
            rows = np.flatnonzero(alike == number)
            seconds[rows] = pipeline_seconds(
                int(self.n_stages[row]),
                int(self.n_virtual[row]),
                self.n_micro[rows],
                self.durations[:, rows],
                self.transfer_seconds[rows],
                self.schedule,
                self.places,
                self.beside_seconds[rows],
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
            durations=np.concatenate([self.durations, other.durations], axis=1),
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
            durations=self.durations[:, rows],
            transfer_seconds=self.transfer_seconds[rows],
            beside_seconds=self.beside_seconds[rows],
            sync_seconds=self.sync_seconds[rows],
            work_seconds=self.work_seconds[rows],
        )


def played_step(plan: StepPlan, play: PlayPart, price: PriceCollective) -> PlayedStep:
    """Play the parts of a step."""
    n_micro = plan.n_microsteps
    end = play(plan.step_end)
    if plan.pipeline is not None:
        return _through_pipeline(plan, plan.pipeline, end, play, price)
    micro = play(plan.microstep)
    seconds = n_micro * micro.seconds + end.seconds
    exposed = n_micro * micro.exposed_seconds + end.exposed_seconds
    if plan.sync_microstep is not None:
        sync = play(plan.sync_microstep)
        seconds = seconds + (sync.seconds - micro.seconds)
        exposed = exposed + (sync.exposed_seconds - micro.exposed_seconds)
    return PlayedStep(seconds, exposed)


def _through_pipeline(
    plan: StepPlan, pipeline: Pipeline, end: Played, play: PlayPart, price: PriceCollective
) -> PlayedStep:
    """Play the passes of each stage; `end` is the end of the step."""
    stages = [[play(part) for part in pipeline.passes_of(stage)] for stage in pipeline.stages]
    sync = [play(part) for part in pipeline.sync.passes]
    shape = plan.n_microsteps.shape
    durations = np.zeros((N_KINDS + kind_of(FORWARD, len(pipeline.others)), *shape))
    for place, stage in enumerate(stages):
        for direction, played in enumerate(stage):
            durations[kind_of(direction, place)] = played.seconds
    counts = pipeline.n_synchronised(plan.candidates)
    additional = [
        count * (synchronising.seconds - usual.seconds)
        for count, synchronising, usual in zip(counts, sync, stages[FIRST], strict=False)
    ]
    sync_seconds = sum(additional, start=np.zeros(shape))
    work = _work(plan, play)
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
        sync_seconds,
        work.seconds,
    )
    exposed = work.exposed_seconds + sync_seconds + end.exposed_seconds
    return PlayedStep(end.seconds, exposed, passes)


def _work(plan: StepPlan, play: PlayPart) -> Played:
    """Return the time of all passes of a rank of the last stage, without its waits for others."""
    played = [(times, play(part)) for times, parts in plan.work_of_last_rank for part in parts]
    seconds = sum(times * part.seconds for times, part in played)
    exposed = sum(times * part.exposed_seconds for times, part in played)
    n_passes = plan.n_microsteps
    return Played(n_passes * seconds, n_passes * exposed)
