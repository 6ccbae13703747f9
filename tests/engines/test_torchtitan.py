"""The facts of torchtitan's engines: bytes that torch's kernels move, and what its allocator holds.

torchtitan's modules are written here again, after their descriptions in its engines' files.
"""

from itertools import pairwise

import pytest
import torch
from build import number, operations, plan_of
from engines.programs_here import printed_by
from engines.traffic import Traffic, bf16, loss_bytes, moved, rms_norm
from torch.nn.functional import cross_entropy, silu
from worlds import llama

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Gemm
from axonn_tune.strategies.zero.shard_kernels import ShardKernels
from axonn_tune.strategies.zero.zero import zero3

EAGER = load_engine("torchtitan-2024-eager")
TOKENS, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 512, 1024, 3584, 32, 8, 128


def traffic(kernel):
    return EAGER.kernels[kernel].traffic.value


def rotated(x, angles):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


def repeated(x):
    batch, seq_len, heads, width = x.shape
    times = HEADS // KV_HEADS
    copies = x.unsqueeze(3).expand(batch, seq_len, heads, times, width)
    return copies.reshape(batch, seq_len, heads * times, width)


def test_a_norm_in_fp32_moves_what_the_engine_says():
    forward, backward = moved(rms_norm, bf16(TOKENS, HIDDEN), bf16(HIDDEN))
    element = 2.0 * TOKENS * HIDDEN
    assert forward.nbytes / (2.0 * element) == pytest.approx(traffic("rms_norm"), rel=0.01)
    assert backward.nbytes / (3.0 * element) == pytest.approx(
        traffic("rms_norm_backward"), rel=0.01
    )


def test_a_gate_moves_what_the_engine_says():
    forward, backward = moved(lambda a, b: silu(a) * b, bf16(TOKENS, FFN), bf16(TOKENS, FFN))
    element = 2.0 * TOKENS * FFN
    assert forward.nbytes / (3.0 * element) == pytest.approx(traffic("swiglu"), rel=0.01)
    assert backward.nbytes / (5.0 * element) == pytest.approx(traffic("swiglu_backward"), rel=0.01)


