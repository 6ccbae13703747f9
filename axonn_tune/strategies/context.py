"""Context parallelism: attention over sequences of which every rank of a group has a part.

A sequence is cut into twice as many chunks as the group has ranks. A rank takes one from the front
and its counterpart from the back, so that all ranks have the same share of a causal mask. The kinds
differ in how the ranks' queries meet all keys and values. They are those of Transformer Engine at
d0067d0d (pytorch/attention/dot_product_attention/context_parallel.py), whose copies and buffers are
counted here. Attention is fused: Transformer Engine splits no other.

Where two kinds work together, two axes share a sequence: ranks that exchange tokens for heads are
neighbours, and each of them is in a ring (Fang and Zhao, arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.candidates import Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import CONTEXT
from axonn_tune.spec.model import Model
from axonn_tune.spec.names import BACKWARD
from axonn_tune.spec.plan import Array, Attention, Size
from axonn_tune.spec.programs import ALL_GATHER, RING, ULYSSES, ULYSSES_RING
from axonn_tune.strategies.attention import attention_name, of_samples, whole_attention
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import Shapes

# The axes of `ULYSSES_RING`, which combines two kinds.
EXCHANGE_AXIS, RING_AXIS = "ulysses", "ring"
# Bytes that a copy moves for each byte of its result, and an addition for each byte of its sum.
_COPY = 2.0
_ADD = 3.0


@dataclass(frozen=True, eq=False)
class ContextParallelism:
    """One kind of context parallelism, for candidates of the given sizes.

    Attributes
    ----------
    axis
        The axis whose ranks share a sequence.
    head_split
        Number of ranks over which an exchange has divided the attention heads before.
    """

    shapes: Shapes
    axis: str = CONTEXT
    head_split: Array | float = 1.0

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Run attention of a chain, with what is sent before, beside and after it."""
        raise NotImplementedError

    @property
    def saved_bytes(self) -> Array | float:
        """The bytes that a block saves in addition to what attention saves of whole sequences."""
        return 0.0

    @property
    def kept_bytes(self) -> Array | float:
        """The bytes that a block keeps of these where every second product is formed again."""
        return 0.0

    @property
    def n_tables(self) -> Array | float:
        """The number of tables of whole sequences that a rank holds in the place of one."""
        return 1.0

    @property
    def working_bytes(self) -> Array:
        """The bytes of the buffers that attention of one block holds at most."""
        raise NotImplementedError

    @cached_property
    def n_ranks(self) -> Array:
        """The number of ranks that share a sequence."""
        return self.shapes.table.size(self.axis)

    @property
    def is_split(self) -> Array:
        """Whether several ranks share a sequence (1) or one rank has it alone (0)."""
        return (self.n_ranks > 1).astype(np.float64)

    @property
    def query_bytes(self) -> Array:
        """The bytes of the rank's queries."""
        return self._bytes_of(self.shapes.model.query_width)

    @property
    def key_bytes(self) -> Array:
        """The bytes of the rank's keys."""
        return self._bytes_of(self.shapes.model.key_width)

    @property
    def value_bytes(self) -> Array:
        """The bytes of the rank's values."""
        return self._bytes_of(self.shapes.model.value_width)

    @property
    def output_bytes(self) -> Array:
        """The bytes of attention's output for the rank's queries."""
        elements = self.shapes.linears["proj"].input_bytes / self.shapes.element_bytes
        return elements * self.shapes.attention_element_bytes

    @property
    def all_key_value_bytes(self) -> Array:
        """The bytes of the keys and values of the whole sequence for the rank's heads."""
        return (self.key_bytes + self.value_bytes) * self.n_ranks

    def _bytes_of(self, width: int) -> Array:
        """Return the bytes of the rank's tokens with the rank's share of some width."""
        shapes = self.shapes
        return shapes.tokens * (width * shapes.attention_element_bytes) / shapes.y

    def _kernel(self, chain: str, window: int, n_sequences: Size, seq_len: Size) -> Attention:
        """Return fused attention with the rank's heads."""
        kernel = Attention(
            attention_name(chain, window),
            n_sequences,
            self.shapes.n_heads / self.head_split,
            seq_len,
            self.shapes.attention_dim,
            backward=chain == BACKWARD,
            fused=True,
            window=window,
            number_format=self.shapes.attention_format,
            dropout=self.shapes.job.drops_scores_within_attention,
        )
        return of_samples(kernel, self.shapes.job)


