"""Selective recomputation by products: a block keeps the outputs of every second product.

torchtitan's selective activation checkpointing per operation counts the products of a block with
query, key, value, gate and up projections apart. The first product is kept, the second one is
formed again, and so on; attention is kept, and every kernel between them is run again. Nothing
reads the block's own output, so that its last product is not formed again in any case.
"""

from __future__ import annotations

from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array
from axonn_tune.strategies.shapes import Shapes


def recomputed_shares(model: Model) -> dict[str, float]:
    """Return the share of a layer's output that is formed again, by name of the layer.

    The layers are those before the last product of a block.
    """
    query = model.n_heads / (model.n_heads + 2.0 * model.n_kv_heads)
    key_or_value = 0.5 * (1.0 - query)
    up = [("up", 0.5), ("up", 0.5)] if model.gated_mlp else [("up", 1.0)]
    products = [("qkv", query), ("qkv", key_or_value), ("qkv", key_or_value), ("proj", 1.0), *up]
    shares = {name: 0.0 for name, _ in products}
    for name, share in products[1::2]:
        shares[name] += share
    return shares


def saved_bytes(shapes: Shapes, keeps_output: bool) -> Array:
    """Return the bytes that a block saves: its input, and what it does not form again.

    Where products are summed over ranks, the sums are kept.

    Parameters
    ----------
    keeps_output : bool
        Whether the output of a last product that would be kept is kept although nothing reads it,
        as where there is no compiler.
    """
    shares = recomputed_shares(shapes.model)
    saved = shapes.residual_bytes + shapes.linears["proj"].input_bytes
    for name in ("qkv", "up"):
        saved = saved + (1.0 - shares[name]) * shapes.linears[name].output_bytes
    if shapes.linears["proj"].input_axis:
        saved = saved + (shapes.y > 1) * shapes.residual_bytes
    is_kept = keeps_output and shapes.model.gated_mlp
    return saved + is_kept * shapes.residual_bytes
