"""The kernels of a training step of a transformer, which are the same for every strategy.

Which kernels a rank runs, and in which order, follows from the model and from how widths are
split. What has to be communicated between them is decided by a strategy's `Communication`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.blocks import Block
from axonn_tune.spec.model import Model
from axonn_tune.spec.names import BACKWARD, FORWARD, RECOMPUTE
from axonn_tune.spec.plan import FROM_HOST, TO_HOST, Phase
from axonn_tune.spec.recomputation import n_recomputed_layers
from axonn_tune.strategies.adapters import AdapterPasses
from axonn_tune.strategies.casts import Casts
from axonn_tune.strategies.communication import Communication, Weight
from axonn_tune.strategies.experts import ExpertShapes, Mixture
from axonn_tune.strategies.modules import norms_again
from axonn_tune.strategies.moved import moved_bytes
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES, MASK_BYTES, Shapes, kernel_of

_EMBEDDING = Weight(FORWARD, "embedding")
# Activations that move to the host's memory, and back.
_MOVED_OUT = names.of_layer(FORWARD, "activations")
_MOVED_BACK = names.of_layer(BACKWARD, "activations")
# Norms whose output is the input of a linear layer, and those of a block with one norm, which is
# formed again once, in the backward pass of the layer that comes last.
_NORM_BEFORE = {"qkv": "norm1", "up": "norm2"}
_SHARED_NORM_BEFORE = {"up": "norm1"}
# The norms of what a module of multi-token prediction joins.
_MODULE_NORMS = ("mtp_token_norm", "mtp_stream_norm")
# The kernel that follows a weight at the entrance of an MLP.
_ACTIVATIONS = {"up": "activation", "shared_up": "shared_activation"}


@dataclass(frozen=True, eq=False)
class Transformer:
    """The phases of a micro-step, and the end of a step, for all candidates of one table."""

    shapes: Shapes
    communication: Communication

    @property
    def _model(self) -> Model:
        """The model."""
        return self.shapes.model

    @cached_property
    def casts(self) -> Casts:
        """The casts of the job's precision."""
        return Casts(self.shapes)

    @cached_property
    def _mixture(self) -> Mixture | None:
        """The routed experts of a layer, in models that have them."""
        experts = self._model.experts
        if experts is None:
            return None
        return Mixture(ExpertShapes(self.shapes, experts), self.communication, self.casts)

    @cached_property
    def _phases(self) -> dict[Hashable, Phase]:
        """The phases so far, by the method that records them and its arguments."""
        return {}

    def _once(self, record: Callable[..., Phase], *arguments: Hashable) -> Phase:
        """Return a phase, which is recorded once: passes over other layers share it."""
        key = (record, *arguments)
        if key not in self._phases:
            self._phases[key] = record(*arguments)
        return self._phases[key]

    def _recomputing(self, recompute: str) -> Transformer:
        """Return what records the backward passes of blocks that are recomputed in this way.

        Candidates of one plan may differ in whether their blocks are recomputed selectively.
        """
        is_selective = self.shapes.recompute == "selective"
        return self if is_selective == (recompute == "selective") else self._otherwise

    @cached_property
    def _otherwise(self) -> Transformer:
        """The same with selective recomputation where this one has none, and the reverse."""
        recompute = "none" if self.shapes.recompute == "selective" else "selective"
        return replace(self, shapes=replace(self.shapes, block_recompute=recompute))

    @cached_property
    def _adapters(self) -> AdapterPasses:
        """The adapters of the job, which may have none."""
        return AdapterPasses(self.shapes)

    # Linear layers -----------------------------------------------------------------------

    def _take_weight(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Wait for a layer's weight, and cast it unless it stays with the rank or is low."""
        self.communication.take_weight(host, weight, following)
        if self.communication.keeps_weights:
            return
        share_transposed = self.communication.share_transposed(weight.chain)
        if share_transposed is None:
            n_elements = self.shapes.linears[weight.layer].n_elements
            self.casts.cast_gathered(host, weight.chain, weight.layer, n_elements)
        else:
            self.casts.transpose_gathered(host, weight.chain, weight.layer, share_transposed)

    def _linear_forward(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Multiply, and sum the output over the axis that splits k."""
        shape = self.shapes.linears[weight.layer]
        number_format = self.casts.number_format(weight.layer)
        self._take_weight(host, weight, following)
        self._bring_input(host, weight)
        for name, n in shape.products:
            owner = names.gemm(names.of_layer(weight.chain, name))
            host.gemm(owner, shape.tokens, n, shape.k, shape.modes[0], number_format)
        self.communication.sum_output(host, weight)
        self._adapters.forward(host, weight.chain, weight.layer)

    def _bring_input(self, host: HostProgram, weight: Weight) -> None:
        """Cast a layer's input and gather it; what an adapter reads, too, is gathered uncast."""
        if self.shapes.linears[weight.layer].gathers_uncast:
            self.communication.gather_input(host, weight)
            self.casts.cast_input(host, weight.chain, weight.layer)
        else:
            self.casts.cast_input(host, weight.chain, weight.layer)
            self.communication.gather_input(host, weight)

    def _linear_backward(self, host: HostProgram, layer: str, following: Weight | None) -> None:
        """Form dI = dO W^T, summed over the axis that splits n, and dW = I^T dO.

        Frozen weights have no dW.
        """
        shape = self.shapes.linears[layer]
        tokens = shape.tokens
        weight = Weight(BACKWARD, layer)
        input_mode = shape.modes[1]
        number_format = self.casts.number_format(layer)
        self._take_weight(host, weight, following)
        self.casts.cast_gradient(host, layer)
        self.communication.gather_for_gradients(host, weight)
        is_trained = self.shapes.job.trains(layer)
        if self.communication.keeps_weights and not is_trained:
            self.casts.transpose_frozen(host, layer, shape.n_elements)
        for name, n in shape.products:
            owner = names.gemm_input(names.of_layer(BACKWARD, name))
            host.gemm(owner, tokens, shape.k, n, input_mode, number_format)
        n_sums = len(shape.products) - 1
        if n_sums:
            name = names.input_gradient(weight.name)
            host.memory_bound(name, n_sums * 3.0 * shape.input_bytes, "add")
        self._recompute_adapted_input(host, layer)
        self._adapters.backward(host, layer)
        pending_sum = self.communication.sum_input_gradient(host, weight)
        if is_trained:
            self._weight_backward(host, layer)
        if pending_sum:
            host.wait(pending_sum)

    def _weight_backward(self, host: HostProgram, layer: str) -> None:
        """Form dW = I^T dO and the gradient of the bias, and send them."""
        shape = self.shapes.linears[layer]
        self._recompute_input(host, layer)
        self.communication.before_weight_gradient(host, layer)
        self.casts.form_columns(host, layer)
        for name, n in shape.products:
            owner = names.gemm_weight(names.of_layer(BACKWARD, name))
            rows, columns = shape.stored_sides(n)
            mode = shape.modes[2]
            host.gemm(owner, rows, columns, shape.tokens, mode, self.casts.number_format(layer))
        if shape.linear.bias:
            nbytes = self.communication.bias_bytes(layer)
            if np.any(np.asarray(nbytes) > 0):
                host.memory_bound(names.bias(names.of_layer(BACKWARD, layer)), nbytes, "reduce")
        self.communication.send_gradient(host, layer)

    def _attend(self, host: HostProgram, chain: str, block: Block) -> None:
        """Run attention of a chain, in a low format between casts where the engine does so."""
        self.casts.cast_for_attention(host, chain)
        self.communication.attend(host, chain, block.window)
        self.casts.convert_from_attention(host, chain)

    def _recompute_adapted_input(self, host: HostProgram, layer: str) -> None:
        """Form the input of a layer again that only its adapter needs, if it has one."""
        if self.shapes.job.has_adapter(layer):
            self._recompute_input(host, layer)

    def _recompute_input(self, host: HostProgram, layer: str) -> None:
        """Form the input of a product again, if selective recomputation has not kept it."""
        if not (self.shapes.recomputes_inputs and self.shapes.recompute == "selective"):
            return
        if layer == "down":
            self._activation(host, RECOMPUTE, "up", "down")
            return
        norms = _SHARED_NORM_BEFORE if self.shapes.model.shares_norm else _NORM_BEFORE
        if layer in norms:
            name = names.of_layer(RECOMPUTE, norms[layer])
            host.memory_bound(name, 2.0 * self.shapes.residual_bytes, self.shapes.norm_kernel)

    def _recompute_products(self, host: HostProgram) -> None:
        """Form again every second product of a block, and the kernels between the products.

        The output of attention has been kept.
        """
        shares = self.shapes.recomputed_shares
        self._norm(host, RECOMPUTE, "norm1")
        self._part_again(host, "qkv", shares["qkv"])
        self._rotary(host, RECOMPUTE)
        self._part_again(host, "proj", shares["proj"])
        self._output_norm(host, RECOMPUTE, "attention_norm")
        self._residual(host, RECOMPUTE, "residual1")
        if not self.shapes.model.shares_norm:
            self._norm(host, RECOMPUTE, "norm2")
        self._part_again(host, "up", shares["up"])
        self._activation(host, RECOMPUTE, "up", "down")

    def _part_again(self, host: HostProgram, layer: str, share: float) -> None:
        """Form a share of a layer's output again; its sum over ranks has been kept."""
        shape = self.shapes.linears[layer]
        weight = Weight(RECOMPUTE, layer)
        number_format = self.casts.number_format(layer)
        if shape.linear.transposed:
            self.casts.cast_input(host, RECOMPUTE, layer)
        else:
            self._bring_input(host, weight)
        if share:
            name, n = names.gemm(weight.name), share * shape.n
            host.gemm(name, shape.tokens, n, shape.k, shape.modes[0], number_format)
        if not shape.linear.transposed:
            self.communication.sum_output(host, weight)

    # Other kernels -----------------------------------------------------------------------

    def _norm(self, host: HostProgram, chain: str, layer: str) -> None:
        """Normalise the residual stream, or form the gradient of the norm.

        Where ranks of X add the sums of the features that each of them has, an earlier kernel forms
        these, and an all-reduce over X adds them in fp32.
        """
        shapes = self.shapes
        name = names.of_layer(chain, layer)
        is_backward = chain == BACKWARD
        axis = self.communication.norm_axis
        if axis:
            n_sums = 2.0 if shapes.model.norm == "layer" else 1.0
            n_reads = 2.0 if is_backward else 1.0
            sums_bytes = (shapes.x > 1) * n_reads * shapes.residual_bytes
            host.memory_bound(names.sums(name), sums_bytes, "reduce")
            message_bytes = shapes.tokens * (n_sums * FP32_BYTES)
            host.run(names.all_reduce(name), "all_reduce", message_bytes, axis)
        kernel = kernel_of(shapes.norm_kernel, chain)
        host.memory_bound(name, (3.0 if is_backward else 2.0) * shapes.residual_bytes, kernel)

    def _output_norm(self, host: HostProgram, chain: str, layer: str) -> None:
        """Normalise the output of attention or MLP, in models that do so."""
        if self.shapes.model.normalises_outputs:
            self._norm(host, chain, layer)

    def _head_norms(self, host: HostProgram, chain: str) -> None:
        """Normalise queries and keys, or the latent vectors, in models that do so."""
        nbytes = self.shapes.head_norm_bytes
        if not self._model.head_norm_parameters:
            return
        kernel = kernel_of(self.shapes.norm_kernel, chain)
        n_passes = 3.0 if chain == BACKWARD else 2.0
        host.memory_bound(names.of_layer(chain, "head_norms"), n_passes * nbytes, kernel)

    def _rotary(self, host: HostProgram, chain: str) -> None:
        """Rotate q and k by their positions, or rotate their gradients back."""
        if self.shapes.model.position == "rotary":
            name = names.of_layer(chain, "rotary")
            host.memory_bound(name, self.shapes.rotary_bytes, self.shapes.rotary_kernel)

    def _activation(self, host: HostProgram, chain: str, up: str, down: str) -> None:
        """Apply the nonlinearity of the MLP between two weights."""
        linears = self.shapes.linears
        nbytes = linears[up].output_bytes + linears[down].input_bytes
        name = names.of_layer(chain, _ACTIVATIONS[up])
        host.memory_bound(name, nbytes, self.shapes.activation_kernel)

    def _activation_backward(self, host: HostProgram, up: str, down: str) -> None:
        """Form the gradient of the activation's input from that input and the output's gradient."""
        linears = self.shapes.linears
        nbytes = 2.0 * linears[up].output_bytes + linears[down].input_bytes
        name = names.of_layer(BACKWARD, _ACTIVATIONS[up])
        host.memory_bound(name, nbytes, f"{self.shapes.activation_kernel}_backward")

    def _residual(self, host: HostProgram, chain: str, layer: str) -> None:
        """Add to the residual stream; with dropout, draw and keep a mask, or apply it again."""
        n_passes = 3.0
        if self.shapes.job.dropout:
            n_passes += MASK_BYTES / self.shapes.element_bytes
            n_passes += 2.0 if chain == BACKWARD else 0.0
        host.memory_bound(
            names.of_layer(chain, layer), n_passes * self.shapes.residual_bytes, "add"
        )

    def _sum(self, host: HostProgram, name: str) -> None:
        """Add two tensors of the residual stream's size.

        These are the outputs of shared and of routed experts, or the gradients of what two layers
        read: router and shared experts, or the weights that form the latent vectors.
        """
        host.memory_bound(name, 3.0 * self.shapes.residual_bytes, "add")

    # A block -----------------------------------------------------------------------------

    def _block_forward(
        self,
        host: HostProgram,
        chain: str,
        block: Block,
        following: Weight | None,
        has_next_block: bool,
    ) -> None:
        """Run attention and MLP in the forward or the recomputed chain.

        `following` is the weight that is used next after the block, in any chain; `has_next_block`
        says whether another block of this chain follows.
        """
        attention = [Weight(chain, linear.name) for linear in self._model.attention_linears]
        mlp = [Weight(chain, linear.name) for linear in self._model.mlp_linears_of(block)]
        followings = dict(zip([*attention, *mlp], [*attention[1:], *mlp, following], strict=True))
        *before_attention, proj = attention
        self.communication.begin_block(host, chain)
        if block.has_experts and self._mixture is not None:
            self._mixture.begin_block(host, chain)
        self._norm(host, chain, "norm1")
        if has_next_block:
            self.communication.prefetch_block(host, chain)
        else:
            self.communication.prefetch_root(host, chain)
        for weight in before_attention:
            self._linear_forward(host, weight, followings[weight])
        self._head_norms(host, chain)
        self._rotary(host, chain)
        self._attend(host, chain, block)
        self._linear_forward(host, proj, followings[proj])
        self._output_norm(host, chain, "attention_norm")
        self._residual(host, chain, "residual1")
        if not self._model.shares_norm:
            self._norm(host, chain, "norm2")
        if chain == RECOMPUTE and self.shapes.leaves_out_last_product:
            self._activated(host, mlp, following)
            return
        self._mlp_forward(host, mlp, following)
        if block.has_experts and self._mixture is not None:
            self._mixture.forward(host, chain)
            if chain == RECOMPUTE and self.shapes.leaves_out_combine:
                return
            if mlp:
                self._sum(host, names.of_layer(chain, "shared_sum"))
        self._output_norm(host, chain, "mlp_norm")
        self._residual(host, chain, "residual2")

    def _mlp_forward(
        self, host: HostProgram, weights: Sequence[Weight], following: Weight | None
    ) -> None:
        """Run the MLP or the shared experts; a block without either has no weights here."""
        if not weights:
            return
        _, down = weights
        self._activated(host, weights, down)
        self._linear_forward(host, down, following)

    def _activated(
        self, host: HostProgram, weights: Sequence[Weight], following: Weight | None
    ) -> None:
        """Form the input of the MLP's last product."""
        up, down = weights
        self._linear_forward(host, up, following)
        self._activation(host, up.chain, up.layer, down.layer)

    def _mlp_again(self, host: HostProgram, block: Block) -> None:
        """Run again those modules of the MLP, or of the experts, that are recomputed."""
        modules = self.shapes.recomputed_modules
        norms = norms_again(self.shapes, block)
        linears = self._model.mlp_linears_of(block)
        weights = [Weight(RECOMPUTE, linear.name) for linear in linears]
        is_whole = ("moe" if block.has_experts else "mlp") in modules
        is_shared = block.has_experts and "shared_experts" in modules
        if "norm2" in norms:
            self._norm(host, RECOMPUTE, "norm2")
            if weights and not (is_whole or is_shared):
                self.casts.cast_input(host, RECOMPUTE, weights[0].layer)
        if is_whole or is_shared:
            self._mlp_forward(host, weights, None)
        if block.has_experts and self._mixture is not None:
            if is_whole:
                self._mixture.forward(host, RECOMPUTE)
                if weights:
                    self._sum(host, names.of_layer(RECOMPUTE, "shared_sum"))
            elif "moe_act" in modules:
                self._mixture.activate_again(host)

    def _first_norm_again(self, host: HostProgram, block: Block) -> None:
        """Form the output of the first norm again, and the casts of it."""
        if "norm1" in norms_again(self.shapes, block):
            self._norm(host, RECOMPUTE, "norm1")
            for linear in self._model.attention_linears:
                if not linear.is_split:
                    self.casts.cast_input(host, RECOMPUTE, linear.name)

    def _up_projections_again(self, host: HostProgram) -> None:
        """Form queries, keys and values of latent attention again from the latent vectors."""
        if "mla_up_proj" not in self.shapes.recomputed_modules:
            return
        self._head_norms(host, RECOMPUTE)
        for layer in ("q_up", "kv_up"):
            self._linear_forward(host, Weight(RECOMPUTE, layer), None)
        self._rotary(host, RECOMPUTE)

    def _block_backward(
        self,
        host: HostProgram,
        block: Block,
        recomputes: bool,
        next_entry: Weight | None,
        is_first: bool = False,
    ) -> None:
        """Recompute the forward pass if asked to, then form the gradients of MLP and attention.

        `next_entry` is the weight that the next block of the backward pass uses first; `is_first`
        has its meaning in `Communication.end_block`.
        """
        layers = [linear.name for linear in self._model.linears_of(block)]
        previous = {layer: Weight(BACKWARD, before) for before, layer in pairwise(layers)}
        *before_attention, proj = (linear.name for linear in self._model.attention_linears)
        if recomputes:
            has_next_block = next_entry is not None
            following = Weight(BACKWARD, layers[-1])
            self._block_forward(host, RECOMPUTE, block, following, has_next_block)
        else:
            self.communication.begin_block(host, BACKWARD)
        if self.shapes.recomputes_by_product:
            self._recompute_products(host)
        if not recomputes:
            self._mlp_again(host, block)
        self._output_norm(host, BACKWARD, "mlp_norm")
        prefetched = next_entry.chain if next_entry is not None and not recomputes else ""
        if next_entry is None and not recomputes:
            self.communication.prefetch_root(host, BACKWARD)
        self._mlp_backward(host, block, previous, prefetched)
        if not self._model.shares_norm:
            self._norm(host, BACKWARD, "norm2")
        self._residual(host, BACKWARD, "residual2")
        self._output_norm(host, BACKWARD, "attention_norm")
        self._first_norm_again(host, block)
        self._linear_backward(host, proj, previous[proj])
        self._up_projections_again(host)
        if self.shapes.recomputes_attention:
            self._attend(host, RECOMPUTE, block)
        self._attend(host, BACKWARD, block)
        self._rotary(host, BACKWARD)
        self._head_norms(host, BACKWARD)
        for layer in reversed(before_attention):
            self._linear_backward(host, layer, previous.get(layer, next_entry))
        if self._model.latent_attention is not None:
            self._sum(host, names.input_gradient(names.of_layer(BACKWARD, "norm1")))
        self._norm(host, BACKWARD, "norm1")
        self._residual(host, BACKWARD, "residual1")
        self.communication.end_block(host, is_first)

    def _mlp_backward(
        self, host: HostProgram, block: Block, previous: Mapping[str, Weight], prefetched: str
    ) -> None:
        """Form the gradients of the MLP, or those of routed and of shared experts.

        `previous` holds the weight that is used after each layer's, and `prefetched` is the chain
        whose next block is gathered meanwhile, empty for none.
        """
        if block.has_experts and self._mixture is not None:
            self._prefetch_block(host, prefetched)
            self._mixture.backward(host)
        linears = self._model.mlp_linears_of(block)
        if not linears:
            return
        up, down = (linear.name for linear in linears)
        if self.shapes.memory.tiles_mlp:
            self._mlp_forward(host, [Weight(RECOMPUTE, up), Weight(RECOMPUTE, down)], None)
        self._linear_backward(host, down, previous[down])
        self._activation_backward(host, up, down)
        if not block.has_experts:
            self._prefetch_block(host, prefetched)
        self._linear_backward(host, up, previous[up])
        if block.has_experts:
            self._sum(host, names.input_gradient(names.of_layer(BACKWARD, up)))

    def _prefetch_block(self, host: HostProgram, chain: str) -> None:
        """Start to gather the next block of a chain; an empty text stands for none."""
        if chain:
            self.communication.prefetch_block(host, chain)

    def _entry(self, chain: str, block: Block) -> Weight:
        """Return the weight that a chain's pass over a block uses first."""
        linears = self._model.linears_of(block)
        return Weight(chain, linears[-1 if chain == BACKWARD else 0].name)

    def _backward_entry(self, layers: Sequence[int], recompute: str) -> Weight:
        """Return the weight that the backward pass over some layers uses first."""
        last = self._model.blocks[layers[-1]] if layers else Block()
        n_layers = len(self.shapes.backward_layers(layers))
        recomputes_last = 0 < n_layers == n_recomputed_layers(recompute, n_layers)
        recomputes = recomputes_last or self.shapes.recompute == "full"
        return self._entry(RECOMPUTE if recomputes else BACKWARD, last)

    # Activations in the host's memory ------------------------------------------------------

    def _move_out(self, host: HostProgram, block: Block) -> None:
        """Start to copy a block's activations to the host, if any move there."""
        if self.shapes.job.offload_modules:
            host.copy(names.to_host(_MOVED_OUT), moved_bytes(self.shapes, block), TO_HOST)

    def _bring_back(self, host: HostProgram, next_block: Block | None) -> None:
        """Wait for a block's activations, and start to copy those of the block that comes next."""
        if not self.shapes.job.offload_modules:
            return
        host.wait(names.from_host(_MOVED_BACK))
        host.idle(names.awaited(_MOVED_BACK), 0.0)
        if next_block is not None:
            nbytes = moved_bytes(self.shapes, next_block)
            after = (names.to_host(_MOVED_OUT),)
            host.copy(names.from_host(_MOVED_BACK), nbytes, FROM_HOST, after)

    # Phases ------------------------------------------------------------------------------

    def _embedding(self) -> Phase:
        """Look up each token's row; ranks along Y hold different parts of the vocabulary."""
        host = HostProgram()
        self.communication.prefetch_weight(host, _EMBEDDING)
        self.communication.take_weight(host, _EMBEDDING, self._first_of_forward)
        self.communication.prefetch_block(host, FORWARD)
        self._look_up(host)
        return host.phase("embedding")

    def _look_up(self, host: HostProgram) -> None:
        """Look up rows, sum them over ranks, and add learned positions to them."""
        shapes = self.shapes
        host.memory_bound(names.lookup(_EMBEDDING.name), 2.0 * shapes.residual_bytes, "lookup")
        if self.communication.sums_embedding:
            host.issue(
                self.communication.embedding_sum,
                self.communication.sum_kind,
                shapes.stream_bytes,
                shapes.y_axis,
            )
        if shapes.model.position == "learned":
            self._wait_for_embedding(host)
            name = names.of_layer(FORWARD, "embedding.position")
            host.memory_bound(name, 2.0 * shapes.residual_bytes, "add")

    def _wait_for_embedding(self, host: HostProgram) -> None:
        """Wait until the embedding's rows have been summed."""
        if self.communication.sums_embedding:
            host.wait(self.communication.embedding_sum)

    def _start(self, entry: Weight) -> Phase:
        """Start a pass of a pipeline's stage whose input comes from the neighbouring stage."""
        host = HostProgram()
        self.communication.receive(host, entry.chain)
        self.communication.prefetch_weight(host, entry)
        return host.phase("start")

    @property
    def _first_of_forward(self) -> Weight:
        """The weight that every block's forward pass uses first."""
        return self._entry(FORWARD, Block())

    def _forward_of_block(
        self, block: Block, following: Weight | None, has_next_block: bool
    ) -> Phase:
        """Run the forward pass of a block; the arguments are those of `_block_forward`."""
        host = HostProgram()
        if self.shapes.model.position != "learned":
            self._wait_for_embedding(host)
        self._block_forward(host, FORWARD, block, following, has_next_block)
        if has_next_block:
            self._move_out(host, block)
        return host.phase("forward")

    def _head(self, backward_entry: Weight) -> Phase:
        """Predict the next token; `backward_entry` is the weight that is used after the head."""
        host = HostProgram()
        self._predict(host, backward_entry)
        return host.phase("head")

    def _predict(self, host: HostProgram, backward_entry: Weight) -> None:
        """Run the final norm, the logits and the loss, and the backward pass of these."""
        shapes = self.shapes
        token_bytes = shapes.tokens * FP32_BYTES
        self._norm(host, FORWARD, "norm")
        self._linear_forward(host, Weight(FORWARD, "head"), Weight(BACKWARD, "head"))
        if shapes.gathers_logits:
            logit_bytes = shapes.loss_logits * shapes.element_bytes
            host.run(names.LOSS_LOGITS, "all_gather", logit_bytes, shapes.y_axis)
            copied = np.where(shapes.y > 1, 2.0 * logit_bytes, 0.0)
            host.memory_bound(f"{names.LOSS_LOGITS}.copy", copied, "copy")
        nbytes = shapes.loss_logits * (2.0 * shapes.element_bytes + FP32_BYTES)
        host.memory_bound(names.LOSS_SOFTMAX, nbytes, "softmax")
        if not shapes.gathers_logits:
            # Each rank has a part of the vocabulary. For the softmax over all of it, the parts'
            # largest value is found first, and then their sums of exponentials and the target's
            # logit are added.
            host.run(names.LOSS_MAXIMUM, "all_reduce", token_bytes, shapes.y_axis)
            host.run(names.LOSS_SUM, "all_reduce", 2.0 * token_bytes, shapes.y_axis)
        nbytes = shapes.loss_logits * (FP32_BYTES + shapes.element_bytes)
        host.memory_bound(names.LOSS_GRADIENT, nbytes, "softmax_backward")
        self.communication.prefetch_beside_head(host, backward_entry.chain)
        self._linear_backward(host, "head", backward_entry)
        self.communication.end_head(host, backward_entry.chain)
        self._norm(host, BACKWARD, "norm")

    def _module(self) -> Phase:
        """Predict one further token with a module of multi-token prediction.

        The module joins the residual stream with the embedding of the next token, both after a
        norm, by a projection. A block, a norm and the model's head follow (DeepSeek-V3, arXiv
        2412.19437, section 2.2; Megatron-Core d98e8a64, core/transformer/multi_token_prediction.py,
        which gathers the projection's columns). The backward pass of all this comes right after.
        """
        host = HostProgram()
        block = self._model.blocks[-1]
        projection = self._model.mtp_projection.name
        last_weight = Weight(BACKWARD, self._model.linears_of(block)[-1].name)
        self._look_up(host)
        if self._model.position != "learned":
            self._wait_for_embedding(host)
        for layer in _MODULE_NORMS:
            self._norm(host, FORWARD, layer)
        joined = names.of_layer(FORWARD, "mtp_join")
        host.memory_bound(joined, 4.0 * self.shapes.residual_bytes, "copy")
        self._linear_forward(host, Weight(FORWARD, projection), self._first_of_forward)
        self._gather_columns(host, FORWARD)
        self._block_forward(host, FORWARD, block, Weight(FORWARD, "head"), False)
        self._predict(host, last_weight)
        recomputes = self.shapes.recompute == "full"
        self._block_backward(host, block, recomputes, Weight(BACKWARD, projection))
        if self.shapes.residual_is_split:
            self._gather_columns(host, BACKWARD)
        self._linear_backward(host, projection, None)
        for layer in reversed(_MODULE_NORMS):
            self._norm(host, BACKWARD, layer)
        return host.phase("module", self.shapes.job.mtp_modules)

    def _gather_columns(self, host: HostProgram, chain: str) -> None:
        """Gather the columns of a module's projection, or the gradients of all tokens."""
        name = names.all_gather(names.of_layer(chain, "mtp_columns"))
        host.run(name, "all_gather", self.shapes.stream_bytes, self.shapes.y_axis)

    def _blocks_backward(
        self,
        name: str,
        layers: Sequence[int],
        recomputes: bool,
        following: Weight | None,
        begins: bool,
    ) -> list[Phase]:
        """Run the backward pass of some layers, which are all recomputed as a whole or all not.

        `following` is the weight that is used after them, and `begins` says whether no layer came
        before them in this backward pass.
        """
        chain = RECOMPUTE if recomputes else BACKWARD
        kinds = [*reversed(self._model.counts(layers).items())]
        phases = []
        for number, (block, n_blocks) in enumerate(kinds):
            entry = self._entry(chain, block)
            next_kind = kinds[number + 1][0] if kinds[number + 1 :] else None
            after = following if next_kind is None else self._entry(chain, next_kind)
            has_first = begins and number == 0 and self.communication.reduces_later
            n_first = int(has_first and n_blocks > 1)
            for end, repeats, next_entry, next_block, is_first in (
                ("_first", n_first, entry, block, True),
                ("", n_blocks - 1 - n_first, entry, block, False),
                ("_last", 1, after, next_kind, has_first and n_blocks == 1),
            ):
                if not repeats:
                    continue
                of_block = self._once(
                    self._backward_of_block, block, recomputes, next_entry, next_block, is_first
                )
                phase_name = f"{name}{_kind_suffix(block)}{end}"
                phases.append(replace(of_block, name=phase_name, repeats=repeats))
        return phases

    def _backward_of_block(
        self,
        block: Block,
        recomputes: bool,
        next_entry: Weight | None,
        next_block: Block | None,
        is_first: bool,
    ) -> Phase:
        """Run the backward pass of a block; the arguments are those of `_block_backward`.

        `next_block` is the block whose activations this pass brings back from the host.
        """
        host = HostProgram()
        self._bring_back(host, next_block)
        self._block_backward(host, block, recomputes, next_entry, is_first)
        return host.phase("backward")

    def _embedding_backward(self) -> Phase:
        """Add rows to a dense gradient block, and send it."""
        host = HostProgram()
        shapes = self.shapes
        owner = names.of_layer(BACKWARD, "embedding")
        if shapes.model.position == "learned":
            position = names.of_layer(BACKWARD, "embedding.position")
            host.memory_bound(position, shapes.residual_bytes, "reduce")
        self.communication.before_weight_gradient(host, "embedding")
        self.communication.gather_embedding_gradient(host)
        cleared_bytes = self.communication.embedding_starts_from_zero * shapes.embedding_bytes
        nbytes = cleared_bytes + 3.0 * shapes.residual_bytes
        host.memory_bound(names.scatter_add(owner), nbytes, "scatter_add")
        self.communication.send_gradient(host, "embedding")
        return host.phase("embedding_backward")

    def _accumulate(self, last_layer: str) -> Phase:
        """Add the gradients of the micro-step to the gradients of earlier micro-steps."""
        host = HostProgram()
        self.communication.accumulate(host, last_layer)
        return host.phase("accumulate")

    def forward_pass(
        self, layers: Sequence[int], first: bool, last: bool, recompute: str
    ) -> tuple[Phase, ...]:
        """Return the forward pass over some layers of the model.

        With `first` the embedding comes before them; with `last` the head comes after them, with
        the job's modules that predict further tokens. Layers of one kind are played one after
        another. `recompute` says what the backward pass recomputes.
        """
        after = Weight(FORWARD, "head") if last else None
        entry = self._first_of_forward
        phases = [self._once(self._embedding) if first else self._once(self._start, entry)]
        *kinds, (block, n_blocks) = [*self._model.counts(layers).items()] or [(Block(), 0)]
        for kind, n_of_kind in (*kinds, (block, n_blocks - 1)):
            if n_of_kind > 0:
                of_block = self._once(self._forward_of_block, kind, entry, True)
                phases.append(replace(of_block, name=_forward_name(kind), repeats=n_of_kind))
        if n_blocks > 0:
            of_block = self._once(self._forward_of_block, block, after, False)
            phases.append(replace(of_block, name=f"{_forward_name(block)}_last"))
        if last:
            phases.append(self._once(self._head, self._backward_entry(layers, recompute)))
        if last and (n_modules := self.shapes.job.mtp_modules):
            embedding = self._once(self._embedding_backward)
            phases.append(self._once(self._module))
            phases.append(replace(embedding, name="module_embedding", repeats=n_modules))
        return _without_empty(phases)

    def backward_pass(
        self, layers: Sequence[int], first: bool, last: bool, recompute: str
    ) -> tuple[Phase, ...]:
        """Return the backward pass over some layers; it ends by adding up their gradients.

        It ends at the lowest layer that is not frozen.

        With `first` the embedding's gradient is among them; with `last` the backward pass of the
        head came before, as a part of `forward_pass`. The layers that are recomputed as a whole are
        the first ones, so that they come last.
        """
        phases = []
        if not last:
            phases.append(self._once(self._start, self._backward_entry(layers, recompute)))
        layers = self.shapes.backward_layers(layers)
        blocks_backward = self._recomputing(recompute)._blocks_backward
        n_recomputed = n_recomputed_layers(recompute, len(layers))
        recomputed, kept = layers[:n_recomputed], layers[n_recomputed:]
        if kept:
            following = None
            if recomputed:
                following = self._entry(RECOMPUTE, self._model.blocks[recomputed[-1]])
            phases += blocks_backward("backward", kept, False, following, True)
        if recomputed:
            name = "backward_recomputed" if kept else "backward"
            phases += blocks_backward(name, recomputed, True, None, not kept)
        trains_embedding = first and self.shapes.job.trains_embedding
        if trains_embedding:
            phases.append(self._once(self._embedding_backward))
        last_layer = "embedding" if trains_embedding else self._first_of_forward.layer
        phases.append(self._once(self._accumulate, last_layer))
        return _without_empty(phases)

    def microstep(self, recompute: str) -> tuple[Phase, ...]:
        """Return the forward and the backward pass of the whole model over one micro-batch."""
        layers = range(self._model.n_layers)
        forward = self.forward_pass(layers, True, True, recompute)
        return forward + self.backward_pass(layers, True, True, recompute)

    def step_end(self) -> tuple[Phase, ...]:
        """Return what happens once per step, after all micro-steps."""
        host = HostProgram()
        self.communication.step_end(host)
        return (host.phase("step_end"),)


def _forward_name(block: Block) -> str:
    """Return the name of the forward pass of a kind of block."""
    return f"forward{_kind_suffix(block)}"


def _kind_suffix(block: Block) -> str:
    """Return what a phase's name adds for a block with experts or with a window."""
    return "_experts" * block.has_experts + "_window" * bool(block.window)


def _without_empty(phases: list[Phase]) -> tuple[Phase, ...]:
    """Return the phases in which something happens."""
    return tuple(phase for phase in phases if phase.common_repeats > 0 and phase.operations)
