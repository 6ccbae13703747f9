"""Units of embedding and head, and a loss in pieces: the plan's messages against torch's FSDP2.

`wrapped_fsdp2.py` and `staged_pieces.py` record them in processes of their own.
"""

import json
from dataclasses import replace

import pytest
import torch
from build import collectives, memory_terms, number, operations, plan_of
from engines.programs_here import printed_by
from engines.traffic import Traffic, bf16
from worlds import llama

from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Collective
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.strategies.zero.zero import zero3

HIDDEN, VOCABULARY, N_BLOCKS, N_RANKS, SEQ_LEN = 64, 256, 4, 4, 64
MODEL = llama(
    n_layers=N_BLOCKS,
    hidden_size=HIDDEN,
    n_heads=4,
    n_kv_heads=4,
    vocab_size=VOCABULARY,
    seq_len=SEQ_LEN,
)
JOB = Job(N_RANKS, N_RANKS, SEQ_LEN)
# Whether head and embedding share their weight, and the number of pieces.
CASES = [(False, 1), (False, 4), (True, 1), (True, 4)]
ELEMENT_BYTES = {"all_gather": 2.0, "reduce_scatter": 4.0}


def strategy_with(n_pieces, wraps_ends=True, **facts):
    program = ZeroProgram(
        is_fsdp2=True,
        wraps_ends=wraps_ends,
        head_chunks=n_pieces,
        reduced_element_bytes=4.0,
        **facts,
    )
    return zero3(Engine(zero=program))


@pytest.fixture(scope="module")
def recorded():
    return dict(zip(CASES, printed_by("wrapped_fsdp2.py", json.dumps(CASES)), strict=True))


def planned(is_tied, n_pieces, recompute):
    model = replace(MODEL, tied_embeddings=is_tied)
    plan = plan_of(strategy_with(n_pieces), model, JOB, recompute=recompute, shard=N_RANKS)
    kinds = ELEMENT_BYTES.keys()
    sent = [op for op in collectives(plan, plan.microstep) if op.kind in kinds]
    return [
        (op.kind, "block" if ".block" in op.name else number(op.nbytes) / ELEMENT_BYTES[op.kind])
        for op in sent
    ]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"tied={case[0]}, {case[1]} pieces")
def test_the_plan_sends_what_torch_sends_in_the_same_order(case, recompute, recorded):
    """The plan sends the norm's few gradients with the head's, where torch sends them alone."""
    of_block = HIDDEN * HIDDEN
    of_torch = [
        (kind, "block" if elements == of_block else elements)
        for kind, elements in recorded[case]
        if elements != HIDDEN
    ]
    of_plan = planned(*case, recompute)
    assert [kind for kind, _ in of_plan] == [kind for kind, _ in of_torch]
    for (_, mine), (_, theirs) in zip(of_plan, of_torch, strict=True):
        assert mine == (theirs if theirs == "block" else pytest.approx(theirs, abs=HIDDEN))


def test_the_last_stage_sends_its_head_for_each_micro_batch():
    """The step also gathers the head before the first norm, as the plan does once."""
    n_micro, of_head = 4, VOCABULARY * HIDDEN
    events = printed_by("staged_pieces.py")
    of_torch = [kind for kind, elements in events if elements >= of_head]
    each = ["all_gather", "reduce_scatter", "all_gather"]
    assert of_torch == ["all_gather", *each * n_micro]
    strategy = strategy_with(4, has_stages=True)
    job = Job(4, 2 * n_micro, SEQ_LEN)
    stages = plan_of(strategy, MODEL, job, shard=2, pipeline=2).pipeline
    parts = (stages.last.forward, stages.last.backward)
    sent = [op for part in parts for op in collectives_of(part) if "head" in op.name]
    assert [op.kind for op in sent if op.kind != "all_reduce"] == each
    for op in sent:
        elements = number(op.nbytes) / ELEMENT_BYTES.get(op.kind, 4.0)
        assert op.kind == "all_reduce" or elements == pytest.approx(of_head, abs=HIDDEN)
    others = (stages.first, stages.middle)
    passes = [part for stage in others for part in (stage.forward, stage.backward)]
    assert not any("head" in op.name for part in passes for op in collectives_of(part))


def collectives_of(part):
    return [op for op in operations(part) if isinstance(op, Collective)]


def test_only_the_first_gather_of_a_head_in_pieces_has_anything_beside_it():
    """No kernel runs from the last gradient of the head until the block's weights are there."""
    plan = plan_of(strategy_with(4), MODEL, JOB, shard=N_RANKS)
    ops = operations(plan.microstep)
    names = [op.name for op in ops]
    start = names.index("backward.head.gemm_weight")
    kernels = [op for op in ops[start + 1 :] if not hasattr(op, "axis")]
    after = {op.name: op.waits_for for op in kernels[:6]}
    assert "gradient.head.pieces" in after
    waited = {name for each in after.values() for name in each}
    assert any("gradient.root_head" in name for name in waited)
    assert "backward.root_head.all_gather" in waited


def test_the_sums_of_pieces_move_what_torch_moves():
    """torch converts the first gradient, and adds each later one to a sum in fp32."""
    n_pieces, tokens = 4, SEQ_LEN
    inputs = bf16(tokens // n_pieces, HIDDEN).detach()
    weight = bf16(VOCABULARY, HIDDEN).detach()
    # What torch does in place is written out of place here, since that is counted.
    with Traffic() as counted:
        joined = torch.zeros(tokens, HIDDEN, device="meta")
        for _ in range(n_pieces):
            inputs.float().clone()
        joined.to(torch.bfloat16)
        total = weight.float()
        for _ in range(n_pieces - 1):
            total = total + weight
    plan = plan_of(strategy_with(n_pieces), MODEL, JOB, shard=N_RANKS)
    [pieces] = [op for op in operations(plan.microstep) if op.name == "gradient.head.pieces"]
    assert number(pieces.nbytes) == pytest.approx(counted.nbytes, rel=0.01)


def test_units_of_their_own_take_less_memory_than_a_root_that_stays():
    large = replace(MODEL, vocab_size=64 * VOCABULARY)
    gathered = {
        wraps: memory_terms(strategy_with(1, wraps), large, JOB, shard=N_RANKS)
        for wraps in (False, True)
    }
    assert sum(gathered[True].values()) < sum(gathered[False].values())


def test_pieces_take_less_memory_for_logits():
    long = replace(MODEL, vocab_size=64 * VOCABULARY)
    job = Job(N_RANKS, 32 * N_RANKS, SEQ_LEN)
    whole, pieces = (
        sum(memory_terms(strategy_with(n), long, job, micro_batch=32, shard=N_RANKS).values())
        for n in (1, 8)
    )
    assert pieces < whole
