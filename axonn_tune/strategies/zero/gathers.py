"""What ZeRO gathers, block by block: weights, and tokens within a tensor group and for experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.engine import OffloadProgram
from axonn_tune.spec.job import Overlap
from axonn_tune.spec.layout import EXPERT
from axonn_tune.spec.names import BACKWARD, FORWARD, RECOMPUTE
from axonn_tune.spec.plan import FROM_HOST, Array, Size
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.strategies.attention import copied_heads
from axonn_tune.strategies.communication import Weight
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.zero.async_tensor import AsyncTensorParallel
from axonn_tune.strategies.zero.shard_kernels import ShardKernels
from axonn_tune.strategies.zero.units import GatherUnit

if TYPE_CHECKING:
    from axonn_tune.strategies.zero.sharding import Sharding
    from axonn_tune.strategies.zero.zero import Zero
    from axonn_tune.strategies.zero.zero_units import ZeroUnits

# Bytes of an element of quantised weights, with the fp16 scale of each group of 2048 elements
# (ZeRO++, section 3.1).
INT8_BYTES = 1.0 + 2.0 / 2048


@dataclass(frozen=True)
class _Gather:
    """A gather of a number of elements in some calls within a group.

    Kernels copy the share `joined` of the elements out of the message.
    """

    name: str
    elements: Size
    n_calls: Size
    joined: Size
    group: str
    is_quantised: bool


@dataclass(frozen=True, eq=False)
class ZeroGathers(AsyncTensorParallel):
    """The gathers of ZeRO, and what its communication knows of engine and strategy.

    options
        The strategy.
    units
        The units in which weights are gathered.
    """

    options: Zero
    units: ZeroUnits

    @cached_property
    def _overlap(self) -> Overlap:
        """The overlaps of the job that the engine has."""
        return self.options.overlap_of(self.shapes.job)

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

    def _unit_of(self, layer: str) -> GatherUnit:
        """Return the unit of the embedding or of the head."""
        return self.units.wrapped_ends.get(layer, self.units.root)

    @property
    def _cuts_tokens(self) -> bool:
        """Whether logits and loss are formed for one piece of the tokens after another."""
        return self._program.head_chunks > 1

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Run attention over sequences that several ranks share, if they do."""
        copies = self._program.copies_heads and self.shapes.job.attention == "flash"
        with copied_heads(host, self.shapes, chain, copies):
            self.options.shared_sequences(self.shapes).attend(host, chain, window)

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
        products = self.shapes.block_products if self._program.scatters_by_product else ()
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
            self._start_gathers(host, FORWARD, self._unit_of("embedding"))

    def take_weight(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Wait for the root's weights, or for those of its units, before they are used.

        What a block's recomputation does not leave gathered comes while the gradients of its last
        matrix are formed.
        """
        if self.keeps_weights:
            return
        if weight.layer == "embedding":
            self._take(host, FORWARD, self._unit_of("embedding"))
        if weight == Weight(FORWARD, "head"):
            self._take_head(host)
        if weight == Weight(BACKWARD, "head") and self._gathers_root_again:
            self._take(host, BACKWARD, self.units.root)
        for unit in self.units.in_block:
            if unit.fetches.n_again:
                self._gather_again(host, unit, weight)

    def _take_head(self, host: HostProgram) -> None:
        """Wait for a unit with the head, and gather it again for pieces of the tokens.

        The end of the forward pass releases it once the final norm has run (torch 2.13,
        _fully_shard/_fsdp_state.py, _force_complete_incomplete_states).
        """
        unit = self._unit_of("head")
        if self.units.wrapped_ends:
            self._take(host, FORWARD, unit)
        if self._cuts_tokens:
            self._gather_now(host, FORWARD, replace(unit, name=f"{unit.name}.again"))

    def _gather_now(self, host: HostProgram, chain: str, unit: GatherUnit) -> None:
        """Gather a unit, and wait for it."""
        if self._overlap.oag:
            self._start_gathers(host, chain, unit)
        self._take(host, chain, unit)

    def _gather_again(self, host: HostProgram, unit: GatherUnit, weight: Weight) -> None:
        """Gather for gradients what recomputation has released, between two uses of matrices.

        Without OAG each matrix is gathered when it is used, after what has been reduced until then.
        """
        layers = [linear.name for linear in self.shapes.model.block_linears]
        *_, before, last = layers
        if not self._overlap.oag and unit.fetches.of_matrices:
            if weight.chain == BACKWARD and weight.layer in layers:
                fetches = unit.fetches.of_matrices[layers.index(weight.layer)]
                part = replace(unit, name=f"{unit.name}.{weight.layer}", fetches=fetches)
                if fetches.n_again:
                    self._take(host, BACKWARD, part)
            return
        if weight == Weight(BACKWARD, last) and self._overlap.oag:
            self._start_gathers(host, BACKWARD, unit)
        if weight == Weight(BACKWARD, before):
            self._take(host, BACKWARD, unit)

    def prefetch_root(self, host: HostProgram, chain: str) -> None:
        """Start to gather the end that comes next, or the root for the backward pass.

        The host is ahead of the device, and the message waits only for the last block's (torch
        2.13, _fully_shard/_fsdp_param_group.py, unshard and wait_for_unshard).
        """
        if not self._gathers_ahead:
            return
        if chain == FORWARD and self._gathers_root_again:
            self._start_gathers(host, BACKWARD, self.units.root)
        if self.units.wrapped_ends and chain == FORWARD:
            self._start_gathers(host, FORWARD, self._unit_of("head"))
        elif self.units.wrapped_ends and self.shapes.job.trains_embedding:
            self._start_gathers(host, BACKWARD, self._unit_of("embedding"))

    def prefetch_beside_head(self, host: HostProgram, chain: str) -> None:
        """Start to gather a block, unless the head is gathered for the norm's gradient first."""
        if not self._cuts_tokens:
            self.prefetch_block(host, chain)

    def end_head(self, host: HostProgram, chain: str) -> None:
        """Gather the head for the norm's gradient, and then start to gather a block.

        Where the head's gradient was formed in pieces, the unit has been released (torchtitan
        b5bcd76c, components/loss.py, ChunkedLossWrapper).
        """
        if self._cuts_tokens:
            self._gather_now(host, BACKWARD, self._unit_of("head"))
            self.prefetch_block(host, chain)

    def begin_block(self, host: HostProgram, chain: str) -> None:
        """Wait for all weights of the block, since they come together."""
        if self.keeps_weights:
            return
        for unit in self.units.in_block:
            self._take(host, chain, unit)

    def prefetch_block(self, host: HostProgram, chain: str) -> None:
        """Start to gather the next block's weights; without OAG, they are gathered when taken."""
        if self._gathers_ahead:
            for unit in self.units.in_block:
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
        is_first = chain == FORWARD
        elements = share * unit.gathered
        n_calls = share * (unit.n_calls if is_first else unit.n_calls_again)
        joined = unit.joined if is_first else unit.joined_again
        early_share = {FORWARD: 1.0, RECOMPUTE: fetches.early_share, BACKWARD: 0.0}[chain]
        if chain == BACKWARD and fetches.n_again:
            elements, n_calls = fetches.again_elements, fetches.n_again
            joined = fetches.joined_again_share
            early_share = fetches.early_again_share
        early, late = (self._source(chain, unit, is_early) for is_early in (True, False))
        if early == late or early_share in (0.0, 1.0):
            source = early if early_share else late
            return [_Gather(name, elements, n_calls, joined, *source)]
        return [
            _Gather(of_part, part * elements, part * n_calls, joined, *source)
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
        is_root = unit.name not in {each.name for each in self.units.in_block}
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
        gathered = sum(unit.gathered for unit in self.units.in_block)
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
        # What is quantised and gathered with nothing else is unpacked to where products read it.
        is_unpacked = gather.is_quantised and not self._program.prefetch_elements
        if np.any(gather.joined) and not (self._program.gathers_in_place or is_unpacked):
            # The first gather of a step has other ranks than gathers from the second copy, and so
            # its copy has a name of its own.
            is_first = self._sharding.copy and group == self._sharding.weights
            copy = f"{name}.first_copy" if is_first else f"{name}.copy"
            n_copies = 2.0 if self._kernels is None else self._kernels.copies
            nbytes = gather.joined * unit.bytes_of(received, self.shapes.job)
            host.memory_bound(copy, n_copies * nbytes, "copy")

    def _of_source(self, gather: _Gather) -> str:
        """Return the name of a gather's kernels, which handle other shards of the second copy."""
        is_copy = bool(self._sharding.copy) and gather.group == self._sharding.copy
        return f"{gather.name}.second_copy" if is_copy else gather.name
