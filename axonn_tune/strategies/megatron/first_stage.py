"""What the first stage of a Megatron-LM rank trains.

It has the embedding, and so it trains the most of all stages: it stands for each of them where
gradients are reduced and weights are updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from axonn_tune.spec.candidates import Ints, distinct
from axonn_tune.spec.job import MUON
from axonn_tune.spec.plan import Array, Size
from axonn_tune.strategies.megatron.muon import Owned, owned_matrices
from axonn_tune.strategies.megatron.stage import module_layers, stored_matrices, trained_parameters
from axonn_tune.strategies.parameters import stage_parameters
from axonn_tune.strategies.pipeline import layers_of_stage
from axonn_tune.strategies.shapes import Shapes

if TYPE_CHECKING:
    from axonn_tune.strategies.megatron.megatron3d import Megatron3D


@dataclass(frozen=True, eq=False)
class FirstStage:
    """Counts what the first stage of a rank trains.

    Attributes
    ----------
    shapes
        The sizes on a rank.
    options
        The strategy.
    """

    shapes: Shapes
    options: Megatron3D

    def of_layers(self, quantity: Callable[[Sequence[int]], Size]) -> Array:
        """Return a quantity of the trained layers of the stage, shape (C,)."""
        kinds, layers_of_kinds = self._kinds
        result = np.zeros(len(self.shapes.table))
        for number, layers in enumerate(layers_of_kinds):
            result = np.where(kinds == number, quantity(layers), result)
        return result

    @cached_property
    def _kinds(self) -> tuple[Ints, list[list[int]]]:
        """The kind of each candidate's stage, shape (C,), and the trained layers of each kind."""
        shapes = self.shapes
        table = shapes.table
        first_rows, kinds = distinct(table.stages, table.n_virtual)
        of_kinds = []
        for row in first_rows.tolist():
            one = table.take(slice(row, row + 1))
            layers = shapes.backward_layers(layers_of_stage(shapes, 0, one))
            of_kinds.append([*layers, *module_layers(shapes, one.n_stages == 1)])
        return kinds, of_kinds

    @cached_property
    def n_layers(self) -> Array:
        """The number of trained layers."""
        return self.of_layers(len)

    @property
    def has_head(self) -> bool:
        """Whether the first stage is the last one, too."""
        return not self.shapes.table.is_pipelined

    @cached_property
    def outside(self) -> Array:
        """The number of parameters outside blocks."""
        return trained_parameters(self.shapes, (), True, self.has_head)[0]

    @cached_property
    def dense(self) -> Array:
        """The number of parameters besides routed experts."""
        return self.outside + self.n_layers * self.block_parameters

    @cached_property
    def experts(self) -> Array:
        """The number of parameters of routed experts."""
        return self.n_layers * self.block_experts

    @property
    def block_parameters(self) -> Array:
        """The number of parameters besides experts in a block on average."""
        return self._in_mean_block[0]

    @property
    def block_experts(self) -> Array:
        """The number of experts' parameters in a block on average."""
        return self._in_mean_block[1]

    @cached_property
    def _in_mean_block(self) -> tuple[Array, Array]:
        """The parameters of dense parts and of experts in the mean block with a backward pass.

        Where replicas share whole matrices, what their buffers have beside these counts, too.
        """
        layers = range(self.shapes.model.n_layers)
        dense, experts = trained_parameters(self.shapes, layers, False, False)
        dense, experts = dense / self.shapes.n_backward, experts / self.shapes.n_backward
        if self.muon is None:
            return dense, experts
        n_layers = np.maximum(self.n_layers, 1.0)
        return dense + self.muon.padding / n_layers, experts + self.muon.expert_padding / n_layers

    @cached_property
    def muon(self) -> Owned | None:
        """The matrices that Muon updates; None with another optimizer."""
        if self.shapes.job.optimizer != MUON:
            return None
        kinds, layers_of_kinds = self._kinds
        owned, *others = (
            owned_matrices(self.shapes, self.options, layers, first=True, last=self.has_head)
            for layers in layers_of_kinds
        )
        for number, of_kind in enumerate(others, start=1):
            owned = of_kind.chosen(kinds == number, owned)
        return owned

    @cached_property
    def n_weights(self) -> Array:
        """The number of weights, gains and biases."""
        model = self.shapes.model
        n_of_block = len(model.block_linears) + model.n_vectors / model.n_layers
        has_own_head = self.has_head and not model.tied_embeddings
        return 1 + has_own_head + self.n_layers * n_of_block

    @cached_property
    def matrices(self) -> Array:
        """The number of elements of its matrices."""
        trains_weights = self.shapes.job.trains_weights
        return trains_weights * self.of_layers(partial(stored_matrices, self.shapes))

    @cached_property
    def replicated(self) -> Array:
        """The number of parameters that every rank of a tensor group has whole.

        These are norms, routers, products that are not split, and biases along the residual stream.
        Learned positions are looked up before the ranks split the tokens.
        """
        is_last = self.has_head and self.shapes.job.trains_head
        return self.of_layers(
            lambda layers: stage_parameters(self.shapes.model, layers, False, is_last)[1]
        )
