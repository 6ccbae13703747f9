"""ZeRO-1 and ZeRO-2 against ZeRO-3, and against lists written out by hand."""

from dataclasses import replace

import pytest
from build import collectives, memory_terms, number, operations, plan_of, ranking_of, search_of
from worlds import FFN, HIDDEN, SEQ, VOCAB, machine_of, small_llama, with_host

from axonn_tune.errors import AxonnTuneError
from axonn_tune.spec.engine import Engine, OffloadProgram
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.plan import Attention, Gemm, MemoryBound
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.strategies.zero.zero import zero1, zero2, zero3

LAYERS, RANKS = 4, 8
MODEL = small_llama(LAYERS)
BLOCK = HIDDEN * 2 * HIDDEN + HIDDEN**2 + 3 * HIDDEN * FFN + 2 * HIDDEN
WEIGHTS = LAYERS * BLOCK + 2 * VOCAB * HIDDEN + HIDDEN
BUCKET = 10_000
ENGINE = Engine(zero=ZeroProgram(gathers_blocks=False, bucket_elements=BUCKET))
ONCE, TWICE = Job(RANKS, RANKS, SEQ), Job(RANKS, 2 * RANKS, SEQ)
STAGES = {1: zero1(ENGINE), 2: zero2(ENGINE)}
EVERY_STAGE = pytest.mark.parametrize("stage", STAGES)


def messages(stage, job):
    """The bytes of the messages of a usual micro-step, of the last one and of the end of a step."""
    plan = plan_of(STAGES[stage], MODEL, job, data=RANKS)
    parts = plan.microstep, plan.sync_microstep or plan.microstep, plan.step_end
    found = [collectives(plan, part) for part in parts]
    return [[(op.kind, number(op.nbytes)) for op in ops if "norm" not in op.name] for ops in found]


@EVERY_STAGE
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_kernels_are_those_of_zero3(stage, recompute):
    def kernels(strategy, **sizes):
        plan = plan_of(strategy, MODEL, ONCE, recompute=recompute, **sizes)
        found = operations(plan.sync_microstep or plan.microstep)
        return [op.name for op in found if isinstance(op, Gemm | Attention)]

    assert kernels(STAGES[stage], data=RANKS) == kernels(zero3(ENGINE), shard=RANKS)


@EVERY_STAGE
def test_gradients_are_reduced_in_the_last_or_in_every_micro_step(stage):
    usual, last, end = messages(stage, TWICE)
    reductions = [("all_reduce", 2.0 * BLOCK)] * LAYERS
    reductions += [("all_reduce", 2.0 * (2 * VOCAB * HIDDEN + HIDDEN))]
    assert last == reductions
    assert usual == (reductions if stage == 2 else [])
    assert end == [("all_gather", 2.0 * WEIGHTS)]


@EVERY_STAGE
def test_a_matrix_that_fills_a_bucket_is_reduced_alone(stage):
    """Four of a block are, and the norms between them in two places; the last norm is a share."""
    plan = plan_of(STAGES[stage], MODEL, ONCE, data=RANKS)
    found = collectives(plan, plan.sync_microstep or plan.microstep)
    n_calls = 6 - (1 - HIDDEN / BUCKET) / LAYERS
    for op in found[:LAYERS]:
        assert number(op.n_calls) == pytest.approx(n_calls)


def test_zero1_adds_gradients_only_where_there_are_earlier_ones():
    def added(job):
        plan = plan_of(STAGES[1], MODEL, job, data=RANKS)
        found = operations(plan.sync_microstep)
        return sum(
            number(op.nbytes)
            for op in found
            if isinstance(op, MemoryBound) and op.name.endswith(".accumulate")
        )

    assert added(ONCE) == 0
    assert added(TWICE) == 3 * 2 * WEIGHTS / 2


@EVERY_STAGE
def test_without_overlap_the_next_kernel_waits_for_every_reduction(stage):
    plan = plan_of(STAGES[stage], MODEL, replace(TWICE, overlap=Overlap(ors=False)), data=RANKS)
    phases = (plan.sync_microstep or plan.microstep).phases
    blocks = [phase for phase in phases if "gradient.block.data.reduce" in names_in(phase)]
    assert sum(phase.repeats for phase in blocks) == LAYERS
    for phase in blocks:
        *_, reduction, kernel = phase.operations
        assert reduction.name == "gradient.block.data.reduce"
        assert kernel.waits_for == (reduction.name,)


def names_in(phase):
    return [op.name for op in phase.operations]


@EVERY_STAGE
def test_memory_of_weights_gradients_and_states_by_hand(stage):
    terms = memory_terms(STAGES[stage], MODEL, TWICE, data=RANKS)
    assert terms["weights"] == 2 * WEIGHTS
    assert terms["gradients"] == 2 * WEIGHTS / (RANKS if stage == 2 else 1)
    assert terms["optimizer_states"] == 12 * WEIGHTS / RANKS
    assert terms["gathered_weights"] == 2 * 2 * BUCKET
    of_zero3 = memory_terms(zero3(ENGINE), MODEL, TWICE, shard=RANKS)
    for term in ("optimizer_states", "activations", "working_set"):
        assert terms[term] == of_zero3[term]


def test_each_stage_takes_less_memory_of_large_models():
    large = replace(MODEL, n_layers=48, hidden_size=4096, n_heads=32, ffn_hidden_size=16384)
    ranks = {zero1: "data", zero2: "data", zero3: "shard"}
    totals = [
        sum(memory_terms(stage(ENGINE), large, ONCE, **{axis: RANKS}).values())
        for stage, axis in ranks.items()
    ]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 3


@EVERY_STAGE
def test_one_rank_sends_nothing(stage):
    plan = plan_of(STAGES[stage], MODEL, Job(1, 2, SEQ), data=1)
    assert not collectives(plan, plan.microstep, plan.sync_microstep or plan.step_end)


def test_zero1_with_offload_is_refused():
    strategy = zero1(replace(ENGINE, offload=OffloadProgram(gradients=True)))
    job = replace(ONCE, offload="optimizer")
    search = search_of(MODEL, job, with_host(machine_of()), strategy)
    with pytest.raises(AxonnTuneError, match="offload beside gradients that are reduced once"):
        ranking_of(search)
