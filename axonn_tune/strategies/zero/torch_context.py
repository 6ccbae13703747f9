"""Context parallelism as torch has it: one gather of keys and values, and sums in fp32.

torch 2.13, distributed/tensor/experimental/_context_parallel/_attention.py, whose messages are
recorded in a test, and whose kernels are counted here: `_templated_ring_attention` and
`_templated_ring_attention_backward`, with the default `_AllGatherRotater`. A test traces what
torch.compile makes of them, too. Both functions were the same in torch 2.6.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.names import BACKWARD
from axonn_tune.spec.plan import Array
from axonn_tune.strategies.context import AllGather, Ring
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES

# Each constant is the number of bytes that a kernel reads and writes for one element.
# Keys and values are joined to one buffer before each step but the last, although they are gathered
# once.
_JOIN = 4.0
# The first step's output is converted to fp32, and the sum of all steps to bf16 at the end.
_CONVERT = 6.0
# A later step's output is converted to fp32 (6). Its difference from the sum is formed (12),
# multiplied by the new step's share of the softmax (8), and subtracted from the sum (12).
_MERGE = 38.0
# Sums of gradients in fp32 are cleared.
_CLEAR = 4.0
# A gradient is added to the whole sum (10), or to a half of it (5), after which both halves are
# joined again (8).
_ADD, _ADD_HALF = 10.0, 13.0
# The sums for keys and values are joined to one buffer after each step.
_JOIN_SUMS = 8.0
# The compiler has one kernel that sums all outputs, all in 16 bits, and another one that sums the
# gradients of queries. Each reads or writes this many bytes for each element of each tensor.
_FUSED = 2.0
# In compiled code the first step's gradients of keys and values are converted to fp32 in the
# message, and the last message received is converted to bf16.
_COMPILED_CONVERT = 6.0
# In compiled code a gradient is added to half of a message (5). The whole message is copied on the
# way, and both halves are joined afterwards.
_COMPILED_ADD_HALF = 22.0


@dataclass(frozen=True, eq=False)
class TorchRing(Ring):
    """Keys and values are gathered during the first step; sums of gradients travel in a ring.

    `key_copies` says how often the model repeats each KV head before attention.
    """

    key_copies: float = 1.0

    @property
    def key_bytes(self) -> Array:
        """The bytes of the rank's keys, with copies of their heads."""
        return super().key_bytes * self.key_copies

    @property
    def value_bytes(self) -> Array:
        """The bytes of the rank's values, with copies of their heads."""
        return super().value_bytes * self.key_copies

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Run as many steps as there are ranks, of which the first one has the mask.

        In the backward pass each step sends sums of gradients on, which the next step awaits. The
        kernels are those of the last rank, all of whose later steps have half of the keys.
        """
        masked = self._masked(chain, window)
        if window:
            host.launch(masked)
            return
        name = masked.name
        n_later = self.n_ranks - 1.0
        keys_values = self._keys_values
        n_joins = np.maximum(n_later, 1.0)
        host.memory_bound(f"{name}.pack", n_later * _JOIN * keys_values, "copy", n_joins)
        gather = names.all_gather(name)
        host.issue(gather, "all_gather", self.all_key_value_bytes, self.axis)
        host.launch(masked)
        host.wait(gather)
        later = replace(masked, name=f"{name}.ring", n_launches=n_later, masked=False)
        if chain != BACKWARD:
            host.launch(later)
            outputs = self.output_bytes / self.shapes.attention_element_bytes
            merged = self.is_split * 2.0 * _CONVERT + n_later * _MERGE
            host.memory_bound(f"{name}.sum", merged * outputs, "add", 2.0 + 4.0 * n_later)
            return
        sums_bytes = FP32_BYTES * keys_values
        self._beside_messages(host, later, n_later, sums_bytes)
        last = names.send_recv(f"{name}.last")
        host.run(last, "send_recv", self.is_split * sums_bytes, self.axis)
        queries = self.query_bytes / self.shapes.attention_element_bytes
        of_keys = _CLEAR + _ADD + n_later * _ADD_HALF + self.n_ranks * _JOIN_SUMS + _CONVERT
        of_queries = _CLEAR + self.n_ranks * _ADD + _CONVERT
        nbytes = self.is_split * (of_keys * keys_values + of_queries * queries)
        host.memory_bound(f"{name}.sum", nbytes, "add", 6.0 + 7.0 * self.n_ranks)

    @property
    def n_tables(self) -> Array:
        """Two where ranks share sequences: `context_parallel` restores a table from its copy.

        Within the step the table is as short as the rank's part, but its memory is not released.
        """
        return 1.0 + self.is_split

    @property
    def _keys_values(self) -> Array:
        """The number of elements of the rank's own keys and values."""
        return (self.key_bytes + self.value_bytes) / self.shapes.attention_element_bytes

    @property
    def working_bytes(self) -> Array:
        """The bytes of all ranks' keys and values, of sums of gradients, and of their messages."""
        queries = self.query_bytes / self.shapes.attention_element_bytes
        sums = FP32_BYTES * (3.0 * self._keys_values + queries)
        return self.is_split * (self.all_key_value_bytes + sums)


