"""What to search: the model, the job, the machine, the strategy, and what the user fixed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from axonn_tune.search.candidates import Constraints
from axonn_tune.spec.grid import Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import RECOMPUTES, Model
from axonn_tune.strategies import axonn4d
from axonn_tune.strategies.strategy import Strategy

COST_MODELS = ("full", "paper")


@dataclass(frozen=True)
class Search:
    """A search; one candidate is a search whose axes are all fixed.

    every_configuration: rank every micro-batch and recomputation of a grid, not its best only.
    """

    model: Model
    job: Job
    machine: Machine
    strategy: Strategy = axonn4d
    constraints: Constraints = field(default_factory=Constraints)
    recomputes: tuple[str, ...] = RECOMPUTES
    cost_model: str = "full"
    include_oom: bool = False
    every_configuration: bool = False

    def rules(self, placements: Placements) -> dict[str, np.ndarray]:
        """The algorithm's divisibility rules for this job."""
        return self.strategy.rejections(self.model, self.job, placements)

    @property
    def memory_capacity_bytes(self) -> float:
        """Memory of one GPU."""
        return self.machine.gpu.memory_bytes.value
