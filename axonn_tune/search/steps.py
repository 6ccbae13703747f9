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
    parts: list[list[Played]] = []
    for stage in (pipeline.first, pipeline.middle, pipeline.last):
        parts.append([])
        for phases in stage.parts:
            parts[-1].append(play(phases, first))
            first += len(phases)
    shape = plan.n_microsteps.shape
    durations = np.zeros((N_KINDS, *shape))
    for place, played in enumerate(parts):
        for number, part in enumerate(played):
            direction = (FORWARD, BACKWARD)[number % 2]
            durations[kind_of(direction, place, number >= 2)] = part.seconds
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
    return seconds, _work(plan, pipeline, parts)


def _work(plan: StepPlan, pipeline: Pipeline, parts: list[list[Played]]) -> Played:
    """All passes of a rank of the last stage, without its waits for others."""
    _, middle, last = parts
    totals = []
    for name in ("seconds", "exposed_seconds"):
        forward, backward, first, final = (
            getattr(last[i], name) + (pipeline.n_virtual - 1) * getattr(middle[i], name)
            for i in range(4)
        )
        usual = plan.n_microsteps - 1.0
        totals.append(usual * (forward + backward) + first + final)
    return Played(*totals)
