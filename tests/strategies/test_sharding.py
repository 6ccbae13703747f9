"""ZeRO-1 and ZeRO-2 of AxoNN's grid and of Megatron-LM: what replicas share, send and hold."""

from dataclasses import replace
from functools import partial

import pytest
from build import collectives, memory_terms, number, operations, plan_of, search_of

from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine, load_machine
from axonn_tune.report.phrases import assumption_line
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.engine import IDEAL, Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import MemoryBound
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.strategies.axonn.axonn4d import AXONN, Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.named import strategy_named
from axonn_tune.strategies.switches import Switches

approx = partial(pytest.approx, rel=1e-9)

TIED = Model("m", n_layers=8, hidden_size=256, n_heads=8, vocab_size=1024, seq_len=128)
UNTIED = replace(TIED, tied_embeddings=False)
MODELS = pytest.mark.parametrize("model", [TIED, UNTIED])
JOB = Job(16, 32, 128)
MEGATRON = Megatron3D(distributed_optimizer=False)
# Nothing sharded, ZeRO-1, ZeRO-2.
OF_AXONN = (
    AXONN,
    Axonn4D(sharded_optimizer=True),
    Axonn4D(sharded_optimizer=True, sharded_gradients=True),
)
OF_MEGATRON = (
    MEGATRON,
    replace(MEGATRON, distributed_optimizer=True),
    replace(MEGATRON, distributed_optimizer=True, shards_gradients=True),
)
BOTH = pytest.mark.parametrize("family", [OF_AXONN, OF_MEGATRON], ids=["axonn", "megatron"])


def grid_elements(model, n_layers=8, h=256, vocabulary=1024):
    """Elements of matrices, and of vectors along the stream and along inner widths."""
    n_embeddings = 1 if model.tied_embeddings else 2
    matrices = n_layers * 12 * h * h + n_embeddings * vocabulary * h
    along_stream = n_layers * (4 * h + 2 * h) + 2 * h + 128 * h
    along_widths = n_layers * (3 * h + 4 * h)
    return matrices, along_stream, along_widths


def moved_over(plan, axis, *parts):
    """Bytes of each collective of parts over an axis, by name, all calls together."""
    moved = {}
    for op in collectives(plan, *parts):
        if op.axis == axis and "norm" not in op.name:
            moved[op.name] = moved.get(op.name, 0.0) + number(op.nbytes)
    return moved


def test_megatron_holds_whole_gradients_of_two_blocks_at_most():
    """The last gradient of a block is formed when those of the block before have been reduced."""
    held, sharded = (plan_of(megatron, TIED, JOB, data=16) for megatron in OF_MEGATRON[1:])
    for plan, waits in ((held, False), (sharded, True)):
        last_gradients = [
            op for op in operations(plan.microstep) if op.name == "backward.qkv.gemm_weight"
        ]
        assert len(last_gradients) == TIED.n_layers
        assert all(("gradient.block.reduce" in op.waits_for) == waits for op in last_gradients)


@pytest.mark.parametrize("clips_shard", [False, True])
def test_replicas_that_have_all_sums_clip_all_or_their_shard(clips_shard):
    """DeepSpeed all-reduces in stage 1 and clips its own share (v0.6.0, stage_1_and_2.py, step)."""
    data = 4
    program = MegatronProgram(sums_sharded=True, clips_shard=clips_shard)
    megatron = replace(OF_MEGATRON[1], overlap_grad_reduce=False, engine=Engine(megatron=program))
    plan = plan_of(megatron, TIED, JOB, data=data, tensor=4)
    summed = {op.name: op for op in collectives(plan, plan.step_end)}["gradient.reduce"]
    by_name = {op.name: op for op in operations(plan.step_end)}
    n_clipped = number(summed.nbytes) / (data if clips_shard else 1)
    assert summed.kind == "all_reduce"
    assert number(by_name["gradient.norm"].nbytes) == approx(n_clipped)
    assert number(by_name["gradient.clip"].nbytes) == approx(2.0 * n_clipped)


# AxoNN's grid ------------------------------------------------------------------------------------


