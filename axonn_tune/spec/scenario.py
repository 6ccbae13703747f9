"""The world in which a training step is predicted."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from axonn_tune.spec.blocks import Experts
from axonn_tune.spec.candidates import CandidateTable, Ints, Placements
from axonn_tune.spec.facts import value_or
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import EXPERT, PIPELINE
from axonn_tune.spec.learned import Learned
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array, Part, Size, StepPlan
from axonn_tune.spec.resources import Resource, host_resources, resources
from axonn_tune.spec.strategy import Strategy
from axonn_tune.spec.track_record import NO_TRACK_RECORDS, TrackRecord, TrackRecords

# torch has a handle of cuBLAS in each thread: one for the forward pass, and one of autograd's for
# the backward pass. Each keeps its workspace (aten/src/ATen/cuda/CublasHandlePool.cpp,
# getCurrentCUDABlasHandle: a thread reserves handles of its own, and each has a workspace for each
# stream).
TORCH_HANDLES = 2


@dataclass(frozen=True)
class Scenario:
    """A model, the job that trains it, the machine, and the strategy that spreads the work.

    track_records
        How predictions have fared, which widens intervals.
    memory_margin_bytes
        Memory of a GPU that is to stay free; below zero, memory that may be missing.
    """

    model: Model
    job: Job
    machine: Machine
    strategy: Strategy
    track_records: TrackRecords = NO_TRACK_RECORDS
    memory_margin_bytes: float = 0.0

    def plan(self, table: CandidateTable) -> StepPlan:
        """Return what the engine does in one training step of candidates that are alike."""
        plan = self.strategy.plan(self.model, self.job_here, table)
        return self.strategy.engine.as_run(plan)

    def rejections(self, placements: Placements) -> dict[str, np.ndarray]:
        """Return, for each rule, the placements that break it, bool of shape (P,).

        Experts are spread over ranks in equal parts, and each strategy has rules of its own.
        """
        broken: dict[str, np.ndarray] = {}
        if folded := placements.axes.folded:
            split, number = placements.size(EXPERT), self.model.n_experts
            broken = {
                f"number of experts ({number}) not divisible by {EXPERT}": number % split != 0,
                f"{folded} not divisible by {EXPERT}": placements.size(folded) % split != 0,
            }
        return broken | self.strategy.rejections(self.model, self.job, placements)

    def planned_together(self, tables: Sequence[CandidateTable]) -> list[list[int]]:
        """Return the indices of the tables that one plan can describe, group by group.

        The candidates of each table are alike. Empty tables are left out.
        """
        groups: dict[Hashable, list[int]] = {}
        for number, table in enumerate(tables):
            if len(table):
                key = self.strategy.plan_key(self.model, self.job_here, table)
                groups.setdefault(key, []).append(number)
        return list(groups.values())

    def planned_rows(self, table: CandidateTable) -> list[Ints]:
        """Return the rows that one plan can describe, group by group."""
        alike = list(table.alike())
        groups = self.planned_together([table.take(rows) for rows in alike])
        return [np.concatenate([alike[number] for number in numbers]) for numbers in groups]

    def memory_terms(self, table: CandidateTable, in_first_stage: bool = False) -> dict[str, Array]:
        """Return the strategy's terms of a rank's peak memory, of candidates that are alike.

        The rank is the one that needs most, or one in the first stage.
        """
        memory = self.strategy.first_stage_memory if in_first_stage else self.strategy.memory
        return memory(self.model, self.job_here, table)

    @property
    def job_here(self) -> Job:
        """The job with two facts of the GPU: `transposes_operands` and `one_queue`."""
        gpu = self.machine.gpu
        return replace(
            self.job, transposes_operands=gpu.transposes_operands, one_queue=gpu.one_queue
        )

    @property
    def workspace_bytes(self) -> float:
        """The bytes of cuBLAS's workspaces on a rank: torch's, and those of the engine."""
        gpu, memory = self.machine.gpu, self.strategy.engine.memory
        of_torch = TORCH_HANDLES * value_or(gpu.torch_workspace_bytes, 0.0)
        n_of_engine = memory.workspaces + (0 if self.model.is_dense else memory.expert_workspaces)
        return of_torch + n_of_engine * value_or(gpu.workspace_bytes, 0.0)

    @property
    def sent_once(self) -> Experts | None:
        """The experts to which tokens are sent once; None where a copy travels to each."""
        return self.model.experts if self.strategy.sends_once else None

    @property
    def issue_seconds(self) -> float:
        """The time in which the host issues one operation: the engine's, or else the machine's.

        An engine was timed on another host, which may be slower or faster.
        """
        engine = self.strategy.engine
        of_engine = engine.issue_seconds
        if not self.model.is_dense:
            of_engine = engine.mixture_issue_seconds or of_engine
        kernels = self.machine.kernels
        if of_engine is None:
            return kernels.issue_seconds.value
        return of_engine.value * kernels.issue_factor.value

    def waits_in(self, plan: StepPlan, part: Part) -> Size:
        """Return whether the host waits in each collective of a part.

        It does so in the stages of a pipeline that spans several nodes, shape (C,), and in a job on
        several nodes if its engine waits without stages.
        """
        engine = self.strategy.engine
        if engine.stage_wait_seconds is None or part is plan.step_end:
            return False
        if plan.pipeline is None:
            return engine.waits_without_stages and self.n_nodes > 1
        return self._spans_nodes(plan.candidates, PIPELINE)

    def wait_seconds_per_rank(self, table: CandidateTable, axis: str) -> Size:
        """Return how long a host that waits does so in a collective, for each rank of the group."""
        engine = self.strategy.engine
        within = value_or(engine.stage_wait_seconds, 0.0)
        across = value_or(engine.spanning_wait_seconds, within)
        factor = self.machine.kernels.issue_factor.value
        return np.where(self._spans_nodes(table, axis), across, within) * factor

    def _spans_nodes(self, table: CandidateTable, axis: str) -> np.ndarray:
        """Return whether the group of an axis spans several nodes, bool of shape (C,)."""
        span = table.placements.stride(axis)[table.placement] * table.size(axis)
        return np.asarray(span > self.machine.ranks_per_node)

    @cached_property
    def model_flops(self) -> float:
        """The FLOPs of a step by which the model's FLOP/s are counted, without recomputation."""
        job = self.job
        return self.model.model_flops(
            job.tokens, job.sample_len, job.adapters, job.mtp_modules, job.frozen
        )

    @property
    def causal_flops(self) -> float:
        """The model's FLOPs of a step, of which attention has the causal half of its scores."""
        job = self.job
        return self.model.causal_flops(
            job.tokens, job.sample_len, job.adapters, job.mtp_modules, job.frozen
        )

    @property
    def attention_share(self) -> float:
        """The share of attention in the FLOPs, on which the clock of the GPUs depends."""
        return self.model.attention_share(self.job.sample_len)

    @property
    def n_nodes(self) -> int:
        """The number of nodes of the job, the last of which may not be full."""
        return math.ceil(self.job.n_gpus / self.machine.ranks_per_node)

    @property
    def memory_capacity_bytes(self) -> float:
        """The memory of one GPU that a rank may take."""
        return self.machine.gpu.memory_bytes.value - self.memory_margin_bytes

    @property
    def resources(self) -> list[Resource]:
        """The resources on which the time of a step rests, those of the host only with offload."""
        return [*resources(self.machine), *self.of_host]

    @property
    def of_host(self) -> list[Resource]:
        """The resources on which only offload rests; none without it."""
        return host_resources(self.machine) if self.job.uses_host else []

    @property
    def host_terms(self) -> tuple[str, ...]:
        """The terms of a rank's memory that are in the host's memory."""
        return self.strategy.engine.host_terms(self.job)

    @property
    def ranks_on_node(self) -> int:
        """The number of ranks of the job on a full node, or on its only one."""
        return min(self.machine.ranks_per_node, self.job.n_gpus)

    @property
    def host_memory_capacity_bytes(self) -> float:
        """The memory of a node's host; infinite where nothing is offloaded."""
        if not self.job.uses_host:
            return math.inf
        return self.machine.require_host().memory_bytes.value

    @property
    def learned(self) -> Learned | None:
        """What the machine has learned from runs of this engine; None if nothing."""
        learned = self.machine.learned
        is_of_engine = learned is not None and learned.engine == self.strategy.engine.title
        return learned if is_of_engine else None

    @property
    def track_record(self) -> TrackRecord | None:
        """How predictions of this kind have fared; None if too few were compared."""
        strategy = self.strategy
        family = self.machine.gpu.family
        return self.track_records.of(strategy.name, strategy.engine.record_title, family, self.kind)

    @property
    def kind(self) -> str:
        """What distinguishes this training from that of dense models in the job's type, in words.

        This is experts, products in 8 or 4 bits, adapters or frozen parts, or several of these. The
        text is empty if there is nothing.
        """
        tuned = "frozen parts" if self.job.frozen else ""
        tuned = tuned if self.job.adapters is None else "adapters"
        experts = "" if self.model.is_dense else "experts"
        low = "" if self.job.recipe is None else "low precision"
        return " in ".join(filter(None, (tuned, experts, low)))

    @property
    def track_record_spread(self) -> float:
        """The spread of ln(predicted / published) of such predictions.

        Predictions that were never compared are trusted like those of the strategy that has fared
        worst.
        """
        record = self.track_record
        return self.track_records.largest_spread if record is None else record.spread
