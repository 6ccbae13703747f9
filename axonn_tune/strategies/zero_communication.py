"""The messages of ZeRO: those of a micro-step, and those at the end of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.engine import OffloadProgram, ZeroProgram
from axonn_tune.spec.job import Overlap
from axonn_tune.spec.layout import EXPERT, PIPELINE, TENSOR
from axonn_tune.spec.names import BACKWARD, FORWARD, RECOMPUTE
from axonn_tune.spec.plan import FROM_HOST, TO_HOST, Array, Size
from axonn_tune.strategies.async_tensor import AsyncTensorParallel
from axonn_tune.strategies.attention import copy_heads
from axonn_tune.strategies.communication import Weight
from axonn_tune.strategies.optimizer import clip_and_update, states_of
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES
from axonn_tune.strategies.shard_kernels import ShardKernels
from axonn_tune.strategies.units import GatherUnit

if TYPE_CHECKING:
    from axonn_tune.strategies.sharding import Sharding
    from axonn_tune.strategies.zero import Zero

# Bytes of an element in quantised messages, with the fp16 scale of each group of 2048 elements
# (ZeRO++, sections 3.1 and 3.3: INT8 weights, INT4 gradients).
INT8_BYTES = 1.0 + 2.0 / 2048
INT4_BYTES = 0.5 + 2.0 / 2048


@dataclass(frozen=True)
class _Gather:
    """A gather of a number of elements in some calls within a group."""

    name: str
    elements: Size
    n_calls: Size
    group: str
    is_quantised: bool


@dataclass(frozen=True, eq=False)
class ZeroCommunication(AsyncTensorParallel):
    """The communication of ZeRO: block by block, weights are gathered and gradients reduced."""

    options: Zero

    @cached_property
    def _overlap(self) -> Overlap:
        """The overlaps of the job, or none if the engine has none."""
        program = self._program
        return self.shapes.job.overlap if program.overlaps else Overlap(False, False, False)

    @property
    def _program(self) -> ZeroProgram:
        """How the engine communicates."""
        return self.options.engine.zero

    @property
    def backward_overlap(self) -> Overlap:
        """The overlaps without OAR: sums over a tensor group are awaited before the next kernel."""
        return replace(self._overlap, oar=False)

    @property
    def _kept_element(self) -> float:
        """The bytes of an element of a reduced gradient, as its owner keeps it."""
        return self.options.kept_element_bytes(self.shapes.job)

    @property
    def _message_element(self) -> float:
        """The bytes of an element of a gradient in a message that is not quantised."""
        return self._program.message_bytes(self.shapes.element_bytes)

    @cached_property
    def _kernels(self) -> ShardKernels | None:
        """The kernels around the messages of torch's FSDP; None where it is not torch's."""
        program = self._program
        if not program.is_of_torch:
            return None
        is_half = self.shapes.job.dtype == "fp16" and program.reduced_element_bytes is None
        return ShardKernels(
            stored=self._kept_element,
            gathered=self.shapes.element_bytes,
            reduced=self._message_element,
            is_flat=program.is_fsdp1,
            divides=program.is_fsdp1 or is_half,
        )

    @property
    def _sharding(self) -> Sharding:
        """The groups of the strategy."""
        return self.options.sharding

    @cached_property
    def _offload(self) -> OffloadProgram:
        """How optimizer states are offloaded; without offload, nothing else is either."""
        return self.options.engine.offload_in(self.shapes.job) or OffloadProgram()

    @cached_property
    def _share_added(self) -> Array:
        """The share of the micro-steps whose gradients are added to earlier ones, shape (C,)."""
        return 1.0 - 1.0 / self.shapes.table.n_microsteps(self.shapes.job.global_batch)

    @property
    def _root(self) -> GatherUnit:
        """The unit of embedding, final norm and head."""
        return self._units[0]

    @property
    def _in_block(self) -> tuple[GatherUnit, ...]:
        """The units of a block."""
        return self._units[1:]

    @cached_property
    def _units(self) -> tuple[GatherUnit, ...]:
        """Return all units in which weights are gathered."""
        return self.options.units(self.shapes)

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Run attention over sequences that several ranks share, if they do."""
        copies = self._program.copies_heads and self.shapes.job.attention == "flash"
        if copies and chain != BACKWARD:
            copy_heads(host, self.shapes, chain)
        self.options.shared_sequences(self.shapes).attend(host, chain, window)
        if copies and chain == BACKWARD:
            copy_heads(host, self.shapes, chain)

    # Experts ---------------------------------------------------------------------------------

    def send_to_experts(self, host: HostProgram, chain: str, message: str, nbytes: Array) -> None:
        """Exchange tokens within the group that holds all experts."""
        if self.options.has_experts:
            host.run(names.of_layer(chain, message), "all_to_all", nbytes, EXPERT)

    def bring_from_experts(
        self, host: HostProgram, chain: str, message: str, nbytes: Array
    ) -> None:
        """Exchange results within the group that holds all experts."""
        self.send_to_experts(host, chain, message, nbytes)

    def gather_counts(self, host: HostProgram, name: str, nbytes: Size) -> None:
        """Exchange the numbers of copies (torchtitan, distributed/expert_parallel.py)."""
        if self.options.has_experts:
            host.run(name, "all_to_all", np.full(len(self.shapes.table), nbytes), EXPERT)

    # Tokens of a tensor group ----------------------------------------------------------------

    @property
    def _overlaps_products(self) -> bool:
        """Whether messages of the tensor group travel beside products."""
        return self.options.overlaps_tensor and bool(self.options.tensor_axis)

    @property
    def sums_embedding(self) -> bool:
        """Whether rows of the embedding are summed over ranks that hold different ones."""
        return super().sums_embedding and not self._program.replicates_embedding

    def sum_output(self, host: HostProgram, weight: Weight) -> None:
        """Bring tokens into the order of their ranks before the sum."""
        shape = self.shapes.linears[weight.layer]
        if shape.input_axis and not self._overlaps_products:
            self._order_tokens(host, f"{weight.name}.sum", shape.output_bytes)
        super().sum_output(host, weight)

    def n_gradient_sums(self, layer: str) -> int:
        """Return the number of a layer's products if each has a sum of its own, else 1."""
        products = self.shapes.model.block_products if self._program.scatters_by_product else ()
        return max(sum(product.layer == layer for product in products), 1)

    def sum_input_gradient(self, host: HostProgram, weight: Weight) -> str:
        """Bring tokens into the order of their ranks before the sum."""
        shape = self.shapes.linears[weight.layer]
        if shape.output_axis:
            nbytes = self.n_gradient_sums(weight.layer) * shape.input_bytes
            self._order_tokens(host, f"{weight.name}.sum", nbytes)
        return super().sum_input_gradient(host, weight)

    def _order_tokens(self, host: HostProgram, message: str, nbytes: Size) -> None:
        """Copy a message within a tensor group if the engine does so."""
        if self._program.orders_tokens and self.options.tensor_axis:
            moved = np.where(self.shapes.y > 1, 2.0 * nbytes, 0.0)
            host.memory_bound(f"{message}.copy", moved, "copy")

    # Weights -----------------------------------------------------------------------------

    @property
    def keeps_weights(self) -> bool:
        """Whether weights stay with the rank; if they are sharded, they are gathered when used."""
        return not self._sharding.weights

    @property
    def _gathers_low(self) -> bool:
        """Whether weights of low products are gathered in their format."""
        return self.options.gathers_low(self.shapes.job)

    def share_transposed(self, chain: str) -> Size | None:
        """Return 1 where copies that a pass has transposed go with the weights.

        torch's backward pass forms them. With Transformer Engine a forward pass forms them for the
        backward pass, too (d0067d0d, pytorch/module/base.py, quantize_weight); where they stay,
        only the first one in a step does. Gradients use those that recomputation has formed, and
        count their time.
        """
        if not self._gathers_low:
            return None
        if self._program.is_of_torch:
            return 1.0 if chain == BACKWARD else 0.0
        if self._program.keeps_transposed:
            return 1.0 - self._share_added if chain == FORWARD else 0.0
        return 0.0 if chain == RECOMPUTE else 1.0

    def prefetch_weight(self, host: HostProgram, weight: Weight) -> None:
        """Start to gather the root before the embedding."""
        if weight.layer == "embedding" and self._gathers_ahead:
            self._start_gathers(host, FORWARD, self._root)

    def take_weight(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Wait for the root's weights before the embedding, and where they are gathered again.

        What a block's recomputation does not leave gathered comes while the gradients of its last
        matrix are formed.
        """
        if self.keeps_weights:
            return
        if weight.layer == "embedding":
            self._take(host, FORWARD, self._root)
        if weight == Weight(BACKWARD, "head") and self._gathers_root_again:
            self._take(host, BACKWARD, self._root)
        for unit in self._in_block:
            if unit.fetches.n_again:
                self._gather_again(host, unit, weight)

    def _gather_again(self, host: HostProgram, unit: GatherUnit, weight: Weight) -> None:
        """Gather for gradients what recomputation has released, between two uses of matrices."""
        *_, before, last = (linear.name for linear in self.shapes.model.block_linears)
        if weight == Weight(BACKWARD, last) and self._overlap.oag:
            self._start_gathers(host, BACKWARD, unit)
        if weight == Weight(BACKWARD, before):
            self._take(host, BACKWARD, unit)

    def prefetch_root(self, host: HostProgram, chain: str) -> None:
        """Start to gather the root for the backward pass, if it does not stay.

        The host is ahead of the device, and the message waits only for the last block's (torch
        2.13, _fully_shard/_fsdp_param_group.py, unshard and wait_for_unshard).
        """
        if chain == FORWARD and self._gathers_root_again and self._gathers_ahead:
            self._start_gathers(host, BACKWARD, self._root)

    def begin_block(self, host: HostProgram, chain: str) -> None:
        """Wait for all weights of the block, since they come together."""
        if self.keeps_weights:
            return
        for unit in self._in_block:
            self._take(host, chain, unit)

    def prefetch_block(self, host: HostProgram, chain: str) -> None:
        """Start to gather the next block's weights; without OAG, they are gathered when taken."""
        if self._gathers_ahead:
            for unit in self._in_block:
                self._start_gathers(host, chain, unit)

    @property
    def _gathers_ahead(self) -> bool:
        """Whether weights are gathered before they are taken."""
        return self._overlap.oag and not self.keeps_weights

    def _source(self, chain: str, unit: GatherUnit, is_early: bool) -> tuple[str, bool]:
        """Return the group from which a chain gathers weights, and whether they are quantised.

        The second copy is made in the first forward pass after an update. `is_early` says whether
        the gather starts in a forward pass or while a block is recomputed.
        """
        if unit.sharded_over:
            return unit.sharded_over, False
        sharding, program = self._sharding, self._program
        has_copy = bool(sharding.copy) and not (chain == FORWARD and self.sync)
        if has_copy and not (is_early and program.copy_serves_gradients):
            return sharding.copy, self.options.quantised_weights and program.quantises_copy
        return sharding.weights, self.options.quantised_weights

    def _gathers(self, chain: str, unit: GatherUnit) -> list[_Gather]:
        """Return the gathers of a unit for its use in a chain.

        For the backward pass of a block that is recomputed, they are those of what recomputation
        has not left gathered.
        """
        name, fetches = names.of_layer(chain, unit.name), unit.fetches
        share = self._share(chain, unit)
        elements, n_calls, early_share = share * unit.gathered, share * unit.n_calls, 1.0
        if chain == BACKWARD:
            early_share = 0.0
        if chain == RECOMPUTE:
            early_share = fetches.early_share
        if chain == BACKWARD and fetches.n_again:
            elements, n_calls = fetches.again_elements, fetches.n_again
            early_share = fetches.early_again_share
        early, late = (self._source(chain, unit, is_early) for is_early in (True, False))
        if early == late or early_share in (0.0, 1.0):
            return [_Gather(name, elements, n_calls, *(early if early_share else late))]
        return [
            _Gather(of_part, part * elements, part * n_calls, *source)
            for of_part, part, source in (
                (name, 1.0 - early_share, late),
                (f"{name}.early", early_share, early),
            )
        ]

    def _start_gathers(self, host: HostProgram, chain: str, unit: GatherUnit) -> None:
        """Start to gather a unit's weights."""
        for gather in self._gathers(chain, unit):
            self._start_gather(host, unit, gather)

    def _start_gather(self, host: HostProgram, unit: GatherUnit, gather: _Gather) -> None:
        """Start a gather; quantised weights are packed to INT8 before."""
        group, n_calls = gather.group, gather.n_calls
        size = self.shapes.table.size(group)
        name = gather.name
        nbytes = unit.bytes_of(gather.elements, self.shapes.job)
        if gather.is_quantised:
            packed = gather.elements * INT8_BYTES
            host.memory_bound(
                f"{self._of_source(gather)}.quantise",
                (size > 1) * (nbytes + packed) / size,
                "scale",
            )
            nbytes = packed
            n_calls = n_calls * (2.0 if self._program.sends_scales_apart else 1.0)
        full = np.full(len(self.shapes.table), nbytes)
        view_seconds = self._program.view_seconds
        if view_seconds is not None:
            n_views = n_calls * size * (size > 1)
            host.idle(names.views(name), n_views * view_seconds.value)
        if not np.any(n_calls):
            return
        share = unit.share_of(gather.elements)
        self._copy_in(host, name, unit, share, size)
        after: tuple[str, ...] = ()
        if self._offload.weights:
            after = (names.from_host(name),)
            shard_bytes = share * unit.fp32_shard_bytes(self.shapes.job) / size
            host.copy(names.from_host(name), shard_bytes, FROM_HOST)
        host.issue(names.all_gather(name), "all_gather", full, group, n_calls, after)

    def _copy_in(
        self, host: HostProgram, name: str, unit: GatherUnit, share: Size, size: Array
    ) -> None:
        """Cast a unit's shard, and copy it into the message that is gathered.

        torch does so in a stream of its own, beside other kernels, which share the memory's
        bandwidth with it.
        """
        kernels = self._kernels
        if kernels is None:
            return
        job, trained = self.shapes.job, unit.all_trained / unit.count
        nbytes = (trained - unit.low) * kernels.of_cast
        nbytes = nbytes + unit.low * kernels.of_low_cast(job.operand_bytes)
        nbytes = nbytes + kernels.copies * unit.bytes_of(unit.gathered, job)
        host.memory_bound(f"{name}.copy_in", (size > 1) * share * nbytes / size, "copy")

    def _share(self, chain: str, unit: GatherUnit) -> Size:
        """Return the share of a chain's units of one kind that are gathered, on average."""
        is_root = unit.name == self._root.name
        is_kept = self._program.keeps_ends and is_root
        if (self.options.syncs_once or is_kept) and not self.sync:
            return 0.0
        return 1.0 if chain == FORWARD or is_root else self._share_gathered_again

    @property
    def _gathers_root_again(self) -> bool:
        """Whether the root is gathered for the backward pass, too."""
        return self._program.reshards_root and not self.shapes.table.is_pipelined

    @cached_property
    def _share_gathered_again(self) -> Size:
        """The share of the blocks that the backward pass gathers again."""
        model = self.shapes.model
        program = self._program
        if self.options.keeps_blocks:
            return 0.0
        gathered = sum(unit.gathered for unit in self._in_block)
        n_kept = max(0.0, program.live_elements - model.head.parameters) / gathered
        n_kept = np.maximum(n_kept, program.keeps_last_block)
        return np.maximum(0.0, 1.0 - n_kept / self.shapes.n_backward)

    def _take(self, host: HostProgram, chain: str, unit: GatherUnit) -> None:
        """Wait for gathers, and copy or unpack the received weights to where they are used."""
        if not self._overlap.oag:
            self._start_gathers(host, chain, unit)
        for gather in self._gathers(chain, unit):
            if np.any(gather.n_calls):
                self._receive(host, unit, gather)

    def _receive(self, host: HostProgram, unit: GatherUnit, gather: _Gather) -> None:
        """Wait for a gather, and copy or unpack the received weights."""
        name, group = gather.name, gather.group
        element = self.shapes.element_bytes
        host.wait(names.all_gather(name))
        if self._offload.weights:
            host.wait(names.from_host(name))
        received = np.where(self.shapes.table.size(group) > 1, gather.elements, 0.0)
        if gather.is_quantised:
            unpacked = received * (INT8_BYTES + element)
            host.memory_bound(f"{self._of_source(gather)}.dequantise", unpacked, "scale")
        elif not self._program.gathers_in_place:
            # The first gather of a step is over other ranks than those from the second copy.
            is_first = self._sharding.copy and group == self._sharding.weights
            copy = f"{name}.first_copy" if is_first else f"{name}.copy"
            n_copies = 2.0 if self._kernels is None else self._kernels.copies
            nbytes = unit.bytes_of(received, self.shapes.job)
            host.memory_bound(copy, n_copies * nbytes, "copy")

    def _of_source(self, gather: _Gather) -> str:
        """Return the name of a gather's kernels, which handle other shards of the second copy."""
        is_copy = bool(self._sharding.copy) and gather.group == self._sharding.copy
        return f"{gather.name}.second_copy" if is_copy else gather.name

    # Gradients ---------------------------------------------------------------------------

    def before_weight_gradient(self, host: HostProgram, layer: str) -> None:
        """Wait, with ORS, for the preceding block's gradients before the block's last product."""
        first = self.shapes.model.attention_linears[0].name
        if layer in (first, "embedding") and self._overlap.ors:
            self._finish_blocks(host)

    def end_block(self, host: HostProgram, is_first: bool) -> None:
        """Start to reduce the block's gradients; without ORS, wait for them.

        If weights are frozen, no product forms dW, so that the preceding block's gradients are
        awaited here.
        """
        if self._overlap.ors and not self.shapes.job.trains_weights:
            self._finish_blocks(host)
        for unit in reversed(self._in_block):
            self._start_reduction(host, unit)
        if not self._overlap.ors:
            self._finish_blocks(host)

    def _finish_blocks(self, host: HostProgram) -> None:
        """Wait for the reduction of a block."""
        for unit in reversed(self._in_block):
            self._finish_reduction(host, unit)

    def send_gradient(self, host: HostProgram, layer: str) -> None:
        """Start to reduce the root's gradients, the last of which is the embedding's.

        Where head and embedding are reduced by themselves, each is as soon as it is formed.
        """
        if layer in self._ends:
            self._start_reduction(host, self._ends[layer])

    def accumulate(self, host: HostProgram, last_layer: str) -> None:
        """Wait for the last gradients and add them.

        They are the root's, which are sent now if the embedding is frozen, or those of adapters.
        """
        job = self.shapes.job
        self._cut_gradients(host)
        if not job.trains_embedding:
            if self._overlap.ors:
                self._finish_blocks(host)
            if job.trains_head and "head" not in self._ends:
                self._start_reduction(host, self._root)
        if job.trains_embedding or job.trains_head:
            for unit in self._ends.values():
                self._finish_reduction(host, unit)
        if self._sharding.reduced_once:
            self._add_whole_gradients(host)

    @cached_property
    def _ends(self) -> dict[str, GatherUnit]:
        """The parts of the root that are reduced by themselves."""
        return self.options.ends(self.shapes)

    def _add_whole_gradients(self, host: HostProgram) -> None:
        """Add gradients to those of earlier micro-steps, where each is reduced once in a step.

        The sums have the type of the messages, to which torch converts the first gradients (2.13,
        _fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed). Experts that no other rank has
        are no part of FSDP, and their sums have the type of the gradients.
        """
        table, element = self.shapes.table, self.shapes.element_bytes
        nbytes = np.zeros(len(table))
        for unit in self._units:
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
        for group in self._reduced_over(unit):
            name = names.unit_gradient(unit.name, group)
            size = table.size(group)
            sent = (size > 1) * remaining
            of_pack: Size = element + message_element
            if self._kernels is not None:
                of_pack = self._kernels.of_pack(is_sum=self._sends_sums)
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

    @property
    def _exchanges_tensors(self) -> bool:
        """Whether each tensor's gradient is quantised and exchanged for itself."""
        return self.options.quantised_gradients and self._program.exchanges_tensors

    def _n_reductions(self, unit: GatherUnit) -> Size:
        """Return the number of reductions over each group that carry a unit's gradients."""
        if not self._exchanges_tensors:
            return unit.n_reductions
        model = self.shapes.model
        n_matrices = len(model.block_linears)
        if unit.name == self._root.name:
            n_matrices = 2 - model.tied_embeddings
        n_messages = 2.0 if self._program.sends_scales_apart else 1.0
        return np.where(self._packs_gradients, n_messages * n_matrices, unit.n_reductions)

    def _reduce_vectors(self, host: HostProgram, unit: GatherUnit) -> None:
        """Reduce the gradient of each norm and bias alone over all ranks, in 16 bits."""
        job, sharding = self.shapes.job, self._sharding
        vectors = (unit.parameters - unit.gathered) * job.trains_weights
        whole = sum(each.count * (each.parameters - each.gathered) for each in self._units)
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
        trained_share = partial(self.options.trained_share, shapes)
        if sharding.outer:
            shard_bytes = trained_share(sharding.gradients) * element
            name = "gradient.states.reduce_scatter"
            host.run(name, "reduce_scatter", shard_bytes, sharding.outer)
        updated = clip_and_update(
            host,
            shapes.job,
            owned=trained_share(sharding.states),
            gradient_bytes=self._kept_element,
            norm_sums=self._norm_sums,
            # torch frees gradients (zero_grad of its optimizers) and does not clear them.
            cleared=np.zeros(len(shapes.table)) if self._program.is_of_torch else None,
            offload=self.options.engine.offload_in(shapes.job),
            states=states_of(
                shapes.job,
                self.options.engine.low_states,
                has_copies=not self._program.is_of_torch,
            ),
            has_main_gradients=self._program.has_main_gradients,
        )
        if self._gathers_low and self._program.is_of_torch:
            self._find_scales(host)
        keeps_vectors = self._program.keeps_vectors and not self.keeps_weights
        if keeps_vectors and shapes.job.trains_weights:
            self._gather_vectors(host, updated)
        if sharding.updated_over:
            kept_bytes = trained_share(sharding.weights) * element
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
        read = sum(unit.count * unit.low for unit in self._units) / size * self._kept_element
        host.memory_bound(names.WEIGHT_SCALES, read, "reduce")
        n_weights = self.shapes.model.n_layers * len(self.shapes.model.block_products)
        groups = (self._sharding.weights, self.options.tensor_axis)
        for group in groups:
            name = names.over(names.all_reduce(names.WEIGHT_SCALES), group)
            host.run(name, "all_reduce", n_weights * FP32_BYTES, group)
        host.memory_bound(f"{names.WEIGHT_SCALES}.form", 2.0 * n_weights * FP32_BYTES, "scale")

    def _gather_vectors(self, host: HostProgram, updated: tuple[str, ...]) -> None:
        """Gather each updated norm and bias by itself, after the copies that `updated` names."""
        n_units = (int(self.shapes.job.trains_head), *(unit.n_trained for unit in self._in_block))
        of_units = [unit.parameters - unit.gathered for unit in self._units]
        vectors = sum(n * elements for n, elements in zip(n_units, of_units, strict=True))
        whole = sum(
            unit.count * elements for unit, elements in zip(self._units, of_units, strict=True)
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
