"""The price of a rehearsed step on a machine, operation by operation.

A rehearsal knows what was issued, not what waited for what. So the step lies between two bounds:
all communication that can be hidden is hidden, or none is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from axonn_tune.cost.prices import KernelPrices, group_seconds
from axonn_tune.errors import InputError
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Attention, Compute, Gemm, MemoryBound, number
from axonn_tune.spec.precision import BYTES_PER_ELEMENT
from axonn_tune.spec.rehearsal import (
    FusedAttention,
    Message,
    OtherKernel,
    Product,
    Rehearsal,
    Rehearsed,
)

# The kernels of a profile by torch's names; all others are priced as copies.
_KERNELS = {
    "add": "add",
    "add_": "add",
    "mul": "scale",
    "mul_": "scale",
    "div": "scale",
    "div_": "scale",
    "_foreach_mul_": "scale",
    "sum": "reduce",
    "mean": "reduce",
    "linalg_vector_norm": "reduce",
    "_foreach_norm": "reduce",
    "embedding": "lookup",
    "index_select": "lookup",
    "embedding_dense_backward": "scatter_add",
    "index_add_": "scatter_add",
    "scatter_add_": "scatter_add",
    "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm_backward",
    "rms_norm": "rms_norm",
    "rms_norm_backward": "rms_norm_backward",
    "_fused_rms_norm": "rms_norm",
    "_fused_rms_norm_backward": "rms_norm_backward",
    "gelu": "gelu",
    "gelu_backward": "gelu_backward",
    "_softmax": "softmax",
    "_log_softmax": "softmax",
    "_softmax_backward_data": "softmax_backward",
    "_log_softmax_backward_data": "softmax_backward",
    "_fused_adamw_": "optimizer",
    "_fused_adam_": "optimizer",
    "_fused_sgd_": "optimizer",
}
# Kinds of messages that a profile has no price for, and the kind that moves as many bytes.
_PRICED_AS = {"broadcast": "all_gather"}


@dataclass(frozen=True)
class PricedOperation:
    """Holds equal operations, with their number and the time of all of them."""

    operation: Rehearsed
    n_calls: int
    seconds: float


@dataclass(frozen=True)
class PricedRehearsal:
    """A rehearsed step with the time of its operations on a machine.

    host_seconds
        Time in which the host issues all operations.
    """

    rehearsal: Rehearsal
    machine: Machine
    operations: tuple[PricedOperation, ...]
    host_seconds: float

    @cached_property
    def compute_seconds(self) -> float:
        """The time of all kernels."""
        return sum(o.seconds for o in self.operations if not isinstance(o.operation, Message))

    @cached_property
    def group_seconds(self) -> dict[tuple[int, ...], float]:
        """The time of all messages of each group, by its ranks."""
        seconds: dict[tuple[int, ...], float] = defaultdict(float)
        for priced in self.operations:
            if isinstance(priced.operation, Message):
                seconds[priced.operation.ranks] += priced.seconds
        return dict(seconds)

    @property
    def communication_seconds(self) -> float:
        """The time of all messages, one after another."""
        return sum(self.group_seconds.values())

    @property
    def hidden_step_seconds(self) -> float:
        """The step time if kernels, each group's messages and the host's work all overlap."""
        return max(self.compute_seconds, self.host_seconds, *self.group_seconds.values(), 0.0)

    @property
    def exposed_step_seconds(self) -> float:
        """The step time if nothing is computed while a message is under way."""
        return max(self.compute_seconds, self.host_seconds) + self.communication_seconds

    @property
    def flops(self) -> float:
        """The FLOPs of products and of attention, which counts the full score matrix."""
        return sum(
            o.n_calls * o.operation.flops
            for o in self.operations
            if isinstance(o.operation, (Product, FusedAttention))
        )


def price(rehearsal: Rehearsal, machine: Machine) -> PricedRehearsal:
    """Return the time of each operation of a rehearsed step on a machine.

    Raises
    ------
    InputError
        The profile has no price for a type in which the program multiplies.
    """
    prices = _Prices(machine, rehearsal.n_ranks)
    operations = tuple(
        PricedOperation(operation, count, count * prices.seconds(operation))
        for operation, count in rehearsal.counts.items()
    )
    n_issued = sum(rehearsal.counts.values())
    host_seconds = n_issued * machine.kernels.issue_seconds.value
    return PricedRehearsal(rehearsal, machine, operations, host_seconds)


class _Prices:
    """The prices of operations on a machine, in whatever type they run."""

    def __init__(self, machine: Machine, n_ranks: int) -> None:
        self._machine = machine
        self._n_ranks = n_ranks
        self._of_dtype: dict[str, KernelPrices] = {}

    def seconds(self, operation: Rehearsed) -> float:
        """Return the time of one call."""
        if isinstance(operation, Message):
            kind = _PRICED_AS.get(operation.kind, operation.kind)
            n_ranks = len(operation.ranks)
            seconds = group_seconds(
                self._machine, kind, operation.stride, n_ranks, operation.nbytes
            )
            return float(seconds[0])
        return number(self._kernel_prices(operation).seconds(_kernel(operation)))

    def _kernel_prices(self, operation: Product | FusedAttention | OtherKernel) -> KernelPrices:
        dtype = operation.dtype
        if isinstance(operation, OtherKernel):
            # Bytes take equally long in any type; the profile's first type stands for one that it
            # lacks.
            known = (*self._machine.gpu.peak_flops_per_s, *BYTES_PER_ELEMENT)
            dtype = dtype if dtype in known else known[0]
        elif dtype not in BYTES_PER_ELEMENT:
            allowed = ", ".join(BYTES_PER_ELEMENT)
            raise InputError(f"the program multiplies in {dtype}; allowed: {allowed}")
        if dtype not in self._of_dtype:
            job = Job(self._n_ranks, 1, 1, dtype, kernel_tuning=False)
            self._of_dtype[dtype] = KernelPrices(self._machine, job)
        return self._of_dtype[dtype]


def _kernel(operation: Product | FusedAttention | OtherKernel) -> Compute:
    """Return an operation as a step plan has it; a batch of products is one with all rows."""
    if isinstance(operation, Product):
        rows = float(operation.m * operation.batch)
        return Gemm("", rows, float(operation.n), float(operation.k), operation.mode)
    if isinstance(operation, FusedAttention):
        whole = 1.0 if operation.causal else 2.0  # a price is that of the causal half
        return Attention(
            "",
            whole * operation.n_sequences,
            float(operation.n_heads),
            operation.seq_len,
            operation.head_dim,
            backward=operation.backward,
            fused=True,
            masked=operation.causal,
        )
    nbytes = float(operation.nbytes)
    kernel = _KERNELS.get(operation.name, "copy")
    return MemoryBound("", nbytes, kernel, strided_bytes=nbytes if operation.is_strided else 0.0)
