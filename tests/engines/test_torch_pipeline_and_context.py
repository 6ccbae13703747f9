"""FSDP2 in the stages of a pipeline, and sequences that ranks share, against torch itself."""

from collections import Counter
from dataclasses import replace

import pytest
from build import collectives, number, operations, plan_of
from engines.programs_here import printed_by
from worlds import llama

from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import Collective, MemoryBound
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.strategies.zero.zero import zero3

ENGINE = Engine(zero=ZeroProgram(is_fsdp2=True, has_stages=True, reduced_element_bytes=4.0))
SIZES = {"hidden_size": 256, "n_heads": 8, "n_kv_heads": 8, "ffn_hidden_size": 512}
MODEL = llama(n_layers=4, vocab_size=1024, seq_len=64, **SIZES)


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


def shared_attention(chain, n_ranks, recompute="none", **facts):
    """The operations of attention of a chain, and the elements of a rank's queries."""
    strategy = zero3(Engine(zero=replace(ENGINE.zero, **facts)), context_kind="ring")
    heads = {**SIZES, "n_heads": 2, "n_kv_heads": 2}
    model = llama(n_layers=1, vocab_size=1024, seq_len=1024, **heads)
    job = Job(n_ranks, 1, 1024)
    plan = plan_of(strategy, model, job, recompute=recompute, context=n_ranks)
    of_chain = [op for op in operations(plan.microstep) if op.name.startswith(f"{chain}.attention")]
    return of_chain, job.seq_len / n_ranks * model.hidden_size


def moved(of_chain):
    return sum(number(op.nbytes) for op in of_chain if isinstance(op, MemoryBound))


@pytest.mark.parametrize("chain", [pytest.param("forward", marks=pytest.mark.slow), "backward"])
def test_a_shared_sequence_moves_what_torch_moves(chain):
    recorded = printed_by("ring_attention.py")[chain]
    of_chain, n_elements = shared_attention(chain, 4, runs_eagerly=True)
    assert moved(of_chain) / n_elements == pytest.approx(recorded["kernels"], rel=0.02)
    sent = Counter()
    for op in of_chain:
        if isinstance(op, Collective):
            sent[op.kind, "number"] += number(op.n_calls)
            sent[op.kind, "bytes"] += number(op.nbytes) / n_elements
    for kind, (count, nbytes) in recorded["messages"].items():
        assert sent[kind, "number"] == count
        assert sent[kind, "bytes"] == pytest.approx(nbytes)


@pytest.mark.parametrize("n_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_compiled_block_awaits_its_messages_and_gathers_once_for_both_passes(n_ranks):
    recorded = printed_by("compiled_ring_attention.py", str(n_ranks))
    for chain in recorded.values():
        order = chain["order"]
        sent = [i for i, kind in enumerate(order) if kind in ("all_gather", "send_recv")]
        assert all(order[i + 1] == "wait" for i in sent)
    # The backward pass begins with the recomputation, and sends when all gradients exist.
    backward = recorded["backward"]["order"]
    assert backward.count("all_gather") == recorded["forward"]["order"].count("all_gather") == 1
    after_attention = backward[len(backward) - backward[::-1].index("backward") :]
    assert after_attention == ["send_recv", "wait"] * n_ranks

    chains, launched = ("forward", "recompute", "backward"), {}
    for chain in chains:
        of_chain, n_elements = shared_attention(chain, n_ranks, recompute="full")
        launched[chain] = moved(of_chain) / n_elements
        sent = [op for op in of_chain if isinstance(op, Collective)]
        kinds = {op.kind: number(op.n_calls) for op in sent}
        assert kinds == ({"send_recv": n_ranks} if chain == "backward" else {"all_gather": 1})
        for message in sent:
            following = of_chain[of_chain.index(message) + 1]
            assert message.name in following.waits_for
    assert launched["forward"] == pytest.approx(recorded["forward"]["kernels"], rel=0.01)
    again = launched["recompute"] + launched["backward"]
    assert again == pytest.approx(recorded["backward"]["kernels"], rel=0.01)
