"""Megatron-LM: tensor, context, pipeline and data parallelism.

Shoeybi et al., arXiv 1909.08053 (tensor parallelism); Narayanan et al., SC21,
arXiv 2104.04473 (pipelines, interleaving); Korthikanti et al., arXiv 2205.05198 (sequence
parallelism, selective recomputation, activation memory); Megatron Core for what came later
(distributed optimizer, overlapped reductions, context parallelism).

The attention heads and the MLP's hidden units are split over the tensor group; between these
the residual stream is replicated, or with sequence parallelism split by tokens. Context
parallelism splits the sequence for everything; `context` has what attention then needs. The experts
of a mixture are spread over the ranks of the tensor, context and data groups taken together (Liu et
al., arXiv 2504.14960, parallel folding). Each expert is whole, or split over the tensor group as
the MLP is (--expert-tensor-parallel-size).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.engine import HELD_BACK, IDEAL, QUEUED, Engine
from axonn_tune.spec.facts import value_or
from axonn_tune.spec.job import MUON, Job, Overlap
from axonn_tune.spec.layout import CONTEXT, EXPERT, EXPERT_REPLICAS, PIPELINE, TENSOR, Axes
from axonn_tune.spec.model import Model
from axonn_tune.spec.offload import OFFLOAD_MODULES
from axonn_tune.spec.plan import Array, Size, StepPlan
from axonn_tune.spec.precision import EIGHT_BITS, FULL
from axonn_tune.spec.programs import RING
from axonn_tune.spec.recomputation import MODULES
from axonn_tune.spec.schedule import DUALPIPE, ONE_F_ONE_B
from axonn_tune.spec.stage_layout import layers_of_stages
from axonn_tune.strategies.adapters import adapter_elements
from axonn_tune.strategies.casts import kept_weight_bytes
from axonn_tune.strategies.context import broken_context_rules, context_axes, context_parallelism
from axonn_tune.strategies.experts import stored_experts
from axonn_tune.strategies.megatron.communication import MegatronCommunication
from axonn_tune.strategies.megatron.muon import broken_muon_rules, owned_matrices
from axonn_tune.strategies.megatron.segments import Segments
from axonn_tune.strategies.megatron.stage import (
    elements_of_kinds,
    held_by_blocks,
    module_layers,
    saved_by_module,
    stored_matrices,
    stored_parameters,
    trained_parameters,
)
from axonn_tune.strategies.moved import host_activations, largest_moved, moved_by_layers
from axonn_tune.strategies.optimizer import States, host_copies, sharded_text, states_of
from axonn_tune.strategies.pipeline import (
    admits_schedule,
    admits_virtual,
    broken_frozen_rules,
    broken_gradient_rules,
    broken_pipeline_rules,
    can_be_cut,
    copies_of_model,
    memory_of_stage,
    memory_of_stages,
    neediest,
)
from axonn_tune.strategies.sequence_parallel import broken_tensor_rules
from axonn_tune.strategies.shapes import FP32_BYTES, Shapes
from axonn_tune.strategies.step_plan import plan_key, step_plan
from axonn_tune.strategies.transformer import Transformer

# Precisions in which Transformer Engine's optimizer holds the master weights; in others
# Megatron-Core does, in fp32 (core/optimizer/__init__.py at d98e8a64).
_MASTERS_IN_OPTIMIZER = (FULL, "fp8-delayed")


@dataclass(frozen=True)
class Megatron3D:
    """The strategy with its options, which are Megatron-LM's flags.

    `Strategy` describes the fields that are not listed here.

    Attributes
    ----------
    sequence_parallel
        Whether the residual stream is split by tokens over the tensor group
        (--sequence-parallel).
    distributed_optimizer
        Whether optimizer states are sharded over the replicas (--use-distributed-optimizer).
    overlap_grad_reduce
        Whether gradients are reduced during the last backward pass, and updated weights gathered
        during the first forward pass (--overlap-grad-reduce, --overlap-param-gather).
    fused_accumulation
        Whether the product that forms dW adds to the fp32 gradient
        (--no-gradient-accumulation-fusion off).
    fp32_gradients
        Whether gradients are summed and reduced in fp32 (--accumulate-allreduce-grads-in-fp32,
        which bf16 implies), not in the weights' dtype.
    context_kind
        Kind of context parallelism, one of `CONTEXT_KINDS` (--cp-comm-type p2p, all_gather, a2a,
        a2a+p2p).
    has_experts
        Whether the model has experts, so that layouts have an axis for them
        (--expert-model-parallel-size).
    splits_experts
        Whether each expert is split over the tensor group, and not whole
        (--expert-tensor-parallel-size).
    sends_once
        Whether a token is sent once to each rank that holds any of its experts, and not once for
        each expert (--moe-token-dispatcher-type flex).
    overlaps_experts
        Whether tokens travel to and from experts while another micro-batch computes
        (--overlap-moe-expert-parallel-comm).
    overlaps_tensor
        Whether tokens travel within the tensor group while the products that read or form them run,
        in as many parts as the group has ranks (--tp-comm-overlap); only with sequence parallelism.
    exchanges_adapters
        Whether an all-to-all exchanges columns of an adapter's output for tokens, instead of a
        gather (Megatron-Bridge's a2a_experimental).
    schedule
        In which order the ranks of a pipeline run their passes, one of `SCHEDULES`.
    stage_layout
        Layers of each virtual stage, as in `spec.stage_layout`; empty where they follow from the
        number of stages (--pipeline-model-parallel-layout).
    low_weights
        Whether weights of low-precision products are stored and gathered in the low format only
        (--fp8-param-gather, --fp4-param-gather).
    shards_gradients
        Whether sums of gradients are sharded with the optimizer states, so that every micro-step
        reduces its own (--data-parallel-sharding-strategy optim_grads).
    """

    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = True
    fused_accumulation: bool = True
    fp32_gradients: bool = True
    context_kind: str = RING
    has_experts: bool = False
    splits_experts: bool = False
    sends_once: bool = False
    overlaps_experts: bool = False
    overlaps_tensor: bool = False
    exchanges_adapters: bool = False
    low_weights: bool = False
    shards_gradients: bool = False
    schedule: str = ONE_F_ONE_B
    stage_layout: str = ""
    name: str = "megatron"
    n_virtual: Sequence[int] = (1, 2, 4)
    recomputing_takes_time: bool = True
    recomputed_modules: Sequence[str] = MODULES
    offload_modules: Sequence[str] = OFFLOAD_MODULES
    engine: Engine = IDEAL
    caveat: str = ""

    @property
    def sharded_by_choice(self) -> str:
        """What replicas shard beyond what the engine shards by default, in words."""
        is_usual = self.distributed_optimizer == self.engine.megatron.distributed_optimizer
        return sharded_text(self.distributed_optimizer and not is_usual, self.shards_gradients)

    @property
    def compute_key(self) -> tuple[str, ...]:
        """The columns on which the sizes of a micro-step's kernels depend."""
        key = (*self.split_axes, "micro_batch")
        return (*key, EXPERT) if self.has_experts else key

    @property
    def axes(self) -> Axes:
        """The axes tensor, context, data and pipeline, and that of experts where there are any.

        Tensor is the fastest axis of the rank number, pipeline the slowest (--use-tp-pp-dp-mapping
        off).
        """
        names = (*self.split_axes, "data", PIPELINE)
        groups = (*names[:-2], PIPELINE, self.replicas)
        if not self.has_experts:
            return Axes(names, ("data",), groups)
        # Experts divide the tensor group, too, unless that splits each of them.
        folded = names[1:-1] if self.splits_experts else names[:-1]
        groups = (*groups, EXPERT, EXPERT_REPLICAS)
        return Axes(names, ("data",), groups, folded="*".join(folded))

    @property
    def context(self) -> str:
        """The axis, or the product of axes, whose ranks share a sequence."""
        return "*".join(context_axes(self.context_kind))

    @property
    def replicas(self) -> str:
        """The product of axes whose ranks hold the same weights, apart from experts."""
        return f"{self.context}*data"

    def rejections(self, model: Model, job: Job, placements: Placements) -> dict[str, np.ndarray]:
        """Return, for each of Megatron-LM's rules, the placements that break it, shape (P,)."""
        tensor = placements.size("tensor")
        context = placements.size(self.context)
        engine = self.engine
        n_split = {TENSOR: tensor, CONTEXT: context}
        broken = {
            **{
                f"{engine.title} has no {axis} parallelism": n_split[axis] > 1
                for axis in engine.megatron.lacks
            },
            **broken_tensor_rules(model, tensor),
            **broken_context_rules(self.context_kind, model, job, placements, "tensor"),
            "global batch not divisible by data": job.global_batch % placements.size("data") != 0,
        }
        if self.shards_gradients:
            reason = "sharded gradients need --overlap-grad-reduce and trained weights"
            is_alone = placements.size(self.replicas) == 1
            broken[reason] = ~(is_alone | self.overlaps_reduction(job))
            broken |= broken_gradient_rules(placements)
        broken |= broken_frozen_rules(job, placements)
        if job.optimizer == MUON:
            broken |= broken_muon_rules(self, model, job, placements)
        if job.adapters is not None:
            reason = "rank of adapters not divisible by tensor"
            broken[reason] = job.adapters.rank % tensor != 0
        if model.experts is not None and self.splits_experts:
            reason = "experts' size not divisible by tensor"
            broken[reason] = model.experts.hidden_size % tensor != 0
            # Asserted by TransformerConfig (d98e8a64).
            broken["experts with biases split over tensor"] = model.experts.bias & (tensor > 1)
        if self._needs_virtual_stages:
            stages = placements.size(PIPELINE)
            cuts = [can_be_cut(model.n_layers, stages * n) for n in self.n_virtual if n > 1]
            reason = "overlapped exchanges of experts need virtual stages in a pipeline"
            broken[reason] = (stages > 1) & ~np.any(cuts, axis=0)
        if model.experts is not None and not self.sequence_parallel:
            broken["experts with tensor need sequence parallelism"] = tensor > 1
        if self.sequence_parallel:
            reason = f"sequence not divisible by tensor*{self.context}"
            broken[reason] = job.seq_len % (tensor * context) != 0
        if self._has_plain_stages and 1 not in self.n_virtual:
            broken[f"{engine.title} has no virtual stages"] = placements.size(PIPELINE) > 1
        if any(engine.megatron.handover_seconds) and self.schedule != ONE_F_ONE_B:
            reason = f"stages of {engine.title} run in the order of {ONE_F_ONE_B}"
            broken[reason] = placements.size(PIPELINE) > 1
        if self.schedule == DUALPIPE:
            if not self.overlap_grad_reduce:
                reason = "micro-batches from both ends need --overlap-grad-reduce"
                broken[reason] = placements.size(PIPELINE) > 1
            broken["micro-batches from both ends need an even number of stages"] = (
                placements.size(PIPELINE) > 1
            ) & (placements.size(PIPELINE) % 2 != 0)
        return broken | broken_pipeline_rules(
            model,
            placements,
            self.engine.megatron.balances_stages,
            layers_of_stages(self.stage_layout),
        )

    def admits(self, model: Model, job: Job, table: CandidateTable) -> np.ndarray:
        """Return which candidates have virtual stages and micro-batches for their schedule.

        Stages that are balanced by their products, or whose hosts sleep over their messages, have
        no virtual stages.
        """
        is_plain = table.n_stages > 1 and table.common_n_virtual == 1
        if is_plain and self._needs_virtual_stages:
            return np.zeros(len(table), dtype=bool)
        if self._has_plain_stages and table.common_n_virtual > 1:
            return np.zeros(len(table), dtype=bool)
        layout = layers_of_stages(self.stage_layout)
        has_stages = admits_virtual(model, job, table, layout)
        return has_stages & admits_schedule(self.schedule, job, table)

    def plan_key(self, model: Model, job: Job, table: CandidateTable) -> Hashable:
        """Return a key that is equal for tables whose candidates one plan can describe.

        One end of the step is valid for several numbers of stages, unless the stages are balanced
        or laid out explicitly.
        """
        joins_stages = not (self.engine.megatron.balances_stages or self.stage_layout)
        return plan_key(self.shapes(model, job, table), joins_stages)

    def plan(self, model: Model, job: Job, table: CandidateTable) -> StepPlan:
        """Return the operations of one rank in one training step, for all candidates."""
        shapes = self.shapes(model, job, table)
        communication = self.communication(shapes, sync=False)
        usual = Transformer(shapes, communication)
        sends_beside = self._sends_beside(job, table)
        alone = None
        if self._runs_in_pairs:
            alone = Transformer(shapes, replace(communication, runs_alone=True))
        if not self.overlaps_reduction(job):
            return step_plan(usual, schedule=self.schedule, sends_beside=sends_beside, alone=alone)
        of_sync = replace(self.communication(shapes, sync=True), runs_alone=self._runs_in_pairs)
        synchronising = Transformer(shapes, of_sync)
        aligns_gathers = self.engine.megatron.aligns_gathers
        passes = (synchronising, self.schedule, aligns_gathers, sends_beside)
        syncs_at_end = self._syncs_at_end(job, table)
        if not syncs_at_end.any():
            return step_plan(usual, *passes, alone=alone)
        of_end = self._without_overlap.communication(shapes, sync=False)
        if not self.engine.megatron.coalesces_buckets:
            return step_plan(usual, *passes, syncs_at_end, Transformer(shapes, of_end))
        at_end = Transformer(shapes, replace(of_end, is_of_first_stage=True))
        besides = replace(self.communication(shapes, sync=False), runs_beside=True)
        return step_plan(usual, *passes, syncs_at_end, at_end, Transformer(shapes, besides))

    @property
    def _runs_in_pairs(self) -> bool:
        """Whether a forward and a backward pass of two micro-batches run together.

        Exchanges of experts then overlap with another micro-batch. The first forward and the last
        backward passes run alone (Megatron-LM at d98e8a64, pipeline_parallel/combined_1f1b.py).
        """
        return self.has_experts and self.overlaps_experts and self.schedule == ONE_F_ONE_B

    @property
    def _has_plain_stages(self) -> bool:
        """Whether no rank has virtual stages, since products balance stages or hosts sleep."""
        program = self.engine.megatron
        return program.balances_stages or any(program.handover_seconds)

    @property
    def _needs_virtual_stages(self) -> bool:
        """Whether pipelines have virtual stages: where exchanges of experts overlap.

        TransformerConfig asserts it (d98e8a64). A search that is held to stages without them stands
        for another schedule.
        """
        return self.has_experts and self.overlaps_experts and len(self.n_virtual) > 1

    @property
    def _without_overlap(self) -> Megatron3D:
        """The same strategy, except that the buckets travel after all micro-steps."""
        program = replace(self.engine.megatron, buckets_without_overlap=True)
        engine = replace(self.engine, megatron=program)
        return replace(self, overlap_grad_reduce=False, engine=engine)

    def _syncs_at_end(self, job: Job, table: CandidateTable) -> np.ndarray:
        """Return whether gathers of weights and reductions of gradients overlap with nothing.

        Where kernels wait in one queue, a rank with virtual stages takes as long as if these ran
        after its passes. This holds for NeMo's steps on H100, and for Llama 3.1 405B on up to 8,192
        of them. The buckets of a virtual stage are issued at once (schedules.py, grad_sync_func and
        param_sync_func), and each holds up the kernels behind it until the bucket before it has
        come (core/distributed/distributed_data_parallel.py).

        Where one launch has all of them, only those of the first virtual stage overlap with
        nothing, and the others run beside the passes of the stage before: of several reductions in
        a row the last one overlaps, as NVIDIA/apex#1551 observed and then coalesced them.
        """
        return self._waits_in_one_queue(job, table) & (table.n_virtual > 1)

    def _sends_beside(self, job: Job, table: CandidateTable) -> np.ndarray:
        """Return whether results travel to the next stage while passes compute, shape (C,).

        They do so where a rank has several stages, and not where its kernels wait in one queue.
        """
        is_interleaved = self.engine.megatron.overlaps_transfers & (table.n_virtual > 1)
        return is_interleaved & ~self._waits_in_one_queue(job, table)

    def _waits_in_one_queue(self, job: Job, table: CandidateTable) -> np.ndarray:
        """Return `has_one_queue` for the candidates of a job, shape (C,)."""
        return self.has_one_queue(job.one_queue, table.size("*".join(self.split_axes)))

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes that split tensors or sequences."""
        return ("tensor", *context_axes(self.context_kind))

    def has_one_queue(self, gpu_has_one: bool, n_split: Size) -> np.ndarray:
        """Return whether the kernels of all streams wait in one queue, shape (C,).

        With one connection they do, unless the engine says that its kernels do not
        (`MegatronProgram.one_queue`), such as those of a CUDA graph.
        """
        return self.engine.megatron.one_queue & self.has_one_connection(gpu_has_one, n_split)

    def has_one_connection(self, gpu_has_one: bool, n_split: Size) -> np.ndarray:
        """Return whether the host has one connection to its GPU, shape (C,).

        `gpu_has_one` is `Gpu.one_queue`, and `n_split` the number of ranks along `split_axes`.
        Where exchanges of experts overlap with another micro-batch, there are several
        (Megatron-Bridge v0.4.0, scripts/performance/perf_plugins.py,
        _set_num_cuda_device_max_connections).
        """
        has_one = gpu_has_one and not self.overlaps_experts
        return np.asarray(n_split) > (1 if has_one else np.inf)

    def memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Return the peak bytes of one rank by term, each of shape (C,)."""
        spare = {*self.engine.host_terms(job), HELD_BACK, QUEUED}
        return neediest(self._memory_of_stages(model, job, table), spare)

    def first_stage_memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Return the peak bytes of a rank in the first stage by term, each of shape (C,)."""
        return next(self._memory_of_stages(model, job, table))

    def stage_memory(
        self, model: Model, job: Job, table: CandidateTable, stage: int
    ) -> dict[str, Array]:
        """Return the peak bytes of a rank in a stage without virtual ones by term, each (C,)."""
        shapes = self.shapes(model, job, table)
        return memory_of_stage(shapes, partial(self._stage_memory, shapes), stage)

    def _memory_of_stages(
        self, model: Model, job: Job, table: CandidateTable
    ) -> Iterator[dict[str, Array]]:
        """Yield the peak bytes by term of the stages that may need most, the first one leading."""
        shapes = self.shapes(model, job, table)
        return memory_of_stages(shapes, partial(self._stage_memory, shapes), self.schedule)

    def _attention_format(self, job: Job) -> str:
        """Return the format of the operands of attention; empty for the job's type."""
        is_low = job.recipe is not None and self.engine.megatron.low_attention
        return EIGHT_BITS if is_low else ""

    def shapes(self, model: Model, job: Job, table: CandidateTable) -> Shapes:
        """Return the sizes: tensor splits the inner widths, context and data split the tokens."""
        tensor = table.size("tensor")
        return Shapes(
            model,
            job,
            table,
            tokens=table.sequences_at_once * job.seq_len / table.size(self.context),
            x=np.ones(len(table)),
            y=tensor,
            y_axis="tensor",
            residual_split=tensor if self.sequence_parallel else 1.0,
            reruns_attention=self.engine.megatron.reruns_attention,
            stage_layout=layers_of_stages(self.stage_layout),
            balances_stages=self.engine.megatron.balances_stages,
            exceeds_shares=self.engine.megatron.exceeds_shares,
            expert_split=table.size(EXPERT) if self.has_experts else 1.0,
            sends_once=self.sends_once,
            expert_tensor=tensor if self.splits_experts else 1.0,
            experts_at_once=self.engine.megatron.experts_at_once,
            leaves_out_combine=not self.engine.recomputes_combine,
            adds_expert_biases=self.engine.adds_expert_biases,
            exchanges_adapters=self.exchanges_adapters,
            fuses_adapters=self.engine.megatron.fuses_adapters,
            gradient_sum_bytes=self.gradient_bytes(job) * self.fused_accumulation,
            casts_in_activations=self.engine.megatron.casts_in_activations,
            fp32_router=self.engine.megatron.fp32_router,
            copies_heads=self.engine.megatron.copies_heads,
            attention_format=self._attention_format(job),
            low_head=self.engine.megatron.low_head,
            memory=self.engine.memory,
        )

    def communication(self, shapes: Shapes, sync: bool) -> MegatronCommunication:
        """Return the communication of a usual micro-step, or of the synchronising one."""
        return MegatronCommunication(shapes, sync, self)

    def overlap_of(self, job: Job) -> Overlap:
        """Return whether sums of a gradient run beside dW, and reductions over replicas early."""
        grad_reduce = self.overlaps_reduction(job)
        oar = job.overlap.oar and self.engine.megatron.overlaps_gradient_sums
        return Overlap(oar, ors=False, oag=False, grad_reduce=grad_reduce)

    def overlaps_reduction(self, job: Job) -> bool:
        """Return whether gradients are reduced, and weights gathered, while a micro-step computes.

        The few gradients of adapters fill one bucket, which is reduced after the last of them.
        """
        return self.overlap_grad_reduce and job.trains_weights

    def gradient_bytes(self, job: Job) -> float:
        """Return the bytes of a gradient element as it is summed and reduced."""
        needs_fp32 = job.dtype == "bf16" and self.engine.megatron.sums_bf16_in_fp32
        return FP32_BYTES if self.fp32_gradients or needs_fp32 else job.element_bytes

    def states(self, job: Job) -> States:
        """Return what the optimizer keeps of each parameter.

        An engine may keep only those 16 bits of each fp32 master weight that the bf16 weight lacks.
        """
        states = states_of(job, self.engine.low_states)
        is_in_bf16 = job.precision in _MASTERS_IN_OPTIMIZER and not self.stores_low_weights(job)
        if self.engine.memory.keeps_remainders and is_in_bf16 and job.moments != "fp32":
            return states._replace(master_bytes=job.element_bytes)
        return states

    def stores_low_weights(self, job: Job) -> bool:
        """Return whether a job's weights of blocks are stored and gathered in a low format only.

        Megatron-Core asserts the distributed optimizer with it.
        """
        return self.low_weights and self.distributed_optimizer and job.recipe is not None

    def gathers_low_weights(self, job: Job) -> bool:
        """Return whether a job's weights of blocks are gathered in the low format, too."""
        gathers_low = job.recipe is not None and job.recipe.gathers_low
        return self.stores_low_weights(job) and gathers_low

    def gathered_bytes(self, job: Job) -> float:
        """Return the bytes of an element of a block's updated weights as they are gathered."""
        return job.operand_bytes if self.gathers_low_weights(job) else job.element_bytes

    def _stage_memory(
        self, shapes: Shapes, layers: Sequence[int], first: bool, last: bool, held: Array
    ) -> dict[str, Array]:
        """Return the bytes by term of one stage, which holds `held` layers' activations at once."""
        job = shapes.job
        model = shapes.model
        n_copies = copies_of_model(self.schedule, shapes.table)
        n_modules = last * job.mtp_modules
        n_in_flight = held / max(len(layers), 1)
        above = shapes.backward_layers(layers)
        chunk = -(-len(above) // (shapes.n_virtual * n_copies))
        held = held * (len(above) / max(len(layers), 1)) + n_modules
        layers, above = ([*part, *module_layers(shapes, last)] for part in (layers, above))
        stored = stored_parameters(shapes, layers, first, last)
        experts = stored_experts(shapes, layers)
        adapters = adapter_elements(shapes, layers)
        everywhere = stored + experts
        projection = model.mtp_projection.parameters / shapes.table.size("tensor")
        matrices = stored_matrices(shapes, layers) + n_modules * projection
        uncast = everywhere - matrices if self.stores_low_weights(job) else everywhere
        dense, routed = trained_parameters(shapes, layers, first, last)
        trained = dense + routed
        owned = trained
        replicas = shapes.table.size(self.replicas)
        if self.distributed_optimizer:
            owned = self.owned_share(shapes, dense, routed) / n_copies
        summed = trained
        if self.shards_gradients:
            outside, _ = trained_parameters(shapes, (), first, last)
            two_blocks = 2.0 * (trained - outside) / len(above)
            summed = owned + np.where(replicas > 1, outside + two_blocks, 0.0)
        memory = self.engine.memory
        segments = Segments(shapes, len(above), held, last)
        states = self.states(job)
        n_dummies = elements_of_kinds(shapes, layers, last)
        has_dummies = self.fused_accumulation and job.trains_weights
        dummy_bytes = value_or(memory.dummy_gradient_bytes, 0.0) * has_dummies
        context = context_parallelism(self.context_kind, shapes)
        saved, working = held_by_blocks(shapes, above, last, context)
        moved = moved_by_layers(shapes, layers, chunk)
        embedding = first * model.head.parameters / shapes.table.size("tensor")
        unsummed = self._unsummed(segments, trained, embedding, len(above) * saved)
        terms = {
            "weights": (uncast + adapters) * job.element_bytes + matrices * kept_weight_bytes(job),
            "gradients": summed * self.gradient_bytes(job) + unsummed,
            "optimizer_states": owned * states.nbytes,
            **host_copies(job, self.engine.offload_in(job), owned),
            **host_activations(job, held * moved),
            "activations": held * (shapes.saved_by_layers(saved, chunk) - moved)
            + n_modules * saved_by_module(shapes)
            + self._kept_transfers(shapes, last) * n_in_flight,
            "working_set": working
            + largest_moved(shapes, layers)
            + n_dummies * dummy_bytes
            + segments.kept_bytes
            + segments.uncounted_bytes,
            **self._held_back(segments, len(above), first, trained, owned * states.moments_bytes),
        }
        if self._copies_gradients(job, states):
            main = trained * (FP32_BYTES - self.gradient_bytes(job)) - terms["activations"]
            terms["working_set"] = np.maximum(terms["working_set"], main)
        if job.optimizer != MUON:
            return terms
        muon = owned_matrices(shapes, self, layers, first, last)
        of_others = muon.others / self.n_sharing(shapes.table) * states.nbytes
        gathered = dense * job.element_bytes * (replicas > 1) * self.deals_matrices(job)
        return terms | muon.memory(shapes, terms, of_others, gathered, self.gradient_bytes(job))

    def _copies_gradients(self, job: Job, states: States) -> bool:
        """Return whether gradients in fp32 take the place of those in 16 bits at the step's end.

        Those in 16 bits are freed one by one, and no activations are there (Megatron-LM at
        78a69eaf, Float16OptimizerWithFloat16Params). A copy of all gradients, which replicas
        reduce, takes as much (distributed.py, allreduce_gradients).
        """
        has_own = self.engine.megatron.has_main_gradients and states.are_mixed
        on_gpu = self.engine.offload_in(job) is None and not self.distributed_optimizer
        return has_own and on_gpu and self.gradient_bytes(job) < FP32_BYTES

    def _kept_transfers(self, shapes: Shapes, last: bool) -> Array:
        """Return the bytes that a stage keeps of what it has sent of one micro-batch, shape (C,).

        They are in buffers of their own, which backward passes release.
        """
        is_kept = self.engine.memory.keeps_transfers and not last
        return is_kept * self.communication(shapes, sync=False).transfer_bytes

    def _unsummed(
        self, segments: Segments, trained: Array, embedding: Array, of_one: Array
    ) -> Array | float:
        """Return the bytes of a pass's gradients beside their sums; 0 where no engine says so.

        Replicas that reduce all of them have buckets for them. `embedding` is the number of its
        parameters, and `of_one` the bytes of one micro-batch's activations.
        """
        if self.engine.memory.unsummed_bytes is None:
            return 0.0
        nbytes = self.engine.memory.unsummed_bytes.value
        table = segments.shapes.table
        matrices = nbytes * (trained - embedding)
        beside = segments.unsummed_bytes(matrices, nbytes * embedding, of_one)
        has_stages = table.n_stages > 1
        beside = beside * has_stages
        if self.distributed_optimizer:
            return beside
        in_buckets = nbytes * trained + segments.alone_bytes(nbytes * embedding) * has_stages
        bucket_bytes = nbytes * self.engine.megatron.bucket_elements
        in_buckets = in_buckets + segments.rounded_bytes(bucket_bytes)
        return np.where(table.size(self.replicas) > 1, in_buckets, beside)

    def _held_back(
        self, segments: Segments, n_layers: int, first: bool, trained: Array, moments_bytes: Array
    ) -> dict[str, Array]:
        """Return the bytes that the allocator holds back; no term where no engine says so.

        Each pass of a layer reduces and scatters two tensors. At the end of the last forward pass,
        those of all passes count that the host has issued, up to what its queue holds. Before all
        stages have a micro-batch, those of the forward pass alone count. Between stages the host
        may need longer than the GPU, and then only forward passes count that the GPU has yet to run
        when the host has issued all that come before the first backward pass. In the first stage
        each of these reduces and scatters the embedding's output, too. A host that waits for each
        message is not ahead.
        """
        memory = self.engine.memory
        most = memory.held_back_tensors
        if most is None:
            return {}
        shapes, table = segments.shapes, segments.shapes.table
        n_micro = table.n_microsteps(shapes.job.global_batch)
        n_stages = table.n_stages
        tensor_bytes = shapes.stream_bytes * (table.size("tensor") > 1)
        n_passes = np.where(n_micro > n_stages, 2.0 * n_micro - n_stages, 1.0)
        is_free = not memory.awaits_messages or n_stages == 1
        queued = is_free * np.minimum(2.0 * n_layers * n_passes, most.value) * tensor_bytes
        n_forward = segments.held / max(n_layers, 1)
        n_unfinished = np.maximum(n_forward - value_or(memory.finished_passes, np.inf), 0.0)
        unfinished = np.minimum((2.0 * n_layers + first) * n_unfinished, most.value) * tensor_bytes
        replicas = table.size(self.replicas)
        weights = trained * shapes.element_bytes * self.distributed_optimizer * (replicas > 1)
        states = moments_bytes, weights, replicas
        may_wait = (n_stages > 1) | self.engine.waits_without_stages
        in_any_case = np.where(may_wait, unfinished, queued)
        nbytes = segments.held_back_bytes(*states, n_micro, in_any_case)
        return {HELD_BACK: nbytes, QUEUED: np.maximum(queued - in_any_case, 0.0)}

    def deals_matrices(self, job: Job) -> bool:
        """Return whether replicas share whole matrices without buffers that are cut for it."""
        is_shared = job.optimizer == MUON and self.distributed_optimizer
        return is_shared and not self.engine.megatron.pads_shares

    def n_sharing(self, table: CandidateTable) -> Size:
        """Return the number of replicas that share the states of the optimizer, shape (C,)."""
        return table.size(self.replicas) if self.distributed_optimizer else 1.0

    def owned_share(self, shapes: Shapes, stored: Array, experts: Size) -> Array:
        """Return the number of parameters whose optimizer states a rank holds if they are sharded.

        The states of experts are sharded over the ranks that hold the same experts, and all other
        states over the replicas of the rank.
        """
        of_others = stored / shapes.table.size(self.replicas)
        if not self.has_experts:
            return of_others
        return of_others + experts / shapes.table.size(EXPERT_REPLICAS)


def megatron_of(
    engine: Engine, n_virtual: Sequence[int] = (1, 2, 4), **options: bool | str | None
) -> Megatron3D:
    """Return the strategy as an engine runs it, with those options that are not None."""
    given = {name: value for name, value in options.items() if value is not None}
    names = [item.name for item in fields(engine.megatron) if hasattr(Megatron3D, item.name)]
    usual = {name: getattr(engine.megatron, name) for name in names}
    if (usual | given)["distributed_optimizer"]:
        usual["overlap_grad_reduce"] &= engine.megatron.overlaps_sharded
    return Megatron3D(**usual | given, n_virtual=n_virtual, engine=engine)
