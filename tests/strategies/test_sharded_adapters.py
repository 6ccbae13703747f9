"""Adapters beside weights that ZeRO shards or AxoNN's grid splits, against lists by hand."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from build import collectives, memory_terms, number, operations, plan_of
from worlds import FFN, HIDDEN, SEQ, VOCAB, by_matrix, machine_of, small_llama

from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import Engine, OffloadProgram
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.plan import Attention, Gemm, HostCopy
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.tuning import TARGETS, Adapters
from axonn_tune.step.predict import predict
from axonn_tune.strategies.axonn.axonn4d import Axonn4D
from axonn_tune.strategies.zero.zero import zero3, zero_topo, zeropp

LAYERS, RANK = 4, 16
MODEL = small_llama(LAYERS)
LARGE = replace(MODEL, hidden_size=4096, n_heads=32, ffn_hidden_size=8192, seq_len=4096)
SIDES = {"qkv": (HIDDEN, 2 * HIDDEN), "proj": (HIDDEN, HIDDEN)}
SIDES |= {"up": (HIDDEN, 2 * FFN), "down": (FFN, HIDDEN)}
BLOCK = sum(k * n for k, n in SIDES.values()) + 2 * HIDDEN
ROOT = 2 * VOCAB * HIDDEN + HIDDEN
WEIGHTS = LAYERS * BLOCK + ROOT
OF_BLOCK = RANK * sum(k + n for k, n in SIDES.values())
ALL = Job(16, 32, SEQ)
LORA = replace(ALL, adapters=Adapters(RANK))
FSDP2 = zero3(Engine(zero=ZeroProgram(is_fsdp2=True)))
TENSOR = zero3(Engine(zero=ZeroProgram(is_fsdp2=True, splits_layers=True)))
GRID = Axonn4D()
LAYOUTS = [
    (FSDP2, {"shard": 8, "replica": 2}),
    (TENSOR, {"tensor": 4, "shard": 4}),
    (zeropp(), {"secondary": 8, "across": 2}),
    (zero_topo(), {"weights": 2, "gradients": 4, "states": 2}),
    (GRID, {"y": 2, "z": 4, "data": 2}),
    (Axonn4D(pipelined=True), {"z": 2, "data": 4, "pipeline": 2}),
]


def messages(strategy, job, axis, kind, **sizes):
    """Bytes of the messages of a step over an axis, those of a unit of FSDP or of a layer."""
    plan = plan_of(strategy, MODEL, job, **sizes)
    parts = [plan.microstep, plan.step_end]
    return [
        number(op.nbytes)
        for op in collectives(plan, *parts)
        if (op.axis, op.kind) == (axis, kind) and op.name.split(".")[1] != "norm"
    ]


def seconds(strategy, job, **sizes):
    """Seconds of a step of a model whose kernels take longer than their launch."""
    layout = Layout({axis: sizes.get(axis, 1) for axis in strategy.axes.sized})
    configuration = Configuration(layout, micro_batch=1, recompute="none")
    return predict(Scenario(LARGE, job, machine_of(), strategy), configuration).step_seconds


# Every strategy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("strategy", [FSDP2, zeropp(), zero_topo(), GRID])
def test_the_plan_has_the_flops_of_the_model(strategy, target):
    """Where no axis splits layers, a rank computes all of its tokens."""
    job = replace(ALL, adapters=Adapters(RANK, (target,)))
    everyone = {strategy.axes.names[-1]: 16}
    plan = plan_of(strategy, MODEL, job, **everyone)
    found = sum(
        number(op.flops) for op in operations(plan.microstep) if isinstance(op, Gemm | Attention)
    )
    assert found == pytest.approx(MODEL.model_flops(SEQ, SEQ, job.adapters), rel=1e-12)


@pytest.mark.parametrize(("strategy", "sizes"), LAYOUTS)
def test_only_adapters_have_gradients_and_states(strategy, sizes):
    names = {op.name for op in operations(plan_of(strategy, MODEL, LORA, **sizes).microstep)}
    gradients = {name for name in names if name.endswith("gemm_weight")}
    assert {name.split(".")[1] for name in gradients} == set(SIDES)
    assert all(".adapter_" in name for name in gradients)
    usual = memory_terms(strategy, MODEL, ALL, **sizes)
    terms = memory_terms(strategy, MODEL, LORA, **sizes)
    for term in ("gradients", "optimizer_states"):
        assert 0 < terms[term] < 0.5 * usual[term]


@pytest.mark.parametrize(("strategy", "sizes"), LAYOUTS)
@pytest.mark.parametrize("overlap", [Overlap(), Overlap(False, False, False)])
def test_a_step_with_adapters_is_shorter_and_grows_with_their_rank(strategy, sizes, overlap):
    everything = replace(ALL, seq_len=LARGE.seq_len, overlap=overlap)
    ranks = [replace(everything, adapters=Adapters(rank)) for rank in (16, 128, 512)]
    slow, slower, slowest = (seconds(strategy, job, **sizes) for job in ranks)
    assert slow < slower < slowest
    assert slow < seconds(strategy, everything, **sizes)


@pytest.mark.parametrize("strategy", [FSDP2, zeropp(), zero_topo(), GRID])
def test_adapters_as_large_as_a_matrix_are_trained_like_it(strategy):
    """A and B of half the rank of a square matrix have as many elements as the matrix."""
    everyone = {strategy.axes.names[-1]: 16}
    half = replace(ALL, adapters=Adapters(HIDDEN // 2, ("proj",)))
    states = memory_terms(strategy, MODEL, ALL, **everyone)["optimizer_states"]
    of_matrices = memory_terms(strategy, MODEL, half, **everyone)["optimizer_states"]
    assert of_matrices / states == pytest.approx(LAYERS * HIDDEN * HIDDEN / WEIGHTS)


# ZeRO --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [Overlap(), Overlap(False, False, False)])
def test_fsdp_gathers_frozen_weights_in_both_passes_and_reduces_adapters(overlap):
    job = replace(LORA, overlap=overlap)
    gathered = messages(FSDP2, job, "shard", "all_gather", shard=16)
    whole = 2 * (BLOCK + OF_BLOCK)
    assert sorted(gathered) == sorted([2 * ROOT] + [whole] * 2 * LAYERS)
    assert messages(FSDP2, job, "shard", "reduce_scatter", shard=16) == [2 * OF_BLOCK] * LAYERS


def test_replicas_sum_the_shards_of_adapters_once():
    sizes = {"shard": 8, "replica": 2}
    plan = plan_of(FSDP2, MODEL, LORA, **sizes)
    sums = [
        number(op.nbytes) for op in collectives(plan, plan.sync_microstep) if op.axis == "replica"
    ]
    assert sums == [2 * OF_BLOCK / 8] * LAYERS
    assert not messages(FSDP2, LORA, "replica", "all_reduce", **sizes)


def test_deepspeed_gathers_each_matrix_of_an_adapter_and_no_updated_norms():
    deepspeed = zero3(by_matrix(keeps_vectors=True))
    plan = plan_of(deepspeed, MODEL, LORA, shard=16)
    calls = {op.name: number(op.n_calls) for op in collectives(plan, plan.microstep)}
    assert calls["forward.block.all_gather"] == 4 + 8
    names = [op.name for op in collectives(plan, plan.step_end)]
    assert not [name for name in names if "all_gather" in name]


def test_shards_of_fsdp2_are_in_the_jobs_type_where_they_are_frozen():
    terms = memory_terms(FSDP2, MODEL, LORA, shard=16)
    trained = LAYERS * OF_BLOCK
    assert terms["weights"] == (2 * WEIGHTS + 4 * trained) / 16
    assert terms["optimizer_states"] == 8 * trained / 16
    deepspeed = memory_terms(zero3(), MODEL, LORA, shard=16)
    assert deepspeed["weights"] == 2 * (WEIGHTS + trained) / 16
    assert deepspeed["gradients"] == 2 * trained / 16
    assert deepspeed["optimizer_states"] == 12 * trained / 16


def test_fsdp2_holds_two_blocks_whole_and_no_gradient_of_a_weight():
    """A block saves inputs of norms and adapters, hidden features, q, k, v, attention and MLP."""
    terms = memory_terms(FSDP2, MODEL, LORA, shard=16)
    whole = BLOCK + OF_BLOCK
    most = 2 * (ROOT + 2 * whole + 2 * OF_BLOCK)
    assert 2 * (ROOT + whole) < terms["gathered_weights"] <= most
    widths = 2 * HIDDEN + 2 * HIDDEN + 2 * HIDDEN + HIDDEN + 3 * FFN + 4 * RANK
    saved = 2 * SEQ * (widths + 0)
    n_left = terms["activations"] / saved
    assert n_left == pytest.approx(LAYERS, abs=1.1)


def test_offloaded_frozen_shards_travel_in_the_jobs_type():
    offloaded = Engine(
        zero=ZeroProgram(is_fsdp2=True), offload=OffloadProgram(gradients=True, weights=True)
    )
    plan = plan_of(zero3(offloaded), MODEL, replace(LORA, offload="optimizer"), shard=16)
    copies = {
        op.name: number(op.nbytes) for op in operations(plan.microstep) if isinstance(op, HostCopy)
    }
    assert copies["forward.block.from_host"] == (2 * BLOCK + 4 * OF_BLOCK) / 16


def test_a_tensor_group_splits_adapters():
    sizes = {"tensor": 4, "shard": 4}
    assert messages(TENSOR, LORA, "shard", "reduce_scatter", **sizes) == [2 * OF_BLOCK / 4] * LAYERS
    found = collectives(plan := plan_of(TENSOR, MODEL, LORA, **sizes), plan.microstep)
    of_adapters = [op for op in found if ".adapter_" in op.name]
    assert {number(op.nbytes) for op in of_adapters} == {2 * SEQ * RANK}
    kinds = {op.name.split(".")[0] + "." + op.name.split(".")[1]: op.kind for op in of_adapters}
    expected = {}
    for layer in SIDES:
        forward, backward = ("all_gather", "all_reduce")
        if layer in ("proj", "down"):
            forward, backward = ("reduce_scatter", "all_gather")
        expected |= {f"forward.{layer}": forward, f"backward.{layer}": backward}
    assert kinds == expected


def test_ranks_that_split_hidden_features_form_parts_of_the_output():
    """Each rank multiplies its sums by its rows of B; the parts add up, and so do the gradients."""
    random = np.random.default_rng(1)
    ranks, m, k, n, r = 4, 6, 8, 12, 4
    i, a, b, o = (random.normal(size=s) for s in [(m, k), (k, r), (r, n), (m, n)])
    rows = [slice(p * k // ranks, (p + 1) * k // ranks) for p in range(ranks)]
    own = [slice(p * r // ranks, (p + 1) * r // ranks) for p in range(ranks)]
    hidden = sum(i[:, part] @ a[part] for part in rows)
    parts = [hidden[:, part] @ b[part] for part in own]
    assert np.allclose(sum(parts), i @ a @ b)
    gathered = np.concatenate([o @ b[part].T for part in own], axis=1)
    for part in rows:
        assert np.allclose(i[:, part].T @ gathered, (i.T @ (o @ b.T))[part])
        assert np.allclose(gathered @ a[part].T, (o @ b.T @ a.T)[:, part])


# AxoNN's grid ------------------------------------------------------------------------------------


def test_a_grid_forms_what_a_dense_layer_forms():
    """Ranks of a 2 x 4 grid sum hidden features over X, their gradient and the input's over Y."""
    random = np.random.default_rng(0)
    x, y, m, k, n, r = 2, 4, 6, 8, 12, 3
    i, w, a, b, o = (random.normal(size=s) for s in [(m, k), (k, n), (k, r), (r, n), (m, n)])
    rows = [slice(p * k // x, (p + 1) * k // x) for p in range(x)]
    columns = [slice(q * n // y, (q + 1) * n // y) for q in range(y)]
    hidden = sum(i[:, rows[p]] @ a[rows[p]] for p in range(x))
    partial = [o[:, columns[q]] @ b[:, columns[q]].T for q in range(y)]
    output, gradient_a = i @ w + i @ a @ b, i.T @ (o @ b.T)
    input_gradient = o @ w.T + o @ b.T @ a.T
    for p, q in product(range(x), range(y)):
        summed = sum(i[:, rows[e]] @ w[rows[e], columns[q]] for e in range(x))
        assert np.allclose(summed + hidden @ b[:, columns[q]], output[:, columns[q]])
        assert np.allclose(i[:, rows[p]].T @ sum(partial), gradient_a[rows[p]])
        parts = [
            o[:, columns[e]] @ w[rows[p], columns[e]].T + partial[e] @ a[rows[p]].T
            for e in range(y)
        ]
        assert np.allclose(sum(parts), input_gradient[:, rows[p]])


@pytest.mark.parametrize(("layer", "axes"), [("qkv", "xy"), ("proj", "yx")])
def test_messages_of_adapters_on_a_grid(layer, axes):
    job = replace(ALL, adapters=Adapters(RANK, (layer,)))
    plan = plan_of(GRID, MODEL, job, x=2, y=4, z=2)
    found = [op for op in collectives(plan, plan.microstep) if ".adapter_" in op.name]
    hidden = 2 * SEQ * RANK
    expected = [("all_reduce", axis, hidden) for axis in axes]
    assert [(op.kind, op.axis, number(op.nbytes)) for op in found] == (
        [expected[0]] * LAYERS + [expected[1]] * LAYERS
    )


def test_a_grid_gathers_frozen_weights_scatters_none_and_sums_adapters_at_the_end():
    sizes = {"x": 2, "y": 2, "z": 2, "data": 2}
    plan = plan_of(GRID, MODEL, LORA, **sizes)
    over_z = [op for op in collectives(plan, plan.microstep) if op.axis == "z"]
    assert {op.kind for op in over_z} == {"all_gather"}
    usual = [
        number(op.nbytes)
        for op in collectives(plan_of(GRID, MODEL, ALL, **sizes), plan.microstep)
        if (op.axis, op.kind) == ("z", "all_gather")
    ]
    assert sum(number(op.nbytes) for op in over_z) == sum(usual)
    # Each rank has half the rows of A and half the columns of B.
    trained = LAYERS * OF_BLOCK / 2
    at_end = {
        op.axis: number(op.nbytes)
        for op in collectives(plan, plan.step_end)
        if op.kind == "all_reduce" and number(op.nbytes) > 4
    }
    assert at_end == {"z": 4 * trained, "data": 4 * trained}


def test_memory_of_a_grid_by_hand():
    x, y, z = 2, 2, 2
    terms = memory_terms(GRID, MODEL, LORA, x=x, y=y, z=z, data=2)
    matrices = WEIGHTS - (2 * LAYERS + 1) * HIDDEN
    trained = LAYERS * OF_BLOCK / 2
    norms = (2 * LAYERS + 1) * HIDDEN / x
    assert terms["weights"] == 2 * (matrices / (x * y * z) + norms + trained)
    assert terms["gradients"] == 6 * trained
    assert terms["optimizer_states"] == 12 * trained
    sharded = memory_terms(Axonn4D(sharded_optimizer=True), MODEL, LORA, x=x, y=y, z=z, data=2)
    assert sharded["optimizer_states"] == 12 * trained / 2


def test_stages_of_a_pipeline_train_the_adapters_of_their_layers():
    pipelined = Axonn4D(pipelined=True)
    whole = memory_terms(pipelined, MODEL, LORA, data=16)["optimizer_states"]
    stage = memory_terms(pipelined, MODEL, LORA, data=8, pipeline=2)["optimizer_states"]
    assert stage == whole / 2
