"""FSDP2 in the stages of a pipeline, and sequences that ranks share, against torch itself."""

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from build import collectives, number, operations, plan_of
from worlds import llama

from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import MemoryBound
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.strategies.zero import zero3

ENGINE = Engine(zero=ZeroProgram(is_fsdp2=True, has_stages=True, reduced_element_bytes=4.0))
SIZES = {"hidden_size": 256, "n_heads": 8, "n_kv_heads": 8, "ffn_hidden_size": 512}
MODEL = llama(n_layers=4, vocab_size=1024, seq_len=64, **SIZES)


@cache
def printed_by(program):
    """What a program of this folder prints, which has a process group of its own."""
    path = Path(__file__).with_name(program)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def messages(plan, part):
    """Number of messages of a part, and their bytes, by kind."""
    counted = Counter()
    for op in collectives(plan, part):
        counted[op.kind, "number"] += number(op.n_calls)
        counted[op.kind, "bytes"] += number(op.nbytes)
    return counted


def test_a_stage_gathers_once_and_reduces_behind_its_last_backward_pass():
    events = printed_by("staged_fsdp2.py")
    kinds = [kind for kind, _ in events]
    last_gather = max(i for i, kind in enumerate(kinds) if kind == "all_gather")
    first_reduction = kinds.index("reduce_scatter")
    # Two blocks: all gathers come in the first forward pass, all reductions behind all passes.
    assert kinds[:last_gather].count("forward") == 1
    assert set(kinds[first_reduction:]) == {"reduce_scatter"}
    assert kinds.count("backward") == kinds.count("forward") == 2 * 4
    n_units = kinds.count("all_gather")
    assert kinds.count("reduce_scatter") == n_units == 3
    recorded = Counter()
    for kind, nbytes in events:
        recorded[kind] += nbytes
    ratio = recorded["reduce_scatter"] / recorded["all_gather"]

    plan = plan_of(zero3(ENGINE), MODEL, Job(4, 8, 64), shard=2, replica=1, pipeline=2)
    stages = plan.pipeline
    gathered = messages(plan, stages.sync.forward)
    reduced = messages(plan, plan.step_end)
    n_planned = 1 + MODEL.n_layers // 2
    assert gathered["all_gather", "number"] == reduced["reduce_scatter", "number"] == n_planned
    assert reduced["reduce_scatter", "bytes"] == ratio * gathered["all_gather", "bytes"]
    usual = [part for stage in stages.stages for part in stage.passes]
    assert not any(messages(plan, part) for part in (*usual, stages.sync.backward))


@pytest.mark.parametrize("chain", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_a_shared_sequence_moves_what_torch_moves(chain):
    recorded = printed_by("ring_attention.py")[chain]
    strategy = zero3(ENGINE, context_kind="ring")
    job = Job(4, 1, 1024)
    model = llama(
        n_layers=1, vocab_size=1024, seq_len=1024, **{**SIZES, "n_heads": 2, "n_kv_heads": 2}
    )
    plan = plan_of(strategy, model, job, context=4)
    of_chain = [op for op in operations(plan.microstep) if op.name.startswith(f"{chain}.attention")]
    n_elements = job.seq_len / 4 * model.hidden_size
    kernels = sum(number(op.nbytes) for op in of_chain if isinstance(op, MemoryBound))
    assert kernels / n_elements == pytest.approx(recorded["kernels"], rel=0.02)
    sent = Counter()
    for op in collectives(plan, plan.microstep):
        if op.name.startswith(f"{chain}.attention"):
            sent[op.kind, "number"] += number(op.n_calls)
            sent[op.kind, "bytes"] += number(op.nbytes) / n_elements
    for kind, (count, nbytes) in recorded["messages"].items():
        assert sent[kind, "number"] == count
        assert sent[kind, "bytes"] == pytest.approx(nbytes)
