"""The time of a step from the times of its parts.

Micro-steps run one after another, or micro-batches pass through a pipeline.
"""

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
from axonn_tune.spec.plan import Array, Collective, Part, Pipeline, Stage, StepPlan

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

    first = play_stage(pipeline.first)
    middle = play_stage(pipeline.middle)
    last = play_stage(pipeline.last)
    sync = play_stage(pipeline.sync)
    shape = plan.n_microsteps.shape
    durations = np.zeros((N_KINDS, *shape))
    for place, stage in enumerate((first, middle, last)):
        for direction in (FORWARD, BACKWARD):
            durations[kind_of(direction, place)] = stage[direction].seconds
    transfer = np.broadcast_to(price(pipeline.transfer), shape)
    seconds = pipeline_seconds(
        pipeline.n_stages,
        pipeline.n_virtual,
        np.rint(plan.n_microsteps).astype(np.int64),
        durations,
        transfer,
    )
    additional = [
        synchronising.seconds - usual.seconds
        for synchronising, usual in zip(sync, first, strict=True)
    ]
    sync_seconds = sum(additional, start=np.zeros(shape))
    work = _work(plan, pipeline, middle, last)
    return seconds + sync_seconds, Played(
        work.seconds + sync_seconds, work.exposed_seconds + sync_seconds
    )


def _work(plan: StepPlan, pipeline: Pipeline, middle: list[Played], last: list[Played]) -> Played:
    """Return the time of all passes of a rank of the last stage, without its waits for others."""
    n_others = pipeline.n_virtual - 1
    passes = list(zip(last, middle, strict=True))
    seconds = sum(final.seconds + n_others * other.seconds for final, other in passes)
    exposed = sum(
        final.exposed_seconds + n_others * other.exposed_seconds for final, other in passes
    )
    return Played(plan.n_microsteps * seconds, plan.n_microsteps * exposed)
