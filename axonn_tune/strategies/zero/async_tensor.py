"""Torch's asynchronous tensor parallelism: messages in parts beside products, and their copies.

torch 2.13, distributed/_symmetric_memory/__init__.py: `_pipelined_multi_all_gather_and_consume`
copies a rank's own tokens to where the others read them, and `_fused_matmul_reduce_scatter_impl`
adds the parts that have come from all ranks. The compiler joins a gather with the products that
read it, and a sum with the one product that forms it (_inductor/fx_passes/micro_pipeline_tp.py), so
that gradients to which several products contribute are summed as usual.
"""

from __future__ import annotations

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.plan import Size
from axonn_tune.strategies.communication import Weight
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.sequence_parallel import SequenceParallel


class AsyncTensorParallel(SequenceParallel):
    """The communication within the tensor group, where messages may run beside products."""

    def gather_input(self, host: HostProgram, weight: Weight) -> None:
        """Copy the rank's own tokens to where the others read them, and start to gather."""
        shape = self.shapes.linears[weight.layer]
        if self._overlaps_products and self._gathers_tokens(shape):
            self._copy_own_part(host, names.all_gather(weight.name), shape.gathered_input_bytes)
        super().gather_input(host, weight)

    def sum_output(self, host: HostProgram, weight: Weight) -> None:
        """Reorder the gathered input that dW will read, or add the parts of a sum."""
        super().sum_output(host, weight)
        shape = self.shapes.linears[weight.layer]
        if not self._overlaps_products:
            return
        if self._gathers_tokens(shape) and self._keeps_gathered(weight):
            name = names.all_gather(weight.name)
            self._order_sequences(host, name, shape.gathered_input_bytes)
        elif shape.linear.transposed:
            size = self.shapes.table.size(self.shapes.y_axis)
            nbytes = np.where(size > 1, (1.0 + 1.0 / size) * self._sum_bytes(weight.layer), 0.0)
            host.memory_bound(f"{names.reduce_scatter(weight.name)}.add", nbytes, "add")

    def gather_for_gradients(self, host: HostProgram, weight: Weight) -> None:
        """Copy the rank's own gradients to where the others read them, and start to gather."""
        shape = self.shapes.linears[weight.layer]
        is_beside = self._overlaps_products and shape.linear.transposed
        if is_beside:
            self._copy_own_part(host, names.all_gather(weight.name), shape.gathered_gradient_bytes)
        super().gather_for_gradients(host, weight)

    def sum_input_gradient(self, host: HostProgram, weight: Weight) -> str:
        """Start to sum dI, and reorder the gathered gradient that dW will read."""
        awaited = super().sum_input_gradient(host, weight)
        shape = self.shapes.linears[weight.layer]
        is_beside = self._overlaps_products and shape.linear.transposed
        if is_beside and self.shapes.job.trains(weight.layer):
            name = names.all_gather(weight.name)
            self._order_sequences(host, name, shape.gathered_gradient_bytes)
        return awaited

    def _keeps_gathered(self, weight: Weight) -> bool:
        """Return whether dW is formed from what this chain has gathered."""
        forms_again = self.shapes.recompute == "full" or self.shapes.recomputes_by_product
        chain = names.RECOMPUTE if forms_again else names.FORWARD
        return weight.chain == chain and self.shapes.job.trains(weight.layer)

    def _order_sequences(self, host: HostProgram, message: str, nbytes: Size) -> None:
        """Reorder what was gathered, since tokens of several sequences arrive interleaved."""
        size = self.shapes.table.size(self.shapes.y_axis)
        is_mixed = (size > 1) & (self.shapes.table.sequences_at_once > 1)
        host.memory_bound(f"{message}.copy", np.where(is_mixed, 2.0 * nbytes, 0.0), "copy")
