"""The peak memory of a rank under torch's FSDP2 with each block a unit.

Weights and gradients are stored in shards, usually in fp32, and gathered in the job's type; frozen
weights are stored in that type, too, since torch wants one type of trained parameters only (torch
2.13, _fully_shard/_fsdp_param_group.py, _init_mp_dtypes). When a unit's backward pass ends, the
message with its gradients is kept until the next unit's is sent; the next unit's weights are
gathered while a unit computes.

Torch's allocator keeps what one stream has freed for the next tensors of that stream. Weights are
received, and gradients reduced, in streams of their own (torch 2.13, _fully_shard/
_fsdp_collectives.py, foreach_all_gather and foreach_reduce), so that the reserved memory has room
for the largest amount of each stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from axonn_tune.spec.blocks import Block
from axonn_tune.spec.facts import value_or
from axonn_tune.spec.plan import Array, Size
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.strategies.adapters import adapter_shape
from axonn_tune.strategies.context import ContextParallelism
from axonn_tune.strategies.experts import ExpertShapes, experts_of, saved_at_inner_widths
from axonn_tune.strategies.optimizer import N_MOMENTS
from axonn_tune.strategies.shapes import FP32_BYTES, Shapes
from axonn_tune.strategies.zero.units import GatherUnit
from axonn_tune.strategies.zero.zero_units import ZeroUnits

# The backward pass of torch's loss holds three tensors of the size of the logits: the logarithm of
# the softmax, its gradient and the gradient of the logits. The logits themselves are freed by then.
_TENSORS_OF_LOSS = 3.0


class Kept(NamedTuple):
    """What a rank keeps.

    shards
        Group whose ranks share what is stored, apart from experts.
    stored_element_bytes
        Bytes of an element of the stored trained weights, of their gradients and of the moments.
    blocks
        Whether blocks stay gathered from their forward to their backward pass.
    gradients
        Whether unsharded gradients stay through all micro-steps of a step, and with them the
        weights that are kept.
    """

    shards: str
    stored_element_bytes: float
    blocks: bool
    gradients: bool


class _Ends(NamedTuple):
    """What the backward pass holds of embedding, final norm and head, in elements.

    weights, gradients
        Whole weights while the head's gradient is formed, and the most that is held of it.
    beside_blocks
        Whole weights and gradients that are held while blocks compute.
    before, sent
        Last message of the micro-step before, and the one that the first block finds.
    at_last
        Whole weights and gradients when the embedding's gradient is formed.
    gathered
        The most that is gathered of them in one message.
    """

    weights: Size
    gradients: Size
    beside_blocks: Size
    before: Size
    sent: Size
    at_last: Size
    gathered: Size


class _Moment(NamedTuple):
    """What a rank holds at one point of its backward pass.

    n_done
        Number of blocks whose backward pass has ended.
    n_reduced
        Number of blocks whose gradients have been reduced.
    gathered
        Elements of whole weights, and of whole gradients, that are held.
    working
        Bytes of the tensors that are being formed, besides what the other blocks have saved.
    """

    n_done: int
    n_reduced: int
    gathered: Size
    working: Size


@dataclass(frozen=True, eq=False)
class Fsdp2Memory:
    """The peak memory of a rank.

    Attributes
    ----------
    units : ZeroUnits
        The units of its weights.
    sharing : ContextParallelism
        How ranks share sequences, for what attention of one block saves and receives.
    """

    shapes: Shapes
    units: ZeroUnits
    program: ZeroProgram
    kept: Kept
    sharing: ContextParallelism

    def peak(self) -> dict[str, Array]:
        """Return the peak bytes of a rank by term, each of shape (C,)."""
        shapes, block = self.shapes, self._block
        one_each = np.ones(len(shapes.table))
        terms: list[dict[str, Array]] = []
        for moment in self._moments():
            reduced, gathered = moment.n_reduced * block.gradient_bytes, moment.gathered
            if self.program.reserves_by_stream:
                reduced = self._stored
                gathered = gathered + block.parameters + self._ends.gathered
            n_left = shapes.n_backward - moment.n_done
            left = n_left * shapes.saved_by_layers(block.saved, shapes.n_backward)
            terms.append(
                {
                    "weights": self._weight_bytes + self.sharing.n_tables * self._table_bytes,
                    "gradients": self._gradient_bytes(reduced),
                    "optimizer_states": N_MOMENTS * self._stored,
                    "gathered_weights": gathered * shapes.element_bytes * one_each,
                    "activations": left + shapes.residual_bytes,
                    "working_set": moment.working * one_each,
                }
            )
        return _largest(terms)

    def peak_of_stage(self, n_held: Array, last: bool) -> dict[str, Array]:
        """Return the bytes by term, each of shape (C,), of a stage of a pipeline.

        Its weights stay whole, and so do its gradients until all are reduced after the last
        backward pass. Its table of rotations has no copy where ranks share sequences: torchtitan at
        9dec370 shares out that of the whole model, which stages do not use (train.py).

        Parameters
        ----------
        n_held : array, shape (C,)
            Number of layers whose activations are held at once.
        last : bool
            Whether the stage has the head.
        """
        shapes, block, root = self.shapes, self._block, self.units.root
        n_layers = self.units.in_block[0].count
        element, message = shapes.element_bytes, self.program.message_bytes(shapes.element_bytes)
        one_each = np.ones(len(shapes.table))
        sums_bytes = sum(unit.all_trained for unit in self.units.all) * message
        whole = n_layers * block.parameters + self._is_copied(root) * root.parameters
        working = np.maximum(
            block.in_activation + _gradient_elements(shapes, "down") * element,
            self._at_end_of_block + block.trained * element,
        )
        if last:
            head_input = shapes.linears["head"].input_bytes
            working = np.maximum(working, self._loss_bytes + head_input)
        saved = n_held * shapes.saved_by_layers(block.saved, n_layers)
        in_backward = {
            "weights": self._weight_bytes + self._table_bytes,
            "gradients": sums_bytes * one_each,
            "optimizer_states": N_MOMENTS * self._stored,
            "gathered_weights": whole * element * one_each,
            "activations": saved + shapes.residual_bytes,
            "working_set": working * one_each,
        }
        reduced = self._stored + np.maximum(root.trained, block.trained) * message
        reducing = in_backward | {"gradients": in_backward["gradients"] + reduced}
        if self.program.reserves_by_stream:
            return reducing
        nothing = 0.0 * one_each
        at_end = reducing | {"activations": nothing, "working_set": nothing}
        return _largest([in_backward, at_end])

    @cached_property
    def _stored(self) -> Array:
        """The bytes of a rank's shards of all gradients as they are stored, shape (C,)."""
        root = self.units.root
        of_root = self._shard_bytes(root, root.trained * self.kept.stored_element_bytes)
        return of_root + self.units.in_block[0].n_trained * self._block.gradient_bytes

    @cached_property
    def _weight_bytes(self) -> Array:
        """The bytes of a rank's shards of all weights, shape (C,)."""
        nbytes = np.zeros(len(self.shapes.table))
        for unit in self.units.all:
            whole = unit.all_bytes(self.shapes.job, self.kept.stored_element_bytes)
            nbytes = nbytes + self._shard_bytes(unit, whole)
        return nbytes

    @property
    def _table_bytes(self) -> float:
        """The bytes of a table of the rotations of all positions, if the engine keeps one."""
        model, seq_len = self.shapes.model, self.shapes.job.seq_len
        has_table = model.position == "rotary"
        return (
            has_table * value_or(self.shapes.memory.rotation_bytes, 0.0) * model.head_dim * seq_len
        )

    def _n_shards(self, unit: GatherUnit) -> Array:
        """Return the number of ranks that share a unit, shape (C,)."""
        return self.shapes.table.size(unit.sharded_over or self.kept.shards)

    def _shard_bytes(self, unit: GatherUnit, nbytes: Size) -> Array:
        """Return the bytes of a rank's shard of a unit of `nbytes`, shape (C,)."""
        return nbytes / self._n_shards(unit)

    def _is_copied(self, unit: GatherUnit) -> np.ndarray:
        """Return whether a rank computes with a gathered or cast copy of a unit, shape (C,)."""
        is_cast = self.kept.stored_element_bytes != self.shapes.element_bytes
        return is_cast | (self._n_shards(unit) > 1)

    @cached_property
    def _block(self) -> _Block:
        """The sizes of the blocks."""
        shapes, job = self.shapes, self.shapes.job
        saved = in_activation = gradient_bytes = np.zeros(len(shapes.table))
        layers = shapes.backward_layers(range(shapes.model.n_layers))
        for kind, count in shapes.model.counts(layers).items():
            everything = self._saved_by(kind)
            of_kind = self._kept_of(everything)
            saved = saved + count * of_kind
            dropped = everything - of_kind
            in_activation = np.maximum(in_activation, dropped + _mlp_bytes(shapes, kind))
        parameters: Size = 0.0
        trained: Size = 0.0
        for unit in self.units.in_block:
            is_copied = self._is_copied(unit)
            parameters = parameters + is_copied * unit.whole_bytes(job) / shapes.element_bytes
            trained = trained + is_copied * unit.trained
            of_unit = unit.trained * self.kept.stored_element_bytes
            gradient_bytes = gradient_bytes + self._shard_bytes(unit, of_unit)
        return _Block(parameters, trained, gradient_bytes, saved / len(layers), in_activation)

    def _kept_of(self, everything: Array) -> Array:
        """Return what a block saves of everything that it would save without recomputation."""
        shapes = self.shapes
        if shapes.recomputes_by_product:
            saved = _saved_beside_products(shapes, self.program.runs_eagerly)
            return saved + self.sharing.kept_bytes
        return {
            "none": everything,
            "selective": everything - shapes.saved_score_bytes,
            "full": shapes.residual_bytes,
        }[shapes.recompute]

    def _saved_by(self, block: Block) -> Array:
        """Return the bytes that a kind of block saves if nothing is recomputed."""
        shapes = self.shapes
        # The outputs of norms are saved after the gather over a tensor group; `norm_output_bytes`
        # counts them so already where weights are frozen.
        n_parts = shapes.y if shapes.job.trains_weights else 1.0
        norm_bytes = shapes.norm_input_bytes + shapes.norm_output_bytes * n_parts
        inner_bytes = saved_at_inner_widths(shapes, block)
        saved = norm_bytes + inner_bytes + shapes.saved_score_bytes + shapes.adapter_bytes
        saved = saved + self.sharing.saved_bytes
        if not self.program.runs_eagerly:
            return saved
        return saved + _kept_by_eager_kernels(shapes, block, self.program)

    @cached_property
    def _accumulates(self) -> Array:
        """Whether there are earlier micro-steps (1) or not (0), shape (C,)."""
        n_microsteps = self.shapes.table.n_microsteps(self.shapes.job.global_batch)
        return np.where(n_microsteps > 1, 1.0, 0.0)

    def _gradient_bytes(self, new: Array) -> Array:
        """Return the bytes of the sharded gradients of earlier micro-steps, and of new ones.

        Sums over replicas have the type of the messages, and they are kept until the backward pass
        ends. The gradients in the stored type are kept next to them: the sums are converted to that
        type, or added where every micro-step sums over the replicas. If only the last micro-step
        does, earlier ones leave their sums in the type of the messages. (torch 2.13,
        distributed/fsdp/_fully_shard, foreach_reduce and finalize_backward.)

        Parameters
        ----------
        new : array, shape (C,)
            Bytes of those that have been reduced in this backward pass, in the stored type.
        """
        shapes, stored = self.shapes, self._stored
        has_earlier = self._accumulates > 0
        message_bytes = self.program.message_bytes(shapes.element_bytes)
        ratio = message_bytes / self.kept.stored_element_bytes
        is_converted = ratio < 1
        first = new * (1.0 + is_converted * ratio)
        if self.program.sums_replicas_each_step:
            later = stored + new * ratio
        else:
            later = stored * ratio + new if is_converted else stored
        over_replicas = np.where(has_earlier, later, first)
        alone = np.where(has_earlier, stored, new)
        return np.where(shapes.table.size("replica") > 1, over_replicas, alone)

    def _moments(self) -> list[_Moment]:
        """Return the moments at which most may be held.

        They are the loss, the head's backward pass, the activation and the end of the backward pass
        of the first two and the last two blocks in it, and the embedding's backward pass.
        """
        shapes, block, kept, ends = self.shapes, self._block, self.kept, self._ends
        n_layers = shapes.n_backward
        head_input = shapes.linears["head"].input_bytes
        n_pieces = self.program.head_chunks
        logits_bytes = shapes.logits * shapes.element_bytes / n_pieces
        # The gradients of the pieces' inputs are joined in fp32.
        joined = head_input * (n_pieces > 1) * FP32_BYTES / shapes.element_bytes
        n_kept = n_layers if kept.blocks else 0
        before_blocks = ends.weights + self._sums + ends.before
        last_block = block.parameters * max(self.program.keeps_last_block, n_kept)
        n_gathered = max(n_pieces == 1, n_kept)
        in_head = before_blocks + ends.gradients + block.parameters * n_gathered
        moments = [
            _Moment(0, 0, before_blocks + last_block, self._loss_bytes + head_input + joined),
            _Moment(0, 0, in_head, logits_bytes + 2.0 * head_input + joined),
        ]
        for n_done in sorted({0, min(1, n_layers - 1), max(n_layers - 2, 0), n_layers - 1}):
            is_last = n_done == n_layers - 1
            sent = block.trained * self._message_ratio if n_done else ends.sent
            n_gathered = max(1 if is_last else 2, n_kept if kept.gradients else n_kept - n_done)
            held = ends.beside_blocks + self._sums + block.parameters * n_gathered + sent
            in_down, at_end = held + self._largest_gradient, held + block.trained
            moments.append(_Moment(n_done, n_done, in_down, block.in_activation))
            moments.append(_Moment(n_done + 1, n_done, at_end, self._at_end_of_block))
        kept_to_end = block.parameters * (n_kept if kept.gradients else 0)
        at_last = ends.at_last + self._sums + kept_to_end + block.trained
        moments.append(_Moment(n_layers, n_layers, at_last, shapes.residual_bytes))
        return moments

    @property
    def _message_ratio(self) -> float:
        """The size of an element of a message, in elements of the job's type."""
        element_bytes = self.shapes.element_bytes
        return self.program.message_bytes(element_bytes) / element_bytes

    @cached_property
    def _ends(self) -> _Ends:
        """What is held of embedding, final norm and head.

        A message stays until the next unit sends its own. Where the head's gradient is formed in
        pieces, its sum has the type of the message, and a copy of the sum is sent.
        """
        ratio, in_pieces = self._message_ratio, self.program.head_chunks > 1
        # The last message of the micro-step before still exists, if that has sent any.
        sends = 0.0 if self.kept.gradients else self._accumulates
        head = _gradient_elements(self.shapes, "head")
        formed = head * (ratio + max(ratio, 1.0)) if in_pieces else head
        wrapped = self.units.wrapped_ends
        if not wrapped:
            root = self.units.root
            before = sends * root.trained * ratio
            held = root.parameters + (0.0 if in_pieces else head)
            at_last = root.parameters + self._n_vocabulary_gradients * head
            return _Ends(root.parameters, formed, held, before, before, at_last, root.parameters)
        unit, embedding = wrapped["head"], wrapped["embedding"]
        is_trained = self.shapes.job.trains_embedding
        return _Ends(
            weights=unit.parameters,
            gradients=formed,
            beside_blocks=0.0,
            before=sends * embedding.trained * ratio,
            sent=0.0 if in_pieces else unit.trained * ratio,
            at_last=is_trained * (embedding.parameters + embedding.trained),
            gathered=np.maximum(unit.parameters, embedding.parameters),
        )

    @property
    def _loss_bytes(self) -> Array:
        """The bytes of the tensors that the loss forms from the logits that exist at once."""
        shapes = self.shapes
        whole = value_or(shapes.memory.logit_bytes, _TENSORS_OF_LOSS * shapes.element_bytes)
        split = value_or(shapes.memory.split_logit_bytes, whole)
        logits = shapes.loss_logits / self.program.head_chunks
        return logits * np.where(shapes.y > 1, split, whole)

    @property
    def _sums(self) -> Size:
        """The elements of whole gradients of earlier micro-steps, if none of these reduced them."""
        if not self.kept.gradients:
            return 0.0
        whole = self.shapes.n_backward * self._block.trained + self.units.root.trained
        return self._accumulates * self._message_ratio * whole

    @property
    def _largest_gradient(self) -> Size:
        """The elements of the weight gradient that is formed beside the activation's."""
        model = self.shapes.model
        down = _gradient_elements(self.shapes, "down")
        if model.experts is None or not self.shapes.job.trains_weights:
            return down
        return np.maximum(down, ExpertShapes(self.shapes, model.experts).down_elements)

    @property
    def _n_vocabulary_gradients(self) -> int:
        """The gradients of head and embedding, and their sum where they share the weight."""
        job = self.shapes.job
        if self.shapes.model.tied_embeddings:
            return 3
        return job.trains_embedding + job.trains_head

    @property
    def _at_end_of_block(self) -> Array:
        """The working bytes at the end of a block's backward pass, without its gradients."""
        shapes = self.shapes
        return 3.0 * shapes.residual_bytes + _attended_bytes(shapes) + self.sharing.working_bytes


