"""The time of a step from the times of its parts.

Micro-steps run one after another, or micro-batches pass through a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from axonn_tune.simulate.orders import BACKWARD, FORWARD, INPUT, WEIGHT
from axonn_tune.simulate.pipeline import N_KINDS, kind_of, pipeline_seconds
from axonn_tune.simulate.player import Played
from axonn_tune.spec.plan import Array, Collective, Part, Pipeline, Stage, StepPlan
from axonn_tune.spec.schedule import DUALPIPE, ONE_F_ONE_B, ZB_H1

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

    def play_stage(stage: Stage) -> list[Played]:
        return [play(part) for part in stage.passes]

    def play_all(stage: Stage) -> list[Played]:
        if pipeline.schedule == ONE_F_ONE_B:
            return play_stage(stage)
        return play_stage(stage) + [play(part) for part in stage.split_backward]

    first = play_all(pipeline.first)
    middle = play_all(pipeline.middle)
    last = play_all(pipeline.last)
    sync = play_stage(pipeline.sync)
    shape = plan.n_microsteps.shape
    durations = np.zeros((N_KINDS, *shape))
    for place, stage in enumerate((first, middle, last)):
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
        )
    additional = [
        synchronising.seconds - usual.seconds
        for synchronising, usual in zip(sync, first, strict=False)
    ]
    sync_seconds = sum(additional, start=np.zeros(shape))
    if pipeline.schedule == DUALPIPE:
        sync_seconds = 2.0 * sync_seconds
    work = _work(plan, pipeline, first, middle, last)
    return seconds + sync_seconds, Played(
        work.seconds + sync_seconds, work.exposed_seconds + sync_seconds
    )


def _work(
    plan: StepPlan,
    pipeline: Pipeline,
    first: list[Played],
    middle: list[Played],
    last: list[Played],
) -> Played:
    """Return the time of all passes of a rank of the last stage, without its waits for others.

    With micro-batches from both ends the rank has the first stage, too, each for half of them.
    """
    if pipeline.schedule == DUALPIPE:
        each = [*first[: BACKWARD + 1], *last[: BACKWARD + 1]]
        share = 0.5
    elif pipeline.schedule == ZB_H1:
        each, share = [last[FORWARD], last[INPUT], last[WEIGHT]], 1.0
    else:
        each, share = last + (pipeline.n_virtual - 1) * middle, 1.0
    n_passes = share * plan.n_microsteps
    seconds = sum(played.seconds for played in each)
    exposed = sum(played.exposed_seconds for played in each)
    return Played(n_passes * seconds, n_passes * exposed)
