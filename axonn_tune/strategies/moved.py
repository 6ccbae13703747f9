"""Activations that move to the host's memory between the forward and the backward pass.

This is Megatron-Core's fine-grained activation offloading: inputs of modules are copied to the host
on a stream of their own once a block has formed them, and come back while the backward pass is at
the block before. The last layer of a virtual stage keeps its activations, since its backward pass
comes next (Megatron-LM d98e8a64, core/pipeline_parallel/fine_grained_activation_offload.py: the
groups that are offloaded last stay on the GPU).

Inputs of whole layers, which are recomputed, move in the same way (Arctic Long Sequence Training,
arXiv 2506.13996, section 3.3; there the host waits for each copy, and the last layer's moves, too).

Transformer Engine moves all that some layers save, for which it has the time of all layers
(d0067d0d, pytorch/cpu_offload.py, DefaultOffloadSynchronizer): each layer but the last counts with
an equal share of these bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axonn_tune.spec.blocks import Block
from axonn_tune.spec.engine import HOST_ACTIVATIONS
from axonn_tune.spec.job import Job
from axonn_tune.spec.offload import LAYER_INPUTS, LAYERS, offloaded_layers, offloaded_modules
from axonn_tune.spec.plan import Array, Size
from axonn_tune.strategies.experts import ExpertShapes, experts_of
from axonn_tune.strategies.modules import norms_again
from axonn_tune.strategies.shapes import Shapes


def moved_bytes(shapes: Shapes, block: Block) -> Size:
    """Return the bytes of a block's activations that move to the host's memory.

    What recomputation does not save does not move.
    """
    modules = offloaded_modules(shapes.job.offload_modules)
    sizes = {
        **_of_norms(shapes, block),
        **_of_attention(shapes),
        LAYER_INPUTS: shapes.residual_bytes,
    }
    n_layers = offloaded_layers(shapes.job.offload_modules)
    if n_layers:
        sizes[LAYERS] = saved_by_kernels(shapes) * (n_layers / (shapes.model.n_layers - 1))
    experts = experts_of(shapes, block)
    if experts is not None:
        sizes |= _of_experts(experts)
    return sum((sizes.get(module, 0.0) for module in modules), start=np.zeros(len(shapes.table)))


def saved_by_kernels(shapes: Shapes) -> Array:
    """Return the bytes that a block saves at whole widths, but for the scores of attention."""
    norms = shapes.norm_input_bytes + shapes.norm_output_bytes
    return norms + shapes.inner_bytes + shapes.adapter_bytes


def moved_by_layers(shapes: Shapes, layers: Sequence[int], n_layers: int) -> Array:
    """Return the bytes that a layer moves on average, shape (C,).

    Parameters
    ----------
    layers
        The layers of a rank.
    n_layers
        Number of layers of a virtual stage, of which the last one moves nothing.
    """
    counts = shapes.model.counts(layers)
    total = np.zeros(len(shapes.table))
    for block, count in counts.items():
        total = total + count * moved_bytes(shapes, block)
    return total / max(len(layers), 1) * (n_layers - 1) / max(n_layers, 1)


def largest_moved(shapes: Shapes, layers: Sequence[int]) -> Array:
    """Return the bytes that are on their way back while a block forms its gradients."""
    moved = np.zeros(len(shapes.table))
    for block in shapes.model.counts(layers):
        moved = np.maximum(moved, moved_bytes(shapes, block))
    return moved


def host_activations(job: Job, nbytes: Array) -> dict[str, Array]:
    """Return the bytes of moved activations in the host's memory, as a term if any move."""
    return {HOST_ACTIVATIONS: nbytes} if job.offload_modules else {}


def _of_norms(shapes: Shapes, block: Block) -> dict[str, Size]:
    """Return the bytes of the inputs of norms, and of the product that follows the first one."""
    is_discarded = "norm1" in norms_again(shapes, block)
    return {
        "attn_norm": shapes.residual_bytes,
        "qkv_linear": 0.0 if is_discarded else shapes.norm_output_of_one,
        "mlp_norm": 0.0 if shapes.model.parallel_block else shapes.residual_bytes,
    }


def _of_attention(shapes: Shapes) -> dict[str, Size]:
    """Return the bytes of attention's input and of the input of the product that follows.

    The latter is the same tensor as attention's output, unless the product saves a cast copy.
    """
    modules = shapes.recomputed_modules
    factor = shapes.attention_factor
    proj = shapes.linears["proj"]
    inputs: Size = 0.0
    if shapes.model.latent_attention is None:
        inputs = shapes.linears["qkv"].output_bytes
    elif "mla_up_proj" not in modules:
        inputs = shapes.up_projected_bytes - shapes.latent_bytes
    output = proj.input_bytes
    if shapes.job.saves_attention_cast:
        output = proj.gathered_input_bytes
        inputs = inputs + (0.0 if "core_attn" in modules else proj.input_bytes)
    return {"core_attn": factor * inputs, "attn_proj": factor * output}


def _of_experts(sizes: ExpertShapes) -> dict[str, Size]:
    """Return the bytes of the inputs of the experts' first product and of their activation."""
    if "moe" in sizes.shapes.recomputed_modules:
        return {}
    return {
        "expert_fc1": sizes.saved_of_input(sizes.taken_bytes),
        "moe_act": sizes.up_bytes,
    }
