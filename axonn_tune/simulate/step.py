"""A step's time from that of its parts: micro-steps one after another, or through a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from axonn_tune.simulate.pipeline import (
    BACKWARD,
    FORWARD,
    N_KINDS,
    kind_of,
    pipeline_seconds,
)
from axonn_tune.simulate.player import Played
from axonn_tune.spec.plan import Array, Collective, Phase, Pipeline, StepPlan

# Phases, and the index of the first of them in the plan -> their seconds.
Play: TypeAlias = Callable[[tuple[Phase, ...], int], Played]
Message: TypeAlias = Callable[[Collective], Array]


def step_times(plan: StepPlan, play: Play, message: Message) -> tuple[Array, Array, Array]:
    """Seconds of a step, of exposed communication and of the bubble in it, shape (C,)."""
    n_micro = plan.n_microsteps
    end = play(plan.step_end, len(plan.microstep))
    if plan.pipeline is not None:
        seconds, busy = _through_pipeline(plan, plan.pipeline, play, message)
        total = seconds + end.seconds
        return total, busy.exposed_seconds + end.exposed_seconds, seconds - busy.seconds
    micro = play(plan.microstep, 0)
    seconds = n_micro * micro.seconds + end.seconds
    exposed = n_micro * micro.exposed_seconds + end.exposed_seconds
    if plan.sync_microstep:
        sync = play(plan.sync_microstep, len(plan.microstep) + len(plan.step_end))
        seconds = seconds + (sync.seconds - micro.seconds)
        exposed = exposed + (sync.exposed_seconds - micro.exposed_seconds)
    return seconds, exposed, np.zeros(seconds.shape)


def _through_pipeline(
    plan: StepPlan, pipeline: Pipeline, play: Play, message: Message
) -> tuple[Array, Played]:
    """Seconds until all ranks have done all passes, and the work of a rank of the last stage."""
    first = len(plan.microstep) + len(plan.step_end) + len(plan.sync_microstep)
    passes: list[list[Played]] = []
    for stage in (pipeline.first, pipeline.middle, pipeline.last, pipeline.sync):
        passes.append([])
        for phases in stage.parts:
            passes[-1].append(play(phases, first))
            first += len(phases)
    *passes, sync = passes
    shape = plan.n_microsteps.shape
    durations = np.zeros((N_KINDS, *shape))
    for place, of_stage in enumerate(passes):
        for direction in (FORWARD, BACKWARD):
            durations[kind_of(direction, place)] = of_stage[direction].seconds
    transfer = np.broadcast_to(message(pipeline.transfer), shape)
    seconds = np.empty(shape)
    for n_micro in np.unique(plan.n_microsteps):
        rows = np.flatnonzero(plan.n_microsteps == n_micro)
        seconds[rows] = pipeline_seconds(
            pipeline.n_stages,
            pipeline.n_virtual,
            round(float(n_micro)),
            durations[:, rows],
            transfer[rows],
        )
    longer = [after.seconds - usual.seconds for after, usual in zip(sync, passes[0], strict=True)]
    synchronising = sum(longer, start=np.zeros(shape))
    work = _work(plan, pipeline, passes)
    return seconds + synchronising, Played(
        work.seconds + synchronising, work.exposed_seconds + synchronising
    )


def _work(plan: StepPlan, pipeline: Pipeline, passes: list[list[Played]]) -> Played:
    """All passes of a rank of the last stage, without its waits for others."""
    _, middle, last = passes
    each = [
        sum(
            getattr(last[i], name) + (pipeline.n_virtual - 1) * getattr(middle[i], name)
            for i in (FORWARD, BACKWARD)
        )
        for name in ("seconds", "exposed_seconds")
    ]
    return Played(plan.n_microsteps * each[0], plan.n_microsteps * each[1])
