"""How members of the ZeRO family form their units of sharded weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from axonn_tune.spec.layout import EXPERT, EXPERT_REPLICAS
from axonn_tune.spec.plan import Size
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.strategies.adapters import adapter_elements
from axonn_tune.strategies.experts import stored_experts
from axonn_tune.strategies.parameters import stage_parameters
from axonn_tune.strategies.shapes import Shapes
from axonn_tune.strategies.zero.block_gathers import block_gathers
from axonn_tune.strategies.zero.fetches import (
    FETCHED_ONCE,
    BackwardFetches,
    FetchRules,
    backward_fetches,
    fetched_each_time,
)
from axonn_tune.strategies.zero.held import HeldModel
from axonn_tune.strategies.zero.units import (
    GatherUnit,
    gradients_of_block,
    reductions_per_block,
)


@dataclass(frozen=True, eq=False)
class ZeroUnits:
    """The units of a rank: the ends of the model that it has, and an average block of its layers.

    Attributes
    ----------
    program
        How the engine communicates.
    layers
        The layers that the rank has: all of them, or those of a stage.
    first, last
        Whether it has the embedding, and final norm and head.
    spreads_experts
        Whether experts may be spread over ranks.
    gathers_low
        Whether weights of low products are gathered in their format.
    """

    shapes: Shapes
    program: ZeroProgram
    layers: Sequence[int]
    first: bool
    last: bool
    spreads_experts: bool
    gathers_low: bool

    @property
    def all(self) -> tuple[GatherUnit, ...]:
        """The root, then the units of a block."""
        return self.root, *self.in_block

    @cached_property
    def root(self) -> GatherUnit:
        """The unit of the ends of the model: embedding, final norm and head."""
        return self._unit("root", (), (self.first, self.last), 1.0)

    @cached_property
    def in_block(self) -> tuple[GatherUnit, ...]:
        """The units of an average block; experts that are spread over ranks have one of their own.

        The experts' unit comes last.
        """
        block = self._block
        if not self.spreads_experts:
            return (replace(block, fetches=self._fetches),)
        shapes = self.shapes
        is_spread = shapes.table.size(EXPERT) > 1
        routed = is_spread * stored_experts(shapes, self.layers) / block.count
        above = stored_experts(shapes, shapes.backward_layers(self.layers))
        trained = is_spread * above * shapes.job.trains_weights / block.n_trained
        block = replace(
            block,
            parameters=block.parameters - routed,
            trained=block.trained - trained,
            gathered=block.gathered - routed,
        )
        n_gathers = np.where(is_spread, 1.0, 0.0)
        n_reductions = n_gathers * shapes.job.trains_weights
        experts = GatherUnit(
            name="experts",
            count=block.count,
            parameters=routed,
            trained=trained,
            n_trained=block.n_trained,
            gathered=routed,
            n_calls=n_gathers,
            n_calls_again=n_gathers,
            n_reductions=n_reductions,
            sharded_over=EXPERT_REPLICAS,
        )
        return block, experts

    @cached_property
    def reduced_alone(self) -> dict[str, GatherUnit]:
        """The parts of a block whose gradients are reduced by themselves, by their layer.

        They are its matrices where each is larger than a bucket, with equal shares of the norms and
        biases. It is empty where a message carries several matrices, and with experts, which are in
        no linear layer.
        """
        model, bucket_elements = self.shapes.model, self.program.bucket_elements
        linears = model.block_linears
        is_alone = bucket_elements > 0.0 and self.shapes.job.trains_weights
        is_alone = is_alone and model.experts is None and not self.shapes.y_axis
        if not is_alone or min(linear.parameters for linear in linears) <= bucket_elements:
            return {}
        (block,) = self.in_block
        n_parts = len(linears)
        vectors = (block.parameters - block.gathered) / n_parts
        return {
            linear.name: replace(
                block,
                name=f"{block.name}.{linear.name}",
                parameters=linear.parameters + vectors,
                trained=linear.parameters + vectors,
                gathered=float(linear.parameters),
                n_reductions=block.n_reductions / n_parts,
                n_matrices=1,
            )
            for linear in linears
        }

    @cached_property
    def ends(self) -> dict[str, GatherUnit]:
        """The parts of the root that are reduced by themselves.

        They are known by the layer whose gradient is formed last. A head that shares the
        embedding's weight has no gradient of its own.
        """
        model, job, root = self.shapes.model, self.shapes.job, self.root
        if self.wrapped_ends:
            is_trained = {"head": job.trains_head, "embedding": job.trains_embedding}
            return {layer: unit for layer, unit in self.wrapped_ends.items() if is_trained[layer]}
        is_apart = self.program.keeps_ends and not model.tied_embeddings and job.trains_head
        if not is_apart:
            return {"embedding": root}
        head = model.head.parameters / self.shapes.y + model.norm_parameters
        ends = {"head": replace(root, name="head", trained=head)}
        if job.trains_embedding:
            ends["embedding"] = replace(root, trained=root.trained - head)
        return ends

    @cached_property
    def wrapped_ends(self) -> dict[str, GatherUnit]:
        """The units of the final norm with the head and of the embedding, if they are separate."""
        is_one = self.shapes.model.tied_embeddings or self.shapes.table.is_pipelined
        if is_one or not self.program.wraps_ends:
            return {}
        return {
            "head": self.head,
            "embedding": self._unit("root_embedding", (), (True, False), 1.0),
        }

    @cached_property
    def head(self) -> GatherUnit:
        """The unit of final norm and head, whether or not the rank has them."""
        return self._unit("root_head", (), (False, True), 1.0)

    @property
    def _block(self) -> GatherUnit:
        """The unit of an average block with all its experts."""
        linears, n_of_adapters = self.shapes.model.block_linears, 2 * self.shapes.n_adapters
        n_matrices = 1.0
        if not self.program.gathers_blocks:
            n_matrices = float(len(linears) + n_of_adapters)
        block = self._unit("block", self.layers, (False, False), n_matrices)
        if not self.program.prefetch_elements:
            return block
        gathers = block_gathers(self.matrices, self.fetch_rules)
        return replace(
            block,
            n_calls=gathers.forward.n_calls + n_of_adapters,
            n_calls_again=gathers.again.n_calls + n_of_adapters,
            joined=gathers.forward.joined_share,
            joined_again=gathers.again.joined_share,
        )

    @property
    def fetch_rules(self) -> FetchRules:
        """When gathered matrices are released, and when further ones are gathered."""
        program = self.program
        forgotten = program.forgets_embedding * self.matrices.embedding
        live_elements = program.live_elements + forgotten
        return FetchRules(live_elements, program.reuse_elements, program.prefetch_elements)

    @cached_property
    def matrices(self) -> HeldModel:
        """The matrices of the model as modules use them, all of which are trained."""
        model = self.shapes.model
        norm = (0.0, True)
        activation = ((0.0, False),) if self.program.activation_is_module else ()
        attention, mlp = (
            [(float(linear.parameters), linear.bias) for linear in linears]
            for linears in (model.attention_linears, model.mlp_linears)
        )
        between = () if model.shares_norm else (norm,)
        modules = (norm, *attention, *between, *mlp[:-1], *activation, *mlp[-1:])
        head = 0.0 if model.tied_embeddings else float(model.head.parameters)
        return HeldModel(
            sizes=tuple(elements for elements, _ in modules),
            has_vectors=tuple(has_vector for _, has_vector in modules),
            n_blocks=model.n_layers,
            # DeepSpeed splits no layer, so that all candidates have the same matrices.
            embedding=float(np.max(self.root.gathered)) - head,
            head=head,
            recomputes=self.shapes.recompute == "full",
        )

    @property
    def _fetches(self) -> BackwardFetches:
        """What is gathered of a block that is recomputed as a whole."""
        program, model = self.program, self.shapes.model
        if self.shapes.recompute != "full":
            return FETCHED_ONCE
        if program.gathers_each_use:
            return fetched_each_time([linear.parameters for linear in model.block_linears])
        if not program.reuse_elements:
            return FETCHED_ONCE
        rules = self.matrices.rules_beside_shared(self.fetch_rules)
        return backward_fetches(self.matrices.sizes, rules)

    def _unit(
        self, name: str, layers: Sequence[int], ends: tuple[bool, bool], n_calls: Size
    ) -> GatherUnit:
        """Return the unit of an average layer or, without layers, of the ends of the model.

        `ends` says whether the embedding, and final norm and head, belong to it.
        """
        shapes, program = self.shapes, self.program
        model, job = shapes.model, shapes.job
        first, last = ends
        count = max(len(layers), 1)
        trained_layers = shapes.backward_layers(layers)
        n_trained = len(trained_layers) if layers else 1
        weights = self._mean_weights(layers, first, last)
        gathered = weights
        if program.keeps_vectors:
            matrices, _, _ = stage_parameters(model, layers, first, last)
            gathered = matrices / count + first * model.position_parameters
        trained_ends = first and job.trains_embedding, last and job.trains_head
        trained = self._mean_weights(trained_layers, *trained_ends)
        added: Size = 0.0
        if not job.trains_weights:
            trained = added = adapter_elements(shapes, layers) / count
        n_reductions: Size = n_calls
        if program.bucket_elements:
            n_reductions = np.minimum(n_calls, trained / program.bucket_elements)
            if layers and job.trains_weights:
                sizes = gradients_of_block(model)
                n_reductions = reductions_per_block(sizes, n_trained, program.bucket_elements)
        low: Size = 0.0
        if layers and self.gathers_low:
            low = stage_parameters(model, layers, False, False)[0] / count / shapes.y
        linears = model.block_linears if layers else (model.head,)
        return GatherUnit(
            name=name,
            count=count,
            parameters=weights + added,
            trained=trained,
            n_trained=n_trained,
            gathered=gathered + added,
            n_calls=n_calls,
            n_calls_again=n_calls,
            n_reductions=n_reductions,
            low=low,
            # The embedding and the head are gathered by themselves.
            joined=0.0 if program.prefetch_elements else 1.0,
            joined_again=0.0 if program.prefetch_elements else 1.0,
            bucketed=self._bucketed([linear.parameters for linear in linears]),
            n_matrices=len(linears) if layers else first + last * (not model.tied_embeddings),
        )

    def _bucketed(self, sizes: Sequence[float]) -> float:
        """Return the share of the gradients that fit into a bucket.

        Parameters
        ----------
        sizes
            Numbers of elements of the matrices of a layer, or of an end of the model.
        """
        if not self.shapes.job.trains_weights:
            return float(self.program.bucket_elements > 0.0)
        return sum(size for size in sizes if size <= self.program.bucket_elements) / sum(sizes)

    def _mean_weights(self, layers: Sequence[int], first: bool, last: bool) -> Size:
        """Return how many weights a rank gathers of a layer on average, or of a part without any.

        `first` and `last` are those of `stage_parameters`.
        """
        shapes = self.shapes
        count = max(len(layers), 1)
        matrices, over_x, over_y = stage_parameters(shapes.model, layers, first, last)
        weights: Size = (matrices + over_x + over_y) / count
        if shapes.y_axis:
            whole = first * self.program.replicates_embedding * shapes.model.head.parameters
            weights = ((matrices - whole + over_y) / shapes.y + whole + over_x) / count
        return weights + stored_experts(shapes, layers) / count
