"""The phases of a training step of a transformer, which are the same for every strategy.

They are the passes over embedding, blocks (`block`) and head. What has to be communicated between
kernels is decided by a strategy's `Communication`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.blocks import Block
from axonn_tune.spec.model import Model
from axonn_tune.spec.names import BACKWARD, FORWARD, RECOMPUTE
from axonn_tune.spec.plan import FROM_HOST, TO_HOST, Phase
from axonn_tune.spec.recomputation import n_recomputed_layers
from axonn_tune.strategies.block import BlockPasses
from axonn_tune.strategies.communication import Communication, Weight
from axonn_tune.strategies.moved import moved_bytes
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES, Shapes

_EMBEDDING = Weight(FORWARD, "embedding")
# Activations that move to the host's memory, and back.
_MOVED_OUT = names.of_layer(FORWARD, "activations")
_MOVED_BACK = names.of_layer(BACKWARD, "activations")
# The norms of what a module of multi-token prediction joins.
_MODULE_NORMS = ("mtp_token_norm", "mtp_stream_norm")


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
    def _blocks(self) -> BlockPasses:
        """What emits the kernels of layers and of blocks."""
        return BlockPasses(self.shapes, self.communication)

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
        """The same phases with the other of two recomputations: none or selective."""
        recompute = "none" if self.shapes.recompute == "selective" else "selective"
        return replace(self, shapes=replace(self.shapes, block_recompute=recompute))

    # Entrances ---------------------------------------------------------------------------

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
        """Run the forward pass of a block; the arguments are those of `BlockPasses.forward`."""
        host = HostProgram()
        if self.shapes.model.position != "learned":
            self._wait_for_embedding(host)
        self._blocks.forward(host, FORWARD, block, following, has_next_block)
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
        self._blocks.norm(host, FORWARD, "norm")
        self._blocks.linear_forward(host, Weight(FORWARD, "head"), Weight(BACKWARD, "head"))
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
        self._blocks.linear_backward(host, "head", backward_entry)
        self.communication.end_head(host, backward_entry.chain)
        self._blocks.norm(host, BACKWARD, "norm")

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
            self._blocks.norm(host, FORWARD, layer)
        joined = names.of_layer(FORWARD, "mtp_join")
        host.memory_bound(joined, 4.0 * self.shapes.residual_bytes, "copy")
        self._blocks.linear_forward(host, Weight(FORWARD, projection), self._first_of_forward)
        self._gather_columns(host, FORWARD)
        self._blocks.forward(host, FORWARD, block, Weight(FORWARD, "head"), False)
        self._predict(host, last_weight)
        recomputes = self.shapes.recompute == "full"
        self._blocks.backward(host, block, recomputes, Weight(BACKWARD, projection))
        if self.shapes.residual_is_split:
            self._gather_columns(host, BACKWARD)
        self._blocks.linear_backward(host, projection, None)
        for layer in reversed(_MODULE_NORMS):
            self._blocks.norm(host, BACKWARD, layer)
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
        """Run the backward pass of a block; the arguments are those of `BlockPasses.backward`.

        `next_block` is the block whose activations this pass brings back from the host.
        """
        host = HostProgram()
        self._bring_back(host, next_block)
        self._blocks.backward(host, block, recomputes, next_entry, is_first)
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
