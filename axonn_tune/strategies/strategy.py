"""What a strategy is: a module with these names."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from axonn_tune.spec.grid import CandidateTable, Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array, StepPlan


class Strategy(Protocol):
    """The algorithm side of a prediction; it knows no hardware.

    NAME: as results name it. COMPUTE_KEY: the columns (grid axes and ``micro_batch``) on
    which the sizes of a micro-step's kernels depend, so that equal ones are priced once.
    """

    NAME: str
    COMPUTE_KEY: tuple[str, ...]

    def rejections(self, model: Model, job: Job, placements: Placements) -> dict[str, np.ndarray]:
        """For each rule of the algorithm the placements that break it, bool of shape (P,)."""
        ...

    def plan(self, model: Model, job: Job, recompute: str, table: CandidateTable) -> StepPlan:
        """The operations of one rank in one training step."""
        ...

    def memory(
        self, model: Model, job: Job, recompute: str, table: CandidateTable
    ) -> dict[str, Array]:
        """Peak bytes of one rank by term, shape (C,)."""
        ...
