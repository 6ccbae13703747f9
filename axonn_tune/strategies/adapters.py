"""The kernels of low-rank adapters beside frozen weights (LoRA), and what a rank holds of them.

The adapter of a layer has two products, A and B (`spec.tuning.Adapters`). The ranks of a tensor
group that split the layer also split A and B, as Megatron-Bridge does (067f987d, peft/utils.py,
`ParallelLinearAdapter`): both by their columns, except that A is split by its rows where the layer
splits its input. The few hidden features between A and B are gathered, or summed. A layer whose
output is summed needs all columns of its adapter's output, so that these are gathered; with
sequence parallelism each rank then keeps its own tokens. A message holds the columns of one rank
after those of another, so that a kernel joins what was gathered, and the backward pass copies a
rank's columns out of the gradient (Megatron-LM d98e8a64, core/tensor_parallel/mappings.py,
`_gather_along_last_dim` and `_split_along_last_dim`).

With FSDP, B of such a layer is instead split by its rows. A rank then takes only its part of the
hidden features, and its product is summed together with its part of the layer's output
(NeMo-Automodel, components/distributed/parallel_styles.py, `RowwiseParallelLora`).

On AxoNN's grid, the rows of A are split as those of the layer's weight are, and the columns of B as
its columns. The hidden features are summed over the axis that splits the rows, and their gradient
over the axis that splits the columns. Z splits neither A nor B.

Both products and all that lies between run in the job's type, whatever the precision of the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.names import BACKWARD
from axonn_tune.spec.plan import Array, Size
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import MASK_BYTES, LinearShape, Shapes


class AdapterShape(NamedTuple):
    """The sizes that the adapter of one layer has on one rank, arrays of shape (C,).

    Attributes
    ----------
    layer
        The sizes of the layer.
    rank
        Number of hidden features that the rank's second product reads, and so of its rows of B.
    hidden
        Number of columns of A that the rank holds.
    n
        Number of columns of B that the rank holds.
    hidden_kind, gradient_kind
        Kinds of the collectives that exchange the hidden features, and the gradient of these.
    hidden_axis, gradient_axis
        Axes over which these collectives run.
    splits_more
        Whether ranks split the columns of B although each of them needs all columns of the output.
    """

    layer: LinearShape
    rank: Size
    hidden: Size
    n: Array
    hidden_kind: str
    gradient_kind: str
    hidden_axis: str
    gradient_axis: str
    splits_more: bool = False

    @property
    def parameters(self) -> Array:
        """The number of elements of A and B that the rank computes with."""
        return self.layer.k * self.hidden + self.rank * self.n


def adapter_shape(shapes: Shapes, layer: str) -> AdapterShape | None:
    """Return the sizes of a layer's adapter; None if the layer has none."""
    adapters = shapes.job.adapters
    if adapters is None or not shapes.job.has_adapter(layer):
        return None
    shape = shapes.linears[layer]
    rank = float(adapters.rank)
    whole = np.full(len(shapes.table), rank)
    split = whole / shapes.y
    summed = "all_reduce", "all_reduce"
    if shapes.x_axis:
        axes = shape.input_axis, shape.output_axis
        return AdapterShape(shape, rank, whole, shape.n, *summed, *axes)
    axes = shapes.y_axis, shapes.y_axis
    if not shape.linear.transposed:
        return AdapterShape(shape, rank, split, shape.n, "all_gather", "all_reduce", *axes)
    if shapes.sums_adapters:
        kinds = "reduce_scatter", "all_gather"
        return AdapterShape(shape, split, whole, shape.n, *kinds, *axes)
    return AdapterShape(shape, rank, whole, shape.n / shapes.y, *summed, *axes, splits_more=True)


def adapter_elements(shapes: Shapes, layers: Sequence[int]) -> Array:
    """Return how many parameters a rank has of the adapters beside some layers, shape (C,)."""
    total = np.zeros(len(shapes.table))
    for block, count in shapes.model.counts(layers).items():
        for linear in shapes.model.linears_of(block):
            adapter = adapter_shape(shapes, linear.name)
            if adapter is not None:
                total = total + count * adapter.parameters
    return total