def test_rotation_and_repeated_keys_move_what_the_engines_say():
    angles = torch.empty(TOKENS, 1, HEAD_DIM // 2, dtype=torch.complex64, device="meta")

    def prepared(q, k, v):
        return rotated(q, angles), repeated(rotated(k, angles)), repeated(v)

    queries = bf16(1, TOKENS, HEADS, HEAD_DIM)
    keys, values = (bf16(1, TOKENS, KV_HEADS, HEAD_DIM) for _ in range(2))
    ideal = 2.0 * (queries.numel() + keys.numel()) * 2.0
    for name in ("torchtitan-2025", "torchtitan-2024", "torchtitan-2024-eager"):
        expected = load_engine(name).kernels["rotary"].traffic.value
        for counted in moved(prepared, queries, keys, values):
            assert counted.nbytes / ideal == pytest.approx(expected, rel=0.02)


def test_rotation_and_copied_values_move_what_the_newest_engine_says():
    """One product forms all three; a compiled cast reads queries and keys where they are."""
    angles = torch.empty(TOKENS, 1, HEAD_DIM // 2, dtype=torch.complex64, device="meta")

    def rotated_tokens(x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles).flatten(-2).type_as(x)

    def prepared(q, k, v):
        return rotated_tokens(q), rotated_tokens(k), v.clone()

    queries = bf16(TOKENS, HEADS, HEAD_DIM)
    keys, values = (bf16(TOKENS, KV_HEADS, HEAD_DIM) for _ in range(2))
    ideal = 2.0 * (queries.numel() + keys.numel()) * 2.0
    forward, _ = moved(prepared, queries, keys, values)
    expected = load_engine("torchtitan").kernels["rotary"].traffic.value
    assert forward.nbytes / ideal == pytest.approx(expected, rel=0.02)


def test_the_loss_in_fp32_moves_what_the_engine_says():
    labels = torch.zeros(TOKENS, dtype=torch.long, device="meta")
    logits = bf16(TOKENS, 128256)
    passes = moved(lambda x: cross_entropy(x.float(), labels), logits)
    ideal = {"softmax": 8.0, "softmax_backward": 6.0}
    for counted, (kernel, ideal_bytes) in zip(passes, ideal.items(), strict=True):
        nbytes = loss_bytes(counted, logits.numel(), 4)
        assert nbytes / ideal_bytes == pytest.approx(traffic(kernel), rel=0.01)


def test_a_shard_is_cast_to_8_bits_by_as_many_bytes_as_the_plan_has():
    """torchao casts it in eager kernels: it scales, clamps and converts what is in fp32."""
    shard = torch.empty(TOKENS, HIDDEN, device="meta")
    scale = torch.empty((), device="meta")
    with Traffic() as counted:
        (shard * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    kernels = ShardKernels(stored=4.0, gathered=2.0, reduced=4.0, is_flat=False, divides=False)
    assert counted.nbytes / shard.numel() == pytest.approx(kernels.of_low_cast(1.0), rel=0.01)


class Pool:
    """One stream's memory: a tensor takes the smallest gap in which it fits, or the end grows."""

    def __init__(self):
        self.held = {}
        self.end = 0

    def allocate(self, name, size):
        edges = sorted([(0, 0), *self.held.values(), (self.end, self.end)])
        gaps = [
            (second[0] - first[1], first[1])
            for first, second in pairwise(edges)
            if second[0] - first[1] >= size
        ]
        start = min(gaps)[1] if gaps else max(stop for _, stop in edges[:-1])
        self.held[name] = (start, start + size)
        self.end = max(self.end, start + size)

    def free(self, *names):
        for name in names:
            del self.held[name]


def test_the_pool_grows_to_the_bytes_that_the_engine_states_for_each_logit():
    """loss_fn in fp32, `del pred`, and backward: the end of what one logit's tensors reach."""
    pool = Pool()
    pool.allocate("bf16 logits", 2)
    pool.allocate("fp32 logits", 4)
    pool.allocate("log-softmax", 4)
    pool.free("bf16 logits", "fp32 logits")
    pool.allocate("gradient of the log-softmax", 4)
    pool.allocate("gradient of the fp32 logits", 4)
    pool.free("log-softmax", "gradient of the log-softmax")
    pool.allocate("gradient of the bf16 logits", 2)
    for name in ("torchtitan-2024", "torchtitan-2024-eager"):
        assert load_engine(name).memory.logit_bytes.value == pool.end


def test_split_logits_grow_the_pool_to_the_bytes_that_the_engine_states():
    """loss_parallel: the softmax of a part of the vocabulary, and its backward pass, by line."""
    pool = Pool()
    pool.allocate("bf16 logits", 2)
    pool.allocate("x", 4)
    pool.allocate("shifted", 4)
    pool.allocate("exp(shifted)", 4)
    pool.free("exp(shifted)")
    pool.allocate("result", 4)
    pool.free("bf16 logits", "x", "shifted")
    pool.allocate("grad_input", 4)
    pool.allocate("exp(result)", 4)
    pool.allocate("grad_input + exp(result)", 4)
    pool.free("exp(result)")
    pool.allocate("times grad_output", 4)
    for name in ("torchtitan-2024", "torchtitan-2024-eager"):
        assert load_engine(name).memory.split_logit_bytes.value == pool.end


def test_the_newest_engine_forms_the_products_again_that_a_compiled_block_does():
    sizes = {"n_layers": 1, "hidden_size": 64, "ffn_hidden_size": 128, "vocab_size": 256}
    model = llama(**sizes, n_heads=4, n_kv_heads=4, seq_len=64)
    for recompute, columns in printed_by("recomputed_products.py").items():
        strategy = zero3(load_engine("torchtitan"))
        plan = plan_of(strategy, model, Job(2, 2, 64), recompute=recompute, shard=2)
        again = [op for op in operations(plan.microstep) if op.name.startswith("recompute.")]
        assert sorted(number(op.n) for op in again if isinstance(op, Gemm)) == columns
