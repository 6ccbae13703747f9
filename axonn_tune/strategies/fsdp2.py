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
from typing import NamedTuple

import numpy as np

from axonn_tune.spec.blocks import Block
from axonn_tune.spec.engine import ZeroProgram, value_or
from axonn_tune.spec.plan import Array, Size
from axonn_tune.strategies.adapters import adapter_shape
from axonn_tune.strategies.experts import ExpertShapes, experts_of, saved_at_inner_widths
from axonn_tune.strategies.optimizer import N_MOMENTS
from axonn_tune.strategies.shapes import Shapes
from axonn_tune.strategies.units import GatherUnit

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


def fsdp2_memory(
    shapes: Shapes,
    units: Sequence[GatherUnit],
    program: ZeroProgram,
    kept: Kept,
    attention_buffers: Array,
) -> dict[str, Array]:
    """Return the peak bytes of a rank by term, each of shape (C,).

    Parameters
    ----------
    units : sequence of GatherUnit
        The root (embedding, final norm and head), then the units of a block.
    attention_buffers : array, shape (C,)
        Bytes of the buffers in which attention of one block receives what other ranks send.
    """
    n_layers = shapes.n_backward
    root, *in_block = units
    block = _Block.of(shapes, in_block, program, kept)
    accumulates = np.where(shapes.table.n_microsteps(shapes.job.global_batch) > 1, 1.0, 0.0)
    element_bytes = kept.stored_element_bytes
    stored, weight_bytes = _stored_bytes(shapes, units, kept, block)
    one_each = np.ones(len(shapes.table))
    terms: list[dict[str, Array]] = []
    for moment in _moments(shapes, block, root, accumulates, program, kept, attention_buffers):
        reduced, gathered = moment.n_reduced * block.gradient_bytes, moment.gathered
        if program.reserves_by_stream:
            reduced, gathered = stored, gathered + block.parameters + root.parameters
        n_left = n_layers - moment.n_done
        left = n_left * shapes.saved_by_layers(block.saved, n_layers)
        terms.append(
            {
                "weights": weight_bytes,
                "gradients": _gradient_bytes(
                    shapes, program, stored, reduced, accumulates, element_bytes
                ),
                "optimizer_states": N_MOMENTS * stored,
                "gathered_weights": gathered * shapes.element_bytes * one_each,
                "activations": left + shapes.residual_bytes,
                "working_set": moment.working * one_each,
            }
        )
    return _largest(terms)


def fsdp2_stage_memory(
    shapes: Shapes,
    units: Sequence[GatherUnit],
    program: ZeroProgram,
    kept: Kept,
    attention_buffers: Array,
    n_held: Array,
    last: bool,
) -> dict[str, Array]:
    """Return the bytes by term, each of shape (C,), of a stage of a pipeline.

    Its weights stay whole, and so do its gradients until all are reduced after the last backward
    pass.

    Parameters
    ----------
    units : sequence of GatherUnit
        Units of the stage.
    attention_buffers : array, shape (C,)
        Bytes of attention's buffers, as in `fsdp2_memory`.
    n_held : array, shape (C,)
        Number of layers whose activations are held at once.
    last : bool
        Whether the stage has the head.
    """
    root, *in_block = units
    n_layers = in_block[0].count
    block = _Block.of(shapes, in_block, program, kept)
    element, message = shapes.element_bytes, program.message_bytes(shapes.element_bytes)
    one_each = np.ones(len(shapes.table))
    stored, weight_bytes = _stored_bytes(shapes, units, kept, block)
    sums_bytes = sum(unit.all_trained for unit in units) * message
    whole = n_layers * block.parameters + _is_copied(shapes, root, kept) * root.parameters
    working = np.maximum(
        block.in_activation + _gradient_elements(shapes, "down") * element,
        _at_end_of_block(shapes, attention_buffers) + block.trained * element,
    )
    if last:
        head_input = shapes.linears["head"].input_bytes
        working = np.maximum(working, _loss_bytes(shapes) + head_input)
    in_backward = {
        "weights": weight_bytes,
        "gradients": sums_bytes * one_each,
        "optimizer_states": N_MOMENTS * stored,
        "gathered_weights": whole * element * one_each,
        "activations": n_held * shapes.saved_by_layers(block.saved, n_layers)
        + shapes.residual_bytes,
        "working_set": working * one_each,
    }
    reduced = stored + np.maximum(root.trained, block.trained) * message
    if program.reserves_by_stream:
        return in_backward | {"gradients": in_backward["gradients"] + reduced}
    at_end = in_backward | {
        "gradients": in_backward["gradients"] + reduced,
        "activations": 0.0 * one_each,
        "working_set": 0.0 * one_each,
    }
    return _largest([in_backward, at_end])


