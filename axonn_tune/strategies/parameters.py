"""The number of parameters of a pipeline's stage, or of parts of a model, by what splits them."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_tune.spec.model import Model


def vocabulary_matrices(model: Model, first: bool, last: bool) -> int:
    """Return the number of weights of embedding and head in a stage; tied ones are one weight."""
    is_shared = model.tied_embeddings and first and last
    return first + last - is_shared


def stage_parameters(
    model: Model, layers: Sequence[int], first: bool, last: bool
) -> tuple[float, float, float]:
    """Return the number of parameters of one stage of a pipeline, or of parts of a model.

    Parameters of routed experts are not counted.

    Parameters
    ----------
    layers : sequence of int
        Its layers.
    first, last : bool
        Whether it has the embedding, and whether it has the final norm and the head.

    Returns
    -------
    split, over_x, over_y : float
        Elements of matrices that the grid splits, of vectors along the residual stream, which X
        splits, and of vectors along the widths that Y splits. Matrices that are not split count
        with the vectors along the residual stream.
    """
    split = vocabulary_matrices(model, first, last) * model.head.parameters
    counts = model.counts(layers)
    n_norms = model.norms_per_block * sum(counts.values()) + last
    over_x = float(n_norms * model.norm_parameters + first * model.position_parameters)
    over_y = 0.0
    for block, count in counts.items():
        over_x += count * model.head_norm_parameters
        if block.has_experts:
            over_x += count * model.router_parameters
        for linear in model.linears_of(block):
            if linear.is_split:
                split += count * linear.parameters
            else:
                over_x += count * linear.parameters
            if linear.bias and linear.is_split and not linear.transposed:
                over_y += count * linear.n_out
            elif linear.bias:
                over_x += count * linear.n_out
    return split, over_x, over_y