def _largest(moments: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Return the bytes by term, shape (C,), at the moment at which a candidate holds most."""
    held = np.stack([np.sum(list(terms.values()), axis=0) for terms in moments])
    most = held.argmax(axis=0)
    return {
        name: np.stack([terms[name] for terms in moments])[most, np.arange(most.size)]
        for name in moments[0]
    }


class _Block(NamedTuple):
    """What a block holds on average, and the most that a kind of block needs to compute.

    parameters, trained
        Number of its parameters that a rank gathers or casts, as elements of the job's type, and of
        those that are trained.
    gradient_bytes
        Bytes of the rank's shards of its gradients.
    saved
        Bytes that it saves.
    in_activation
        Bytes that are being formed in the activation, besides what the block has saved.
    """

    parameters: Size
    trained: Size
    gradient_bytes: Array
    saved: Array
    in_activation: Array


def _mlp_bytes(shapes: Shapes, block: Block) -> Array:
    """Return the bytes of the gradients around the activation of a block's MLP or experts."""
    experts = experts_of(shapes, block)
    if experts is not None:
        return experts.working_bytes
    return (2.0 if shapes.model.gated_mlp else 1.0) * shapes.mlp_bytes


def _saved_beside_products(shapes: Shapes, runs_eagerly: bool) -> Array:
    """Return the bytes that a block saves if every second product is formed again.

    These are its input, the outputs of attention and of the other products, and sums of products
    over a tensor group. A compiler leaves out the last product's, which no backward pass reads.
    """
    products = shapes.block_products
    shares = shapes.recomputed_shares
    saved = shapes.residual_bytes + shapes.linears["proj"].input_bytes
    for name in ("qkv", "up"):
        saved = saved + (1.0 - shares[name]) * shapes.linears[name].output_bytes
    if shapes.y_axis:
        saved = saved + (shapes.y > 1) * shapes.residual_bytes
    is_last_kept = len(products) % 2 == 1
    return saved + (runs_eagerly and is_last_kept) * shapes.residual_bytes + shapes.adapter_bytes


def _kept_by_eager_kernels(shapes: Shapes, block: Block, program: ZeroProgram) -> Array:
    """Return the bytes that a kind of block saves because its kernels are not fused.

    With rotary positions, attention's output is also stored in another order, rotated queries and
    keys are stored next to the unrotated ones if these share a tensor with the values, and keys and
    values are copied for their query heads if the engine does so. Without them, grouped queries are
    copied. A gate's output is stored before it is applied.
    """
    model = shapes.model
    query_bytes = shapes.linears["proj"].input_bytes
    experts = experts_of(shapes, block)
    mlp_bytes = shapes.mlp_bytes if experts is None else experts.activated_bytes
    kept = mlp_bytes if model.gated_mlp else 0.0 * query_bytes
    if model.position == "rotary":
        kv_share = model.n_kv_heads / model.n_heads
        copied = 2.0 * (1.0 - kv_share) if program.repeats_kv_heads else 0.0
        shared = 0.0 if program.separates_products else 1.0 + kv_share
        return kept + query_bytes * (1.0 + shared + copied)
    return kept + (query_bytes if model.n_kv_heads < model.n_heads else 0.0)


def _attended_bytes(shapes: Shapes) -> Size:
    """Return the bytes of queries, keys and values, or those that latent attention forms."""
    if shapes.model.latent_attention is not None:
        return shapes.up_projected_bytes
    return shapes.linears["qkv"].output_bytes


def _gradient_elements(shapes: Shapes, layer: str) -> Size:
    """Return the elements of a layer's weight gradient, or of its adapter's gradients."""
    if shapes.job.trains(layer):
        return shapes.linears[layer].weight_bytes / shapes.element_bytes
    adapter = adapter_shape(shapes, layer)
    return 0.0 if adapter is None else adapter.parameters
