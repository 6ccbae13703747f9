"""What torch's compiler saves of attention whose queries and keys have norms."""

import math

import pytest

torch = pytest.importorskip("torch")
from functorch.compile import (  # noqa: E402
    aot_function,
    min_cut_rematerialization_partition,
    nop,
)
from torch.nn.functional import rms_norm, scaled_dot_product_attention  # noqa: E402

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 64, 8, 2, 32
HIDDEN = HEADS * HEAD_DIM


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def attention(x, qkv, proj, q_gain, k_gain, cos, sin, has_norms):
    widths = [HIDDEN, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    q, k, v = (
        part.view(1, TOKENS, -1, HEAD_DIM).transpose(1, 2) for part in (x @ qkv).split(widths, -1)
    )
    if has_norms:
        q, k = rms_norm(q, (HEAD_DIM,), q_gain), rms_norm(k, (HEAD_DIM,), k_gain)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    k, v = (heads.repeat_interleave(HEADS // KV_HEADS, 1) for heads in (k, v))
    attended = scaled_dot_product_attention(q, k, v, is_causal=True)
    return attended.transpose(1, 2).reshape(1, TOKENS, HIDDEN) @ proj


def saved_bytes(has_norms):
    """Bytes that the compiled forward pass keeps for the backward pass, weights included."""
    kept = []

    def compiler(graph, _):
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        kept.extend(node.meta["val"] for node in output.args[0][1:])
        return graph

    def bf16(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)

    weights = bf16(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM), bf16(HIDDEN, HIDDEN)
    angles = [torch.randn(TOKENS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)]
    compiled = aot_function(
        lambda *inputs: attention(*inputs, has_norms),
        fw_compiler=compiler,
        bw_compiler=nop,
        partition_fn=min_cut_rematerialization_partition,
    )
    inputs = bf16(1, TOKENS, HIDDEN), *weights, bf16(HEAD_DIM), bf16(HEAD_DIM), *angles
    compiled(*inputs).sum().backward()
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in kept)


def test_what_norms_of_queries_and_keys_read_is_saved_beside_what_is_rotated():
    added = saved_bytes(True) - saved_bytes(False)
    heads = TOKENS * (HEADS + KV_HEADS)
    gains = 2 * HEAD_DIM * 2
    assert added == heads * HEAD_DIM * 2 + heads * 4 + gains
