"""The peak memory of a rank under torch's FSDP2 with each block a unit.

Weights and gradients are stored in fp32 shards and gathered in the job's type; frozen weights are
stored in that type, too, since torch wants one type of trained parameters only (torch 2.13,
_fully_shard/_fsdp_param_group.py, _init_mp_dtypes). When a unit's
backward pass ends, the message with its gradients is kept until the next unit's is sent; the next
unit's weights are gathered while a unit computes.

Torch's allocator keeps what one stream has freed for the next tensors of that stream. Weights are
received, and gradients reduced, in streams of their own (torch 2.13, _fully_shard/
_fsdp_collectives.py, foreach_all_gather and foreach_reduce), so that what is reserved holds the
largest amount of each.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from axonn_tune.spec.engine import ZeroProgram, value_or
from axonn_tune.spec.plan import Array, Size
from axonn_tune.strategies.adapters import adapter_shape
from axonn_tune.strategies.optimizer import FP32_MOMENT_BYTES
from axonn_tune.strategies.shapes import FP32_BYTES, Shapes
from axonn_tune.strategies.units import GatherUnit

# The backward pass of torch's loss holds the logarithm of the softmax, its gradient and that of the
# logits, which are gone by then.
_TENSORS_OF_LOSS = 3.0


class _Moment(NamedTuple):
    """What a rank holds at one point of its backward pass.

    n_done
        Number of blocks whose backward pass has ended.
    n_reduced
        Number of blocks whose gradients have been reduced.
    gathered
        Elements of whole weights, and of whole gradients, that are held.
    working
        Bytes of what is in work, besides what the other blocks have saved.
    """

    n_done: int
    n_reduced: int
    gathered: Size
    working: Size


def fsdp2_memory(
    shapes: Shapes, block: GatherUnit, root: GatherUnit, program: ZeroProgram
) -> dict[str, Array]:
    """Return the bytes by term, each of shape (C,), of the units of a block and of the root."""
    model = shapes.model
    n_layers = model.n_layers
    n_shards = shapes.table.size("shard")
    everything = _saved_by_block(shapes, program.runs_eagerly)
    saved = {
        "none": everything,
        "selective": everything - shapes.saved_score_bytes,
        "full": shapes.residual_bytes,
    }[shapes.recompute]
    if shapes.recomputes_by_product:
        saved = _saved_beside_products(shapes, program.runs_eagerly)
    accumulates = np.where(shapes.table.n_microsteps(shapes.job.global_batch) > 1, 1.0, 0.0)
    trained = n_layers * block.trained + root.trained
    stored = trained * FP32_BYTES / n_shards
    block_bytes, root_bytes = (unit.fp32_shard_bytes(shapes.job) for unit in (block, root))
    one_each = np.ones(len(shapes.table))
    terms: list[dict[str, Array]] = []
    for moment in _moments(shapes, block, root, everything, saved, accumulates, program):
        reduced, gathered = moment.n_reduced * block.trained, moment.gathered
        if program.reserves_by_stream:
            reduced, gathered = trained, gathered + block.parameters + root.parameters
        n_left = n_layers - moment.n_done
        left = n_left * shapes.saved_by_layers(saved, n_layers)
        terms.append(
            {
                "weights": (n_layers * block_bytes + root_bytes) / n_shards,
                "gradients": _gradient_bytes(shapes, stored, reduced, accumulates),
                "optimizer_states": stored * (FP32_MOMENT_BYTES / FP32_BYTES),
                "gathered_weights": gathered * shapes.element_bytes * one_each,
                "activations": left + shapes.residual_bytes,
                "working_set": moment.working * one_each,
            }
        )
    largest = np.stack([sum(held.values(), start=0.0 * one_each) for held in terms]).argmax(axis=0)
    return {
        name: np.stack([held[name] for held in terms])[largest, np.arange(len(shapes.table))]
        for name in terms[0]
    }


def _gradient_bytes(shapes: Shapes, stored: Array, reduced: Size, accumulates: Array) -> Array:
    """Return the bytes of the sharded gradients of earlier micro-steps, and of new ones.

    Replicas add their sums once in a step. These are in the type of the messages, and they are kept
    next to the fp32 gradients to which they are converted.

    Parameters
    ----------
    stored : array, shape (C,)
        Bytes of all gradients in fp32.
    reduced : float, or array of shape (C,)
        Number of parameters whose gradients have been reduced in this backward pass.
    accumulates : array, shape (C,)
        1 where there are earlier micro-steps, 0 elsewhere.
    """
    new = reduced * FP32_BYTES / shapes.table.size("shard")
    ratio = shapes.element_bytes / FP32_BYTES
    is_converted = (shapes.table.size("replica") > 1) & (ratio < 1)
    converted = accumulates * stored * ratio + new * (1.0 + (1.0 - accumulates) * ratio)
    return np.where(is_converted, converted, np.where(accumulates > 0, stored, new))


def _saved_by_block(shapes: Shapes, runs_eagerly: bool) -> Array:
    """Return the bytes that a block saves if nothing is recomputed."""
    # Norms' outputs are saved as they were gathered over a tensor group; beside frozen weights they
    # are counted so in any case.
    n_parts = shapes.y if shapes.job.trains_weights else 1.0
    norm_bytes = shapes.norm_input_bytes + shapes.norm_output_bytes * n_parts
    saved = norm_bytes + shapes.inner_bytes + shapes.saved_score_bytes + shapes.adapter_bytes
    return saved + _kept_by_eager_kernels(shapes) if runs_eagerly else saved


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


def _kept_by_eager_kernels(shapes: Shapes) -> Array:
    """Return the bytes that a block saves because its kernels are not fused.

    Rotated queries and keys are stored next to what they were, and then attention's output lies in
    the order of the queries; grouped queries are copied; a gate is stored before it is applied.
    """
    model = shapes.model
    query_bytes = shapes.linears["proj"].input_bytes
    kept = shapes.mlp_bytes if model.gated_mlp else 0.0 * query_bytes
    if model.position == "rotary":
        return kept + query_bytes * (2.0 + model.n_kv_heads / model.n_heads)
    return kept + (query_bytes if model.n_kv_heads < model.n_heads else 0.0)


def _moments(
    shapes: Shapes,
    block: GatherUnit,
    root: GatherUnit,
    everything: Array,
    saved: Array,
    accumulates: Array,
    program: ZeroProgram,
) -> list[_Moment]:
    """Return the moments at which most may be held.

    They are the loss, the head's backward pass, the activation and the end of the backward pass of
    the first two and the last two blocks in it, and the embedding's backward pass.
    """
    model = shapes.model
    n_layers = model.n_layers
    stream = shapes.residual_bytes
    head_input = shapes.linears["head"].input_bytes
    logits_bytes = shapes.logits * shapes.element_bytes
    logit_bytes = value_or(shapes.memory.logit_bytes, _TENSORS_OF_LOSS * shapes.element_bytes)
    split_logit_bytes = value_or(shapes.memory.split_logit_bytes, logit_bytes)
    of_loss = shapes.logits * np.where(shapes.y > 1, split_logit_bytes, logit_bytes)
    head = _gradient_elements(shapes, "head")
    # Elements of the job's type that are as large as an element of a message.
    per_element = program.message_bytes(shapes.element_bytes) / shapes.element_bytes
    # The message of the micro-step before, until the first block sends its own.
    message = accumulates * root.trained * per_element
    last_block = block.parameters if program.keeps_last_block else 0.0
    in_activation = everything - saved + (2.0 if model.gated_mlp else 1.0) * shapes.mlp_bytes
    at_end = 3.0 * stream + shapes.linears["qkv"].output_bytes
    down = _gradient_elements(shapes, "down")
    whole_root, whole_block = root.parameters, block.parameters
    before_blocks = whole_root + message
    moments = [
        _Moment(0, 0, before_blocks + last_block, of_loss + head_input),
        _Moment(0, 0, before_blocks + head + whole_block, logits_bytes + 2.0 * head_input),
    ]
    telling = {0, min(1, n_layers - 1), max(n_layers - 2, 0), n_layers - 1}
    for n_done in sorted(telling):
        is_last = n_done == n_layers - 1
        sent = block.trained * per_element if n_done else message
        held = whole_root + head + whole_block * (1 if is_last else 2) + sent
        moments.append(_Moment(n_done, n_done, held + down, in_activation))
        moments.append(_Moment(n_done + 1, n_done, held + block.trained, at_end))
    # The gradients of the head and of the embedding, and their sum where they share the weight.
    n_gradients = 3 if model.tied_embeddings else 2
    at_last = whole_root + block.trained + n_gradients * head
    moments.append(_Moment(n_layers, n_layers, at_last, stream))
    return moments


def _gradient_elements(shapes: Shapes, layer: str) -> Size:
    """Return the elements of the gradients that a layer forms: its weight's, or its adapter's."""
    if shapes.job.trains_weights:
        return shapes.linears[layer].weight_bytes / shapes.element_bytes
    adapter = adapter_shape(shapes, layer)
    return 0.0 if adapter is None else adapter.parameters
