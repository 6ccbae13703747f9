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
    """The algorithm side of a prediction; it knows no hardware.

    name: as results name it. axes: along which it arranges ranks. compute_key: the columns
    (axes and ``micro_batch``) on which the sizes of a micro-step's kernels depend, so that
    equal ones are priced once. free_axes: those that a search tries sizes of; others are 1
    unless they are fixed. n_virtual: numbers of virtual stages that it tries.
    """

    @property
    def name(self) -> str: ...

    @property
    def axes(self) -> Axes: ...

    @property
    def compute_key(self) -> tuple[str, ...]: ...

    @property
    def free_axes(self) -> tuple[str, ...]: ...

    @property
    def n_virtual(self) -> Sequence[int]: ...

    def rejections(self, model: Model, job: Job, placements: Placements) -> dict[str, np.ndarray]:
        """For each rule of the algorithm the placements that break it, bool of shape (P,)."""
        ...

    def can_run(self, model: Model, job: Job, variant: Variant, table: CandidateTable) -> np.ndarray:
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