class WholeSequences(ContextParallelism):
    """Every rank has whole sequences."""

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Run attention of whole sequences."""
        whole_attention(host, self.shapes, chain, window)

    @property
    def working_bytes(self) -> Array:
        """The bytes of buffers, which are zero because nothing is sent."""
        return np.zeros(len(self.shapes.table))


class Ring(ContextParallelism):
    """Keys and values travel around a ring of ranks while each step of attention computes.

    Every step does the work of a causal sequence as long as the rank's part. One of them meets the
    rank's own keys and has the mask. The others meet the first half of another rank's keys, or meet
    all of them with the second half of the queries.
    """

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Run as many steps as there are ranks, and send beside them.

        The forward pass begins with the masked step; each step but the last one sends keys and
        values on. The backward pass ends with it: the first step sends keys and values, the last
        one the sums of their gradients, the others both. No ring splits attention with a window.

        Kernels sum the denominators of the softmax; all but the last of them run beside the steps.
        After the last one, a kernel of its own adds each step's output. In the backward pass every
        rank launches three kernels for each step, which sum dQ, dK and dV (flash_attn_fwd_* and
        `backward` of AttnFuncWithCPAndKVP2P).
        """
        masked = self._masked(chain, window)
        if window:
            host.launch(masked)
            return
        name = masked.name
        n_ends = self.is_split
        n_inner = np.maximum(self.n_ranks - 2.0, 0.0)
        inner = replace(masked, name=f"{name}.ring", n_launches=n_inner, masked=False)
        end = replace(masked, name=f"{name}.end", n_launches=n_ends, masked=False)
        sent_bytes = self.key_bytes + self.value_bytes
        host.memory_bound(f"{name}.pack", self.is_split * _COPY * sent_bytes, "copy")
        if chain == BACKWARD:
            self._beside_messages(host, end, n_ends, sent_bytes)
            self._beside_messages(host, inner, n_inner, 2.0 * sent_bytes)
            self._beside_messages(host, masked, n_ends, sent_bytes)
            summed_bytes, n_sums = self._gradient_sum_bytes, 3.0 * self.n_ranks
        else:
            self._beside_messages(host, masked, n_ends, sent_bytes)
            self._beside_messages(host, inner, n_inner, sent_bytes)
            host.launch(end)
            summed_bytes, n_sums = self._output_sum_bytes, self.n_ranks + 1.0
        n_kernels = np.where(self.n_ranks > 1, n_sums, 1.0)
        sums = self.is_split * summed_bytes
        host.memory_bound(f"{name}.sum", sums, "add", n_kernels, n_issues=1.0)

    def _masked(self, chain: str, window: int) -> Attention:
        """Return the step that meets the rank's own keys; with a window there is no other."""
        n_sequences, seq_len = self.shapes.table.sequences_at_once, self.shapes.job.seq_len
        if window:
            return self._kernel(chain, window, n_sequences / self.n_ranks, seq_len)
        return self._kernel(chain, 0, n_sequences, seq_len / self.n_ranks)

    @property
    def _output_sum_bytes(self) -> Array:
        """The bytes moved by the sums of outputs on the last rank, whose queries take every step.

        The output of the first step is scaled into the sum, and each other one is added.
        """
        return (_COPY + _ADD * (self.n_ranks - 1.0)) * self.output_bytes

    @property
    def _gradient_sum_bytes(self) -> Array:
        """The bytes moved by the sums of gradients, on the first or the last rank.

        In all steps but the masked one, the last rank has gradients of all of its queries and of
        half of another rank's keys, and the first rank of half of its queries and of all of those
        keys. Each part of a sum begins with a copy. The masked step has all of both, and is the
        first in which the first rank has its other queries, and in which anyone has the other half
        of its keys.
        """
        queries, keys = self.query_bytes, self.key_bytes + self.value_bytes
        inner_steps = np.maximum(self.n_ranks - 2.0, 0.0)
        half_copy, half_add = _COPY / 2.0, _ADD / 2.0
        last = (_COPY + _ADD + inner_steps * _ADD) * queries
        last = last + (half_copy + _ADD + inner_steps * half_add) * keys
        first = (half_copy + (half_copy + half_add) + inner_steps * half_add) * queries
        first = first + (_COPY + (half_add + half_copy) + inner_steps * _ADD) * keys
        return np.maximum(first, last)

    def _beside_messages(
        self, host: HostProgram, steps: Attention, n_messages: Array, message_bytes: Array
    ) -> None:
        """Run steps of attention while messages go to the next rank, and wait for these."""
        sent = names.send_recv(steps.name)
        host.issue(sent, "send_recv", n_messages * message_bytes, self.axis, n_messages)
        host.launch(steps)
        host.wait(sent)

    @property
    def working_bytes(self) -> Array:
        """The bytes of all steps' keys, values and outputs, which are kept to the last step."""
        return self.is_split * (self.all_key_value_bytes + self.n_ranks * self.output_bytes)


