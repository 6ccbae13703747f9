"""Tensor parallelism with the residual stream split by tokens.

Korthikanti et al., arXiv 2205.05198: between the layers that are split over the tensor group each
rank keeps its tokens only, which sequence parallelism brings together before columns are split, and
which the sum of the rows' products leaves behind.
"""

from __future__ import annotations

import math

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Size
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
    """Return a number that tensor divides if it divides the inner features of every split MLP."""
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
        """Return whether the tokens of a product come together before it."""
        linear = shape.linear
        return self._splits_tokens and linear.is_split and not linear.transposed

    def gather_input(self, host: HostProgram, weight: Weight) -> None:
        """Bring all tokens together before their columns are split."""
        shape = self.shapes.linears[weight.layer]
        if self._gathers_tokens(shape):
            name = names.all_gather(weight.name)
            host.run(name, "all_gather", shape.gathered_input_bytes, self.shapes.y_axis)
            self._order_tokens(host, name, shape.gathered_input_bytes)

    def gather_for_gradients(self, host: HostProgram, weight: Weight) -> None:
        """Gather the gradient of an output whose sum has left each rank its tokens."""
        shape = self.shapes.linears[weight.layer]
        if self._splits_tokens and shape.linear.transposed:
            name = names.all_gather(weight.name)
            host.run(name, "all_gather", shape.gathered_gradient_bytes, self.shapes.y_axis)
            self._order_tokens(host, name, shape.gathered_gradient_bytes)

    def gather_embedding_gradient(self, host: HostProgram) -> None:
        """Gather the gradients of all tokens, since each rank holds some rows of the embedding."""
        if self._splits_tokens:
            name = names.all_gather(names.of_layer(names.BACKWARD, "embedding"))
            host.run(name, "all_gather", self.shapes.stream_bytes, self.shapes.y_axis)

    def _order_tokens(self, host: HostProgram, message: str, nbytes: Size) -> None:
        """Copy what a message has brought, or will take, where its ranks' tokens do not adjoin."""
