"""Recomputation of single modules of a block: what the block then does not save.

This is Megatron-Core 0.16.1 with Transformer Engine (``--recompute-granularity selective`` with
``--recompute-modules``; transformer/transformer_layer.py, multi_latent_attention.py, moe/experts.py
and moe/moe_layer.py). The outputs of ``layernorm``, ``moe_act`` and ``mla_up_proj`` are discarded
and formed again. Of each other module only the input is kept, and the whole module runs again.

A norm before a product that is not the router's is a part of that product's module there
(TELayerNormColumnParallelLinear), and so ``layernorm`` leaves it alone. These are the norm before
the MLP, which ``mlp`` includes, and the norm before attention that is not latent.
"""

from __future__ import annotations

from axonn_tune.spec.blocks import Block
from axonn_tune.spec.plan import Size
from axonn_tune.strategies.experts import ExpertShapes, experts_of
from axonn_tune.strategies.shapes import Shapes


def norms_again(shapes: Shapes, block: Block) -> tuple[str, ...]:
    """Return the norms of a block whose output is discarded."""
    modules = shapes.recomputed_modules
    model = shapes.model
    is_first = "layernorm" in modules and model.latent_attention is not None
    is_second = ("layernorm" if block.has_experts else "mlp") in modules and not model.shares_norm
    return ("norm1",) * is_first + ("norm2",) * is_second


def saved_beside(shapes: Shapes, block: Block) -> dict[str, Size]:
    """Return the bytes that a block saves of each norm's output beside one cast copy of it.

    Two weights that form latent vectors save a cast copy each. The router saves the output uncast,
    and shared experts that one, too, but where scales come from earlier steps (Megatron-Core
    d98e8a64, moe/shared_experts.py, set_save_original_input).
    """
    recipe = shapes.job.recipe
    cast_bytes, uncast_bytes = shapes.norm_output_of_one, shapes.residual_bytes
    nbytes: dict[str, Size] = {"norm1": 0.0, "norm2": 0.0}
    if recipe is None or shapes.memory.saves_uncast or not shapes.job.trains_weights:
        return nbytes
    if shapes.model.latent_attention is not None:
        nbytes["norm1"] = cast_bytes
    if block.has_experts:
        has_cast = bool(shapes.model.shared_linears) and recipe.saves_attention_cast
        nbytes["norm2"] = uncast_bytes - (not has_cast) * cast_bytes
    return nbytes


def discarded_bytes(shapes: Shapes, block: Block, score_bytes: Size) -> Size:
    """Return the bytes that a block does not save because of the modules that are recomputed.

    Parameters
    ----------
    score_bytes : array, shape (C,), or float
        Bytes that attention saves of its scores.
    """
    nbytes = _of_attention(shapes, score_bytes)
    for norm in norms_again(shapes, block):
        nbytes = nbytes + shapes.norm_output_of_one + saved_beside(shapes, block)[norm]
    experts = experts_of(shapes, block)
    if experts is not None:
        return nbytes + _of_experts(experts)
    if "mlp" in shapes.recomputed_modules:
        nbytes = nbytes + shapes.inner_bytes - shapes.attention_bytes
    return nbytes


def _of_attention(shapes: Shapes, score_bytes: Size) -> Size:
    """Return the bytes that attention does not save.

    The product that follows saves attention's output as its own input, unless it saves a cast copy.
    """
    modules = shapes.recomputed_modules
    nbytes: Size = 0.0
    if "mla_up_proj" in modules:
        nbytes = nbytes + shapes.attention_factor * shapes.up_projected_bytes
    if "core_attn" in modules:
        nbytes = nbytes + score_bytes
        if shapes.job.saves_attention_cast:
            nbytes = nbytes + shapes.linears["proj"].input_bytes
    return nbytes


def _of_experts(sizes: ExpertShapes) -> Size:
    """Return the bytes that a layer of experts does not save."""
    modules = sizes.shapes.recomputed_modules
    if "moe" in modules:
        return sizes.saved_bytes
    nbytes: Size = 0.0
    if "moe_act" in modules:
        nbytes = nbytes + sizes.activation_bytes
    if "shared_experts" in modules:
        nbytes = nbytes + sizes.shared_bytes
    return nbytes
