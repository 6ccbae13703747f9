"""The kernels of low-rank adapters beside frozen weights (LoRA), and what a rank holds of them.

The adapter of a layer has two products, A and B (`spec.tuning.Adapters`). The ranks that split the
layer split both of them, as Megatron-Bridge does (067f987d, peft/utils.py,
`ParallelLinearAdapter`): by their columns, and A by its rows instead where the layer splits its
input. The few hidden features between A and B are brought together, or summed. A layer whose output
is summed takes all columns of its adapter's output, which are gathered; with sequence parallelism
each rank then keeps its tokens.

Both products and all that lies between run in the job's type, whatever the precision of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.names import BACKWARD
from axonn_tune.spec.plan import Array, Size
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import MASK_BYTES, LinearShape, Shapes


@dataclass(frozen=True, eq=False)
class AdapterShape:
    """The sizes that the adapter of one layer has on one rank, arrays of shape (C,).

    Attributes
    ----------
    layer
        The sizes of the layer.
    rank
        Number of hidden features.
    hidden
        Number of columns of A that the rank holds.
    n
        Number of columns of B that the rank holds.
    """

    layer: LinearShape
    rank: float
    hidden: Size
    n: Array

    @property
    def sums_hidden(self) -> bool:
        """Whether ranks sum the hidden features, since they split the rows of A."""
        return self.layer.linear.transposed


@dataclass(frozen=True, eq=False)
class AdapterPasses:
    """The passes over the adapters of a block."""

    shapes: Shapes

    def forward(self, host: HostProgram, chain: str, layer: str) -> None:
        """Form the output of a layer's adapter, if it has one, and add it to the layer's output."""
        adapter = self._of(layer)
        if adapter is None:
            return
        owner = names.of_layer(chain, layer)
        inner, outer = names.adapter_in(owner), names.adapter_out(owner)
        tokens = adapter.layer.tokens
        self._drop(host, inner, adapter)
        host.gemm(names.gemm(inner), tokens, adapter.hidden, adapter.layer.k, "NN")
        kind = "all_reduce" if adapter.sums_hidden else "all_gather"
        name = names.collective(inner, kind)
        host.run(name, kind, self._hidden_bytes(adapter), self.shapes.y_axis)
        host.gemm(names.gemm(outer), tokens, adapter.n, adapter.rank, "NN")
        if adapter.sums_hidden:
            self._exchange(host, outer, adapter)
        self._scale(host, outer, adapter)
        host.memory_bound(names.adapter_sum(owner), 3.0 * self._output_bytes(adapter), "add")

    def backward(self, host: HostProgram, layer: str) -> None:
        """Form the gradients of A, B and the adapter's input, if the layer has an adapter.

        The gradient of the hidden features is summed while that of B is formed.
        """
        adapter = self._of(layer)
        if adapter is None:
            return
        owner = names.of_layer(BACKWARD, layer)
        inner, outer = names.adapter_in(owner), names.adapter_out(owner)
        tokens, k = adapter.layer.tokens, adapter.layer.k
        self._scale(host, outer, adapter)
        if adapter.sums_hidden and np.any(np.asarray(self.shapes.residual_split) > 1.0):
            self._exchange(host, outer, adapter)
        host.gemm(names.gemm_input(outer), tokens, adapter.rank, adapter.n, "NT")
        name, axis = names.all_reduce(outer), self.shapes.y_axis
        host.issue(name, "all_reduce", self._hidden_bytes(adapter), axis)
        host.gemm(names.gemm_weight(outer), adapter.rank, adapter.n, tokens, "TN")
        if axis:
            host.wait(name)
        host.gemm(names.gemm_input(inner), tokens, k, adapter.hidden, "NT")
        host.gemm(names.gemm_weight(inner), k, adapter.hidden, tokens, "TN")
        self._drop(host, inner, adapter)
        host.memory_bound(names.adapter_sum(owner), 3.0 * adapter.layer.input_bytes, "add")

    def _of(self, layer: str) -> AdapterShape | None:
        """Return the sizes of a layer's adapter; None if the layer has none."""
        adapters = self.shapes.job.adapters
        if adapters is None or not adapters.are_beside(layer):
            return None
        shape = self.shapes.linears[layer]
        split = self.shapes.y
        is_transposed = shape.linear.transposed
        return AdapterShape(
            shape,
            rank=float(adapters.rank),
            hidden=np.full(len(split), float(adapters.rank)) / (1.0 if is_transposed else split),
            n=shape.n / split if is_transposed else shape.n,
        )

    def _hidden_bytes(self, adapter: AdapterShape) -> Array:
        """Return the bytes of all hidden features."""
        return adapter.layer.tokens * (adapter.rank * self.shapes.element_bytes)

    def _output_bytes(self, adapter: AdapterShape) -> Array:
        """Return the bytes of the adapter's output where it is added to the layer's."""
        split = self.shapes.residual_split if adapter.sums_hidden else 1.0
        return adapter.layer.output_bytes / split

    def _exchange(self, host: HostProgram, owner: str, adapter: AdapterShape) -> None:
        """Bring all columns of the output together, or exchange columns for tokens."""
        nbytes = adapter.layer.output_bytes
        kind = "all_gather"
        if self.shapes.exchanges_adapters:
            kind, nbytes = "all_to_all", nbytes / self.shapes.y
        host.run(names.collective(owner, kind), kind, nbytes, self.shapes.y_axis)

    def _scale(self, host: HostProgram, owner: str, adapter: AdapterShape) -> None:
        """Scale the adapter's output, or its gradient."""
        host.memory_bound(names.scaled(owner), 2.0 * self._output_bytes(adapter), "scale")

    def _drop(self, host: HostProgram, owner: str, adapter: AdapterShape) -> None:
        """Drop elements of the adapter's input, or of its gradient, by a mask of a byte each."""
        adapters = self.shapes.job.adapters
        if adapters is not None and adapters.dropout:
            n_passes = 2.0 + MASK_BYTES / self.shapes.element_bytes
            nbytes = n_passes * adapter.layer.input_bytes
            host.memory_bound(names.dropped(owner), nbytes, "scale")
