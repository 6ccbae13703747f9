"""The world in which a training step is predicted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import StepPlan
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

    @property
    def n_nodes(self) -> int:
        """The number of nodes of the job, the last of which may not be full."""
        return math.ceil(self.job.n_gpus / self.machine.ranks_per_node)

    @property
    def memory_capacity_bytes(self) -> float:
        """The memory of one GPU."""
        return self.machine.gpu.memory_bytes.value
