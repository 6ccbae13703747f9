"""What DeepSpeed itself holds of whole weights and gradients on gloo ranks, and what the plan says.

Models have so few tokens that all activations are smaller than any matrix. Torch's allocator would
count the same tensors as allocated: it does so until Python lets go of them, whichever stream still
uses them. The buffer of a bucket exists before a step, so that it is not among the live tensors.
The plan leaves out norms and biases, which are copied with the matrices of a bucket.
"""

from dataclasses import replace

import pytest
import torch
from engines.deepspeed_cases import ELEMENT_BYTES, WIDE, Case
from engines.deepspeed_on_cpu import most_live_bytes
from runtime.ranks import on_ranks

from axonn_tune.runtime.released.deepspeed import import_deepspeed

pytest.importorskip("deepspeed")

GPT = replace(WIDE, seq_len=4)
TIED = replace(GPT, tied_embeddings=True)
# Its four matrices have 9,216, 3,072, 49,152 and 24,576 elements.
LLAMA = replace(
    GPT,
    ffn_hidden_size=256,
    gated_mlp=True,
    norm="rms",
    bias=False,
    qkv_bias=False,
    proj_bias=False,
)
N_STEPS = 3

CASES = [
    # Blocks that are larger than what a rank may hold gathered, as those of 12288 are.
    Case(GPT, live=0.33, bucket=2.5),
    Case(GPT, live=0.33, bucket=0),
    Case(LLAMA, live=0.3, bucket=0),
    # Several blocks.
    Case(LLAMA, live=2.2, bucket=0),
    Case(LLAMA, live=2.2, bucket=1.2),
    Case(TIED, live=2.2, bucket=0),
    Case(TIED, live=0.33, bucket=1.2),
    # Matrices share gathers.
    Case(GPT, live=2.2, bucket=0, prefetched=15000),
    Case(LLAMA, live=1.1, bucket=0, prefetched=15000),
    Case(GPT, live=1.5, bucket=0.3, prefetched=15000, recompute="none"),
]


def check_case(case, n_ranks):
    matrices = [ELEMENT_BYTES * linear.parameters for linear in case.spec.block_linears]
    least_bytes = min(matrices)
    live = most_live_bytes(case.spec, case.zero_settings, case.recompute, N_STEPS, least_bytes)
    held = live + ELEMENT_BYTES * case.bucket_elements
    planned = case.memory(n_ranks)["gathered_weights"]
    if case.bucket:
        assert planned == pytest.approx(held, rel=0.01), case
    else:
        assert planned == held, case


def check_rank(rank, n_ranks):
    import_deepspeed(torch.device("cpu"))
    for case in CASES:
        check_case(case, n_ranks)


@pytest.mark.slow
def test_deepspeed_holds_what_the_plan_says():
    on_ranks(2, check_rank, 2)
