"""Megatron-LM: tensor, context, pipeline and data parallelism.

Shoeybi et al., arXiv 1909.08053 (tensor parallelism); Narayanan et al., SC21,
arXiv 2104.04473 (pipelines, interleaving); Korthikanti et al., arXiv 2205.05198 (sequence
parallelism, selective recomputation, activation memory); Megatron Core for what came later
(distributed optimizer, overlapped reductions, context parallelism).

The attention heads and the MLP's hidden units are split over the tensor group; between these
the residual stream is replicated, or with sequence parallelism split by tokens. Context
parallelism splits the sequence for everything; `context` has what attention then needs. The
experts of a mixture are spread over ranks of the tensor, context and data groups, whatever these
are (Liu et al., arXiv 2504.14960, parallel folding). Each expert is whole, or split over the tensor
group as the MLP is (--expert-tensor-parallel-size).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.engine import IDEAL, RING, Engine, value_or
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import EXPERT, EXPERT_REPLICAS, PIPELINE, Axes
from axonn_tune.spec.model import Model
from axonn_tune.spec.names import BACKWARD, FORWARD
from axonn_tune.spec.offload import OFFLOAD_MODULES
from axonn_tune.spec.plan import Array, Size, StepPlan
from axonn_tune.spec.recomputation import MODULES
from axonn_tune.spec.schedule import DUALPIPE, ONE_F_ONE_B
from axonn_tune.spec.stage_layout import layers_of_stages
from axonn_tune.strategies.adapters import adapter_elements
from axonn_tune.strategies.casts import Casts, kept_weight_bytes
from axonn_tune.strategies.communication import Weight
from axonn_tune.strategies.context import (
    broken_context_rules,
    context_axes,
    context_parallelism,
)
from axonn_tune.strategies.experts import stored_experts
from axonn_tune.strategies.megatron_stage import (
    held_by_blocks,
    module_layers,
    saved_by_module,
    stored_matrices,
    stored_parameters,
)
from axonn_tune.strategies.moved import host_activations, largest_moved, moved_by_layers
from axonn_tune.strategies.optimizer import (
    clip_and_update,
    host_copies,
    sharded_text,
    state_bytes,
)
from axonn_tune.strategies.pipeline import (
    admits_schedule,
    admits_virtual,
    broken_gradient_rules,
    broken_pipeline_rules,
    copies_of_model,
    layers_of_stage,
    stage_memory,
    step_plan,
)
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.sequence_parallel import SequenceParallel, broken_tensor_rules
from axonn_tune.strategies.shapes import FP32_BYTES, Shapes
from axonn_tune.strategies.transformer import Transformer

_UPDATED_BLOCK = "weights.block.all_gather"
_UPDATED_EXPERTS = "weights.experts.all_gather"
_BLOCK_GRADIENTS = "gradient.block.reduce"
_HEAD_GRADIENT = "gradient.head.reduce"
_EXPERT_GRADIENTS = "gradient.experts.reduce"


@dataclass(frozen=True)
class Megatron3D:
    """The strategy with its options, which are Megatron-LM's flags.

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
        Whether tokens travel within the tensor group, in as many parts as it has ranks, beside the
        products that take or form them (--tp-comm-overlap); only with sequence parallelism.
    exchanges_adapters
        Whether the output of an adapter is exchanged, columns for tokens, and not gathered
        (Megatron-Bridge's a2a_experimental).
    schedule
        In which order the ranks of a pipeline run their passes, one of `SCHEDULES`.
    stage_layout
        Layers of each virtual stage, as in `spec.stage_layout`; empty where they follow from the
        number of stages (--pipeline-model-parallel-layout).
    low_weights
        Whether weights of low products are stored and gathered in their format only
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
    recomputed_modules: Sequence[str] = MODULES
    offload_modules: Sequence[str] = OFFLOAD_MODULES
    engine: Engine = IDEAL
    caveat: str = ""

    @property
    def sharded_by_choice(self) -> str:
        """What replicas share beyond the engine's distributed optimizer, if it has one."""
        is_usual = self.distributed_optimizer == self.engine.megatron.distributed_optimizer
        return sharded_text(self.distributed_optimizer and not is_usual, self.shards_gradients)

    @property
    def compute_key(self) -> tuple[str, ...]:
        """The columns on which the sizes of a micro-step's kernels depend."""
        key = ("tensor", *context_axes(self.context_kind), "micro_batch")
        return (*key, EXPERT) if self.has_experts else key

    @property
    def axes(self) -> Axes:
        """The axes tensor, context, data and pipeline, and that of experts where there are any.

        Tensor is the fastest axis of the rank number, pipeline the slowest (--use-tp-pp-dp-mapping
        off).
        """
        names = ("tensor", *context_axes(self.context_kind), "data", PIPELINE)
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
        broken = {
            **broken_tensor_rules(model, tensor),
            **broken_context_rules(self.context_kind, model, job, placements, "tensor"),
            "global batch not divisible by data": job.global_batch % placements.size("data") != 0,
        }
        if self.shards_gradients:
            reason = "sharded gradients need --overlap-grad-reduce and trained weights"
            is_alone = placements.size(self.replicas) == 1
            broken[reason] = ~(is_alone | self.overlaps_reduction(job))
            broken |= broken_gradient_rules(placements)
        if job.adapters is not None:
            reason = "rank of adapters not divisible by tensor"
            broken[reason] = job.adapters.rank % tensor != 0
        if model.experts is not None and self.splits_experts:
            reason = "experts' size not divisible by tensor"
            broken[reason] = model.experts.hidden_size % tensor != 0
        if model.experts is not None and not self.sequence_parallel:
            broken["experts with tensor need sequence parallelism"] = tensor > 1
        if self.sequence_parallel:
            reason = f"sequence not divisible by tensor*{self.context}"
            broken[reason] = job.seq_len % (tensor * context) != 0
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
        """Return which candidates have virtual stages and micro-batches for their schedule."""
        layout = layers_of_stages(self.stage_layout)
        has_stages = admits_virtual(model, job, table, layout)
        return has_stages & admits_schedule(self.schedule, job, table)

    def plan(self, model: Model, job: Job, table: CandidateTable) -> StepPlan:
        """Return the operations of one rank in one training step, for all candidates."""
        shapes = self.shapes(model, job, table)
        usual = Transformer(shapes, self.communication(shapes, sync=False))
        if not self.overlaps_reduction(job):
            return step_plan(usual, schedule=self.schedule)
        synchronising = Transformer(shapes, self.communication(shapes, sync=True))
        return step_plan(usual, synchronising, self.schedule)

    def memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Return the peak bytes of one rank by term, each of shape (C,)."""
        shapes = self.shapes(model, job, table)
        memory_of = partial(self._stage_memory, shapes)
        return stage_memory(shapes, memory_of, self.engine.host_terms(job), self.schedule)

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
            stage_layout=layers_of_stages(self.stage_layout),
            balances_stages=self.engine.megatron.balances_stages,
            expert_split=table.size(EXPERT) if self.has_experts else 1.0,
            sends_once=self.sends_once,
            expert_tensor=tensor if self.splits_experts else 1.0,
            experts_at_once=self.engine.megatron.experts_at_once,
            exchanges_adapters=self.exchanges_adapters,
            gradient_sum_bytes=self.gradient_bytes(job) * self.fused_accumulation,
            memory=self.engine.memory,
        )

    def communication(self, shapes: Shapes, sync: bool) -> MegatronCommunication:
        """Return the communication of a usual micro-step, or of the synchronising one."""
        return MegatronCommunication(shapes, sync, self)

    def overlaps_reduction(self, job: Job) -> bool:
        """Return whether gradients are reduced, and weights gathered, while a micro-step computes.

        The few gradients of adapters fill one bucket, which is reduced after the last of them.
        """
        return self.overlap_grad_reduce and job.trains_weights

    def gradient_bytes(self, job: Job) -> float:
        """Return the bytes of a gradient element as it is summed and reduced."""
        return FP32_BYTES if self.fp32_gradients else job.element_bytes

    def stores_low_weights(self, job: Job) -> bool:
        """Return whether a job's weights of blocks are stored and gathered in a low format only.

        Megatron-Core asserts the distributed optimizer with it.
        """
        return self.low_weights and self.distributed_optimizer and job.recipe is not None

    def gathered_bytes(self, job: Job) -> float:
        """Return the bytes of an element of a block's updated weights as they are gathered."""
        return job.operand_bytes if self.stores_low_weights(job) else job.element_bytes

    def _stage_memory(
        self, shapes: Shapes, layers: Sequence[int], first: bool, last: bool, held: Array
    ) -> dict[str, Array]:
        """Return the bytes by term of one stage, which holds `held` layers' activations at once."""
        job = shapes.job
        model = shapes.model
        n_copies = copies_of_model(self.schedule, shapes.table)
        chunk = -(-len(layers) // (shapes.n_virtual * n_copies))
        n_modules = last * job.mtp_modules
        layers = [*layers, *module_layers(shapes, last)]
        held = held + n_modules
        stored = stored_parameters(shapes, layers, first, last)
        experts = stored_experts(shapes, layers)
        adapters = adapter_elements(shapes, layers)
        everywhere = stored + experts
        projection = model.mtp_projection.parameters / shapes.table.size("tensor")
        matrices = stored_matrices(shapes, layers) + n_modules * projection
        uncast = everywhere - matrices if self.stores_low_weights(job) else everywhere
        dense, routed = (stored, experts) if job.trains_weights else (adapters, 0.0)
        trained = dense + routed
        owned = trained
        replicas = shapes.table.size(self.replicas)
        if self.distributed_optimizer:
            owned = self.owned_share(shapes, dense, routed) / n_copies
        summed = trained
        if self.shards_gradients:
            outside = stored_parameters(shapes, (), first, last)
            two_blocks = 2.0 * (trained - outside) / len(layers)
            summed = owned + np.where(replicas > 1, outside + two_blocks, 0.0)
        memory = self.engine.memory
        bucket_bytes = np.where(replicas > 1, value_or(memory.bucket_bytes, 0.0), 0.0)
        n_dummies = model.block_matmul_parameters + last * model.head.parameters
        has_dummies = self.fused_accumulation and job.trains_weights
        dummy_bytes = value_or(memory.dummy_gradient_bytes, 0.0) * has_dummies
        context = context_parallelism(self.context_kind, shapes)
        saved, working = held_by_blocks(shapes, layers, last, context)
        moved = moved_by_layers(shapes, layers, chunk)
        return {
            "weights": (uncast + adapters) * job.element_bytes + matrices * kept_weight_bytes(job),
            "gradients": summed * (self.gradient_bytes(job) + bucket_bytes),
            "optimizer_states": owned * state_bytes(job),
            **host_copies(job, self.engine.offload_in(job), owned),
            **host_activations(job, held * moved),
            "activations": held * (shapes.saved_by_layers(saved, chunk) - moved)
            + n_modules * saved_by_module(shapes),
            "working_set": working
            + largest_moved(shapes, layers)
            + n_dummies * dummy_bytes / shapes.table.size("tensor"),
        }

    def owned_share(self, shapes: Shapes, stored: Array, experts: Size) -> Array:
        """Return of how many parameters a rank holds the states with a distributed optimizer.

        Of those that it stores, replicas of the rank share all but the experts, and ranks that hold
        the same experts share these.
        """
        of_others = stored / shapes.table.size(self.replicas)
        if not self.has_experts:
            return of_others
        return of_others + experts / shapes.table.size(EXPERT_REPLICAS)


def megatron_of(
    engine: Engine, n_virtual: Sequence[int] = (1, 2, 4), **options: bool | str | None
) -> Megatron3D:
    """Return the strategy as an engine runs it, with the options that are given and not None."""
    given = {name: value for name, value in options.items() if value is not None}
    names = [item.name for item in fields(engine.megatron) if hasattr(Megatron3D, item.name)]
    usual = {name: getattr(engine.megatron, name) for name in names}
    return Megatron3D(**{**usual, **given}, n_virtual=n_virtual, engine=engine)


@dataclass(frozen=True, eq=False)
class MegatronCommunication(SequenceParallel):
    """The communication of Megatron-LM.

    Weights stay where they are, partial sums are reduced over the tensor group, and gradients are
    reduced over the replicas.
    """

    options: Megatron3D

    @property
    def _gradient_bytes(self) -> float:
        """The bytes of a gradient element."""
        return self.options.gradient_bytes(self.shapes.job)

    # Sums over the tensor group ------------------------------------------------------------

    @property
    def _splits_tokens(self) -> bool:
        """Whether there is sequence parallelism."""
        return self.options.sequence_parallel

    @property
    def _overlaps_products(self) -> bool:
        """Whether products begin with the first part of what the tensor group sends for them."""
        return self.options.overlaps_tensor and self._splits_tokens

    def gather_input(self, host: HostProgram, weight: Weight) -> None:
        """Bring all tokens together, or start to send what travels beside the product."""
        if not self._overlaps_products:
            super().gather_input(host, weight)
            return
        shape = self.shapes.linears[weight.layer]
        if self._gathers_tokens(shape):
            name = names.all_gather(weight.name)
            host.issue(name, "all_gather", shape.gathered_input_bytes, "tensor")
        elif shape.linear.transposed:
            self._scatter_sum(host, weight, self._share_beside)

    def sum_output(self, host: HostProgram, weight: Weight) -> None:
        """Sum the output, of which a product that runs beside the sum leaves the last part."""
        if not self._overlaps_products:
            super().sum_output(host, weight)
            return
        shape = self.shapes.linears[weight.layer]
        if self._gathers_tokens(shape):
            host.wait(names.all_gather(weight.name))
        elif shape.linear.transposed:
            self._scatter_sum(host, weight, 1.0 - self._share_beside)
            host.wait(names.reduce_scatter(weight.name))

    @property
    def _share_beside(self) -> Array:
        """The share of a sum that is sent while its product runs: all but the last rank's part."""
        return 1.0 - 1.0 / self.shapes.table.size("tensor")

    def _scatter_sum(self, host: HostProgram, weight: Weight, share: Array) -> None:
        """Start to sum a share of the output of a product."""
        nbytes = share * self.shapes.linears[weight.layer].output_bytes
        host.issue(names.reduce_scatter(weight.name), "reduce_scatter", nbytes, "tensor")

    def sum_input_gradient(self, host: HostProgram, weight: Weight) -> str:
        """Start to sum dI; the gradient that came beside the product of dI is there."""
        shape = self.shapes.linears[weight.layer]
        if self._overlaps_products and shape.linear.transposed:
            host.wait(names.all_gather(weight.name))
        return super().sum_input_gradient(host, weight)

    def gather_for_gradients(self, host: HostProgram, weight: Weight) -> None:
        """Gather dO, or start to gather the input for dW (sequence parallelism).

        The input is gathered while dI is formed (Korthikanti et al., section 4.2.2).
        """
        shape = self.shapes.linears[weight.layer]
        if self._overlaps_products and shape.linear.transposed:
            name = names.all_gather(weight.name)
            host.issue(name, "all_gather", shape.gathered_gradient_bytes, "tensor")
        else:
            super().gather_for_gradients(host, weight)
        if self._gathers_tokens(shape) and self.shapes.job.trains_weights:
            name = names.all_gather(weight.name)
            host.issue(name, "all_gather", shape.gathered_input_bytes, "tensor")

    def before_weight_gradient(self, host: HostProgram, layer: str) -> None:
        """Wait for the gathered input; where gradients are sharded, for those of another block.

        A rank then holds the whole gradients of two blocks at most.
        """
        shape = self.shapes.linears.get(layer)
        if shape is not None and self._gathers_tokens(shape):
            host.wait(names.all_gather(names.of_layer(BACKWARD, layer)))
        is_last_of_block = layer == self.shapes.model.attention_linears[0].name
        if self.options.shards_gradients and is_last_of_block:
            host.wait(_BLOCK_GRADIENTS)
            self._await_experts(host, _EXPERT_GRADIENTS)

    # Experts ---------------------------------------------------------------------------------

    def send_to_experts(self, host: HostProgram, name: str, nbytes: Array) -> None:
        """Exchange within the group that holds all experts, then gather what parts of one take."""
        self._exchange(host, name, nbytes)
        if self.options.splits_experts:
            gathered_bytes = nbytes * self.shapes.expert_tensor
            host.run(names.all_gather(name), "all_gather", gathered_bytes, "tensor")

    def bring_from_experts(self, host: HostProgram, name: str, nbytes: Array) -> None:
        """Sum what parts of an expert have formed, then exchange within the group of experts."""
        if self.options.splits_experts:
            summed_bytes = nbytes * self.shapes.expert_tensor
            host.run(names.reduce_scatter(name), "reduce_scatter", summed_bytes, "tensor")
        self._exchange(host, name, nbytes)

    def _exchange(self, host: HostProgram, name: str, nbytes: Array) -> None:
        """Exchange tokens within the group of experts; wait unless another micro-batch computes."""
        if not self.options.has_experts:
            return
        host.issue(name, "all_to_all", nbytes, EXPERT)
        if not self.options.overlaps_experts:
            host.wait(name)

    @property
    def sends_probabilities(self) -> bool:
        """True: the experts' ranks multiply by them (Megatron-Core 0.16, token_dispatcher.py)."""
        return True

    def gather_counts(self, host: HostProgram, name: str, nbytes: Size) -> None:
        """Gather each rank's numbers within the group that holds all experts."""
        if self.options.has_experts:
            gathered_bytes = nbytes * self.shapes.table.size(EXPERT)
            host.run(names.all_gather(name), "all_gather", gathered_bytes, EXPERT)

    # Context and pipeline --------------------------------------------------------------------

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Run attention over sequences that the context group shares, if it is fused."""
        if self.shapes.job.attention == "unfused":
            super().attend(host, chain, window)
        else:
            kind = self.options.context_kind
            context_parallelism(kind, self.shapes).attend(host, chain, window)

    @property
    def transfer_bytes(self) -> Array:
        """The bytes that a rank sends to the next stage: its part of the residual stream.

        Without sequence parallelism every rank of a tensor group holds the whole stream and sends
        a part of it.
        """
        return self.shapes.stream_bytes / self.shapes.table.size("tensor")

    def receive(self, host: HostProgram, chain: str) -> None:
        """Without sequence parallelism, gather the received parts (SC21, section 4.1)."""
        if self.options.sequence_parallel:
            return
        name = names.of_layer(chain, "pipeline")
        nbytes = self.shapes.stream_bytes
        host.run(names.all_gather(name), "all_gather", nbytes, "tensor")
        host.memory_bound(f"{name}.copy", 2.0 * nbytes, "copy")

    # Gradients and updated weights over the replicas -----------------------------------------

    @property
    def _gathers_updated(self) -> bool:
        """Whether updated weights are gathered block by block during this micro-step."""
        return self.sync and self.options.distributed_optimizer

    def begin_block(self, host: HostProgram, chain: str) -> None:
        """Wait for the updated weights of the block."""
        if self._gathers_updated and chain == FORWARD:
            host.wait(_UPDATED_BLOCK)
            self._await_experts(host, _UPDATED_EXPERTS)

    def take_weight(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Start to gather updated weights of the next block with a block's first weight.

        There are as many gathers as blocks: the gather in the last block stands for the gather of
        the first block's weights.
        """
        first_layer = self.shapes.model.attention_linears[0].name
        if self._gathers_updated and weight == Weight(FORWARD, first_layer):
            element = self.options.gathered_bytes(self.shapes.job)
            self._over_replicas(host, _UPDATED_BLOCK, "all_gather", self._block_parameters, element)
            self._over_expert_replicas(
                host, _UPDATED_EXPERTS, "all_gather", self._block_experts, element
            )

    def end_block(self, host: HostProgram, is_first: bool) -> None:
        """Start to reduce the block's gradients, while earlier blocks form theirs."""
        if self.sync or self.options.shards_gradients:
            self._reduce(host, _BLOCK_GRADIENTS, self._block_parameters)
            self._reduce_experts(host, self._block_experts)

    def send_gradient(self, host: HostProgram, layer: str) -> None:
        """Start to reduce gradients outside blocks, where they are sharded.

        The head's are the first; all others go with the embedding's, which may be the head's, too.
        """
        if not self.options.shards_gradients:
            return
        model = self.shapes.model
        has_own = not model.tied_embeddings
        of_head = has_own * model.head.parameters / self.shapes.table.size("tensor")
        if layer == "embedding":
            self._reduce(host, names.GRADIENT_REDUCE, self._stored_outside() - of_head)
        elif layer == "head" and has_own:
            self._reduce(host, _HEAD_GRADIENT, of_head)

    def _reduce(self, host: HostProgram, name: str, n_elements: Array) -> None:
        """Start to reduce gradients over the replicas."""
        self._over_replicas(host, name, self._reduce_kind, n_elements, self._gradient_bytes)

    def _over_replicas(
        self,
        host: HostProgram,
        name: str,
        kind: str,
        n_elements: Array,
        element_bytes: Size,
        axis: str = "",
        after: tuple[str, ...] = (),
    ) -> None:
        """Start a collective over replicas, or another axis, in buckets, after some copies."""
        axis = axis or self.options.replicas
        program = self.options.engine.megatron
        n_replicas = self.shapes.table.size(axis)
        bucket_elements = np.maximum(
            program.bucket_elements, program.bucket_elements_per_replica * n_replicas
        )
        n_calls = np.ceil(n_elements / bucket_elements)
        host.issue(name, kind, n_elements * element_bytes, axis, n_calls, after)

    def _over_expert_replicas(
        self,
        host: HostProgram,
        name: str,
        kind: str,
        n_elements: Array,
        element_bytes: Size,
        after: tuple[str, ...] = (),
    ) -> None:
        """Start the same over the ranks that hold the same experts, where there are any."""
        if self.options.has_experts:
            axis = EXPERT_REPLICAS
            self._over_replicas(host, name, kind, n_elements, element_bytes, axis, after)

    def _await_experts(self, host: HostProgram, name: str) -> None:
        """Wait for what has been started over the ranks that hold the same experts."""
        if self.options.has_experts:
            host.wait(name)

    def _reduce_experts(self, host: HostProgram, n_elements: Array) -> None:
        """Start to reduce gradients of experts."""
        kind, element_bytes = self._reduce_kind, self._gradient_bytes
        self._over_expert_replicas(host, _EXPERT_GRADIENTS, kind, n_elements, element_bytes)

    @property
    def _reduce_kind(self) -> str:
        """The kind of collective that reduces gradients over the replicas."""
        return "reduce_scatter" if self.options.distributed_optimizer else "all_reduce"

    @property
    def _block_parameters(self) -> Array:
        """The number of trained parameters besides experts that a rank stores of a mean block."""
        n_layers = self.shapes.model.n_layers
        if not self.shapes.job.trains_weights:
            return adapter_elements(self.shapes, range(n_layers)) / n_layers
        return stored_parameters(self.shapes, range(n_layers), False, False) / n_layers

    @property
    def _block_experts(self) -> Array:
        """The number of experts' parameters that a rank trains of a block on the average."""
        if not self.shapes.job.trains_weights:
            return np.zeros(len(self.shapes.table))
        n_layers = self.shapes.model.n_layers
        stored = stored_experts(self.shapes, range(n_layers)) / n_layers
        return stored * np.ones(len(self.shapes.table))

    def _stored_in_blocks(self) -> Array:
        """Return how many parameters the first stage trains in blocks, experts included."""
        return len(self._first_layers) * (self._block_parameters + self._block_experts)

    # Once per micro-step and once per step -----------------------------------------------------

    @cached_property
    def _first_layers(self) -> list[int]:
        """The layers of the first stage, which stores most, since it has the embedding."""
        has_head = self.shapes.table.n_stages == 1
        return [*layers_of_stage(self.shapes, 0), *module_layers(self.shapes, has_head)]

    def _stored_outside(self) -> Array:
        """Return how many parameters the first stage trains outside blocks."""
        if not self.shapes.job.trains_weights:
            return np.zeros(len(self.shapes.table))
        return stored_parameters(self.shapes, (), True, self.shapes.table.n_stages == 1)

    def _replicated(self) -> float:
        """Return how many parameters of norms and routers every rank of a tensor group has."""
        model = self.shapes.model
        counts = model.counts(self._first_layers)
        of_block = model.norms_per_block * model.norm_parameters + model.head_norm_parameters
        of_routers = sum(count for block, count in counts.items() if block.has_experts)
        is_last = self.shapes.table.n_stages == 1
        return (
            sum(counts.values()) * of_block
            + of_routers * model.router_parameters
            + is_last * float(model.norm_parameters)
        )

    def accumulate(self, host: HostProgram, last_layer: str) -> None:
        """Without fused accumulation, add the micro-step's gradients to the fp32 sums.

        Where gradients are sharded, add what the last reductions have brought to the shards.
        """
        if self.options.shards_gradients:
            self._add_shards(host)
        if self.options.fused_accumulation:
            return
        stored = self._stored_outside() + self._stored_in_blocks()
        # Gradients of which each replica sums a shard are converted only.
        n_passes = 2.0 - self._shares_gradients
        nbytes = stored * (self.shapes.element_bytes + n_passes * self._gradient_bytes)
        host.memory_bound(names.GRADIENT_ACCUMULATE, nbytes / self.shapes.n_virtual, "add")

    def _add_shards(self, host: HostProgram) -> None:
        """Wait for the micro-step's gradients, and add a rank's shards to the earlier ones."""
        host.wait(_BLOCK_GRADIENTS)
        host.wait(names.GRADIENT_REDUCE)
        self._await_experts(host, _EXPERT_GRADIENTS)
        n_layers = len(self._first_layers)
        dense = self._stored_outside() + n_layers * self._block_parameters
        owned = self.options.owned_share(self.shapes, dense, n_layers * self._block_experts)
        nbytes = self._shares_gradients * 3.0 * owned * self._gradient_bytes
        host.memory_bound("gradient.shards", nbytes, "add")

    @property
    def _shares_gradients(self) -> Array:
        """1 where several replicas share the sums of gradients, else 0."""
        has_replicas = self.shapes.table.size(self.options.replicas) > 1
        return (has_replicas & self.options.shards_gradients).astype(np.float64)

    def step_end(self, host: HostProgram) -> None:
        """Reduce the gradients that no micro-step has reduced, clip, and update the weights.

        With overlap, these are the gradients of the parameters outside blocks.
        """
        shapes = self.shapes
        model = shapes.model
        options = self.options
        is_overlapped = options.overlaps_reduction(shapes.job)
        gradient_bytes = self._gradient_bytes
        n_layers = len(self._first_layers)
        outside = self._stored_outside()
        in_blocks = n_layers * self._block_parameters
        experts = n_layers * self._block_experts
        trains_weights = shapes.job.trains_weights
        matrices = trains_weights * stored_matrices(shapes, self._first_layers)
        has_copy = model.tied_embeddings or shapes.job.mtp_modules > 0
        if trains_weights and has_copy and shapes.table.n_stages > 1:
            shared_bytes = model.head.parameters * gradient_bytes / shapes.y
            host.run(names.GRADIENT_EMBEDDING, "send_recv", shared_bytes, PIPELINE)
        if trains_weights and options.sequence_parallel:
            norm_bytes = np.full(len(shapes.table), self._replicated() * gradient_bytes)
            host.run("gradient.norms.all_reduce", "all_reduce", norm_bytes, "tensor")
        remaining = outside
        if not is_overlapped:
            remaining = outside + in_blocks
            self._reduce_experts(host, experts)
            self._await_experts(host, _EXPERT_GRADIENTS)
        if not options.shards_gradients:
            self._reduce(host, names.GRADIENT_REDUCE, remaining)
            host.wait(names.GRADIENT_REDUCE)
        stored = outside + in_blocks + experts
        owned = stored
        if options.distributed_optimizer:
            owned = options.owned_share(shapes, outside + in_blocks, experts)
        updated = clip_and_update(
            host,
            shapes.job,
            owned,
            gradient_bytes,
            norm_sums={names.norm_all_reduce(axis): axis for axis in ("tensor", PIPELINE)},
            cleared=owned if options.shards_gradients else stored,
            offload=options.engine.offload_in(shapes.job),
        )
        if options.distributed_optimizer:
            name = names.WEIGHTS_ALL_GATHER
            element: Size = shapes.element_bytes
            gathered = options.gathered_bytes(shapes.job)
            if not is_overlapped:
                saved = shapes.element_bytes - gathered
                element = element - saved * (matrices - experts) / (outside + in_blocks)
            self._over_replicas(host, name, "all_gather", remaining, element, after=updated)
            host.wait(names.WEIGHTS_ALL_GATHER)
            if not is_overlapped:
                name = _UPDATED_EXPERTS
                self._over_expert_replicas(host, name, "all_gather", experts, gathered, updated)
                self._await_experts(host, name)
            host.memory_bound("weights.copy", 2.0 * remaining * element, "copy")
        if not trains_weights:
            return
        if options.stores_low_weights(shapes.job):
            Casts(shapes).transpose_kept_weights(host, matrices)
        else:
            Casts(shapes).cast_kept_weights(host, matrices)