class AllGather(ContextParallelism):
    """Keys and values are gathered before attention; nothing hides the gather."""

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Gather, put the chunks in order, and run a kernel for each of the rank's two chunks.

        The outputs of the chunks are copied into one, and so are the gradients of their queries.
        The backward pass gathers again. It adds the gradients of both chunks to cleared sums, puts
        these back into the order of the ranks, and scatters them.
        """
        n_chunks = 1.0 + self.is_split
        n_sequences = self.shapes.table.sequences_at_once / (self.n_ranks * n_chunks)
        kernel = self._kernel(chain, window, n_sequences, self.shapes.job.seq_len)
        name = kernel.name
        everything = self.all_key_value_bytes
        host.run(names.all_gather(name), "all_gather", everything, self.axis, 2.0)
        host.memory_bound(f"{name}.order", self.is_split * _COPY * everything, "copy")
        host.launch(replace(kernel, n_launches=n_chunks))
        joined_bytes = (1.0 + _COPY) * self.output_bytes  # it is cleared before
        if chain == BACKWARD:
            joined_bytes = _COPY * self.query_bytes
        host.memory_bound(f"{name}.join", self.is_split * joined_bytes, "copy")
        if chain == BACKWARD:
            summed_bytes = (1.0 + _ADD + _COPY) * everything
            host.memory_bound(f"{name}.sum", self.is_split * summed_bytes, "add")
            host.run(names.reduce_scatter(name), "reduce_scatter", everything, self.axis, 2.0)

    @property
    def working_bytes(self) -> Array:
        """The bytes of what is gathered, of its gradient, and of one chunk's part of this."""
        return self.is_split * 3.0 * self.all_key_value_bytes


class Ulysses(ContextParallelism):
    """Tokens are exchanged for heads: attention sees whole sequences with a part of the heads.

    Jacobs et al., arXiv 2309.14509.
    """

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Exchange the queries, keys and values, run attention, and exchange its output.

        The backward pass exchanges the gradient of the output before attention, and the gradients
        of queries, keys and values after it.
        """
        name = attention_name(chain, window)
        inputs = (("q", self.query_bytes), ("k", self.key_bytes), ("v", self.value_bytes))
        output = (("out", self.output_bytes),)
        before, after = (output, inputs) if chain == BACKWARD else (inputs, output)
        self._exchange(host, name, before, splits_heads=True)
        self._attend_with_part_of_heads(host, chain, window)
        self._exchange(host, name, after, splits_heads=False)

    def _attend_with_part_of_heads(self, host: HostProgram, chain: str, window: int) -> None:
        """Run attention over the tokens of all ranks of the group, with the rank's heads."""
        shapes = self.shapes
        kernel = self._kernel(chain, window, shapes.table.sequences_at_once, shapes.job.seq_len)
        host.launch(replace(kernel, n_heads=shapes.n_heads / self.n_ranks))

    def _exchange(
        self,
        host: HostProgram,
        name: str,
        tensors: Collection[tuple[str, Array]],
        splits_heads: bool,
    ) -> None:
        """Exchange tensors; meanwhile the next one is packed and the one before unpacked.

        The copy that parts the heads of ranks, or joins them again, moves an axis, so that it
        handles one element at a time. The other copy puts whole chunks of tokens in order.
        """
        for tensor, nbytes in tensors:
            copied = self.is_split * _COPY * nbytes
            strided = splits_heads * copied
            host.memory_bound(f"{name}.{tensor}.pack", copied, "copy", strided_bytes=strided)
            host.issue(names.all_to_all(f"{name}.{tensor}"), "all_to_all", nbytes, self.axis)
        for tensor, nbytes in tensors:
            host.wait(names.all_to_all(f"{name}.{tensor}"))
            copied = self.is_split * _COPY * nbytes
            strided = (not splits_heads) * copied
            host.memory_bound(f"{name}.{tensor}.unpack", copied, "copy", strided_bytes=strided)

    @property
    def saved_bytes(self) -> Array:
        """The bytes of the output before its exchange; the projection saves it after that."""
        return self.is_split * self.output_bytes

    @property
    def working_bytes(self) -> Array:
        """The bytes of four copies of dQ, dK and dV, and of dO before and after its exchange."""
        inputs = self.query_bytes + self.key_bytes + self.value_bytes
        return self.is_split * (4.0 * inputs + 2.0 * self.output_bytes)


