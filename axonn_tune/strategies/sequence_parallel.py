"""Tensor parallelism with the residual stream split by tokens.

Korthikanti et al., arXiv 2205.05198: between the layers that are split over the tensor group, each
rank keeps only its own tokens. All tokens are gathered before a layer whose columns are split, and
the reduce-scatter after a layer whose rows are split leaves each rank its tokens again.
"""

from __future__ import annotations

import math

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array, Size
from axonn_tune.strategies.communication import Communication, Weight
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import LinearShape


def broken_tensor_rules(model: Model, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Return, for each size that a tensor group splits, the groups that do not divide it."""
    return {
        "attention heads not divisible by tensor": model.n_heads % tensor != 0,
        "KV heads not divisible by tensor": model.n_kv_heads % tensor != 0,
        "MLP size not divisible by tensor": _split_mlp_sizes(model) % tensor != 0,
        "vocabulary not divisible by tensor": model.padded_vocab_size % tensor != 0,
    }


def _split_mlp_sizes(model: Model) -> int:
    """Return the largest number that divides the inner features of each MLP that is split."""
    experts = model.experts
    shared = experts.shared_hidden_size if experts is not None else 0
    return math.gcd(model.ffn_hidden_size, shared)


class SequenceParallel(Communication):
    """The communication within the tensor group, which is the group of `shapes.y_axis`."""

    @property
    def _splits_tokens(self) -> bool:
        """Whether the residual stream is split; otherwise every rank of the group has all of it."""
        return True

    @property
    def sum_kind(self) -> str:
        """The collective that sums: with sequence parallelism each rank keeps its tokens only."""
        return "reduce_scatter" if self._splits_tokens else "all_reduce"

    @property
    def embedding_sum(self) -> str:
        """The name of the collective that sums the rows found by ranks of the tensor group."""
        return "forward.embedding.sum"

    def _gathers_tokens(self, shape: LinearShape) -> bool:
        """Return whether all tokens are gathered before a product."""
        linear = shape.linear
        is_split = bool(self.shapes.y_axis) and self._splits_tokens and linear.is_split
        return is_split and not linear.transposed

    @property
    def _overlaps_products(self) -> bool:
        """Whether products begin as soon as the first part of their message has come."""
        return False

    def gather_input(self, host: HostProgram, weight: Weight) -> None:
        """Gather all tokens, or start the sum that overlaps with the product."""
        shape = self.shapes.linears[weight.layer]
        if self._overlaps_products and shape.linear.transposed:
            self._scatter_sum(host, weight, weight.name, self._share_beside)
        if not self._gathers_tokens(shape):
            return
        name = names.all_gather(weight.name)
        host.issue(name, "all_gather", shape.gathered_input_bytes, self.shapes.y_axis)
        if not self._overlaps_products or self._awaits_all_tokens(weight.layer):
            host.wait(name)
        if not self._overlaps_products:
            self._order_tokens(host, name, shape.gathered_input_bytes)

    def _awaits_all_tokens(self, layer: str) -> bool:
        """Return whether all tokens must have come before a product begins.

        What an adapter reads, too, is cast for the product once it has been gathered.
        """
        return self.shapes.job.recipe is not None and self.shapes.job.has_adapter(layer)

    def sum_output(self, host: HostProgram, weight: Weight) -> None:
        """Sum the output; if the sum overlaps with the product, only its last part remains."""
        shape = self.shapes.linears[weight.layer]
        if not self._overlaps_products:
            super().sum_output(host, weight)
        elif self._gathers_tokens(shape):
            host.wait(names.all_gather(weight.name))
        elif shape.linear.transposed:
            last_part = names.last_part(weight.name)
            self._scatter_sum(host, weight, last_part, 1.0 - self._share_beside)
            host.wait(names.reduce_scatter(weight.name))
            host.wait(names.reduce_scatter(last_part))

    @property
    def _share_beside(self) -> Array:
        """The share of a sum that is sent while its product runs: all but the last rank's part."""
        return 1.0 - 1.0 / self.shapes.table.size(self.shapes.y_axis)

    def _scatter_sum(self, host: HostProgram, weight: Weight, name: str, share: Array) -> None:
        """Start to sum a share of the output of a product, under a name of its own."""
        nbytes = share * self._sum_bytes(weight.layer)
        host.issue(names.reduce_scatter(name), "reduce_scatter", nbytes, self.shapes.y_axis)

    def _sum_bytes(self, layer: str) -> Size:
        """Return the bytes of a layer's output in the messages that sum it."""
        return self.shapes.linears[layer].output_bytes

    def sum_input_gradient(self, host: HostProgram, weight: Weight) -> str:
        """Start to sum dI, once the gradient has come that was gathered while dI was formed."""
        if self._overlaps_products and self.shapes.linears[weight.layer].linear.transposed:
            host.wait(names.all_gather(weight.name))
        return super().sum_input_gradient(host, weight)

    def gather_for_gradients(self, host: HostProgram, weight: Weight) -> None:
        """Gather the gradient of an output, if each rank has it for its own tokens only."""
        shape = self.shapes.linears[weight.layer]
        if not (self.shapes.y_axis and self._splits_tokens and shape.linear.transposed):
            return
        name = names.all_gather(weight.name)
        host.issue(name, "all_gather", shape.gathered_gradient_bytes, self.shapes.y_axis)
        if not self._overlaps_products:
            host.wait(name)
            self._order_tokens(host, name, shape.gathered_gradient_bytes)

    def gather_embedding_gradient(self, host: HostProgram) -> None:
        """Gather the gradients of all tokens, since each rank holds some rows of the embedding."""
        if self._splits_tokens:
            name = names.all_gather(names.of_layer(names.BACKWARD, "embedding"))
            host.run(name, "all_gather", self.shapes.stream_bytes, self.shapes.y_axis)

    def _copy_own_part(
        self, host: HostProgram, message: str, nbytes: Size, n_issues: float = 1.0
    ) -> None:
        """Copy a rank's own part of a message to memory that the other ranks read."""
        size = self.shapes.table.size(self.shapes.y_axis)
        moved = np.where(size > 1, 2.0 * nbytes / size, 0.0)
        host.memory_bound(f"{message}.shard", moved, "copy", n_issues=n_issues)

    def _order_tokens(self, host: HostProgram, message: str, nbytes: Size) -> None:
        """Reorder the tokens of a message by rank; by default, nothing has to be done."""