@dataclass(frozen=True, eq=False)
class CompiledRing(TorchRing):
    """The same steps in a block that torch.compile has traced.

    A traced message is awaited as soon as it has been sent (distributed/_functional_collectives.py,
    _maybe_wrap_tensor), and inductor moves no message beside a kernel unless it is told to
    (_inductor/config.py, reorder_for_compute_comm_overlap). Nothing overlaps, therefore. The
    backward pass reads what the forward pass or its recomputation has gathered, which stays until
    then. Its kernels of attention all run before the first message, and their results wait for the
    messages of the steps before them.
    """

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Run all steps, with the gather before them or the messages of their sums after them."""
        masked = self._masked(chain, window)
        if window:
            host.launch(masked)
            return
        name, element_bytes = masked.name, self.shapes.attention_element_bytes
        n_later, keys_values = self.n_ranks - 1.0, self._keys_values
        later = replace(masked, name=f"{name}.ring", n_launches=n_later, masked=False)
        if chain != BACKWARD:
            host.memory_bound(f"{name}.pack", self.is_split * _JOIN * keys_values, "copy")
            gathered = self.is_split * self.all_key_value_bytes
            host.run(names.all_gather(name), "all_gather", gathered, self.axis)
            host.launch(masked)
            host.launch(later)
            nbytes = self._fused_bytes(self.output_bytes / element_bytes)
            host.memory_bound(f"{name}.sum", nbytes, "add")
            return
        host.launch(masked)
        host.launch(later)
        of_keys = 2.0 * _COMPILED_CONVERT + n_later * _COMPILED_ADD_HALF
        of_queries = self._fused_bytes(self.query_bytes / element_bytes)
        nbytes = self.is_split * of_keys * keys_values + of_queries
        message = names.send_recv(name)
        sums_bytes = self.is_split * self.n_ranks * FP32_BYTES * keys_values
        host.issue(message, "send_recv", sums_bytes, self.axis, self.n_ranks)
        host.wait(message)
        host.memory_bound(f"{name}.sum", nbytes, "add", 2.0 + 4.0 * self.n_ranks)

    def _fused_bytes(self, elements: Array) -> Array:
        """Return the bytes that one kernel moves to sum what all steps have formed."""
        return self.is_split * _FUSED * (self.n_ranks + 1.0) * elements

    @property
    def saved_bytes(self) -> Array:
        """The bytes of all ranks' keys and values."""
        return self.is_split * self.all_key_value_bytes

    @property
    def kept_bytes(self) -> Array:
        """The same bytes, since nothing that is not a product is formed again for them."""
        return self.saved_bytes

    @property
    def working_bytes(self) -> Array:
        """The bytes that the first rank holds once attention has run and nothing has been sent.

        These are the gradients of every step. After the first one, the rank has half of its queries
        and all of other ranks' keys and values in each. With two ranks, the first message and what
        comes in return for it need more than the keys and values that have been gathered, and that
        attention has read by then.
        """
        n_later = self.n_ranks - 1.0
        of_keys = self.n_ranks * (self.key_bytes + self.value_bytes)
        gradients = of_keys + (1.0 + 0.5 * n_later) * self.query_bytes
        messages = 2.0 * FP32_BYTES * self._keys_values
        beyond_gathered = np.maximum(messages - self.all_key_value_bytes, 0.0)
        return self.is_split * (gradients + self.all_key_value_bytes + beyond_gathered)


@dataclass(frozen=True, eq=False)
class FlexGather(AllGather):
    """Keys and values are gathered along the first dimension, and one kernel has a mask of blocks.

    The mask knows in which order the ranks' tokens come, so that nothing orders keys and values,
    and autograd scatters sums of their gradients. What was gathered is saved, unless selective
    recomputation gathers it again (torchtitan b5bcd76c, models/common/decoder_sharding.py,
    set_gqa_inner_attention_local_map, and distributed/activation_checkpoint.py, comm_ops).
    """

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Gather where it has not been done, attend, and scatter sums of gradients."""
        n_sequences = self.shapes.table.sequences_at_once / self.n_ranks
        kernel = self._kernel(chain, window, n_sequences, self.shapes.job.seq_len)
        everything = self.all_key_value_bytes
        if chain != BACKWARD or self.shapes.recomputes_by_product:
            name = names.all_gather(kernel.name)
            host.run(name, "all_gather", everything, self.axis, 2.0)
        host.launch(kernel)
        if chain == BACKWARD:
            name = names.reduce_scatter(kernel.name)
            host.run(name, "reduce_scatter", everything, self.axis, 2.0)

    @property
    def saved_bytes(self) -> Array:
        """The bytes of gathered keys and values beside the rank's own."""
        return self.all_key_value_bytes * (1.0 - 1.0 / self.n_ranks)

    @property
    def working_bytes(self) -> Array:
        """The bytes of what is gathered, and of its gradients."""
        return self.is_split * 2.0 * self.all_key_value_bytes