class UlyssesInTurn(Ulysses):
    """Tensors are exchanged one after another, and each exchange is awaited at once.

    Where there are fewer KV heads than ranks, the heads are copied first, so that each rank gets
    one (DeepSpeed 0.19, runtime/sequence_parallel/ulysses_sp.py).
    """

    @property
    def key_bytes(self) -> Array:
        """The bytes of the rank's keys, with copies of their heads."""
        return super().key_bytes * self._n_copies

    @property
    def value_bytes(self) -> Array:
        """The bytes of the rank's values, with copies of their heads."""
        return super().value_bytes * self._n_copies

    @property
    def _n_copies(self) -> Array:
        """The number of ranks that have the same KV head."""
        return np.maximum(self.n_ranks / self.shapes.model.n_kv_heads, 1.0)

    def _exchange(
        self,
        host: HostProgram,
        name: str,
        tensors: Collection[tuple[str, Array]],
        splits_heads: bool,
    ) -> None:
        """Pack, exchange and unpack one tensor after another."""
        for tensor in tensors:
            super()._exchange(host, name, (tensor,), splits_heads)

    @property
    def saved_bytes(self) -> Array:
        """The bytes of the output before its exchange, and of the copies of keys and values."""
        copies = self.key_bytes + self.value_bytes - super().key_bytes - super().value_bytes
        return super().saved_bytes + self.is_split * copies

    @property
    def working_bytes(self) -> Array:
        """The bytes of dQ, dK and dV, of dQ once packed and once received, and of dO."""
        inputs = self.query_bytes + self.key_bytes + self.value_bytes
        return self.is_split * (inputs + 2.0 * self.query_bytes + self.output_bytes)


class UlyssesRing(Ulysses):
    """Neighbours exchange tokens for heads; each then sends its keys and values around a ring.

    Fang and Zhao, arXiv 2405.07719 (USP); cp_comm_type a2a+p2p in Transformer Engine. A rank has as
    many bytes of queries, keys and values after the exchange as before.
    """

    @cached_property
    def _ring(self) -> Ring:
        """The ring of the ranks that have the same heads."""
        return Ring(self.shapes, RING_AXIS, head_split=self.n_ranks)

    def _attend_with_part_of_heads(self, host: HostProgram, chain: str, window: int) -> None:
        """Run the steps of the ring."""
        self._ring.attend(host, chain, window)

    @property
    def working_bytes(self) -> Array:
        """The bytes of the ring's buffers and of dO twice, or, if more, of the exchange's."""
        in_ring = self._ring.working_bytes + self.is_split * 2.0 * self.output_bytes
        return np.maximum(in_ring, super().working_bytes)


def context_axes(kind: str) -> tuple[str, ...]:
    """Return the axes whose ranks share a sequence, the fastest varying first."""
    return (EXCHANGE_AXIS, RING_AXIS) if kind == ULYSSES_RING else (CONTEXT,)


def context_parallelism(kind: str, shapes: Shapes) -> ContextParallelism:
    """Return a kind of context parallelism, one of `CONTEXT_KINDS`, with its sizes.

    Without a kind every rank has whole sequences.
    """
    if not kind:
        return WholeSequences(shapes)
    if kind == ULYSSES_RING:
        return UlyssesRing(shapes, EXCHANGE_AXIS)
    kinds: dict[str, type[ContextParallelism]] = {
        RING: Ring,
        ALL_GATHER: AllGather,
        ULYSSES: Ulysses,
    }
    return kinds[kind](shapes)


def broken_context_rules(
    kind: str,
    model: Model,
    job: Job,
    placements: Placements,
    head_axis: str,
    copies_kv_heads: bool = False,
) -> dict[str, np.ndarray]:
    """Return, for each rule of a kind, which placements break it, shape (P,).

    `head_axis` splits the attention heads, too; it may be empty. `copies_kv_heads` says whether
    several ranks may have copies of a head's keys and values.
    """
    axes = context_axes(kind)
    context = placements.size("*".join(axes))
    broken = {
        "sequence not divisible by twice context": (context > 1)
        & (job.seq_len % (2 * context) != 0),
        "unfused attention of split sequences": (context > 1) & (job.attention == "unfused"),
    }
    if kind in (ULYSSES, ULYSSES_RING):
        group = "*".join(filter(None, (head_axis, axes[0])))
        n_ranks = placements.size(group)
        is_copied = copies_kv_heads & (n_ranks % model.n_kv_heads == 0)
        broken[f"attention heads not divisible by {group}"] = model.n_heads % n_ranks != 0
        broken[f"KV heads not divisible by {group}"] = (
            model.n_kv_heads % n_ranks != 0
        ) & ~is_copied
    if kind in (RING, ULYSSES_RING) and model.window:
        reason = "sliding windows of sequences that a ring splits"
        broken[reason] = placements.size(axes[-1]) > 1
    return broken
