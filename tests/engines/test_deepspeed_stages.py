"""DeepSpeed's ZeRO-1 and ZeRO-2 on gloo ranks, and what they send compared with the plan.

They differ from the plan in these facts (runtime/zero/stage_1_and_2.py):

- A bucket is sent where the next gradient does not fit, so that there are more than full ones.
- The norm is summed with other numbers of 4 bytes, one after another.
"""

from dataclasses import replace

import pytest
from build import number, operations, plan_of
from engines.deepspeed_cases import GPT
from engines.deepspeed_on_cpu import recorded_deepspeed, trained
from runtime.ranks import on_ranks

from axonn_tune.io.presets import load_engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Collective
from axonn_tune.strategies.zero.zero import zero1, zero2

pytest.importorskip("deepspeed")

STAGES = {1: zero1, 2: zero2}
N_STEPS = 3
N_MICROSTEPS = 2
# Two blocks and a half.
BUCKET_ELEMENTS = int(2.5 * GPT.block_matmul_parameters)


def plan(stage, n_ranks):
    engine = load_engine("deepspeed")
    program = replace(engine.zero, bucket_elements=BUCKET_ELEMENTS)
    job = Job(n_ranks, n_ranks * N_MICROSTEPS, GPT.seq_len, dtype="bf16")
    strategy = STAGES[stage](replace(engine, zero=program))
    return plan_of(strategy, GPT, job, 1, "none", data=n_ranks)


def planned(part, kind):
    """The bytes and the calls of a plan's collectives of a kind, but the norm's."""
    found = [op for op in operations(part) if isinstance(op, Collective) and op.kind == kind]
    found = [op for op in found if "norm" not in op.name]
    return sum(number(op.nbytes) for op in found), sum(number(op.n_calls) for op in found)


def sent(events, kind):
    """The bytes of each message of a kind, but of single numbers."""
    return [e.amount for e in events if e.action == "start" and e.kind == kind and e.amount > 8]


def check_stage(stage, n_ranks, events):
    settings = {
        "stage": stage,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    microsteps = trained(GPT, settings, "none", N_MICROSTEPS, N_STEPS, events)
    wanted = plan(stage, n_ranks)
    parts = wanted.microstep, wanted.sync_microstep or wanted.microstep
    for part, microstep in zip(parts, microsteps[-N_MICROSTEPS:], strict=True):
        assert not sent(microstep["forward"], "all_gather")
        nbytes, n_calls = planned(part, "all_reduce")
        reduced = sent(microstep["backward"], "all_reduce")
        assert sum(reduced) == nbytes
        assert n_calls <= len(reduced) <= 2 * n_calls
    nbytes, _ = planned(wanted.step_end, "all_gather")
    assert sum(sent(microsteps[-1]["step"], "all_gather")) == pytest.approx(nbytes, rel=0.01)


def check_rank(rank, n_ranks):
    with recorded_deepspeed() as events:
        for stage in STAGES:
            check_stage(stage, n_ranks, events)


@pytest.mark.slow
def test_deepspeed_sends_what_the_plan_says():
    on_ranks(2, check_rank, 2)
