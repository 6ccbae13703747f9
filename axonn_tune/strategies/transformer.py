"""The kernels of a training step of a transformer, which are the same for every strategy.

Which kernels a rank runs, and in which order, follows from the model and from how widths are
split. What has to be communicated between them is decided by a strategy's `Communication`.
"""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.spec import names
from axonn_tune.spec.names import BACKWARD, FORWARD, RECOMPUTE
from axonn_tune.spec.plan import Phase
from axonn_tune.strategies.communication import Communication, Weight
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES, MASK_BYTES, Shapes

_EMBEDDING = Weight(FORWARD, "embedding")
_FIRST_OF_FORWARD = Weight(FORWARD, "qkv")
# The weights that the backward pass of a block uses first, without and with full recomputation.
_BACKWARD_ENTRY = Weight(BACKWARD, "down")
_RECOMPUTED_ENTRY = Weight(RECOMPUTE, "qkv")
# Norms whose output is the input of a linear layer, and those of a block with one norm, which is
# formed again once, in the backward pass of the layer that comes last.
_NORM_BEFORE = {"qkv": "norm1", "up": "norm2"}
_SHARED_NORM_BEFORE = {"up": "norm1"}


@dataclass(frozen=True, eq=False)
class Transformer:
    """The phases of a micro-step, and the end of a step, for all candidates of one table."""

    shapes: Shapes
    communication: Communication

    # Linear layers -----------------------------------------------------------------------

    def _linear_forward(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Multiply, and sum the output over the axis that splits k."""
        shape = self.shapes.linears[weight.layer]
        self.communication.take_weight(host, weight, following)
        self.communication.gather_input(host, weight)
        for name, n in shape.products:
            owner = names.of_layer(weight.chain, name)
            host.gemm(names.gemm(owner), self.shapes.tokens, n, shape.k, shape.modes[0])
        self.communication.sum_output(host, weight)

    def _linear_backward(self, host: HostProgram, layer: str, following: Weight | None) -> None:
        """Form dI = dO W^T, summed over the axis that splits n, and dW = I^T dO."""
        shape = self.shapes.linears[layer]
        tokens = self.shapes.tokens
        weight = Weight(BACKWARD, layer)
        _, input_mode, weight_mode = shape.modes
        self.communication.take_weight(host, weight, following)
        self.communication.gather_for_gradients(host, weight)
        for name, n in shape.products:
            owner = names.of_layer(BACKWARD, name)
            host.gemm(names.gemm_input(owner), tokens, shape.k, n, input_mode)
        n_sums = len(shape.products) - 1
        if n_sums:
            name = names.input_gradient(weight.name)
            host.memory_bound(name, n_sums * 3.0 * shape.input_bytes, "add")
        pending_sum = self.communication.sum_input_gradient(host, weight)
        self._recompute_input(host, layer)
        self.communication.before_weight_gradient(host, layer)
        for name, n in shape.products:
            owner = names.of_layer(BACKWARD, name)
            host.gemm(names.gemm_weight(owner), *shape.stored_sides(n), tokens, weight_mode)
        if shape.linear.bias:
            host.memory_bound(names.bias(weight.name), shape.output_bytes, "reduce")
        self.communication.send_gradient(host, layer)
        if pending_sum:
            host.wait(pending_sum)

    def _recompute_input(self, host: HostProgram, layer: str) -> None:
        """Form the input of a product again, if selective recomputation has not kept it."""
        if not (self.shapes.recomputes_inputs and self.shapes.recompute == "selective"):
            return
        if layer == "down":
            self._activation(host, RECOMPUTE)
            return
        norms = _SHARED_NORM_BEFORE if self.shapes.model.shares_norm else _NORM_BEFORE
        if layer in norms:
            name = names.of_layer(RECOMPUTE, norms[layer])
            host.memory_bound(name, 2.0 * self.shapes.residual_bytes, self.shapes.norm_kernel)

    def _recompute_products(self, host: HostProgram) -> None:
        """Form again what a block has not kept of every second product and of the kernels between.

        Attention has been kept.
        """
        shares = self.shapes.model.recomputed_shares
        self._norm(host, RECOMPUTE, "norm1")
        self._part_again(host, "qkv", shares["qkv"])
        self._rotary(host, RECOMPUTE)
        self._part_again(host, "proj", shares["proj"])
        self._output_norm(host, RECOMPUTE, "attention_norm")
        self._residual(host, RECOMPUTE, "residual1")
        if not self.shapes.model.shares_norm:
            self._norm(host, RECOMPUTE, "norm2")
        self._part_again(host, "up", shares["up"])
        self._activation(host, RECOMPUTE)

    def _part_again(self, host: HostProgram, layer: str, share: float) -> None:
        """Form a share of a layer's output again; its sum over ranks has been kept."""
        shape = self.shapes.linears[layer]
        weight = Weight(RECOMPUTE, layer)
        self.communication.gather_input(host, weight)
        if share:
            name = names.gemm(weight.name)
            host.gemm(name, self.shapes.tokens, share * shape.n, shape.k, shape.modes[0])

    # Other kernels -----------------------------------------------------------------------

    def _norm(self, host: HostProgram, chain: str, layer: str) -> None:
        """Normalise the residual stream, or form the gradient of the norm.

        Where X splits the hidden dimension, an earlier kernel forms the sums over the rank's
        columns, which travel over X in fp32.
        """
        shapes = self.shapes
        name = names.of_layer(chain, layer)
        is_backward = chain == BACKWARD
        if shapes.x_axis:
            n_sums = 2.0 if shapes.model.norm == "layer" else 1.0
            n_reads = 2.0 if is_backward else 1.0
            sums_bytes = (shapes.x > 1) * n_reads * shapes.residual_bytes
            host.memory_bound(names.sums(name), sums_bytes, "reduce")
            message_bytes = shapes.tokens * (n_sums * FP32_BYTES)
            host.run(names.all_reduce(name), "all_reduce", message_bytes, shapes.x_axis)
        kernel = f"{shapes.norm_kernel}_backward" if is_backward else shapes.norm_kernel
        host.memory_bound(name, (3.0 if is_backward else 2.0) * shapes.residual_bytes, kernel)

    def _output_norm(self, host: HostProgram, chain: str, layer: str) -> None:
        """Normalise the output of attention or MLP, in models that do so."""
        if self.shapes.model.normalises_outputs:
            self._norm(host, chain, layer)

    def _attention(self, host: HostProgram, chain: str) -> None:
        """Run attention with the rank's heads, over its share of the queries."""
        shapes = self.shapes
        job = shapes.job
        self.communication.begin_attention(host, chain)
        host.attention(
            names.of_layer(chain, "attention"),
            shapes.tokens / job.seq_len,
            shapes.model.n_heads / shapes.y,
            job.seq_len,
            shapes.model.head_dim,
            chain == BACKWARD,
            job.attention == "flash",
        )
        if job.dropout and job.attention == "unfused":
            nbytes = shapes.score_bytes * (2.0 + MASK_BYTES / shapes.element_bytes)
            host.memory_bound(names.of_layer(chain, "attention_dropout"), nbytes, "scale")
        self.communication.end_attention(host, chain)

    def _rotary(self, host: HostProgram, chain: str) -> None:
        """Turn q and k by their positions, or turn their gradients back."""
        if self.shapes.model.position == "rotary":
            host.memory_bound(names.of_layer(chain, "rotary"), self.shapes.rotary_bytes, "rotary")

    def _activation(self, host: HostProgram, chain: str) -> None:
        """Apply the MLP's nonlinearity."""
        shapes = self.shapes
        nbytes = shapes.linears["up"].output_bytes + shapes.mlp_bytes
        host.memory_bound(names.of_layer(chain, "activation"), nbytes, shapes.activation_kernel)

    def _activation_backward(self, host: HostProgram) -> None:
        """Read the MLP before its activation and dO, and write dI."""
        shapes = self.shapes
        nbytes = 2.0 * shapes.linears["up"].output_bytes + shapes.mlp_bytes
        kernel = f"{shapes.activation_kernel}_backward"
        host.memory_bound(names.of_layer(BACKWARD, "activation"), nbytes, kernel)

    def _residual(self, host: HostProgram, chain: str, layer: str) -> None:
        """Add to the residual stream; with dropout, draw and keep a mask, or apply it again."""
        n_passes = 3.0
        if self.shapes.job.dropout:
            n_passes += MASK_BYTES / self.shapes.element_bytes
            n_passes += 2.0 if chain == BACKWARD else 0.0
        host.memory_bound(
            names.of_layer(chain, layer), n_passes * self.shapes.residual_bytes, "add"
        )

    # A block -----------------------------------------------------------------------------

    def _block_forward(
        self, host: HostProgram, chain: str, following: Weight | None, has_next_block: bool
    ) -> None:
        """Run attention and MLP in the forward or the recomputed chain.

        `following` is the weight that is used next after the block, in any chain; `has_next_block`
        says whether another block of this chain follows.
        """
        qkv, proj, up, down = (
            Weight(chain, linear.name) for linear in self.shapes.model.block_linears
        )
        self.communication.begin_block(host, chain)
        self._norm(host, chain, "norm1")
        if has_next_block:
            self.communication.prefetch_block(host, chain)
        self._linear_forward(host, qkv, proj)
        self._rotary(host, chain)
        self._attention(host, chain)
        self._linear_forward(host, proj, up)
        self._output_norm(host, chain, "attention_norm")
        self._residual(host, chain, "residual1")
        if not self.shapes.model.shares_norm:
            self._norm(host, chain, "norm2")
        self._linear_forward(host, up, down)
        self._activation(host, chain)
        self._linear_forward(host, down, following)
        self._output_norm(host, chain, "mlp_norm")
        self._residual(host, chain, "residual2")

    def _block_backward(
        self, host: HostProgram, recomputes: bool, next_entry: Weight | None
    ) -> None:
        """Recompute the forward pass if told so, then form the gradients of MLP and attention.

        `next_entry` is the weight that the next block of the backward pass uses first.
        """
        if recomputes:
            has_next_block = next_entry is not None
            self._block_forward(host, RECOMPUTE, Weight(BACKWARD, "down"), has_next_block)
        else:
            self.communication.begin_block(host, BACKWARD)
        if self.shapes.recomputes_by_product:
            self._recompute_products(host)
        self._output_norm(host, BACKWARD, "mlp_norm")
        self._linear_backward(host, "down", Weight(BACKWARD, "up"))
        self._activation_backward(host)
        if next_entry is not None and not recomputes:
            self.communication.prefetch_block(host, next_entry.chain)
        self._linear_backward(host, "up", Weight(BACKWARD, "proj"))
        if not self.shapes.model.shares_norm:
            self._norm(host, BACKWARD, "norm2")
        self._residual(host, BACKWARD, "residual2")
        self._output_norm(host, BACKWARD, "attention_norm")
        self._linear_backward(host, "proj", Weight(BACKWARD, "qkv"))
        if self.shapes.recomputes_attention:
            self._attention(host, RECOMPUTE)
        self._attention(host, BACKWARD)
        self._rotary(host, BACKWARD)
        self._linear_backward(host, "qkv", next_entry)
        self._norm(host, BACKWARD, "norm1")
        self._residual(host, BACKWARD, "residual1")
        self.communication.end_block(host)

    def _backward_entry(self, n_layers: int) -> Weight:
        """Return the weight that the backward pass over some layers uses first."""
        recomputes_last = 0 < n_layers == self.shapes.n_recomputed(n_layers)
        if recomputes_last or self.shapes.recompute == "full":
            return _RECOMPUTED_ENTRY
        return _BACKWARD_ENTRY

    # Phases ------------------------------------------------------------------------------

    def _embedding(self) -> Phase:
        """Look up each token's row; ranks along Y hold different parts of the vocabulary."""
        host = HostProgram()
        shapes = self.shapes
        self.communication.prefetch_weight(host, _EMBEDDING)
        self.communication.take_weight(host, _EMBEDDING, _FIRST_OF_FORWARD)
        self.communication.prefetch_block(host, FORWARD)
        host.memory_bound(names.lookup(_EMBEDDING.name), 2.0 * shapes.residual_bytes, "lookup")
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
        return host.phase("embedding")

    def _wait_for_embedding(self, host: HostProgram) -> None:
        """Wait until the embedding's rows have been summed."""
        if self.shapes.y_axis:
            host.wait(self.communication.embedding_sum)

    def _start(self, entry: Weight) -> Phase:
        """Start a pass of a pipeline's stage whose input comes from the neighbouring stage."""
        host = HostProgram()
        self.communication.receive(host, entry.chain)
        self.communication.prefetch_weight(host, entry)
        return host.phase("start")

    def _blocks_forward(
        self, name: str, n_blocks: int, following: Weight | None, has_next_block: bool
    ) -> Phase:
        """Run the forward pass of some equal blocks."""
        host = HostProgram()
        if self.shapes.model.position != "learned":
            self._wait_for_embedding(host)
        self._block_forward(host, FORWARD, following, has_next_block)
        return host.phase(name, n_blocks)

    def _head(self, backward_entry: Weight) -> Phase:
        """Run the final norm, the logits and the loss, and the backward pass of these.

        `backward_entry` is the weight that the backward pass uses next.
        """
        host = HostProgram()
        shapes = self.shapes
        token_bytes = shapes.tokens * FP32_BYTES
        self._norm(host, FORWARD, "norm")
        self._linear_forward(host, Weight(FORWARD, "head"), Weight(BACKWARD, "head"))
        # Softmax of the rank's part of the vocabulary, then of the parts: their largest
        # log-sum-exp, then the sum of exponentials with the target's logit.
        nbytes = shapes.logits * (2.0 * shapes.element_bytes + FP32_BYTES)
        host.memory_bound(names.LOSS_SOFTMAX, nbytes, "softmax")
        host.run(names.LOSS_MAXIMUM, "all_reduce", token_bytes, shapes.y_axis)
        host.run(names.LOSS_SUM, "all_reduce", 2.0 * token_bytes, shapes.y_axis)
        nbytes = shapes.logits * (FP32_BYTES + shapes.element_bytes)
        host.memory_bound(names.LOSS_GRADIENT, nbytes, "softmax_backward")
        self.communication.prefetch_block(host, backward_entry.chain)
        self._linear_backward(host, "head", backward_entry)
        self._norm(host, BACKWARD, "norm")
        return host.phase("head")

    def _blocks_backward(
        self, name: str, n_blocks: int, recomputes: bool, following: Weight | None
    ) -> list[Phase]:
        """Run the backward pass of some blocks, which are all recomputed as a whole or all not.

        `following` is the weight that is used after them.
        """
        entry = _RECOMPUTED_ENTRY if recomputes else _BACKWARD_ENTRY
        phases = []
        for end, repeats, next_entry in (
            ("", n_blocks - 1, entry),
            ("_last", min(n_blocks, 1), following),
        ):
            host = HostProgram()
            self._block_backward(host, recomputes, next_entry)
            phases.append(host.phase(f"{name}{end}", repeats))
        return phases

    def _embedding_backward(self) -> Phase:
        """Add rows to a dense gradient block, and send it."""
        host = HostProgram()
        shapes = self.shapes
        name = names.of_layer(BACKWARD, "embedding")
        if shapes.model.position == "learned":
            position = names.of_layer(BACKWARD, "embedding.position")
            host.memory_bound(position, shapes.residual_bytes, "reduce")
        self.communication.before_weight_gradient(host, "embedding")
        cleared_bytes = self.communication.embedding_starts_from_zero * shapes.embedding_bytes
        nbytes = cleared_bytes + 3.0 * shapes.residual_bytes
        host.memory_bound(names.scatter_add(name), nbytes, "scatter_add")
        self.communication.send_gradient(host, "embedding")
        return host.phase("embedding_backward", over_storage=True)

    def _accumulate(self, last_layer: str) -> Phase:
        """Add the gradients of the micro-step to the gradients of earlier micro-steps."""
        host = HostProgram()
        self.communication.accumulate(host, last_layer)
        return host.phase("accumulate", over_storage=True)

    def forward_pass(self, n_layers: int, first: bool, last: bool) -> tuple[Phase, ...]:
        """Return the forward pass over some layers of the model.

        With `first` the embedding comes before them; with `last` the head comes after them.
        """
        after = Weight(FORWARD, "head") if last else None
        phases = [
            self._embedding() if first else self._start(_FIRST_OF_FORWARD),
            self._blocks_forward("forward", n_layers - 1, _FIRST_OF_FORWARD, True),
            self._blocks_forward("forward_last", min(n_layers, 1), after, False),
        ]
        if last:
            phases.append(self._head(self._backward_entry(n_layers)))
        return _without_empty(phases)

    def backward_pass(self, n_layers: int, first: bool, last: bool) -> tuple[Phase, ...]:
        """Return the backward pass over some layers; it ends by adding up their gradients.

        With `first` the embedding's gradient is among them; with `last` the backward pass of the
        head came before, as a part of `forward_pass`. The layers that are recomputed as a whole are
        the first ones, so that they come last.
        """
        phases = [] if last else [self._start(self._backward_entry(n_layers))]
        n_recomputed = self.shapes.n_recomputed(n_layers)
        n_kept = n_layers - n_recomputed
        if n_kept:
            following = _RECOMPUTED_ENTRY if n_recomputed else None
            phases += self._blocks_backward("backward", n_kept, False, following)
        if n_recomputed:
            name = "backward_recomputed" if n_kept else "backward"
            phases += self._blocks_backward(name, n_recomputed, True, None)
        if first:
            phases.append(self._embedding_backward())
        phases.append(self._accumulate("embedding" if first else "qkv"))
        return _without_empty(phases)

    def microstep(self) -> tuple[Phase, ...]:
        """Return the forward and the backward pass of the whole model over one micro-batch."""
        n_layers = self.shapes.model.n_layers
        return self.forward_pass(n_layers, True, True) + self.backward_pass(n_layers, True, True)

    def step_end(self) -> tuple[Phase, ...]:
        """Return what happens once per step, after all micro-steps."""
        host = HostProgram()
        self.communication.step_end(host)
        return (host.phase("step_end", over_storage=True),)


def _without_empty(phases: list[Phase]) -> tuple[Phase, ...]:
    """Return the phases in which something happens."""
    return tuple(phase for phase in phases if phase.repeats > 0 and phase.operations)
