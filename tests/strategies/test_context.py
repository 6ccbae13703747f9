"""Context parallelism: work and bytes of each kind against a ring that is played step by step."""

from dataclasses import replace

import pytest
from build import (
    attentions,
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

from axonn_tune.cost.prices import host_seconds
from axonn_tune.errors import InputError
from axonn_tune.spec.blocks import LatentAttention
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.names import BACKWARD, FORWARD
from axonn_tune.spec.plan import MemoryBound
from axonn_tune.spec.programs import ALL_GATHER, RING, ULYSSES
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.named import strategy_named
from axonn_tune.strategies.switches import Switches

GPT = Model("m", n_layers=2, hidden_size=256, n_heads=16, vocab_size=1024, seq_len=512)
LLAMA = llama(n_layers=2, hidden_size=256, n_heads=16, n_kv_heads=8, vocab_size=1024, seq_len=512)
JOB = Job(16, 16, 512)
MODELS = pytest.mark.parametrize("model", [GPT, LLAMA])
ALONE = (RING, ALL_GATHER, ULYSSES)
KINDS = pytest.mark.parametrize("kind", ALONE)
SIZES = pytest.mark.parametrize("context", [1, 2, 4, 8])


def megatron(kind):
    return Megatron3D(False, False, False, context_kind=kind)


def plan(kind, model=LLAMA, job=JOB, **sizes):
    return plan_of(megatron(kind), model, job, **sizes)


def sent_of_block(plan, chain, model):
    """What a rank sends over the context group for attention of one block."""
    return sent_bytes(plan, chain, "context") / model.n_layers


# Work ---------------------------------------------------------------------------------------------


@MODELS
@KINDS
@SIZES
@pytest.mark.parametrize("chain", [FORWARD, BACKWARD])
def test_ranks_share_the_work_of_attention(model, kind, context, chain):
    alone = sum(number(op.flops) for op in attentions(plan(kind, model), chain))
    shared = attentions(plan(kind, model, tensor=2, context=context), chain)
    assert sum(number(op.flops) for op in shared) == pytest.approx(alone / (2 * context))


@pytest.mark.parametrize("context", [2, 3, 4, 8])
def test_every_step_of_a_ring_has_the_same_work(context):
    """Count the unmasked pairs of chunks of one rank's queries and another one's keys.

    A pair on the diagonal counts half. A rank holds one chunk from the front and one from the back.
    """
    chunks = [(rank, 2 * context - 1 - rank) for rank in range(context)]
    for own in range(context):
        for other in range(context):
            pairs = [(q, k) for q in chunks[own] for k in chunks[other]]
            work = sum(0.5 if q == k else 1.0 for q, k in pairs if k <= q)
            assert work == 2.0  # Half of the four pairs, as in a causal sequence of two chunks.
    job = replace(JOB, seq_len=24 * context)
    steps = attentions(plan("ring", job=job, context=context), FORWARD)
    each = {number(op.flops) / number(op.n_launches) for op in steps}
    assert len(each) == 1 and {number(op.seq_len) for op in steps} == {24.0}
    assert sum(number(op.n_launches) for op in steps) == context
    assert sum(number(op.n_launches) for op in steps if op.masked) == 1


def test_ulysses_has_whole_sequences_and_a_part_of_the_heads():
    (kernel,) = attentions(plan("ulysses", tensor=2, context=4), FORWARD)
    assert (number(kernel.n_sequences), number(kernel.n_heads)) == (1, 2)
    assert number(kernel.seq_len) == 512


@KINDS
def test_attention_of_every_kind_drops_scores_where_the_job_has_dropout(kind):
    for dropout in (False, True):
        found = plan(kind, job=replace(JOB, dropout=dropout), tensor=2, context=4)
        kernels = [*attentions(found, FORWARD), *attentions(found, BACKWARD)]
        assert kernels and {op.dropout for op in kernels} == {dropout}


# Bytes ------------------------------------------------------------------------------------------


def ring_messages(context, backward):
    """Play a ring: how often keys and values, and how often their gradients, leave a rank.

    After the last step everybody has seen all keys and, in the backward pass, the summed gradient
    of a rank's keys has come back to it.
    """
    keys_of, gradients_of = list(range(context)), [None] * context
    seen = [set() for _ in range(context)]
    n_keys = n_gradients = 0
    for step in range(context):
        moves_keys = step < context - 1
        moves_gradients = backward and step > 0
        arriving = [keys_of[rank - 1] for rank in range(context)]
        if moves_gradients:
            gradients_of = [gradients_of[rank - 1] for rank in range(context)]
        for rank in range(context):
            seen[rank].add(keys_of[rank])
            gradients_of[rank] = keys_of[rank]
        n_keys += moves_keys
        n_gradients += moves_gradients
        if moves_keys:
            keys_of = arriving
    assert all(len(each) == context for each in seen)
    return n_keys, n_gradients


@MODELS
@SIZES
def test_what_a_ring_sends(model, context):
    found = plan("ring", model, tensor=2, context=context)
    keys_and_values = 512 / context * 2 * model.n_kv_heads * 16 / 2 * 2.0
    for chain, backward in ((FORWARD, False), (BACKWARD, True)):
        n_messages = sum(ring_messages(context, backward))
        assert sent_of_block(found, chain, model) == pytest.approx(n_messages * keys_and_values)


def test_a_ring_sends_keys_and_values_of_latent_attention_as_attention_reads_them():
    latent = LatentAttention(kv_rank=32, q_rank=0, content_dim=16, position_dim=8, value_dim=12)
    model = replace(LLAMA, latent_attention=latent)
    found = plan("ring", model, tensor=2, context=4)
    keys_and_values = 512 / 4 * model.n_heads / 2 * (16 + 8 + 12) * 2.0
    assert sent_of_block(found, FORWARD, model) == pytest.approx(3 * keys_and_values)


@MODELS
@SIZES
def test_gathers_send_what_a_ring_does(model, context):
    for chain in (FORWARD, BACKWARD):
        ring, gathered = (
            sent_of_block(plan(kind, model, context=context), chain, model)
            for kind in ("ring", "all_gather")
        )
        assert gathered == pytest.approx(ring)


@MODELS
@SIZES
def test_ulysses_sends_queries_keys_values_and_the_output_once(model, context):
    found = plan("ulysses", model, context=context)
    elements = 512 / context * (2 * model.n_heads + 2 * model.n_kv_heads) * 16
    for chain in (FORWARD, BACKWARD):
        expected = (context - 1) / context * elements * 2.0
        assert sent_of_block(found, chain, model) == pytest.approx(expected)


@KINDS
def test_nothing_is_left_unawaited(kind):
    found = plan(kind, tensor=2, context=4)
    for phase in found.microstep.phases:
        awaited = {name for op in phase.operations for name in op.waits_for}
        issued = {op.name for op in phase.operations if getattr(op, "axis", "") == "context"}
        assert issued <= awaited


def copied_bytes(plan, chain):
    """Bytes of the kernels beside attention, by the end of their names."""
    start = f"{chain}.attention."
    return {
        op.name.removeprefix(start): number(op.nbytes)
        for op in operations(plan.microstep)
        if isinstance(op, MemoryBound) and op.name.startswith(start)
    }


def sums_of_gradients(rank, n_ranks, queries, keys):
    """Bytes that a rank moves in the backward pass of a ring, played half by half.

    A step of a lower triangle has all queries and the first half of the keys that are at the rank,
    one of an upper triangle the second half of the queries and all keys. The sums of the keys at a
    rank have come with them; those of the last step are of its own keys.
    """
    copy, add = 2, 3
    moved = 0
    seen_queries = set()
    for step in range(n_ranks):
        owner = (rank + step + 1) % n_ranks
        if step == n_ranks - 1:
            parts = {0, 1}, {0, 1}
        elif step >= n_ranks - rank - 1:
            parts = {0, 1}, {0}
        else:
            parts = {1}, {0, 1}
        for part in parts[0]:
            moved += (add if part in seen_queries else copy) * queries / 2
        seen_queries |= parts[0]
        # The ranks whose steps with these keys came before are those that sent them here.
        earlier = [(owner - 1 - s) % n_ranks for s in range(step)]
        formed = {p for r in earlier for p in ({0} if r > owner else {0, 1})}
        for part in parts[1]:
            moved += (add if part in formed else copy) * keys / 2
    return moved


@pytest.mark.parametrize("context", [2, 4, 8])
def test_a_ring_sums_with_a_kernel_for_each_step_and_sum(context):
    """Outputs are added one by one, after the last sum of denominators; dQ, dK and dV likewise."""
    found = plan("ring", context=context)
    for chain, n_kernels in ((FORWARD, context + 1), (BACKWARD, 3 * context)):
        (sums,) = {
            float(op.n_launches[0])
            for op in operations(found.microstep)
            if isinstance(op, MemoryBound) and op.name == f"{chain}.attention.sum"
        }
        assert sums == n_kernels


def test_the_host_issues_the_sums_of_a_ring_as_one_operation():
    """The times of an issue are fitted to plans that count them so."""
    found = plan("ring", context=4)
    sums = [op for op in operations(found.microstep) if op.name.endswith("attention.sum")]
    assert sums
    for op in sums:
        alone = replace(found.microstep.phases[0], operations=(op,), repeats=1.0)
        assert number(host_seconds([alone], found.candidates, 2.0)) == 2.0


@MODELS
def test_copies_and_sums_beside_attention(model):
    """A copy reads and writes; an addition reads two and writes one.

    Sums of a ring begin with copies, and those of gathered keys from zeros.
    """
    query, keys = (512 / 4 * heads * 16 * 2.0 for heads in (model.n_heads, model.n_kv_heads))
    found = {
        (kind, chain): copied_bytes(plan(kind, model, context=4), chain)
        for kind in ALONE
        for chain in (FORWARD, BACKWARD)
    }
    pack = 2 * 2 * keys
    assert found["ring", FORWARD] == {"pack": pack, "sum": (2 + 3 * 3) * query}
    slowest = max(sums_of_gradients(rank, 4, query, 2 * keys) for rank in range(4))
    assert found["ring", BACKWARD] == {"pack": pack, "sum": slowest}
    everything = 4 * 2 * keys
    written, copied, added, ordered = 1, 2, 3, 2
    joined = (written + copied) * query
    assert found["all_gather", FORWARD] == {"order": 2 * everything, "join": joined}
    sums = (written + added + ordered) * everything
    joined = copied * query
    backward = {"order": 2 * everything, "join": joined, "sum": sums}
    assert found["all_gather", BACKWARD] == backward
    exchanged = {"q": query, "k": keys, "v": keys, "out": query}
    copies = {f"{x}.{end}": 2 * b for x, b in exchanged.items() for end in ("pack", "unpack")}
    assert found["ulysses", FORWARD] == found["ulysses", BACKWARD] == copies


def strided_copies(plan, chain):
    """The copies beside attention that handle one element at a time."""
    start = f"{chain}.attention."
    return {
        op.name.removeprefix(start)
        for op in operations(plan.microstep)
        if isinstance(op, MemoryBound) and op.name.startswith(start) and number(op.strided_bytes)
    }


def test_only_the_copies_that_move_the_axis_of_heads_are_strided():
    """Before attention tokens are packed by heads, and after it heads are unpacked by tokens."""
    found = plan(ULYSSES, context=4)
    assert strided_copies(found, FORWARD) == {"q.pack", "k.pack", "v.pack", "out.unpack"}
    assert strided_copies(found, BACKWARD) == {"out.pack", "q.unpack", "k.unpack", "v.unpack"}
    for kind in (RING, ALL_GATHER):
        assert not strided_copies(plan(kind, context=4), BACKWARD)


# Times --------------------------------------------------------------------------------------------


def predicted(kind, machine, job=JOB, **sizes):
    strategy = megatron(kind)
    search = search_of(LLAMA, job, machine, strategy, micro_batch=1, recomputes=("none",))
    return prediction_of(search, layout_of(strategy, **sizes))


def test_all_kinds_are_equal_where_sequences_are_whole():
    found = [predicted(kind, machine_of(), tensor=2, data=8) for kind in ALONE]
    assert len({each.step_seconds for each in found}) == 1
    assert len({each.memory_bytes for each in found}) == 1


FREE = machine_of(bandwidths=(1e21, 1e21), latencies=(0.0, 0.0))


@pytest.mark.parametrize("context", [2, 4, 16])
def test_a_ring_over_a_free_network_takes_as_long_as_its_steps_alone(context):
    job = replace(JOB, n_gpus=context, seq_len=2**18)
    found = predicted("ring", FREE, job, context=context)
    assert found.exposed_communication_seconds == pytest.approx(0.0, abs=1e-9)
    whole = predicted("ring", FREE, replace(job, n_gpus=1))
    copies = 1.06  # Partial results are summed; every kernel has its launch.
    assert 1.0 < found.step_seconds * context / whole.step_seconds < copies


def test_a_ring_shows_only_what_is_longer_than_its_steps():
    """On a slow network messages are exposed, those of gathers and exchanges on any network."""
    job = replace(JOB, n_gpus=8, seq_len=2**17)
    exposed = {}
    for name, bandwidth in (("fast", 300e9), ("slow", 3e7)):
        machine = machine_of(bandwidths=(bandwidth, bandwidth))
        exposed[name] = {
            kind: predicted(kind, machine, job, context=8).exposed_communication_seconds
            for kind in ALONE
        }
    assert exposed["fast"]["ring"] < 0.1 * exposed["fast"]["all_gather"]
    assert exposed["fast"]["ulysses"] > exposed["fast"]["ring"]
    assert exposed["slow"]["ring"] > 0.5 * exposed["slow"]["all_gather"]


def test_candidates_of_any_size_share_a_plan():
    """One table with several context sizes, and each alone, take equally long."""
    for kind in ALONE:
        strategy = megatron(kind)
        search = search_of(LLAMA, JOB, machine_of(), strategy, micro_batch=1)
        for context in (1, 2, 8):
            layout = layout_of(strategy, context=context, data=16 // context)
            alone = predicted(kind, machine_of(), context=context, data=16 // context)
            assert prediction_of(search, layout).step_seconds <= alone.step_seconds * (1 + 1e-12)


# Memory -------------------------------------------------------------------------------------------


@MODELS
def test_buffers_of_long_sequences(model):
    """One block has those of a rank's tokens with half of the heads, in bytes."""
    model = replace(model, vocab_size=128, ffn_hidden_size=64)
    job = replace(JOB, seq_len=2**15)
    tokens = 2**15 / 8
    query, keys = (2.0 * tokens * heads * 16 / 2 for heads in (model.n_heads, model.n_kv_heads))
    working = {
        kind: memory_terms(megatron(kind), model, job, tensor=2, context=8)["working_set"]
        for kind in ALONE
    }
    # Keys and values of all steps and an output of each; what is gathered, its gradient and a part.
    assert working["ring"] == 8 * (2 * keys + query)
    assert working["all_gather"] == 3 * 8 * 2 * keys
    # Four copies of the gradients of q, k and v, and the output's as it comes and as it is used.
    assert working["ulysses"] == 4 * (query + 2 * keys) + 2 * query
    saved = {
        kind: memory_terms(megatron(kind), model, job, tensor=2, context=8)["activations"]
        for kind in ALONE
    }
    assert saved["ring"] == saved["all_gather"]
    assert saved["ulysses"] - saved["ring"] == pytest.approx(model.n_layers * query)


# Rules --------------------------------------------------------------------------------------------


def broken(kind, model=LLAMA, job=JOB, **sizes):
    strategy = megatron(kind)
    placements = table_of(strategy, **sizes).placements
    return {
        reason for reason, mask in strategy.rejections(model, job, placements).items() if mask.all()
    }


def test_ulysses_needs_heads_for_all_ranks():
    assert not broken("ulysses", tensor=2, context=4)
    assert broken("ulysses", tensor=4, context=4) == {"KV heads not divisible by tensor*context"}
    assert not broken("ring", tensor=4, context=4)


@KINDS
def test_only_fused_attention_is_split(kind):
    job = replace(JOB, attention="unfused")
    assert broken(kind, job=job, context=2) == {"unfused attention of split sequences"}
    assert not broken(kind, job=job, data=2)


def test_a_ring_splits_no_windows():
    model = replace(LLAMA, window=128)
    assert broken("ring", model, context=2) == {"sliding windows of sequences that a ring splits"}
    assert not broken("ulysses", model, context=2)
    assert not broken("all_gather", model, context=2)
    (whole,) = attentions(plan("ring", model), FORWARD)
    assert (whole.name, whole.window) == ("forward.windowed_attention", 128)
    for kind in ("ulysses", "all_gather"):
        (kernel,) = attentions(plan(kind, model, context=2), FORWARD)
        share = kernel.attended_fraction
        assert kernel.window == 128 and share == pytest.approx(2 / 4 - 1 / 16)


def test_the_option_names_a_kind():
    strategy = strategy_named("megatron", Switches(context_kind="ulysses"))
    assert strategy.context_kind == "ulysses"
    assert strategy_named("megatron").context_kind == "ring"
    with pytest.raises(InputError, match="context_kind is 'star'; allowed: ring, all_gather"):
        strategy_named("megatron", Switches(context_kind="star"))
