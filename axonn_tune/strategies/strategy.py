"""What a strategy is: an object with these attributes and methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from axonn_tune.spec.grid import Axes, CandidateTable, Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array, StepPlan
from axonn_tune.spec.variant import Variant


class Strategy(Protocol):
    """The algorithm side of a prediction; it knows no hardware."""

    @property
    def name(self) -> str:
        """As results name it."""
        ...

    @property
    def axes(self) -> Axes:
        """Along which it arranges ranks."""
        ...

    @property
    def compute_key(self) -> tuple[str, ...]:
        """Columns on which the sizes of a micro-step's kernels depend.

        Axes and ``micro_batch``; candidates that agree in them are priced once.
        """
        ...

    @property
    def n_virtual(self) -> Sequence[int]:
        """Numbers of virtual stages that a search tries."""
        ...

    def rejections(self, model: Model, job: Job, placements: Placements) -> dict[str, np.ndarray]:
        """For each rule of the algorithm the placements that break it, bool of shape (P,)."""
        ...

    def can_run(
        self, model: Model, job: Job, variant: Variant, table: CandidateTable
    ) -> np.ndarray:
        """Which candidates the variant admits, bool of shape (C,)."""
        ...

    def plan(self, model: Model, job: Job, variant: Variant, table: CandidateTable) -> StepPlan:
        """The operations of one rank in one training step."""
        ...

    def memory(
        self, model: Model, job: Job, variant: Variant, table: CandidateTable
    ) -> dict[str, Array]:
        """Peak bytes of one rank by term, shape (C,)."""
        ...