@MODELS
@pytest.mark.parametrize("z", [1, 4])
def test_every_micro_step_of_axonn_scatters_all_matrices_over_data(model, z):
    """Messages in the job's type follow those over Z; vectors are left to the end, in fp32."""
    plan = plan_of(OF_AXONN[2], model, replace(JOB, n_gpus=4 * z), x=2, z=z, data=2)
    matrices, along_stream, along_widths = grid_elements(model)
    if model.tied_embeddings:
        matrices += 1024 * 256  # the shared matrix has a gradient as head and one as embedding
    moved = moved_over(plan, "data", plan.microstep)
    assert sum(moved.values()) == approx(2.0 * matrices / (2 * z))
    assert all(name.endswith(".reduce_scatter.data") for name in moved)
    vectors = along_stream / 2 + along_widths
    stored = grid_elements(model)[0] / (2 * z) + vectors
    assert moved_over(plan, "data", plan.step_end) == approx(
        {"gradient.reduce_scatter": 4.0 * vectors, "weights.all_gather": 2.0 * stored}
    )


def test_data_scatters_what_z_has_scattered():
    plan = plan_of(OF_AXONN[2], UNTIED, JOB, x=2, z=4, data=2)
    by_name = {op.name: op for op in collectives(plan, plan.microstep)}
    over_data = [op for op in by_name.values() if op.axis == "data"]
    assert len(over_data) == 6
    for op in over_data:
        over_z = by_name[op.name.removesuffix(".data")]
        assert over_z.axis == "z" and over_z.name in op.waits_for
        assert number(over_z.nbytes) == approx(4 * number(op.nbytes))


@MODELS
def test_gradients_of_axonn_are_shards_and_two_that_are_under_way(model):
    h, x, z, data = 256, 2, 2, 4
    terms = [memory_terms(s, model, JOB, x=x, z=z, data=data) for s in OF_AXONN]
    matrices, along_stream, along_widths = grid_elements(model)
    vectors = along_stream / x + along_widths
    whole = matrices / (x * z) + vectors
    # The MLP's two weights, or the embedding's and that of queries, keys and values.
    pair = 2.0 * max(2 * 4 * h * h, 1024 * h + 4 * h * h) / (x * z)
    assert terms[0]["gradients"] == approx(whole * 6.0)
    assert terms[1]["gradients"] == approx(whole * 6.0)
    assert terms[2]["gradients"] == approx((matrices / (x * z) / data + vectors) * 6.0 + pair)


def test_a_rank_adds_to_its_shards_only():
    """It reads the new gradient and the sum, and writes the sum."""
    at = {"x": 2, "z": 2, "data": 4}
    added = []
    for strategy in OF_AXONN[1:]:
        plan = plan_of(strategy, UNTIED, JOB, **at)
        kernels = [op for op in operations(plan.microstep) if isinstance(op, MemoryBound)]
        (nbytes,) = [number(op.nbytes) for op in kernels if op.name == "gradient.accumulate"]
        added.append(nbytes)
    matrices = grid_elements(UNTIED)[0]
    assert added[0] - added[1] == approx((2.0 + 8.0) * matrices / 4 * 3 / 4)


# Megatron-LM -------------------------------------------------------------------------------------


@MODELS
def test_with_one_micro_step_megatron_sends_the_same_whichever_it_shards(model):
    job = replace(JOB, global_batch=8)
    totals = []
    for strategy in OF_MEGATRON[1:]:
        plan = plan_of(strategy, model, job, tensor=2, data=8)
        moved = moved_over(plan, "context*data", plan.sync_microstep, plan.step_end)
        gathers = {name: nbytes for name, nbytes in moved.items() if "all_gather" in name}
        totals.append((sum(moved.values()), sum(gathers.values())))
    assert totals[0] == approx(totals[1])


@MODELS
def test_every_micro_step_of_megatron_reduces_all_gradients(model):
    plan = plan_of(OF_MEGATRON[2], model, JOB, tensor=2, context=2, data=4)
    weights = memory_terms(OF_MEGATRON[2], model, JOB, tensor=2, context=2, data=4)["weights"]
    for part in (plan.microstep, plan.sync_microstep):
        moved = moved_over(plan, "context*data", part)
        reduced = sum(nbytes for name, nbytes in moved.items() if "reduce" in name)
        assert reduced == approx(weights / 2.0 * 4.0)
    assert not any("reduce" in name for name in moved_over(plan, "context*data", plan.step_end))


def test_megatron_holds_shards_and_the_whole_gradients_of_two_blocks():
    sizes = {"tensor": 2, "data": 8}
    terms = memory_terms(OF_MEGATRON[2], UNTIED, JOB, **sizes)
    stored = terms["weights"] / 2.0
    block = 12 * 256 * 256 / 2 + (3 + 4) * 256 / 2 + (4 + 2) * 256
    outside = stored - 8 * block
    assert terms["gradients"] == approx(4.0 * (stored / 8 + outside + 2 * block))