def _largest(moments: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Return the bytes by term, shape (C,), at the moment at which a candidate holds most."""
    held = np.stack([np.sum(list(terms.values()), axis=0) for terms in moments])
    most = held.argmax(axis=0)
    return {
        name: np.stack([terms[name] for terms in moments])[most, np.arange(most.size)]
        for name in moments[0]
    }


def _stored_bytes(
    shapes: Shapes, units: Sequence[GatherUnit], kept: Kept, block: _Block
) -> tuple[Array, Array]:
    """Return the bytes of a rank's shards of all gradients, and of all weights, shape (C,) each."""
    root, *in_block = units
    element_bytes = kept.stored_element_bytes
    root_bytes = _shard_bytes(shapes, root, kept, root.trained * element_bytes)
    gradients = root_bytes + in_block[0].n_trained * block.gradient_bytes
    weights = np.zeros(len(shapes.table))
    for unit in units:
        nbytes = unit.all_bytes(shapes.job, element_bytes)
        weights = weights + _shard_bytes(shapes, unit, kept, nbytes)
    return gradients, weights


def _shard_bytes(shapes: Shapes, unit: GatherUnit, kept: Kept, nbytes: Size) -> Array:
    """Return the bytes of a rank's shard of a unit of `nbytes`, shape (C,)."""
    return nbytes / shapes.table.size(unit.sharded_over or kept.shards)


def _is_copied(shapes: Shapes, unit: GatherUnit, kept: Kept) -> np.ndarray:
    """Return whether a rank computes with a gathered or cast copy of a unit, shape (C,)."""
    is_cast = kept.stored_element_bytes != shapes.element_bytes
    return is_cast | (shapes.table.size(unit.sharded_over or kept.shards) > 1)


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

    @classmethod
    def of(
        cls, shapes: Shapes, units: Sequence[GatherUnit], program: ZeroProgram, kept: Kept
    ) -> _Block:
        """Return the sizes of the blocks whose weights are in the given units."""
        saved = in_activation = gradient_bytes = np.zeros(len(shapes.table))
        element = shapes.element_bytes
        layers = shapes.backward_layers(range(shapes.model.n_layers))
        counts = shapes.model.counts(layers)
        for kind, count in counts.items():
            everything = _saved_by_block(shapes, kind, program)
            of_kind = _kept_by_block(shapes, everything, program)
            saved = saved + count * of_kind
            dropped = everything - of_kind
            in_activation = np.maximum(in_activation, dropped + _mlp_bytes(shapes, kind))
        for unit in units:
            of_unit = unit.trained * kept.stored_element_bytes
            gradient_bytes = gradient_bytes + _shard_bytes(shapes, unit, kept, of_unit)
        return cls(
            sum(
                _is_copied(shapes, unit, kept) * unit.whole_bytes(shapes.job) / element
                for unit in units
            ),
            sum(_is_copied(shapes, unit, kept) * unit.trained for unit in units),
            gradient_bytes,
            saved / len(layers),
            in_activation,
        )


def _kept_by_block(shapes: Shapes, everything: Array, program: ZeroProgram) -> Array:
    """Return what a block saves of everything that it would save without recomputation."""
    if shapes.recomputes_by_product:
        return _saved_beside_products(shapes, program.runs_eagerly)
    return {
        "none": everything,
        "selective": everything - shapes.saved_score_bytes,
        "full": shapes.residual_bytes,
    }[shapes.recompute]


def _mlp_bytes(shapes: Shapes, block: Block) -> Array:
    """Return the bytes of the gradients around the activation of a block's MLP or experts."""
    experts = experts_of(shapes, block)
    if experts is not None:
        return experts.working_bytes
    return (2.0 if shapes.model.gated_mlp else 1.0) * shapes.mlp_bytes


def _gradient_bytes(
    shapes: Shapes,
    program: ZeroProgram,
    stored: Array,
    new: Array,
    accumulates: Array,
    stored_element_bytes: float,
) -> Array:
    """Return the bytes of the sharded gradients of earlier micro-steps, and of new ones.

    Sums over replicas have the type of the messages, and they are kept until the backward pass
    ends. The gradients in the stored type are kept next to them: the sums are converted to that
    type, or added where every micro-step sums over the replicas. If only the last micro-step does,
    earlier ones leave their sums in the type of the messages. (torch 2.13,
    distributed/fsdp/_fully_shard, foreach_reduce and finalize_backward.)

    Parameters
    ----------
    stored : array, shape (C,)
        Bytes of all gradients as they are stored.
    new : array, shape (C,)
        Bytes of those that have been reduced in this backward pass, in the same type.
    accumulates : array, shape (C,)
        1 where there are earlier micro-steps, 0 elsewhere.
    stored_element_bytes : float
        Bytes of an element in this type.
    """
    sums = np.where(accumulates > 0, stored, new)
    ratio = program.message_bytes(shapes.element_bytes) / stored_element_bytes
    is_converted = ratio < 1
    first = new * (1.0 + is_converted * ratio)
    if program.sums_replicas_each_step:
        later = stored + new * ratio
    else:
        later = stored * ratio + new if is_converted else stored
    return np.where(shapes.table.size("replica") > 1, np.where(accumulates > 0, later, first), sums)


def _saved_by_block(shapes: Shapes, block: Block, program: ZeroProgram) -> Array:
    """Return the bytes that a kind of block saves if nothing is recomputed."""
    # The outputs of norms are saved after the gather over a tensor group; `norm_output_bytes`
    # counts them so already where weights are frozen.
    n_parts = shapes.y if shapes.job.trains_weights else 1.0
    norm_bytes = shapes.norm_input_bytes + shapes.norm_output_bytes * n_parts
    inner_bytes = saved_at_inner_widths(shapes, block)
    saved = norm_bytes + inner_bytes + shapes.saved_score_bytes + shapes.adapter_bytes
    return saved + _kept_by_eager_kernels(shapes, block, program) if program.runs_eagerly else saved


def _saved_beside_products(shapes: Shapes, runs_eagerly: bool) -> Array:
    """Return the bytes that a block saves if every second product is formed again.

    These are its input, the outputs of attention and of the other products, and sums of products
    over a tensor group. A compiler leaves out the last product's, which no backward pass reads.
    """
    products = shapes.model.block_products
    shares = shapes.model.recomputed_shares
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


def _moments(
    shapes: Shapes,
    block: _Block,
    root: GatherUnit,
    accumulates: Array,
    program: ZeroProgram,
    kept: Kept,
    attention_buffers: Array,
) -> list[_Moment]:
    """Return the moments at which most may be held.

    They are the loss, the head's backward pass, the activation and the end of the backward pass of
    the first two and the last two blocks in it, and the embedding's backward pass.
    """
    model, job = shapes.model, shapes.job
    n_layers = shapes.n_backward
    stream = shapes.residual_bytes
    head_input = shapes.linears["head"].input_bytes
    logits_bytes = shapes.logits * shapes.element_bytes
    of_loss = _loss_bytes(shapes)
    head = _gradient_elements(shapes, "head")
    # The size of an element of a message, in elements of the job's type.
    per_element = program.message_bytes(shapes.element_bytes) / shapes.element_bytes
    # The message of the micro-step before, until the first block sends its own.
    message = accumulates * root.trained * per_element
    # The whole gradients of earlier micro-steps, where none of these has reduced them.
    sums = 0.0 * message
    if kept.gradients:
        message, sums = sums, accumulates * per_element * (n_layers * block.trained + root.trained)
    n_kept = n_layers if kept.blocks else 0
    last_block = block.parameters * max(program.keeps_last_block, n_kept)
    at_end = _at_end_of_block(shapes, attention_buffers)
    down = _gradient_elements(shapes, "down")
    if model.experts is not None and job.trains_weights:
        down = np.maximum(down, ExpertShapes(shapes, model.experts).down_elements)
    whole_root, whole_block = root.parameters + sums, block.parameters
    before_blocks = whole_root + message
    moments = [
        _Moment(0, 0, before_blocks + last_block, of_loss + head_input),
        _Moment(
            0,
            0,
            before_blocks + head + whole_block * max(1, n_kept),
            logits_bytes + 2.0 * head_input,
        ),
    ]
    ends = {0, min(1, n_layers - 1), max(n_layers - 2, 0), n_layers - 1}
    for n_done in sorted(ends):
        is_last = n_done == n_layers - 1
        sent = block.trained * per_element if n_done else message
        n_gathered = max(1 if is_last else 2, n_kept if kept.gradients else n_kept - n_done)
        held = whole_root + head + whole_block * n_gathered + sent
        moments.append(_Moment(n_done, n_done, held + down, block.in_activation))
        moments.append(_Moment(n_done + 1, n_done, held + block.trained, at_end))
    # The gradients of the head and of the embedding, and their sum where they share the weight.
    n_gradients = 3 if model.tied_embeddings else job.trains_embedding + job.trains_head
    kept_to_end = whole_block * (n_kept if kept.gradients else 0)
    at_last = whole_root + kept_to_end + block.trained + n_gradients * head
    moments.append(_Moment(n_layers, n_layers, at_last, stream))
    return moments


def _loss_bytes(shapes: Shapes) -> Array:
    """Return the bytes of the tensors that the loss forms from the logits."""
    whole = value_or(shapes.memory.logit_bytes, _TENSORS_OF_LOSS * shapes.element_bytes)
    split = value_or(shapes.memory.split_logit_bytes, whole)
    return shapes.loss_logits * np.where(shapes.y > 1, split, whole)


def _at_end_of_block(shapes: Shapes, attention_buffers: Array) -> Array:
    """Return the working bytes at the end of a block's backward pass, without its gradients."""
    return 3.0 * shapes.residual_bytes + _attended_bytes(shapes) + attention_buffers


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
