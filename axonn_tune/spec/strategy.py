"""The protocol of strategies: what an algorithm must state to be predicted.

A strategy knows no hardware.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import Axes
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array, StepPlan


class Strategy(Protocol):
    """The algorithm side of a prediction."""

    @property
    def name(self) -> str:
        """The name of the strategy for users and in results."""
        ...

    @property
    def engine(self) -> Engine:
        """The engine that carries out the strategy."""
        ...

    @property
    def caveat(self) -> str:
        """A sentence on what its times do not show, if it changes the numerics or is not released.

        The text is empty where neither is so.
        """
        ...

    @property
    def sharded_by_choice(self) -> str:
        """What replicas shard beyond what the engine shards by default, in words; may be empty."""
        ...

    @property
    def sends_once(self) -> bool:
        """Whether tokens travel once to each unit that holds any of their experts."""
        ...

    @property
    def axes(self) -> Axes:
        """The axes along which the strategy arranges ranks."""
        ...

    @property
    def compute_key(self) -> tuple[str, ...]:
        """The columns on which the sizes of a micro-step's kernels depend.

        These are axes and ``micro_batch``; candidates that agree in them are priced once.
        """
        ...

    @property
    def n_virtual(self) -> Sequence[int]:
        """The numbers of virtual stages that a search tries, in growing order."""
        ...

    @property
    def recomputing_takes_time(self) -> bool:
        """Whether a step that recomputes more never takes less time.

        It may where recomputation changes how early weights are gathered.
        """
        ...

    @property
    def schedule(self) -> str:
        """The order in which the ranks of a pipeline run their passes, one of `SCHEDULES`."""
        ...

    @property
    def recomputed_modules(self) -> Sequence[str]:
        """The modules of a block that the strategy can recompute by themselves."""
        ...

    @property
    def offload_modules(self) -> Sequence[str]:
        """The modules of a block whose inputs the strategy can move to the host's memory."""
        ...

    def overlap_of(self, job: Job) -> Overlap:
        """Return the overlaps that the strategy carries out, of those that a job asks for."""
        ...

    def rejections(self, model: Model, job: Job, placements: Placements) -> dict[str, np.ndarray]:
        """Return, for each rule of the algorithm, which placements break it, bool of shape (P,).

        The result depends only on the sizes of placements, as memory does, so that it is computed
        for one rank order only.
        """
        ...

    def admits(self, model: Model, job: Job, table: CandidateTable) -> np.ndarray:
        """Return which candidates can be cut into their virtual stages, bool of shape (C,).

        The candidates are alike (`CandidateTable.alike`).
        """
        ...

    def plan_key(self, model: Model, job: Job, table: CandidateTable) -> Hashable:
        """Return a key that is equal for tables whose candidates one plan can describe.

        The candidates of a table are alike. Those of several tables may differ in how often phases
        are repeated.
        """
        ...

    def plan(self, model: Model, job: Job, table: CandidateTable) -> StepPlan:
        """Return the operations of one rank in one training step of candidates that are alike.

        The candidates of several tables with the same `plan_key` have one plan, too.
        """
        ...

    def memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Return the peak bytes of one rank by term, shape (C,), of candidates that are alike.

        They include what the engine offloads (`OffloadProgram.terms`).
        """
        ...

    def first_stage_memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Return the same as `memory` for a rank of the first stage, which may not need most.

        Some programs report the memory of rank 0 only.
        """
        ...
