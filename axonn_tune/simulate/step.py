"""The time of a step from the times of its parts.

Micro-steps run one after another, or micro-batches pass through a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from axonn_tune.simulate.player import Played
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import Array, Collective, Part, Size, StepPlan

if TYPE_CHECKING:
    from axonn_tune.simulate.passes import Passes

# Functions from a part of a plan, and from a collective, to their times.
PlayPart: TypeAlias = Callable[[Part], Played]
PriceCollective: TypeAlias = Callable[[Collective], Array]
# A function from a number of ranks that wait for one another to how long kernels take there in
# terms of their prices, which are those of the slowest of all ranks.
PaceAmong: TypeAlias = Callable[[Size], Size]


class PlayedStep(NamedTuple):
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


def played_step(
    plan: StepPlan, play: PlayPart, price: PriceCollective, pace: PaceAmong
) -> PlayedStep:
    """Play the parts of a step."""
    n_micro = plan.n_microsteps
    end = play(plan.step_end)
    if plan.pipeline is not None:
        # Plans without a pipeline do not need this import, which takes 2 ms.
        from axonn_tune.simulate.passes import passes_of

        passes, exposed = passes_of(plan, plan.pipeline, play, price, pace)
        return PlayedStep(end.seconds, exposed + end.exposed_seconds, passes)
    micro = play(plan.microstep)
    seconds = n_micro * micro.seconds + end.seconds
    exposed = n_micro * micro.exposed_seconds + end.exposed_seconds
    if plan.sync_microstep is not None:
        sync = play(plan.sync_microstep)
        seconds = seconds + (sync.seconds - micro.seconds)
        exposed = exposed + (sync.exposed_seconds - micro.exposed_seconds)
    return PlayedStep(seconds, exposed)
