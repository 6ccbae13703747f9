"""Ulysses within rings: between the two kinds that it joins, and bytes counted by hand."""

from dataclasses import replace

import pytest
from build import (
    attentions,
    collectives,
    layout_of,
    memory_terms,
    number,
    operations,
    plan_of,
    prediction_of,
    search_of,
    sent_bytes,
    table_of,
)
from worlds import llama, machine_of

from axonn_tune.spec.job import Job
from axonn_tune.spec.names import BACKWARD, FORWARD
from axonn_tune.spec.plan import Attention, MemoryBound
from axonn_tune.spec.programs import RING, ULYSSES, ULYSSES_RING
from axonn_tune.strategies.megatron.megatron3d import Megatron3D

MODEL = llama(n_layers=2, hidden_size=256, n_heads=16, n_kv_heads=8, vocab_size=1024, seq_len=512)
JOB = Job(16, 16, 512)
STRATEGY = Megatron3D(False, False, False, context_kind=ULYSSES_RING)
OF_ONE_KIND = {kind: replace(STRATEGY, context_kind=kind) for kind in (RING, ULYSSES)}
CHAINS = pytest.mark.parametrize("chain", [FORWARD, BACKWARD])


def plan(model=MODEL, job=JOB, **sizes):
    return plan_of(STRATEGY, model, job, **sizes)


def sent_of_block(plan, chain, axis):
    """What a rank sends over an axis for attention of one block."""
    return sent_bytes(plan, chain, axis) / MODEL.n_layers


@CHAINS
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2), (2, 4)])
def test_ranks_share_the_work_of_attention(ulysses, ring, chain):
    alone = sum(number(op.flops) for op in attentions(plan(), chain))
    shared = attentions(plan(tensor=2, ulysses=ulysses, ring=ring), chain)
    assert sum(number(op.flops) for op in shared) == pytest.approx(alone / (2 * ulysses * ring))


def test_steps_have_the_tokens_of_an_exchange_and_its_part_of_the_heads():
    steps = attentions(plan(tensor=2, ulysses=4, ring=2), FORWARD)
    assert {(number(op.seq_len), number(op.n_heads)) for op in steps} == {(512 / 2, 16 / 2 / 4)}
    assert sum(number(op.n_launches) for op in steps) == 2
    assert sum(number(op.n_launches) for op in steps if op.masked) == 1


@CHAINS
@pytest.mark.parametrize(("ulysses", "ring"), [(2, 4), (4, 2), (2, 1), (1, 8)])
def test_what_is_exchanged_and_what_goes_around(ulysses, ring, chain):
    """An exchange has queries, keys, values and the output once; a ring has keys and values.

    Backward, a step's gradients follow the keys and values of the next one.
    """
    found = plan(ulysses=ulysses, ring=ring)
    per_head = 512 / (ulysses * ring) * 16 * 2.0
    exchanged = per_head * (2 * 16 + 2 * 8)
    assert sent_of_block(found, chain, "ulysses") == pytest.approx(
        (ulysses - 1) / ulysses * exchanged
    )
    n_messages = (ring - 1) * (2 if chain == BACKWARD else 1)
    assert sent_of_block(found, chain, "ring") == pytest.approx(n_messages * per_head * 2 * 8)


def work_and_bytes(plan, renamed):
    """Every operation of a micro-step with its amount, the group under the name of another kind."""
    return [
        (op.name, renamed.get(op.axis, op.axis), number(op.nbytes))
        for op in collectives(plan, plan.microstep)
    ], [
        (op.name, number(op.nbytes if isinstance(op, MemoryBound) else op.flops))
        for op in operations(plan.microstep)
        if isinstance(op, MemoryBound | Attention) and number(getattr(op, "n_launches", 1.0))
    ]


