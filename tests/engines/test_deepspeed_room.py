"""DeepSpeed gathers one matrix after another once a rank holds as much as it may.

The model has the matrices of a GPT of width 4096, in 1/16,384 of their sizes, and DeepSpeed's
default sizes are as much smaller.
"""

from dataclasses import replace

import pytest
from build import number, operations
from engines.deepspeed_cases import ELEMENT_BYTES, GPT, Case
from engines.deepspeed_on_cpu import recorded_deepspeed, trained
from engines.test_deepspeed import N_STEPS, planned, sent
from runtime.ranks import on_ranks

pytest.importorskip("deepspeed")

SCALE = 16384
SPEC = replace(
    GPT, n_layers=24, vocab_size=384, bias=False, qkv_bias=False, proj_bias=False, norm="rms"
)
LIVE = (1e9 / SCALE - SPEC.head.parameters) / SPEC.block_matmul_parameters
MATRICES = [ELEMENT_BYTES * linear.parameters for linear in SPEC.block_linears]
PROJ = MATRICES[1]
CASES = [
    Case(SPEC, LIVE, bucket=2.5, prefetched=int(5e7 / SCALE), activation_is_module=is_module)
    for is_module in (False, True)
]


def recorded_gathers(case, events):
    """The bytes of gathers of blocks in the last step: for the forward pass, and for later ones."""
    last = trained(
        SPEC,
        case.zero_settings,
        case.recompute,
        case.n_microsteps,
        N_STEPS,
        events,
        reentrant=True,
        has_activation=case.activation_is_module,
    )[-1]
    everything = sent(last, "all_gather", "forward", "backward")
    embedding = ELEMENT_BYTES * SPEC.head.parameters
    of_blocks = [nbytes for nbytes in everything if nbytes != embedding]
    forward = []
    while sum(forward) < SPEC.n_layers * sum(MATRICES):
        forward.append(of_blocks[len(forward)])
    return forward, of_blocks[len(forward) :]


def joined_bytes(gathers):
    """The bytes of gathers that bring several matrices."""
    return sum(nbytes for nbytes in gathers if nbytes not in MATRICES)


def copied_bytes(plan, name):
    """The bytes that a plan copies out of messages, which kernels read and write."""
    copies = [op for op in operations(plan.microstep) if op.name == f"{name}.block.copy"]
    return sum(number(op.nbytes) for op in copies) / 2


def check_pass(plan, name, gathers):
    n_calls, nbytes = planned(plan.microstep, f"{name}.block")
    assert abs(n_calls - len(gathers)) < len(MATRICES)
    assert abs(nbytes - sum(gathers)) < sum(MATRICES)
    assert abs(copied_bytes(plan, name) - joined_bytes(gathers)) < sum(MATRICES)


def check_case(case, n_ranks, events):
    forward, later = recorded_gathers(case, events)
    plan = case.plan(n_ranks)
    check_pass(plan, "forward", forward)
    check_pass(plan, "recompute", later)
    assert forward.count(PROJ) > SPEC.n_layers / 2, "proj comes alone"
    # With an activation between up and down, proj is gathered there in the backward pass.
    assert (later.count(PROJ) > len(later) / 5) == case.activation_is_module


def check_rank(rank, n_ranks):
    with recorded_deepspeed() as events:
        for case in CASES:
            check_case(case, n_ranks, events)


@pytest.mark.slow
def test_where_there_is_room_for_one_matrix_deepspeed_gathers_it_alone():
    on_ranks(2, check_rank, 2)
