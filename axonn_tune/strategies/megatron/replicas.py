"""What replicas of Megatron-LM exchange: gradients and updated weights, and the end of a step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.layout import EXPERT_REPLICAS, PIPELINE
from axonn_tune.spec.names import BACKWARD, FORWARD
from axonn_tune.spec.plan import Array, Size
from axonn_tune.strategies.casts import Casts
from axonn_tune.strategies.communication import Weight
from axonn_tune.strategies.megatron.buckets import Buckets
from axonn_tune.strategies.megatron.first_stage import FirstStage
from axonn_tune.strategies.megatron.muon import update_matrices
from axonn_tune.strategies.optimizer import Gradients, Optimizer, clip_and_update
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.sequence_parallel import SequenceParallel
from axonn_tune.strategies.shapes import FP32_BYTES

if TYPE_CHECKING:
    from axonn_tune.strategies.megatron.megatron3d import Megatron3D

BLOCK_GRADIENTS = "gradient.block.reduce"
EXPERT_GRADIENTS = "gradient.experts.reduce"
_HEAD_GRADIENT = "gradient.head.reduce"
_UPDATED_BLOCK = "weights.block.all_gather"
_UPDATED_EXPERTS = "weights.experts.all_gather"
_PENDING_GRADIENTS = "gradient.pending.reduce"
_UPDATED_PENDING = "weights.pending.all_gather"
# What the host issues between the end of a wait for a bucket's norm and the next kernel: a check
# for infinite numbers (after that for NaN), the reduction, and this kernel (Megatron-Core v0.13.1,
# core/distributed/param_and_grad_buffer.py, check_grads and start_grad_sync). A check is a
# comparison on the device whose result the host reads.
_ISSUES_AFTER_CHECK = 3.0


@dataclass(frozen=True, eq=False)
class ReplicaCommunication(SequenceParallel):
    """The communication of ranks that hold the same weights, and the end of a step.

    Attributes
    ----------
    options
        The strategy.
    is_of_first_stage
        Whether the end of the step reduces and gathers what the first virtual stage of a rank has,
        and not what all of them have.
    runs_beside
        Whether a part of what replicas exchange of another virtual stage travels beside this
        micro-step.
    """

    options: Megatron3D
    is_of_first_stage: bool = False
    runs_beside: bool = False

    @property
    def _gradient_bytes(self) -> float:
        """The bytes of a gradient element."""
        return self.options.gradient_bytes(self.shapes.job)

    # Beside the micro-steps --------------------------------------------------------------------

    @property
    def _gathers_updated(self) -> bool:
        """Whether updated weights are gathered block by block during this micro-step."""
        return self.sync and self.options.distributed_optimizer and self._gathers_early

    def begin_block(self, host: HostProgram, chain: str) -> None:
        """Wait for the updated weights of the block."""
        if self._gathers_updated and chain == FORWARD:
            host.wait(_UPDATED_BLOCK)
            self._await_experts(host, _UPDATED_EXPERTS)
        if self.runs_beside:
            self._exchange_beside(host, chain)

    def _exchange_beside(self, host: HostProgram, chain: str) -> None:
        """Start a part of a gather, or of a reduction, of a block of another virtual stage.

        All ranks start these at the same time, and a rank then runs as many micro-batches as there
        are stages before it turns to its next virtual stage (Megatron-LM at df727128,
        core/pipeline_parallel/schedules.py, param_sync_microbatch_id and grad_sync_microbatch_id).
        Each block of them has a part of the one launch.
        """
        table = self.shapes.table
        share = 1.0 / table.stages
        n_calls = share * table.n_virtual / np.maximum(self._first.n_layers, 1.0)
        of_block = self._first.block_parameters, self.options.replicas, "block"
        of_experts = self._first.block_experts, self._expert_replicas, "experts"
        for n_elements, axis, what in (of_block, of_experts):
            if not axis:
                continue
            if chain == FORWARD and self.options.distributed_optimizer and self._gathers_early:
                nbytes = n_elements * self.options.gathered_bytes(self.shapes.job)
                name = names.all_gather(f"weights.{what}.beside")
                host.issue(name, "all_gather", share * nbytes, axis, n_calls)
            elif chain == BACKWARD:
                nbytes = n_elements * self._gradient_bytes
                name = names.reduce(f"gradient.{what}.beside")
                host.issue(name, self._reduce_kind, share * nbytes, axis, n_calls)

    def take_weight(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Start to gather updated weights of the next block with a block's first weight.

        There are as many gathers as blocks: the gather in the last block stands for the gather of
        the first block's weights. If some blocks are frozen, the bytes of the others are spread
        over all gathers.
        """
        if not (self._gathers_updated and weight.chain == FORWARD):
            return
        model = self.shapes.model
        first, *others = (linear.name for linear in model.attention_linears)
        if weight.layer == "embedding":
            if self._pending.any():
                element = self.options.gathered_bytes(self.shapes.job)
                self._gather(host, _UPDATED_PENDING, self._pending, element, self.options.replicas)
        elif weight.layer == first:
            share = self.shapes.n_backward / model.n_layers
            element = share * self.options.gathered_bytes(self.shapes.job)
            blocks, experts = self._early_parameters, self._first.block_experts
            self._gather(host, _UPDATED_BLOCK, blocks, element, self.options.replicas)
            self._gather(host, _UPDATED_EXPERTS, experts, element, self._expert_replicas)
        elif weight.layer not in others:
            host.wait(_UPDATED_PENDING)

    def end_block(self, host: HostProgram, is_first: bool) -> None:
        """Start to reduce the block's gradients, while earlier blocks form theirs."""
        if self.sync or self.options.shards_gradients:
            self._reduce(host, BLOCK_GRADIENTS, self._early_parameters, self.options.replicas)
            self._reduce(host, EXPERT_GRADIENTS, self._first.block_experts, self._expert_replicas)

    def send_gradient(self, host: HostProgram, layer: str) -> None:
        """Start to reduce gradients outside blocks, where they are sharded.

        The head's are the first; all others go with the embedding's, which may be the head's, too.
        """
        if not self.options.shards_gradients:
            return
        model, job = self.shapes.model, self.shapes.job
        has_own = not model.tied_embeddings and job.trains_head
        of_head = has_own * model.head.parameters / self.shapes.table.size("tensor")
        if not job.trains_embedding:
            of_head = self._first.outside
        if layer == "embedding":
            others = self._first.outside - of_head
            self._reduce(host, names.GRADIENT_REDUCE, others, self.options.replicas)
        elif layer == "head" and has_own:
            self._reduce(host, _HEAD_GRADIENT, of_head, self.options.replicas)

    @property
    def _expert_replicas(self) -> str:
        """The group of ranks that hold the same experts; empty where there are none."""
        return EXPERT_REPLICAS if self.options.has_experts else ""

    def _reduce_pending(self, host: HostProgram) -> None:
        """Start to reduce what waited for the bucket of the first block."""
        if self.sync and self._pending.any():
            self._reduce(host, _PENDING_GRADIENTS, self._pending, self.options.replicas)

    def _reduce(
        self,
        host: HostProgram,
        name: str,
        n_elements: Array,
        axis: str,
        n_weights: Size = np.inf,
    ) -> None:
        """Start to reduce gradients over an axis of replicas, unless it is empty."""
        if axis:
            n_calls = self._n_calls(n_elements, axis, n_weights)
            self._prepare(host, name, n_elements, n_calls)
            nbytes = n_elements * self._gradient_bytes
            host.issue(name, self._reduce_kind, nbytes, axis, n_calls)

    def _gather(
        self,
        host: HostProgram,
        name: str,
        n_elements: Array,
        element_bytes: Size,
        axis: str,
        n_weights: Size = np.inf,
        after: tuple[str, ...] = (),
    ) -> None:
        """Start to gather updated weights, once the copies that `after` names have ended."""
        if axis:
            n_calls = self._n_calls(n_elements, axis, n_weights)
            host.issue(name, "all_gather", n_elements * element_bytes, axis, n_calls, after)

    def _prepare(self, host: HostProgram, name: str, n_elements: Array, n_buckets: Array) -> None:
        """Form the norm of gradients that are reduced next, and divide them by the replicas.

        The host waits for the norm of each bucket. It then has to issue the second of two checks,
        the reduction and the next kernel, while the device has nothing to do.
        """
        engine = self.options.engine
        program = engine.megatron
        nbytes = n_elements * self._gradient_bytes
        if program.checks_gradients:
            host.memory_bound(f"{name}.check", nbytes, "reduce")
            if engine.issue_seconds is not None:
                seconds = _ISSUES_AFTER_CHECK * engine.issue_seconds.value
                host.idle(f"{name}.await", (nbytes > 0) * n_buckets * seconds)
        if program.scales_gradients:
            host.memory_bound(f"{name}.scale", 2.0 * self._has_replicas * nbytes, "scale")

    @cached_property
    def _first(self) -> FirstStage:
        """What the first stage trains."""
        return FirstStage(self.shapes, self.options)

    @cached_property
    def _buckets(self) -> Buckets:
        """How gradients are cut into buckets."""
        return Buckets(self.shapes, self.options)

    def _n_calls(self, n_elements: Array, axis: str, n_weights: Size = np.inf) -> Array:
        """Return the number of buckets in which elements travel over an axis of replicas.

        At the end of a step a rank has the buckets of all its virtual stages. The number of weights
        matters where they are few.
        """
        has_one_stage = self.options.overlap_grad_reduce or self.is_of_first_stage
        n_stages = 1.0 if has_one_stage else self.shapes.table.n_virtual.astype(np.float64)
        return self._buckets.number(n_elements, axis, n_stages, n_weights)

    @cached_property
    def _has_one_bucket(self) -> np.ndarray:
        """Whether one bucket holds all gradients of a rank with one stage, shape (C,).

        It is complete after the last gradient, and the first product needs weights of it, so that
        neither its reduction nor its gather has anything beside it (Megatron-Core v0.11,
        core/distributed/param_and_grad_buffer.py, register_grad_ready and finish_param_sync).
        Buckets of routed experts are left out: no run with such large ones is known.
        """
        is_alone = not (self.options.shards_gradients or self.options.has_experts)
        fits = self._first.dense < self._buckets.least_elements(self.options.replicas)
        return is_alone & fits & (self.shapes.table.n_virtual == 1)

    @cached_property
    def _pending(self) -> Array:
        """The number of elements whose gradients wait for their bucket as the first block begins.

        The bucket is full, or complete, only in that block, so that next to nothing runs beside its
        reduction (Megatron-Core v0.13.1, core/distributed/param_and_grad_buffer.py,
        register_grad_ready). The first block needs weights of it, too. Stages after the first one
        and virtual stages have one bucket each.
        """
        table = self.shapes.table
        first, axis = self._first, self.options.replicas
        is_cut = self._is_overlapped and not (self.options.shards_gradients or first.muon)
        if not is_cut or self.options.has_experts:
            return np.zeros(len(table))
        pending = first.of_layers(
            lambda layers: self._buckets.waiting(layers, axis, first.has_head)
        )
        return np.where(self._has_one_bucket | (table.n_virtual > 1), 0.0, pending)

    def _await_experts(self, host: HostProgram, name: str) -> None:
        """Wait for what has been started over the ranks that hold the same experts."""
        if self.options.has_experts:
            host.wait(name)

    @property
    def _reduce_kind(self) -> str:
        """The kind of collective that reduces gradients over the replicas."""
        is_scattered = self.options.distributed_optimizer
        is_scattered &= not self.options.engine.megatron.sums_sharded
        is_scattered &= not self.options.deals_matrices(self.shapes.job)
        return "reduce_scatter" if is_scattered else "all_reduce"

    @property
    def _early_parameters(self) -> Array:
        """The number of parameters of a block that travel while a micro-step computes.

        Experts are counted by themselves.
        """
        pending = self._pending / np.maximum(self._first.n_layers, 1.0)
        return np.where(self._has_one_bucket, 0.0, self._first.block_parameters - pending)

    # Once per micro-step and once per step -----------------------------------------------------

    @property
    def _embedding_parameters(self) -> Array:
        """The number of parameters of a rank's part of the embedding, and of learned positions."""
        model = self.shapes.model
        of_words = model.head.parameters / self.shapes.table.size("tensor")
        return of_words + model.position_parameters

    def accumulate(self, host: HostProgram, last_layer: str) -> None:
        """Add the micro-step's gradients to the fp32 sums, unless products have added them.

        No product forms the embedding's gradient, so that a kernel adds it in any case
        (Megatron-Core 23e00ed0, distributed_data_parallel.py, _make_backward_post_hook). Where
        gradients are sharded, add what the last reductions have brought to the shards. Copies to
        buckets and back count here, although they are made beside the backward pass.
        """
        if self.options.shards_gradients:
            self._add_shards(host)
        if self.options.fused_accumulation:
            if last_layer == "embedding":
                element_bytes = self.shapes.element_bytes + 2.0 * self._gradient_bytes
                nbytes = self._embedding_parameters * element_bytes
                host.memory_bound(names.GRADIENT_ACCUMULATE, nbytes, "add")
            return
        stored = self._first.dense + self._first.experts
        if self.options.engine.megatron.autocasts:
            self._autocast(host, stored / self.shapes.table.n_virtual)
            return
        # Sharded gradients are only converted here; `_add_shards` adds them.
        n_passes = 2.0 - self._shares_gradients
        nbytes = stored * (self.shapes.element_bytes + n_passes * self._gradient_bytes)
        n_virtual = self.shapes.table.n_virtual
        n_sums = np.maximum(self._n_launched / n_virtual, 1.0)
        if self.sync and self.options.engine.megatron.copies_to_buckets:
            copied_bytes = 4.0 * self._has_replicas * stored * self.shapes.element_bytes
            host.memory_bound("gradient.buckets", copied_bytes / n_virtual, "copy", 2.0 * n_sums)
        host.memory_bound(names.GRADIENT_ACCUMULATE, nbytes / n_virtual, "add", n_sums)

    def _autocast(self, host: HostProgram, n_elements: Array) -> None:
        """Cast weights from fp32, their gradients to fp32, and add these, in a kernel for each.

        The casts of weights count here, where those of gradients are, although they are made one by
        one before the products. Nothing is added to in the first micro-step, whose gradients are
        copied to the buckets and back instead, which takes a few bytes more.
        """
        cast_bytes = n_elements * (self.shapes.element_bytes + FP32_BYTES)
        host.memory_bound("weights.autocast", cast_bytes, "cast")
        host.memory_bound("gradient.autocast", cast_bytes, "cast")
        host.memory_bound(names.GRADIENT_ACCUMULATE, 3.0 * n_elements * FP32_BYTES, "add")

    def _add_shards(self, host: HostProgram) -> None:
        """Wait for the micro-step's gradients, and add a rank's shards to the earlier ones."""
        host.wait(BLOCK_GRADIENTS)
        host.wait(names.GRADIENT_REDUCE)
        self._await_experts(host, EXPERT_GRADIENTS)
        owned = self.options.owned_share(self.shapes, self._first.dense, self._first.experts)
        nbytes = self._shares_gradients * 3.0 * owned * self._gradient_bytes
        host.memory_bound("gradient.shards", nbytes, "add")

    @property
    def _shares_gradients(self) -> Array:
        """Whether several replicas share the sums of gradients (1) or not (0)."""
        return (self._has_replicas & self.options.shards_gradients).astype(np.float64)

    @property
    def _has_replicas(self) -> np.ndarray:
        """Whether other ranks have the same weights, shape (C,)."""
        return self.shapes.table.size(self.options.replicas) > 1

    def step_end(self, host: HostProgram) -> None:
        """Reduce the gradients that no micro-step has reduced, clip, and update the weights."""
        trains_weights = self.shapes.job.trains_weights
        if trains_weights:
            self._sum_replicated(host)
        self._reduce_remaining(host)
        updated = self._update(host)
        if self.options.distributed_optimizer:
            self._agree_on_scales(host)
            self._gather_updated(host, updated)
        if trains_weights:
            self._cast_updated(host)

    @property
    def _is_overlapped(self) -> bool:
        """Whether micro-steps reduce the gradients of blocks, and gather their weights."""
        return self.options.overlaps_reduction(self.shapes.job)

    @property
    def _gathers_early(self) -> bool:
        """Whether micro-steps gather the weights of blocks."""
        return self._is_overlapped and not self.options.deals_matrices(self.shapes.job)

    def _left(self, is_early: bool) -> tuple[Array, Array]:
        """Return how many parameters besides experts are left for the end of the step.

        Micro-steps have reduced, or will gather, those of blocks if `is_early`. The number of
        weights that hold them follows: embedding and head, or any number.
        """
        of_blocks = self._share_at_end * self._first.n_layers * self._first.block_parameters
        are_at_end = self._has_one_bucket | (not is_early)
        remaining = self._first.outside + np.where(are_at_end, of_blocks, 0.0)
        return remaining, np.where(are_at_end, np.inf, 2.0)

    @property
    def _share_at_end(self) -> Size:
        """The share of a rank's blocks that are exchanged at the end, if no micro-step does so."""
        return 1.0 / self.shapes.table.n_virtual if self.is_of_first_stage else 1.0

    @property
    def _n_launched(self) -> Size:
        """The number of kernels that do the same for all gradients or weights."""
        return self._first.n_weights if self.options.engine.megatron.launches_per_weight else 1.0

    def _sum_replicated(self, host: HostProgram) -> None:
        """Sum the gradients of copies of the embedding, and of norms that ranks share."""
        shapes = self.shapes
        has_copy = shapes.model.tied_embeddings or shapes.job.mtp_modules > 0
        if has_copy and not self._first.has_head:
            shared_bytes = shapes.model.head.parameters * self._gradient_bytes / shapes.y
            host.run(names.GRADIENT_EMBEDDING, "send_recv", shared_bytes, PIPELINE)
        if self.options.sequence_parallel:
            norm_bytes = self._first.replicated * self._gradient_bytes
            host.run("gradient.norms.all_reduce", "all_reduce", norm_bytes, "tensor")

    def _reduce_remaining(self, host: HostProgram) -> None:
        """Reduce gradients over the replicas, with overlap those of parameters outside blocks."""
        if not self._is_overlapped:
            experts = self._share_at_end * self._first.experts
            self._reduce(host, EXPERT_GRADIENTS, experts, self._expert_replicas)
            self._await_experts(host, EXPERT_GRADIENTS)
        if not self.options.shards_gradients:
            remaining, n_weights = self._left(self._is_overlapped)
            axis = self.options.replicas
            self._reduce(host, names.GRADIENT_REDUCE, remaining, axis, n_weights)
            host.wait(names.GRADIENT_REDUCE)

    def _update(self, host: HostProgram) -> tuple[str, ...]:
        """Clip the gradients and update the weights; return what the gathers wait for."""
        options = self.options
        stored = self._first.dense + self._first.experts
        owned = stored
        if options.distributed_optimizer:
            owned = options.owned_share(self.shapes, self._first.dense, self._first.experts)
        clipped = owned if self._clips_share else stored
        muon = self._first.muon
        if muon is not None:
            owned = muon.others / self._n_sharing
            clipped = owned + muon.elements
        cleared = owned if options.shards_gradients else stored
        optimizer = Optimizer(
            options.states(self.shapes.job),
            options.engine.offload_in(self.shapes.job),
            has_main_gradients=options.engine.megatron.has_main_gradients,
            n_tensors=self._n_launched,
            n_pieces=self._n_pieces,
        )
        updated = clip_and_update(
            host,
            self.shapes.job,
            Gradients(owned, clipped, cleared, self._gradient_bytes),
            {names.norm_all_reduce(axis): axis for axis in self._norm_axes},
            optimizer,
        )
        if muon is not None:
            update_matrices(host, self.shapes, muon, self._gradient_bytes)
        return updated

    @property
    def _norm_axes(self) -> tuple[str, ...]:
        """The axes over which the square of the gradients' norm is summed.

        A rank with a share of the gradients knows only their part of it (Megatron-LM at d98e8a64,
        core/optimizer/__init__.py: the grad_stats_parallel_group of a distributed optimizer is its
        intra_dist_opt_group, which holds all replicas).
        """
        return ("tensor", PIPELINE, *((self.options.replicas,) if self._clips_share else ()))

    @property
    def _clips_share(self) -> bool:
        """Whether a rank clips its share of the gradients alone, even where it has all sums."""
        program = self.options.engine.megatron
        has_share = not program.sums_sharded or program.clips_shard
        return self.options.distributed_optimizer and has_share

    def _agree_on_scales(self, host: HostProgram) -> None:
        """Find the largest value of each weight before it is cast, where it has a single scale.

        Each replica has updated a part of it (Transformer Engine d0067d0d,
        pytorch/tensor/utils.py, cast_master_weights_to_fp8, whose group is that of the replicas).
        """
        job = self.shapes.job
        recipe = job.recipe
        if recipe is None or not self.options.gathers_low_weights(job):
            return
        if recipe.knows_scales or recipe.finds_scale_of_tensor:
            n_matrices = self._first.n_layers * len(self.shapes.model.block_linears)
            nbytes = job.trains_weights * FP32_BYTES * n_matrices
            name = names.all_reduce("weights.scales")
            host.run(name, "all_reduce", nbytes, self.options.replicas)

    @property
    def _n_sharing(self) -> Size:
        """The number of replicas that share the states of the optimizer."""
        return self.options.n_sharing(self.shapes.table)

    @property
    def _n_pieces(self) -> Array:
        """The number of tensors, or parts of them, that a rank has; a bucket's parts are cut."""
        n_buckets = self._n_calls(self._first.dense, self.options.replicas)
        return self._first.n_weights / self._n_sharing + n_buckets

    def _gather_updated(self, host: HostProgram, updated: tuple[str, ...]) -> None:
        """Gather the weights that the replicas have updated for each other."""
        self._view_parts(host)
        name, (remaining, n_weights) = names.WEIGHTS_ALL_GATHER, self._left(self._gathers_early)
        element: Size = self.shapes.element_bytes
        gathered = self.options.gathered_bytes(self.shapes.job)
        if not self._gathers_early or self._has_one_bucket.any():
            saved = self.shapes.element_bytes - gathered
            # A first stage that holds only a frozen embedding trains nothing.
            trained = np.maximum(self._first.dense, 1.0)
            of_all = element - saved * (self._first.matrices - self._first.experts) / trained
            holds_all = self._has_one_bucket | (not self._gathers_early)
            element = np.where(holds_all, of_all, element)
        self._gather(host, name, remaining, element, self.options.replicas, n_weights, updated)
        host.wait(name)
        if not self._gathers_early:
            name, axis = _UPDATED_EXPERTS, self._expert_replicas
            experts = self._share_at_end * self._first.experts
            self._gather(host, name, experts, gathered, axis, after=updated)
            self._await_experts(host, name)
        n_copies = self._n_copies_of_gathered
        host.memory_bound("weights.copy", n_copies * 2.0 * remaining * element, "copy")

    @property
    def _n_copies_of_gathered(self) -> Array:
        """The number of times that updated weights are copied where they are gathered.

        Where every replica has a buffer of its parts, the old weights are copied into the buffers,
        torch copies what it gathers into them (ProcessGroupNCCL, allgather), and the parts are
        copied out of them.
        """
        has_buffers = self.options.engine.megatron.view_seconds is not None
        return np.where(self._has_replicas & has_buffers, 3.0, 1.0)

    def _view_parts(self, host: HostProgram) -> None:
        """Let the host make a view of each replica's part of each weight, if the engine does."""
        view_seconds = self.options.engine.megatron.view_seconds
        if view_seconds is None:
            return
        n_replicas = self.shapes.table.size(self.options.replicas)
        n_parts = self._first.n_weights * n_replicas * self._has_replicas
        host.idle(names.views("weights"), n_parts * view_seconds.value)

    def _cast_updated(self, host: HostProgram) -> None:
        """Cast the updated matrices that stay in a low format, or transpose them.

        The first micro-batch has each stage do so when it arrives (NeMo bd0b818a,
        modules/common/megatron/transformer.py, is_first_train_microbatch; Megatron-LM at d98e8a64,
        core/extensions/transformer_engine.py, is_first_microbatch), and so it waits in all stages,
        one after another. They are taken to have as many matrices as the first one.
        """
        casts = Casts(self.shapes)
        gathers_low = self.options.gathers_low_weights(self.shapes.job)
        cast = casts.transpose_kept_weights if gathers_low else casts.cast_kept_weights
        cast(host, names.WEIGHTS_CAST, self._first.matrices)
        n_others = self.shapes.table.stages - 1.0
        cast(host, names.WEIGHTS_CAST_ELSEWHERE, n_others * self._first.matrices)
