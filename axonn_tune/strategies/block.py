"""The kernels of a block's forward and backward pass, which are the same for every strategy.

Which kernels a rank runs, and in which order, follows from the model and from how widths are
split. What has to be communicated between them is decided by a strategy's `Communication`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.blocks import Block
from axonn_tune.spec.model import Model
from axonn_tune.spec.names import BACKWARD, RECOMPUTE
from axonn_tune.strategies.adapters import AdapterPasses
from axonn_tune.strategies.casts import Casts
from axonn_tune.strategies.communication import Communication, Weight
from axonn_tune.strategies.experts import ExpertShapes, Mixture
from axonn_tune.strategies.modules import norms_again
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES, MASK_BYTES, Shapes, kernel_of

# Norms whose output is the input of a linear layer, and those of a block with one norm, which is
# formed again once, in the backward pass of the layer that comes last.
_NORM_BEFORE = {"qkv": "norm1", "up": "norm2"}
_SHARED_NORM_BEFORE = {"up": "norm1"}
# The kernel that follows a weight at the entrance of an MLP.
_ACTIVATIONS = {"up": "activation", "shared_up": "shared_activation"}


@dataclass(frozen=True, eq=False)
class BlockPasses:
    """The kernels of layers and of whole blocks, which its methods add to a host program."""

    shapes: Shapes
    communication: Communication

    @property
    def _model(self) -> Model:
        """The model."""
        return self.shapes.model

    @cached_property
    def _casts(self) -> Casts:
        """The casts of the job's precision."""
        return Casts(self.shapes)

    @cached_property
    def _mixture(self) -> Mixture | None:
        """The routed experts of a layer, in models that have them."""
        experts = self._model.experts
        if experts is None:
            return None
        return Mixture(ExpertShapes(self.shapes, experts), self.communication, self._casts)

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
            self._casts.cast_gathered(host, weight.chain, weight.layer, n_elements)
        else:
            self._casts.transpose_gathered(host, weight.chain, weight.layer, share_transposed)

    def linear_forward(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Multiply, and sum the output over the axis that splits k."""
        shape = self.shapes.linears[weight.layer]
        number_format = self._casts.number_format(weight.layer)
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
            self._casts.cast_input(host, weight.chain, weight.layer)
        else:
            self._casts.cast_input(host, weight.chain, weight.layer)
            self.communication.gather_input(host, weight)

    def linear_backward(self, host: HostProgram, layer: str, following: Weight | None) -> None:
        """Form dI = dO W^T, summed over the axis that splits n, and dW = I^T dO.

        Frozen weights have no dW.
        """
        shape = self.shapes.linears[layer]
        tokens = shape.tokens
        weight = Weight(BACKWARD, layer)
        input_mode = shape.modes[1]
        number_format = self._casts.number_format(layer)
        self._take_weight(host, weight, following)
        self._casts.cast_gradient(host, layer)
        self.communication.gather_for_gradients(host, weight)
        is_trained = self.shapes.job.trains(layer)
        if self.communication.keeps_weights and not is_trained:
            self._casts.transpose_frozen(host, layer, shape.n_elements)
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
        self._casts.form_columns(host, layer)
        for name, n in shape.products:
            owner = names.gemm_weight(names.of_layer(BACKWARD, name))
            rows, columns = shape.stored_sides(n)
            mode = shape.modes[2]
            host.gemm(owner, rows, columns, shape.tokens, mode, self._casts.number_format(layer))
        if shape.linear.bias:
            nbytes = self.communication.bias_bytes(layer)
            if np.any(np.asarray(nbytes) > 0):
                host.memory_bound(names.bias(names.of_layer(BACKWARD, layer)), nbytes, "reduce")
        self.communication.send_gradient(host, layer)

    def _attend(self, host: HostProgram, chain: str, block: Block) -> None:
        """Run attention of a chain, in a low format between casts where the engine does so."""
        self._casts.cast_for_attention(host, chain)
        self.communication.attend(host, chain, block.window)
        self._casts.convert_from_attention(host, chain)

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
        self.norm(host, RECOMPUTE, "norm1")
        self._part_again(host, "qkv", shares["qkv"])
        self._rotary(host, RECOMPUTE)
        self._part_again(host, "proj", shares["proj"])
        self._output_norm(host, RECOMPUTE, "attention_norm")
        self._residual(host, RECOMPUTE, "residual1")
        if not self.shapes.model.shares_norm:
            self.norm(host, RECOMPUTE, "norm2")
        self._part_again(host, "up", shares["up"])
        self._activation(host, RECOMPUTE, "up", "down")

    def _part_again(self, host: HostProgram, layer: str, share: float) -> None:
        """Form a share of a layer's output again; its sum over ranks has been kept."""
        shape = self.shapes.linears[layer]
        weight = Weight(RECOMPUTE, layer)
        number_format = self._casts.number_format(layer)
        if shape.linear.transposed:
            self._casts.cast_input(host, RECOMPUTE, layer)
        else:
            self._bring_input(host, weight)
        if share:
            name, n = names.gemm(weight.name), share * shape.n
            host.gemm(name, shape.tokens, n, shape.k, shape.modes[0], number_format)
        if not shape.linear.transposed:
            self.communication.sum_output(host, weight)

    # Other kernels -----------------------------------------------------------------------

    def norm(self, host: HostProgram, chain: str, layer: str) -> None:
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
            self.norm(host, chain, layer)

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

    def forward(
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
        self.norm(host, chain, "norm1")
        if has_next_block:
            self.communication.prefetch_block(host, chain)
        else:
            self.communication.prefetch_root(host, chain)
        for weight in before_attention:
            self.linear_forward(host, weight, followings[weight])
        self._head_norms(host, chain)
        self._rotary(host, chain)
        self._attend(host, chain, block)
        self.linear_forward(host, proj, followings[proj])
        self._output_norm(host, chain, "attention_norm")
        self._residual(host, chain, "residual1")
        if not self._model.shares_norm:
            self.norm(host, chain, "norm2")
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
        self.linear_forward(host, down, following)

    def _activated(
        self, host: HostProgram, weights: Sequence[Weight], following: Weight | None
    ) -> None:
        """Form the input of the MLP's last product."""
        up, down = weights
        self.linear_forward(host, up, following)
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
            self.norm(host, RECOMPUTE, "norm2")
            if weights and not (is_whole or is_shared):
                self._casts.cast_input(host, RECOMPUTE, weights[0].layer)
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
            self.norm(host, RECOMPUTE, "norm1")
            for linear in self._model.attention_linears:
                if not linear.is_split:
                    self._casts.cast_input(host, RECOMPUTE, linear.name)

    def _up_projections_again(self, host: HostProgram) -> None:
        """Form queries, keys and values of latent attention again from the latent vectors."""
        if "mla_up_proj" not in self.shapes.recomputed_modules:
            return
        self._head_norms(host, RECOMPUTE)
        for layer in ("q_up", "kv_up"):
            self.linear_forward(host, Weight(RECOMPUTE, layer), None)
        self._rotary(host, RECOMPUTE)

    def backward(
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
            self.forward(host, RECOMPUTE, block, following, has_next_block)
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
            self.norm(host, BACKWARD, "norm2")
        self._residual(host, BACKWARD, "residual2")
        self._output_norm(host, BACKWARD, "attention_norm")
        self._first_norm_again(host, block)
        self.linear_backward(host, proj, previous[proj])
        self._up_projections_again(host)
        if self.shapes.recomputes_attention:
            self._attend(host, RECOMPUTE, block)
        self._attend(host, BACKWARD, block)
        self._rotary(host, BACKWARD)
        self._head_norms(host, BACKWARD)
        for layer in reversed(before_attention):
            self.linear_backward(host, layer, previous.get(layer, next_entry))
        if self._model.latent_attention is not None:
            self._sum(host, names.input_gradient(names.of_layer(BACKWARD, "norm1")))
        self.norm(host, BACKWARD, "norm1")
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
        self.linear_backward(host, down, previous[down])
        self._activation_backward(host, up, down)
        if not block.has_experts:
            self._prefetch_block(host, prefetched)
        self.linear_backward(host, up, previous[up])
        if block.has_experts:
            self._sum(host, names.input_gradient(names.of_layer(BACKWARD, up)))

    def _prefetch_block(self, host: HostProgram, chain: str) -> None:
        """Start to gather the next block of a chain; an empty text stands for none."""
        if chain:
            self.communication.prefetch_block(host, chain)
