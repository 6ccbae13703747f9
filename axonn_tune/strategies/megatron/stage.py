"""What a rank of a Megatron-LM stage stores of the weights, and saves of the activations.

Korthikanti et al., arXiv 2205.05198, section 4, for dense blocks; experts, adapters and modules of
multi-token prediction are counted beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axonn_tune.spec.blocks import Block
from axonn_tune.spec.plan import Array
from axonn_tune.strategies.adapters import adapter_elements
from axonn_tune.strategies.context import ContextParallelism
from axonn_tune.strategies.experts import experts_of, saved_at_inner_widths, stored_experts
from axonn_tune.strategies.modules import discarded_bytes, saved_beside
from axonn_tune.strategies.parameters import stage_parameters
from axonn_tune.strategies.shapes import MASK_BYTES, Shapes


def held_by_blocks(
    shapes: Shapes, layers: Sequence[int], last: bool, context: ContextParallelism
) -> tuple[Array, Array]:
    """Return the bytes that a block saves on average, and the working set, shape (C,) each.

    A block that is recomputed as a whole saves its input; `Shapes.saved_by_layers` counts partial
    recomputation.
    """
    counts = shapes.model.counts(layers)
    total = np.zeros(len(shapes.table))
    working = context.working_bytes
    for block, count in counts.items():
        without_scores = _saved_without_scores(shapes, block) + context.saved_bytes
        scores = _saved_scores(shapes)
        everything = without_scores + scores
        saved = {
            "none": everything - discarded_bytes(shapes, block, scores),
            "selective": without_scores,
            "full": shapes.residual_bytes,
        }[shapes.recompute]
        total = total + count * saved
        in_mlp = _mlp_bytes(shapes, block)
        in_head = _final_norm_bytes(shapes) + _input_bytes(shapes)
        working = np.maximum(working, shapes.working_set(everything, saved, last, in_mlp, in_head))
    return total / max(sum(counts.values()), 1), working


def _mlp_bytes(shapes: Shapes, block: Block) -> Array:
    """Return the peak bytes of the gradients in a block's MLP, or in its experts.

    Beside the gradient of the residual stream these are the gradients before and after the
    activation, or later the one before it with that of the MLP's input.
    """
    experts = experts_of(shapes, block)
    if experts is not None:
        return experts.working_bytes
    before = shapes.linears["up"].output_bytes
    in_work = np.maximum(shapes.gated_bytes, before + _input_bytes(shapes))
    return shapes.residual_bytes + in_work


def _final_norm_bytes(shapes: Shapes) -> Array:
    """Return the bytes of the input and the output of the final norm, which are saved."""
    return 2.0 * shapes.residual_bytes


def _input_bytes(shapes: Shapes) -> Array:
    """Return the bytes of the gradient of a product's input before it is summed.

    With sequence parallelism the gathered input is beside it.
    """
    return shapes.stream_bytes * (1.0 + (np.asarray(shapes.residual_split) > 1.0))


def _saved_without_scores(shapes: Shapes, block: Block) -> Array:
    """Return the bytes that a block saves apart from attention's scores.

    These are inputs of the norms, what products save of their outputs, and two dropout masks of the
    residual stream; q, k, v, the input of proj, the MLP before and after its activation
    (Korthikanti et al., equations 1 to 4), or what the experts save.
    """
    n_masks = 2.0 * MASK_BYTES / shapes.element_bytes if shapes.job.dropout else 0.0
    beside = sum(saved_beside(shapes, block).values())
    norm_bytes = shapes.norm_input_bytes + shapes.norm_output_bytes + beside
    inner_bytes = saved_at_inner_widths(shapes, block) + shapes.adapter_bytes
    return norm_bytes + n_masks * shapes.residual_bytes + inner_bytes


def saved_by_module(shapes: Shapes) -> Array:
    """Return the bytes that a module of multi-token prediction saves besides its block.

    These are the inputs of its three norms, the outputs of two of them, which are joined, and the
    output of the third.
    """
    return shapes.residual_bytes * (4.0 + 2.0 * shapes.saved_share)


def module_layers(shapes: Shapes, last: bool) -> list[int]:
    """Return layers with the same sizes as the blocks of multi-token prediction in a stage."""
    return [shapes.model.n_layers - 1] * (last * shapes.job.mtp_modules)


def _saved_scores(shapes: Shapes) -> Array | float:
    """Return the bytes that unfused attention saves of its scores.

    These are the softmax, the mask of its dropout and the result of the dropout (Korthikanti et
    al., equation 1).
    """
    mask = MASK_BYTES / shapes.element_bytes
    n_of_scores = 2.0 + mask if shapes.job.dropout else 1.0
    return n_of_scores * shapes.saved_score_bytes


def stored_parameters(shapes: Shapes, layers: Sequence[int], first: bool, last: bool) -> Array:
    """Return how many parameters a rank of a stage stores besides routed experts, shape (C,).

    Matrices and their biases are split over the tensor group, other vectors are not. `layers`
    includes the blocks of modules of multi-token prediction. With `last`, the projections and norms
    of the modules count, too, and in any stage but the first their copy of the embedding.
    """
    model = shapes.model
    matrices, whole, split = stage_parameters(model, layers, first, last)
    n_modules = last * shapes.job.mtp_modules
    if n_modules:
        matrices += n_modules * model.mtp_projection.parameters
        whole += n_modules * 3.0 * model.norm_parameters
        matrices += (not first and not model.tied_embeddings) * model.head.parameters
    return (matrices + split) / shapes.table.size("tensor") + whole


def trained_parameters(
    shapes: Shapes, layers: Sequence[int], first: bool, last: bool
) -> tuple[Array, Array]:
    """Return how many parameters a rank of a stage trains, shape (C,) each.

    The first number is that of all but routed experts, as in `stored_parameters`, or of adapters;
    the second one is that of routed experts.
    """
    job = shapes.job
    if not job.trains_weights:
        return adapter_elements(shapes, layers), np.zeros(len(shapes.table))
    layers = shapes.backward_layers(layers)
    first, last = first and job.trains_embedding, last and job.trains_head
    experts = stored_experts(shapes, layers) * np.ones(len(shapes.table))
    return stored_parameters(shapes, layers, first, last), experts


def stored_matrices(shapes: Shapes, layers: Sequence[int]) -> Array:
    """Return how many elements a rank stores of the matrices of some layers, experts included.

    These are the weights that low precisions cast.
    """
    tensor = shapes.table.size("tensor")
    total = stored_experts(shapes, layers) * np.ones(len(shapes.table))
    for block, count in shapes.model.counts(layers).items():
        for linear in shapes.model.linears_of(block):
            total = total + count * linear.elements_on_rank(tensor)
    return total


def elements_of_kinds(shapes: Shapes, layers: Sequence[int], last: bool) -> Array:
    """Return the elements of one matrix of each kind that a rank of a stage has, shape (C,).

    All experts of a rank have matrices of the same kinds.
    """
    model = shapes.model
    tensor = shapes.table.size("tensor")
    blocks = model.counts(layers)
    linears = {linear for block in blocks for linear in model.linears_of(block)}
    total = last * model.head.parameters / tensor
    for linear in linears:
        total = total + linear.elements_on_rank(tensor)
    if any(block.has_experts for block in blocks):
        total = total + model.expert_parameters / shapes.expert_tensor
    return total