@pytest.mark.parametrize(("kind", "axis"), [(RING, "ring"), (ULYSSES, "ulysses")])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_kind_alone_is_a_group_of_one_rank_of_the_other(kind, axis, recompute):
    strategy = OF_ONE_KIND[kind]
    machine = machine_of()
    together, alone = (
        prediction_of(
            search_of(MODEL, JOB, machine, each, micro_batch=1, recomputes=(recompute,)),
            layout_of(each, tensor=2, **{name: 4}, data=2),
        )
        for each, name in ((STRATEGY, axis), (strategy, "context"))
    )
    assert together.step_seconds == pytest.approx(alone.step_seconds, rel=1e-12)
    assert together.memory_terms_bytes == alone.memory_terms_bytes
    plans = [
        plan_of(each, MODEL, JOB, tensor=2, data=2, **{name: 4})
        for each, name in ((STRATEGY, axis), (strategy, "context"))
    ]
    moved, computed = zip(
        work_and_bytes(plans[0], {axis: "context", "ulysses*ring*data": "context*data"}),
        work_and_bytes(plans[1], {}),
        strict=True,
    )
    assert moved[0] == moved[1]
    of_kind = [[(name, n) for name, n in each if n] for each in computed]
    assert of_kind[0] == of_kind[1]


def test_where_sequences_are_whole_nothing_differs():
    machine = machine_of()
    found = [
        prediction_of(search_of(MODEL, JOB, machine, s, micro_batch=1), layout_of(s, data=16))
        for s in (STRATEGY, *OF_ONE_KIND.values())
    ]
    assert len({each.step_seconds for each in found}) == 1
    assert len({each.memory_bytes for each in found}) == 1


def test_buffers_are_those_of_the_longer_part():
    """The ring's, with the output's gradient before and after its exchange; or the exchange's."""
    model = replace(MODEL, vocab_size=128, ffn_hidden_size=64)
    job = replace(JOB, seq_len=2**15)
    query, keys = (2.0 * 2**15 / 8 * heads * 16 for heads in (16, 8))
    for ulysses, ring in ((2, 4), (4, 2)):
        terms = memory_terms(STRATEGY, model, job, ulysses=ulysses, ring=ring)
        in_ring = ring * (2 * keys + query) + 2 * query
        in_exchange = 4 * (query + 2 * keys) + 2 * query
        assert terms["working_set"] == max(in_ring, in_exchange)


def broken(model=MODEL, job=JOB, **sizes):
    placements = table_of(STRATEGY, **sizes).placements
    rejections = STRATEGY.rejections(model, job, placements)
    return {reason for reason, mask in rejections.items() if mask.all()}


def test_heads_limit_the_exchange_and_not_the_ring():
    assert not broken(tensor=2, ulysses=4, ring=2)
    assert broken(tensor=4, ulysses=4) == {"KV heads not divisible by tensor*ulysses"}
    assert not broken(tensor=4, ulysses=2, ring=2)
    assert broken(replace(MODEL, seq_len=24), replace(JOB, seq_len=24), ulysses=4, ring=4) == {
        "sequence not divisible by twice context"
    }


def test_only_the_ring_splits_no_windows():
    windowed = replace(MODEL, window=128)
    assert broken(windowed, ring=2) == {"sliding windows of sequences that a ring splits"}
    assert not broken(windowed, ulysses=2)
    (kernel,) = attentions(plan(windowed, ulysses=2), FORWARD)
    assert kernel.window == 128 and number(kernel.n_heads) == 8


def test_neighbours_exchange_and_the_ring_goes_across():
    placements = table_of(STRATEGY, tensor=2, ulysses=4, ring=2).placements
    strides = {axis: int(placements.stride(axis)[0]) for axis in ("tensor", "ulysses", "ring")}
    assert strides == {"tensor": 1, "ulysses": 2, "ring": 8}


def test_long_sequences_gain_from_exchanges_in_a_node_and_rings_across():
    """A ring across nodes sends half as much where two ranks exchange heads inside a node."""
    long = replace(JOB, seq_len=2**17, global_batch=1)
    machine = machine_of(bandwidths=(300e9, 2e9))
    search = search_of(MODEL, long, machine, STRATEGY, micro_batch=1, recomputes=("full",))
    ring = prediction_of(search, layout_of(STRATEGY, ring=16))
    both = prediction_of(search, layout_of(STRATEGY, ulysses=4, ring=4))
    assert both.exposed_communication_seconds < ring.exposed_communication_seconds
