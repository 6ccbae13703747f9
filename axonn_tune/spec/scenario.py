"""The world in which a training step is predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import PIPELINE
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Part, Size, StepPlan
from axonn_tune.spec.strategy import Strategy


@dataclass(frozen=True)
class Scenario:
    """A model, the job that trains it, the machine, and the strategy that spreads the work."""

    model: Model
    job: Job
    machine: Machine
    strategy: Strategy

    def plan(self, table: CandidateTable) -> StepPlan:
        """Return what the engine does in one training step of candidates that are alike."""
        return self.strategy.engine.as_run(self.strategy.plan(self.model, self.job, table))

    @property
    def issue_seconds(self) -> float:
        """The time in which the host issues one operation: the engine's, or else the machine's."""
        of_engine = self.strategy.engine.issue_seconds
        return (of_engine or self.machine.kernels.issue_seconds).value

    def wait_seconds_per_rank(self, plan: StepPlan, part: Part) -> Size:
        """Return how long the host waits in each collective of a part, for each of its ranks.

        It does so in the stages of a pipeline that spans several nodes, shape (C,).
        """
        waits = self.strategy.engine.stage_wait_seconds
        if waits is None or plan.pipeline is None or part is plan.step_end:
            return 0.0
        table = plan.candidates
        span = table.placements.stride(PIPELINE)[table.placement] * table.size(PIPELINE)
        return np.where(span > self.machine.ranks_per_node, waits.value, 0.0)

    @property
    def n_nodes(self) -> int:
        """The number of nodes of the job, the last of which may not be full."""
        return math.ceil(self.job.n_gpus / self.machine.ranks_per_node)

    @property
    def memory_capacity_bytes(self) -> float:
        """The memory of one GPU."""
        return self.machine.gpu.memory_bytes.value
