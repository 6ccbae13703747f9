"""What to search: the model, the job, the machine, the strategy, and what the user fixed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from axonn_tune.errors import NoCandidateError
from axonn_tune.search.candidates import Constraints, legal_placements, no_grid_error
from axonn_tune.spec.grid import AnyGrid, Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import RECOMPUTES, Model
from axonn_tune.spec.variant import Variant
from axonn_tune.strategies.axonn4d import AXONN
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
    strategy: Strategy = AXONN
    constraints: Constraints = field(default_factory=Constraints)
    recomputes: tuple[str, ...] = RECOMPUTES
    cost_model: str = "full"
    include_oom: bool = False
    every_configuration: bool = False

    def rules(self, placements: Placements) -> dict[str, np.ndarray]:
        """The algorithm's divisibility rules for this job."""
        return self.strategy.rejections(self.model, self.job, placements)

    def legal_placements(self, n_gpus: int | None = None) -> tuple[Placements, dict[str, int]]:
        """See `candidates.legal_placements`; on the job's GPUs, or on another number."""
        count = self.job.n_gpus if n_gpus is None else n_gpus
        return legal_placements(count, self.constraints, self.rules, self.strategy)

    def no_grid_error(self, rejected: Mapping[str, int]) -> NoCandidateError:
        """See `candidates.no_grid_error`."""
        return no_grid_error(self.job.n_gpus, self.constraints, self.rules, rejected, self.strategy)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Every way to execute a layout that is tried."""
        return tuple(
            Variant(recompute, n_virtual)
            for recompute in self.recomputes
            for n_virtual in self.strategy.n_virtual
        )

    @property
    def n_nodes(self) -> int:
        """Nodes of the job, the last one perhaps not full."""
        return math.ceil(self.job.n_gpus / self.machine.ranks_per_node)

    def of_layout(self, grid: AnyGrid) -> Search:
        """The search of one layout, whether it fits or not."""
        axes = {axis: grid.sizes.get(axis, 1) for axis in self.strategy.axes.names}
        constraints = replace(self.constraints, axes=axes)
        return replace(self, constraints=constraints, include_oom=True)

    @property
    def memory_capacity_bytes(self) -> float:
        """Memory of one GPU."""
        return self.machine.gpu.memory_bytes.value