# Laws of both ------------------------------------------------------------------------------------


@BOTH
@MODELS
@pytest.mark.parametrize("n_replicas", [1, 2, 4, 16])
def test_sharding_more_never_takes_more_memory(family, model, n_replicas):
    job = replace(JOB, n_gpus=n_replicas)
    needed = [sum(memory_terms(s, model, job, data=n_replicas).values()) for s in family]
    assert needed[0] >= needed[1] >= needed[2]
    assert (needed[0] > needed[1] > needed[2]) == (n_replicas > 1)


@BOTH
def test_shards_of_all_replicas_are_the_whole(family):
    whole, *sharded = (memory_terms(s, UNTIED, JOB, data=16) for s in family)
    for terms in sharded:
        assert 16 * terms["optimizer_states"] == approx(whole["optimizer_states"])


@BOTH
def test_one_replica_has_nothing_to_share(family):
    job = replace(JOB, n_gpus=2, global_batch=4)
    inner = "x" if family is OF_AXONN else "tensor"
    plans = [plan_of(s, UNTIED, job, **{inner: 2}) for s in family]
    sent = [
        [(op.name, number(op.nbytes)) for op in collectives(plan, plan.microstep, plan.step_end)]
        for plan in plans
    ]
    assert sent[0] == sent[1] == sent[2]
    moved = [
        sum(number(op.nbytes) for op in operations(plan.microstep) if isinstance(op, MemoryBound))
        for plan in plans
    ]
    assert moved[0] == moved[1] == moved[2]
    memory = [memory_terms(s, UNTIED, job, **{inner: 2}) for s in family]
    assert memory[0] == memory[1] == memory[2]


@BOTH
def test_an_earlier_reduction_hides_and_costs_bytes(family):
    """With many micro-steps ZeRO-2 sends more, and most of it beside the backward pass."""
    machine = load_machine("perlmutter")
    sizes = {"data": 16}
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    seconds = []
    for strategy in family:
        search = search_of(UNTIED, replace(JOB, global_batch=256), machine, strategy, micro_batch=1)
        seconds.append(best_of_layout(search, text).step_seconds)
    assert seconds[2] > seconds[1]


# Rules and names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["axonn-pipeline", "megatron"])
def test_gradients_of_a_pipeline_are_not_sharded(name):
    strategy = strategy_named(name, Switches(shard_gradients=True))
    search = search_of(UNTIED, JOB, load_machine("perlmutter"), strategy)
    with pytest.raises(InputError, match="sharded gradients in a pipeline"):
        best_of_layout(search, "data=8,pipeline=2")
    assert best_of_layout(search, "data=16").fits


def test_sharded_gradients_are_reduced_beside_the_backward_pass():
    strategy = replace(OF_MEGATRON[2], overlap_grad_reduce=False)
    search = search_of(UNTIED, JOB, load_machine("perlmutter"), strategy)
    with pytest.raises(InputError, match="need --overlap-grad-reduce"):
        best_of_layout(search, "data=16")


def test_switches_say_what_is_sharded():
    assert strategy_named("axonn", Switches(shard_gradients=True)) == replace(
        OF_AXONN[2], engine=IDEAL
    )
    megatron = strategy_named("megatron", Switches(shard_gradients=True))
    assert megatron.distributed_optimizer and megatron.shards_gradients
    both = Switches(shard_gradients=True, distributed_optimizer=False)
    with pytest.raises(InputError, match="leave out --no-distributed-optimizer"):
        strategy_named("megatron", both)
    with pytest.raises(InputError, match="engine axonn reduces whole gradients"):
        strategy_named("axonn", Switches(shard_gradients=True), load_engine("axonn"))


@pytest.mark.parametrize(
    ("name", "switches", "said"),
    [
        ("axonn", Switches(), ""),
        ("axonn", Switches(distributed_optimizer=True), "optimizer states"),
        ("axonn", Switches(shard_gradients=True), "optimizer states and gradients"),
        ("megatron", Switches(), ""),
        ("megatron", Switches(shard_gradients=True), "optimizer states and gradients"),
        ("zero3", Switches(), ""),
    ],
)
def test_what_is_sharded_is_said(name, switches, said):
    strategy = strategy_named(name, switches)
    line = assumption_line(search_of(UNTIED, JOB, load_machine("perlmutter"), strategy))
    assert (f", {said} sharded over replicas." in line) if said else "sharded" not in line