@dataclass(frozen=True, eq=False)
class AdapterPasses:
    """The passes over the adapters of a block."""

    shapes: Shapes

    def forward(self, host: HostProgram, chain: str, layer: str) -> None:
        """Form the output of a layer's adapter, if it has one, and add it to the layer's output."""
        adapter = adapter_shape(self.shapes, layer)
        if adapter is None:
            return
        owner = names.of_layer(chain, layer)
        inner, outer = names.adapter_in(owner), names.adapter_out(owner)
        tokens = adapter.layer.tokens
        self._drop(host, inner, adapter)
        host.gemm(names.gemm(inner), tokens, adapter.hidden, adapter.layer.k, "NN")
        kind = adapter.hidden_kind
        name = names.collective(inner, kind)
        host.run(name, kind, self._hidden_bytes(adapter), adapter.hidden_axis)
        if self._copies_hidden(adapter):
            self._join(host, inner, self._hidden_bytes(adapter))
        host.gemm(names.gemm(outer), tokens, adapter.n, adapter.rank, "NN")
        if adapter.splits_more:
            self._exchange(host, outer, adapter)
            self._join(host, outer, self._exchanged_bytes(adapter))
        self._scale(host, outer, adapter)
        self._add(host, owner, self._output_bytes(adapter))

    def backward(self, host: HostProgram, layer: str) -> None:
        """Form the gradients of A, B and the adapter's input, if the layer has an adapter.

        The gradient of the hidden features is exchanged while the gradient of B is formed. On
        AxoNN's grid the gradient of the input need not wait for this exchange: it is formed from
        the rank's partial sum, and is itself summed together with the layer's gradient.
        """
        adapter = adapter_shape(self.shapes, layer)
        if adapter is None:
            return
        owner = names.of_layer(BACKWARD, layer)
        inner, outer = names.adapter_in(owner), names.adapter_out(owner)
        tokens, k = adapter.layer.tokens, adapter.layer.k
        self._scale(host, outer, adapter)
        if adapter.splits_more:
            self._exchange_gradient(host, outer, adapter)
        host.gemm(names.gemm_input(outer), tokens, adapter.rank, adapter.n, "NT")
        kind, axis = adapter.gradient_kind, adapter.gradient_axis
        name = names.collective(outer, kind)
        host.issue(name, kind, self._hidden_bytes(adapter), axis)
        host.gemm(names.gemm_weight(outer), adapter.rank, adapter.n, tokens, "TN")
        if axis and not self.shapes.x_axis:
            host.wait(name)
        if self._copies_hidden(adapter):
            self._part(host, inner, self._hidden_bytes(adapter) / self.shapes.y)
        host.gemm(names.gemm_input(inner), tokens, k, adapter.hidden, "NT")
        if axis and self.shapes.x_axis:
            host.wait(name)
        host.gemm(names.gemm_weight(inner), k, adapter.hidden, tokens, "TN")
        self._drop(host, inner, adapter)
        self._add(host, owner, adapter.layer.input_bytes)

    def _hidden_bytes(self, adapter: AdapterShape) -> Array:
        """Return the bytes of all hidden features."""
        adapters = self.shapes.job.adapters
        rank = 0.0 if adapters is None else float(adapters.rank)
        return adapter.layer.tokens * (rank * self.shapes.element_bytes)

    def _output_bytes(self, adapter: AdapterShape) -> Array:
        """Return the bytes of the adapter's output where it is added to the layer's."""
        split = self.shapes.residual_split if adapter.splits_more else 1.0
        return adapter.layer.output_bytes / split

    def _copies_hidden(self, adapter: AdapterShape) -> bool:
        """Return whether kernels join gathered hidden features, and part their gradient.

        DTensor's copies beside FSDP are not counted.
        """
        return adapter.hidden_kind == "all_gather" and not self.shapes.sums_adapters

    def _exchange(self, host: HostProgram, owner: str, adapter: AdapterShape) -> None:
        """Gather all columns of the output, or exchange columns for tokens."""
        kind = "all_to_all" if self.shapes.exchanges_adapters else "all_gather"
        nbytes = self._exchanged_bytes(adapter)
        host.run(names.collective(owner, kind), kind, nbytes, self.shapes.y_axis)

    def _exchange_gradient(self, host: HostProgram, owner: str, adapter: AdapterShape) -> None:
        """Bring a rank's columns of the output's gradient together for all tokens.

        Where columns were exchanged for tokens, kernels part those of the rank's own tokens for
        each rank, and one joins what comes back (Megatron-Bridge 067f987d, peft/utils.py,
        `_All2AllHp2Sp`). Otherwise all columns of all tokens are gathered, unless each rank has
        them, and one kernel copies the rank's own.
        """
        own_bytes = adapter.layer.output_bytes / self.shapes.y
        if self.shapes.exchanges_adapters:
            self._part(host, owner, own_bytes, self.shapes.y)
            self._exchange(host, owner, adapter)
            self._join(host, owner, own_bytes)
            return
        if self.shapes.residual_is_split:
            self._exchange(host, owner, adapter)
        self._part(host, owner, own_bytes)

    def _exchanged_bytes(self, adapter: AdapterShape) -> Array:
        """Return the bytes of a message with columns of the output, or of its gradient."""
        split = self.shapes.y if self.shapes.exchanges_adapters else 1.0
        return adapter.layer.output_bytes / split

    def _join(self, host: HostProgram, owner: str, nbytes: Array) -> None:
        """Join the parts that came from several ranks into one tensor of `nbytes`."""
        host.memory_bound(names.joined(owner), 2.0 * self._is_split * nbytes, "copy")

    def _part(self, host: HostProgram, owner: str, nbytes: Array, n_parts: Size = 1.0) -> None:
        """Copy `nbytes` of columns out of a gradient, in kernels that handle single elements."""
        copied = 2.0 * self._is_split * nbytes
        host.memory_bound(names.parted(owner), copied, "copy", n_parts, strided_bytes=copied)

    @property
    def _is_split(self) -> np.ndarray:
        """Whether ranks split the columns of adapters at all, shape (C,)."""
        return np.asarray(self.shapes.y) > 1.0

    def _scale(self, host: HostProgram, owner: str, adapter: AdapterShape) -> None:
        """Scale the adapter's output, or its gradient."""
        n_passes = np.where(self.shapes.adapters_are_fused, 0.0, 2.0)
        host.memory_bound(names.scaled(owner), n_passes * self._output_bytes(adapter), "scale")

    def _add(self, host: HostProgram, owner: str, nbytes: Array) -> None:
        """Add the adapter's output, or the gradient of its input, to that of the layer.

        Where a product adds its result itself, only the read of the tensor to which it adds counts.
        """
        n_passes = np.where(self.shapes.adapters_are_fused, 1.0, 3.0)
        host.memory_bound(names.adapter_sum(owner), n_passes * nbytes, "add")

    def _drop(self, host: HostProgram, owner: str, adapter: AdapterShape) -> None:
        """Drop elements of the adapter's input or its gradient, with a mask of a byte each."""
        adapters = self.shapes.job.adapters
        if adapters is not None and adapters.dropout:
            n_passes = 2.0 + MASK_BYTES / self.shapes.element_bytes
            nbytes = n_passes * adapter.layer.input_bytes
            host.memory_bound(names.dropped(owner), nbytes, "scale")
