"""The messages of ZeRO: gradients of a micro-step, and those at the end of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.layout import PIPELINE, TENSOR
from axonn_tune.spec.names import BACKWARD
from axonn_tune.spec.plan import FROM_HOST, TO_HOST, Array, Size
from axonn_tune.strategies.optimizer import Gradients, Optimizer, clip_and_update, states_of
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES
from axonn_tune.strategies.zero.gathers import ZeroGathers
from axonn_tune.strategies.zero.units import GatherUnit, reduced_beside, trained_share

# Bytes of an element of quantised gradients, with the fp16 scale of each group of 2048 elements
# (ZeRO++, section 3.3).
INT4_BYTES = 0.5 + 2.0 / 2048


@dataclass(frozen=True, eq=False)
class ZeroCommunication(ZeroGathers):
    """The communication of ZeRO: block by block, weights are gathered and gradients reduced."""

    # Gradients ---------------------------------------------------------------------------

    def before_weight_gradient(self, host: HostProgram, layer: str) -> None:
        """Wait, with ORS, for the preceding block's gradients before the block's last product."""
        first = self.shapes.model.attention_linears[0].name
        if layer == "embedding" and self.units.wrapped_ends:
            self._take(host, BACKWARD, self._unit_of("embedding"))
        is_last = layer == "embedding" or (layer == first and not self._reduces_alone)
        if is_last and self._overlap.ors:
            self._finish_blocks(host)

    def end_block(self, host: HostProgram, is_first: bool) -> None:
        """Start to reduce the block's gradients; without ORS, wait for them.

        If weights are frozen, no product forms dW, so that the preceding block's gradients are
        awaited here.
        """
        if self._overlap.ors and not self.shapes.job.trains_weights:
            self._finish_blocks(host)
        if self._reduces_alone:
            return
        for unit in reversed(self.units.in_block):
            self._start_reduction(host, unit)
        if not self._overlap.ors:
            self._finish_blocks(host)

    def _finish_blocks(self, host: HostProgram) -> None:
        """Wait for the reduction of a block."""
        alone = [*self.units.reduced_alone.values()] if self._reduces_alone else []
        for unit in reversed(alone or self.units.in_block):
            self._finish_reduction(host, unit)

    def send_gradient(self, host: HostProgram, layer: str) -> None:
        """Start to reduce the root's gradients, the last of which is the embedding's.

        Where head and embedding are reduced by themselves, the gradient of each is sent as soon as
        it is formed. Where the matrices of a block are reduced by themselves, the gradient of each
        is sent when the next one comes.
        """
        if layer == "head" and self._cuts_tokens:
            self._sum_pieces(host)
        elif layer in self.units.ends:
            self._start_reduction(host, self.units.ends[layer])
        elif self._reduces_alone:
            self._reduce_alone(host, layer)

    @property
    def _reduces_alone(self) -> bool:
        """Whether each matrix of a block is reduced by itself."""
        return bool(self.units.reduced_alone) and not self.keeps_weights

    def _reduce_alone(self, host: HostProgram, layer: str) -> None:
        """Start to reduce the matrices that are ready; with ORS, wait for those of the last block.

        DeepSpeed's host waits for a reduction three calls earlier (0.10, runtime/zero/stage3.py,
        max_param_reduce_events), which is about a block with its vectors.
        """
        reduced = [
            self.units.reduced_alone[each]
            for each in reduced_beside(self.shapes.model).get(layer, ())
        ]
        for unit in reduced:
            if self._overlap.ors:
                self._finish_reduction(host, unit)
            self._start_reduction(host, unit)
            if not self._overlap.ors:
                self._finish_reduction(host, unit)

    def _sum_pieces(self, host: HostProgram) -> None:
        """Add the pieces' gradients of the head, and reduce their sum before anything else runs.

        The sums have the type of the messages, to which torch converts the first gradients (2.13,
        _fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed), and no kernel runs until the
        message has arrived (_fsdp_param_group.py, post_backward, is_partial_group_backward). The
        gradients of the head's input are copied into one tensor in fp32: 24 bytes of each element
        (torchtitan b5bcd76c, components/loss.py, GradAccumulator).
        """
        self._add_pieces(host)
        head = self._unit_of("head")
        self._start_reduction(host, head)
        self._finish_reduction(host, head)

    def _add_pieces(self, host: HostProgram) -> None:
        """Add the pieces' gradients of the head, and join those of its input."""
        shapes, element, of_sum = self.shapes, self.shapes.element_bytes, self._message_element
        n_pieces = self._program.head_chunks
        converted = (of_sum != element) * (element + of_sum)
        of_weight = converted + (n_pieces - 1) * (element + 2.0 * of_sum)
        weights = shapes.linears["head"].n_elements
        of_input = 24.0 / element * shapes.linears["head"].input_bytes
        host.memory_bound("gradient.head.pieces", weights * of_weight + of_input, "add")

    def accumulate(self, host: HostProgram, last_layer: str) -> None:
        """Wait for the last gradients and add them.

        They are the root's, which are sent now if the embedding is frozen, or those of adapters.
        """
        job = self.shapes.job
        self._cut_gradients(host)
        if not job.trains_embedding:
            if self._overlap.ors:
                self._finish_blocks(host)
            if job.trains_head and "head" not in self.units.ends:
                self._start_reduction(host, self.units.root)
        if job.trains_embedding or job.trains_head:
            for layer, unit in self.units.ends.items():
                if not (layer == "head" and self._cuts_tokens):
                    self._finish_reduction(host, unit)
        if self._sharding.reduced_once:
            self._add_whole_gradients(host)

    def _add_whole_gradients(self, host: HostProgram) -> None:
        """Add gradients to those of earlier micro-steps, where each is reduced once in a step.

        The sums have the type of the messages, to which torch converts the first gradients (2.13,
        _fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed). Experts that no other rank has
        are no part of FSDP, and their sums have the type of the gradients.
        """
        table, element = self.shapes.table, self.shapes.element_bytes
        nbytes = np.zeros(len(table))
        for unit in self.units.all:
            is_alone = bool(unit.sharded_over) & (table.size(unit.sharded_over) == 1)
            of_sum = np.where(is_alone, element, self._message_element)
            is_converted = (self._share_added > 0.0) & (of_sum != element)
            converted = is_converted * (1.0 - self._share_added) * (element + of_sum)
            each = self._share_added * (element + 2.0 * of_sum) + converted
            nbytes = nbytes + unit.all_trained / table.n_virtual * each
        host.memory_bound(names.GRADIENT_ACCUMULATE, nbytes, "add")

    def _cut_gradients(self, host: HostProgram) -> None:
        """Let the host cut each gradient into the ranks' parts, unless gradients are quantised.

        It does so whenever a bucket is full. The device then has little left to run, since the host
        is at most three gathers ahead of it. The time for all buckets counts here, at the end.
        """
        job = self.shapes.job
        slice_seconds = self._program.slice_seconds
        if slice_seconds is None or not (self._sharding.weights and job.trains_weights):
            return
        model = self.shapes.model
        n_layers = self.shapes.n_backward
        n_tables = (1 + (model.position_parameters > 0)) * job.trains_embedding
        n_heads = (not model.tied_embeddings) * job.trains_head
        n_vectors = model.n_vectors * n_layers / model.n_layers
        n_matrices = n_tables + n_heads + n_layers * len(model.block_linears)
        n_gradients = n_vectors + n_matrices * (not self.options.quantised_gradients)
        size = self.shapes.table.size(self._sharding.gradients)
        n_slices = n_gradients * size * (size > 1)
        host.idle(names.GRADIENT_SLICES, n_slices * slice_seconds.value)

    def _start_reduction(self, host: HostProgram, unit: GatherUnit) -> None:
        """Reduce over each group in turn; the remaining message shrinks by the group's size.

        All packing counts as if it were done before the message over the first group.
        """
        if not self._reduces:
            return
        table = self.shapes.table
        element = self.shapes.element_bytes
        remaining = np.full(len(table), unit.trained)
        before: tuple[str, ...] = ()
        kind = "all_to_all" if self.options.quantised_gradients else "reduce_scatter"
        if self.keeps_weights:
            kind = "all_reduce"
        message_element = np.where(self._packs_gradients, INT4_BYTES, self._message_element)
        for index, group in enumerate(self._reduced_over(unit)):
            name = names.unit_gradient(unit.name, group)
            size = table.size(group)
            sent = (size > 1) * remaining
            of_pack: Size = element + message_element
            if self._program.bucket_elements and index == 0:
                of_pack = self._of_bucket(unit)
            if self._kernels is not None:
                is_head = self._cuts_tokens and unit.name == self._unit_of("head").name
                of_pack = self._kernels.of_pack(is_sum=self._sends_sums | is_head)
            host.memory_bound(f"{name}.pack", sent * of_pack, "copy")
            if self._program.scales_gradients:
                host.memory_bound(f"{name}.scale", sent * (2.0 * message_element), "scale")
            reduction = names.reduce(name)
            nbytes = remaining * message_element
            host.issue(reduction, kind, nbytes, group, self._n_reductions(unit), before)
            remaining = remaining / size
            before = (reduction,)
        if self._exchanges_tensors:
            self._reduce_vectors(host, unit)
        if self._sums_replicas:
            host.issue(
                replica_sum(unit),
                "all_reduce",
                remaining * self._message_element,
                self._sharding.replicas,
                np.sign(unit.n_reductions),
                after=before,
            )
            before = (replica_sum(unit),)
        if self._offload.gradients:
            self._keep_on_host(host, unit, remaining, before)

    def _of_bucket(self, unit: GatherUnit) -> Array:
        """Return the bytes that kernels move of each gradient that a bucket sends, shape (C,).

        One that fits into the bucket is copied there, in the type of the message; any other is cast
        if its type differs. The gradients of a message are joined, unless it has one only, and
        divided. What is quantised is neither joined nor divided (DeepSpeed 0.19,
        runtime/zero/stage3.py, __add_grad_to_ipg_bucket and __avg_scatter_grads, and
        runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced; 0.10 does the same, but
        casts after the copy). Stages 1 and 2 join what several ranks own (stage_1_and_2.py,
        average_tensor and allreduce_bucket).
        """
        element, message = self.shapes.element_bytes, self._message_element
        share_copied = unit.bucketed if message == element else 1.0
        joined_and_divided = (1.0 + unit.bucketed) * 2.0 * message
        sent = np.where(self._packs_gradients, message + INT4_BYTES, joined_and_divided)
        return np.asarray(share_copied * (element + message) + sent)

    @property
    def _exchanges_tensors(self) -> bool:
        """Whether each tensor's gradient is quantised and exchanged for itself."""
        return self.options.quantised_gradients and self._program.exchanges_tensors

    def _n_reductions(self, unit: GatherUnit) -> Size:
        """Return the number of reductions over each group that carry a unit's gradients."""
        if not self._exchanges_tensors:
            return unit.n_reductions
        n_messages = 2.0 if self._program.sends_scales_apart else 1.0
        return np.where(self._packs_gradients, n_messages * unit.n_matrices, unit.n_reductions)

    def _reduce_vectors(self, host: HostProgram, unit: GatherUnit) -> None:
        """Reduce the gradient of each norm and bias alone over all ranks, in 16 bits."""
        job, sharding = self.shapes.job, self._sharding
        vectors = (unit.parameters - unit.gathered) * job.trains_weights
        whole = sum(each.count * (each.parameters - each.gathered) for each in self.units.all)
        n_vectors = self.shapes.model.n_vectors * vectors / whole * self._packs_gradients
        nbytes = np.full(len(self.shapes.table), vectors * self._message_element)
        host.issue(_vector_reduction(unit), "reduce_scatter", nbytes, sharding.gradients, n_vectors)

    @property
    def _reduces(self) -> bool:
        """Whether this micro-step reduces gradients."""
        return self.sync or not self._sharding.reduced_once

    @property
    def _sends_sums(self) -> np.ndarray:
        """Whether what is reduced are sums of several micro-steps, shape (C,)."""
        return (self._share_added > 0.0) & self._sharding.reduced_once

    @property
    def _sums_replicas(self) -> bool:
        """Whether this micro-step sums sharded gradients over the replicas of the shards."""
        in_step = self.sync or (self._program.sums_replicas_each_step and self._reduces)
        return in_step and bool(self._sharding.replicas)

    def _keep_on_host(
        self, host: HostProgram, unit: GatherUnit, shard: Array, reduced: tuple[str, ...]
    ) -> None:
        """Copy a shard of gradients to the host's memory while the backward pass goes on.

        FSDP2 does so in the first micro-step of a step only (`_add_on_host`). DeepSpeed brings
        earlier sums to the GPU first and adds to them there, and in the last micro-step it also
        copies them in fp32 (0.19, runtime/zero/stage3.py, partition_grads). Each micro-step counts
        with the mean of these bytes.
        """
        name = f"gradient.{unit.name}"
        share_first = 1.0 - self._share_added
        nbytes = shard * share_first * FP32_BYTES
        if not self._offload.weights:
            sums_bytes = shard * self.shapes.element_bytes
            host.copy(names.from_host(name), self._share_added * sums_bytes, FROM_HOST)
            reduced = (*reduced, names.from_host(name))
            nbytes = nbytes + sums_bytes
        host.copy(names.to_host(name), nbytes, TO_HOST, reduced)

    def _add_on_host(self, host: HostProgram, unit: GatherUnit, shard: Array) -> None:
        """Copy a shard of gradients to the host, which adds it to earlier ones, and wait for it.

        torch waits in all micro-steps but the first (2.13, _fsdp_collectives.py,
        foreach_reduce).
        """
        name = f"gradient.{unit.name}.added"
        nbytes = self._share_added * shard * FP32_BYTES
        host.copy(names.to_host(name), nbytes, TO_HOST)
        host.wait(names.to_host(name))
        host.host_kernel(f"gradient.{unit.name}.accumulate", 3.0 * nbytes)

    def _reduced_over(self, unit: GatherUnit) -> tuple[str, ...]:
        """Return the groups over which a unit's gradients are reduced, one after the other."""
        return (unit.sharded_over,) if unit.sharded_over else self._sharding.reduced_over

    @property
    def _packs_gradients(self) -> np.ndarray:
        """Whether gradients are quantised, which DeepSpeed does across nodes only, shape (C,)."""
        groups = self._sharding.reduced_over
        across = np.ones(len(self.shapes.table), dtype=bool)
        if len(groups) > 1:
            across = self.shapes.table.size(groups[-1]) > 1
        return across & self.options.quantised_gradients

    def _finish_reduction(self, host: HostProgram, unit: GatherUnit) -> None:
        """Wait for a reduction, unpack its result, and add it to the sums."""
        table = self.shapes.table
        element = self.shapes.element_bytes
        remaining = np.full(len(table), unit.trained)
        for group in self._reduced_over(unit) if self._reduces else ():
            name = names.unit_gradient(unit.name, group)
            size = table.size(group)
            host.wait(names.reduce(name))
            if self.options.quantised_gradients:
                moved = (size > 1) * remaining * (INT4_BYTES + element / size)
                moved = np.where(self._packs_gradients, moved, 0.0)
                host.memory_bound(f"{name}.dequantise", moved, "reduce")
            remaining = remaining / size
        if self._exchanges_tensors and self._reduces:
            host.wait(_vector_reduction(unit))
        if self._sums_replicas:
            host.wait(replica_sum(unit))
        if self._offload.weights:
            self._add_on_host(host, unit, remaining)
            return
        received = remaining * self._of_receipt(unit)
        if self._sharding.reduced_once:
            if self._reduces and (np.any(received > 0) or not self._overlap.ors):
                host.memory_bound(f"gradient.{unit.name}.receive", received, "cast")
            return
        if self._kernels is None:
            added = remaining * (3.0 * self._kept_element)
        else:
            # The first gradients of a step become the sums.
            added = remaining * (self._share_added * self._kernels.of_sum)
        host.memory_bound(f"gradient.{unit.name}.accumulate", received + added, "add")

    def _of_receipt(self, unit: GatherUnit) -> Array:
        """Return the bytes that kernels move of each reduced gradient before it is added."""
        table = self.shapes.table
        n_ranks = np.prod([table.size(group) for group in self._reduced_over(unit)], axis=0)
        of_receipt = 0.0 if self._kernels is None else self._kernels.of_receipt
        return np.where(n_ranks > 1, of_receipt, 0.0)

    # Once per step -----------------------------------------------------------------------

    def step_end(self, host: HostProgram) -> None:
        """Reduce gradients over the outer group, clip, update, and bring weights to their ranks."""
        shapes = self.shapes
        sharding = self._sharding
        element = shapes.element_bytes
        if sharding.outer:
            shard_bytes = trained_share(self.units.all, shapes.table, sharding.gradients) * element
            name = "gradient.states.reduce_scatter"
            host.run(name, "reduce_scatter", shard_bytes, sharding.outer)
        owned = trained_share(self.units.all, shapes.table, sharding.states)
        # torch frees gradients (zero_grad of its optimizers) and does not clear them.
        cleared = np.zeros(len(shapes.table)) if self._program.is_of_torch else owned
        gradients = Gradients(owned, owned, cleared, self._kept_element)
        has_copies = not self._program.is_of_torch
        optimizer = Optimizer(
            states_of(shapes.job, self.options.engine.low_states, has_copies),
            self.options.engine.offload_in(shapes.job),
            has_main_gradients=self._program.has_main_gradients,
        )
        updated = clip_and_update(host, shapes.job, gradients, self._norm_sums, optimizer)
        if self._gathers_low and self._program.is_of_torch:
            self._find_scales(host)
        keeps_vectors = self._program.keeps_vectors and not self.keeps_weights
        if keeps_vectors and shapes.job.trains_weights:
            self._gather_vectors(host, updated)
        if sharding.updated_over:
            kept_bytes = trained_share(self.units.all, shapes.table, sharding.weights) * element
            name = names.WEIGHTS_ALL_GATHER
            host.issue(name, "all_gather", kept_bytes, sharding.updated_over, after=updated)

    @property
    def _norm_sums(self) -> dict[str, str]:
        """The groups over which the norm of the gradients is summed, by name of the all-reduce."""
        sums = {names.all_reduce(names.GRADIENT_NORM): self._sharding.states}
        axes = (axis for axis in (TENSOR, PIPELINE) if axis in self.options.axes.names)
        return sums | {names.norm_all_reduce(axis): axis for axis in axes}

    def _find_scales(self, host: HostProgram) -> None:
        """Find the largest value of each updated weight, and from all ranks' its scale.

        torchao does so for all weights at once (pytorch/ao at 0afa4c1b, float8/fsdp_utils.py,
        precompute_float8_dynamic_scale_for_fsdp).
        """
        size = self.shapes.table.size(self._sharding.weights)
        read = sum(unit.count * unit.low for unit in self.units.all) / size * self._kept_element
        host.memory_bound(names.WEIGHT_SCALES, read, "reduce")
        n_weights = self.shapes.model.n_layers * len(self.shapes.block_products)
        groups = (self._sharding.weights, self.options.tensor_axis)
        for group in groups:
            name = names.over(names.all_reduce(names.WEIGHT_SCALES), group)
            host.run(name, "all_reduce", n_weights * FP32_BYTES, group)
        host.memory_bound(f"{names.WEIGHT_SCALES}.form", 2.0 * n_weights * FP32_BYTES, "scale")

    def _gather_vectors(self, host: HostProgram, updated: tuple[str, ...]) -> None:
        """Gather each updated norm and bias by itself, after the copies that `updated` names."""
        n_units = (
            int(self.shapes.job.trains_head),
            *(unit.n_trained for unit in self.units.in_block),
        )
        of_units = [unit.parameters - unit.gathered for unit in self.units.all]
        vectors = sum(n * elements for n, elements in zip(n_units, of_units, strict=True))
        whole = sum(
            unit.count * elements for unit, elements in zip(self.units.all, of_units, strict=True)
        )
        full = np.full(len(self.shapes.table), vectors * self.shapes.element_bytes)
        group = self._sharding.weights
        n_calls = self.shapes.model.n_vectors * (vectors / whole)
        host.issue(names.VECTORS_ALL_GATHER, "all_gather", full, group, n_calls, updated)


def _vector_reduction(unit: GatherUnit) -> str:
    """Return the name of the reductions of a unit's gradients of norms and biases."""
    return names.reduce(f"gradient.{unit.name}.vectors")


def replica_sum(unit: GatherUnit) -> str:
    """Return the name of the all-reduce of a unit's gradients over replicas."""
    return names.all_reduce(f"gradient.{unit.name}")
