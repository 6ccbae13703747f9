"""The time of a step from the times of its parts.

Micro-steps run one after another, or micro-batches pass through a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from axonn_tune.simulate.orders import BACKWARD, FORWARD, INPUT, WEIGHT
from axonn_tune.simulate.pipeline import (
    FIRST,
    LAST,
    MIDDLE,
    N_KINDS,
    kind_of,
    pipeline_seconds,
)
from axonn_tune.simulate.player import Played
from axonn_tune.spec.plan import Array, Collective, Part, Pipeline, StepPlan
from axonn_tune.spec.schedule import DUALPIPE, ZB_H1

# Functions from a part of a plan, and from a collective, to their times.
PlayPart: TypeAlias = Callable[[Part], Played]
PriceCollective: TypeAlias = Callable[[Collective], Array]


def step_times(
    plan: StepPlan, play: PlayPart, price: PriceCollective
) -> tuple[Array, Array, Array]:
    """Return the time of a step, of its exposed communication and of its bubble, shape (C,)."""
    n_micro = plan.n_microsteps
    end = play(plan.step_end)
    if plan.pipeline is not None:
        seconds, busy = _through_pipeline(plan, plan.pipeline, play, price)
        exposed = busy.exposed_seconds + end.exposed_seconds
        return seconds + end.seconds, exposed, seconds - busy.seconds
    micro = play(plan.microstep)
    seconds = n_micro * micro.seconds + end.seconds
    exposed = n_micro * micro.exposed_seconds + end.exposed_seconds
    if plan.sync_microstep is not None:
        sync = play(plan.sync_microstep)
        seconds = seconds + (sync.seconds - micro.seconds)
        exposed = exposed + (sync.exposed_seconds - micro.exposed_seconds)
    return seconds, exposed, np.zeros(seconds.shape)


def _through_pipeline(
    plan: StepPlan, pipeline: Pipeline, play: PlayPart, price: PriceCollective
) -> tuple[Array, Played]:
    """Return the time of all passes of all ranks, and the work of a rank of the last stage."""
    stages = [[play(part) for part in pipeline.passes_of(stage)] for stage in pipeline.stages]
    sync = [play(part) for part in pipeline.sync.passes]
    shape = plan.n_microsteps.shape
    durations = np.zeros((N_KINDS + kind_of(FORWARD, len(pipeline.others)), *shape))
    for place, stage in enumerate(stages):
        for direction, played in enumerate(stage):
            durations[kind_of(direction, place)] = played.seconds
    transfer = np.broadcast_to(price(pipeline.transfer), shape)
    seconds = np.empty(shape)
    for n_micro in np.unique(plan.n_microsteps):
        rows = np.flatnonzero(plan.n_microsteps == n_micro)
        seconds[rows] = pipeline_seconds(
            pipeline.n_stages,
            pipeline.n_virtual,
            round(float(n_micro)),
            durations[:, rows],
            transfer[rows],
            pipeline.schedule,
            pipeline.places,
        )
    additional = [
        synchronising.seconds - usual.seconds
        for synchronising, usual in zip(sync, stages[FIRST], strict=False)
    ]
    sync_seconds = pipeline.n_synchronised * sum(additional, start=np.zeros(shape))
    work = _work(plan, pipeline, stages)
    return seconds + sync_seconds, Played(
        work.seconds + sync_seconds, work.exposed_seconds + sync_seconds
    )


def _work(plan: StepPlan, pipeline: Pipeline, stages: Sequence[Sequence[Played]]) -> Played:
    """Return the time of all passes of a rank of the last stage, without its waits for others.

    With micro-batches from both ends the rank has the first stage, too, each for half of them.
    """
    last, share = stages[LAST], 1.0
    if pipeline.schedule == DUALPIPE:
        each = [*stages[FIRST][: BACKWARD + 1], *last[: BACKWARD + 1]]
        share = 0.5
    elif pipeline.schedule == ZB_H1:
        each = [last[FORWARD], last[INPUT], last[WEIGHT]]
    else:
        usual = [*[MIDDLE] * (pipeline.n_virtual - 1), LAST]
        places = pipeline.places[pipeline.n_stages - 1 :: pipeline.n_stages] or usual
        each = [played for place in places for played in stages[place]]
    n_passes = share * plan.n_microsteps
    seconds = sum(played.seconds for played in each)
    exposed = sum(played.exposed_seconds for played in each)
    return Played(n_passes * seconds, n_passes * exposed)
