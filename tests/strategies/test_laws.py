"""Laws of every strategy's plan: work is shared and not lost, nothing is left unawaited, and the
bytes of each kernel are those that a reader of the papers would count."""

import math
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from build import (
    can_run,
    collectives,
    group_size,
    memory_terms,
    number,
    operations,
    plan_of,
)
from worlds import BY_MATRIX, SMALL_BUCKETS, by_matrix

from axonn_tune.api.contenders import strategies_of
from axonn_tune.api.searching import build_search
from axonn_tune.io.presets import list_engines, load_engine, load_model
from axonn_tune.search.candidates import executions, legal_placements, with_micro_batches
from axonn_tune.spec.engine import IDEAL
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Attention, Collective, Gemm, MemoryBound
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.strategies.axonn.axonn4d import AXONN, Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.named import strategy_named
from axonn_tune.strategies.zero.zero import zero3, zero_topo, zeropp

DEEPSPEED = load_engine("deepspeed")
approx = partial(pytest.approx, rel=1e-9)

MODEL = Model("m", n_layers=8, hidden_size=256, n_heads=8, vocab_size=1024, seq_len=128)
LLAMA = replace(
    MODEL, gated_mlp=True, norm="rms", position="rotary", bias=False, qkv_bias=False,
    proj_bias=False, tied_embeddings=False, n_kv_heads=4,
)  # fmt: skip
JOB = Job(16, 32, 128)
PLAIN = Megatron3D(False, False, False, True)
SHARDED = Megatron3D(True, True, True, True)
PIPELINED = Axonn4D(pipelined=True)
LAYOUTS = [
    (AXONN, {"x": 2, "y": 2, "z": 2, "data": 2}),
    (PIPELINED, {"x": 2, "z": 2, "data": 2, "pipeline": 2}),
    (Axonn4D(False, True, True), {"x": 2, "y": 2, "z": 2, "data": 2}),
    (PLAIN, {"tensor": 2, "context": 2, "data": 4}),
    (replace(SHARDED, shards_gradients=True), {"tensor": 2, "context": 2, "data": 4}),
    (SHARDED, {"tensor": 2, "context": 2, "data": 2, "pipeline": 2}),
    (replace(SHARDED, overlaps_tensor=True), {"tensor": 4, "data": 4}),
    (replace(PLAIN, context_kind="all_gather"), {"tensor": 2, "context": 4, "data": 2}),
    (replace(SHARDED, context_kind="ulysses"), {"tensor": 2, "context": 2, "data": 4}),
    (zero3(), {"shard": 2, "replica": 8}),
    (zero3(), {"shard": 16}),
    (zero3(DEEPSPEED), {"shard": 16}),
    (zeropp(), {"secondary": 8, "across": 2}),
    (zeropp(False, False, False), {"secondary": 2, "across": 8}),
    (zero_topo(), {"weights": 2, "gradients": 4, "states": 2}),
]
SEARCH = build_search("llama3-8b", 16, "dgx-h100", global_batch=32, strategy="megatron")
OVERLAPS = [Overlap(), Overlap(False, False, False)]


# Stages share the work ---------------------------------------------------------------------------


def work(ops):
    """How often each product and attention runs, and their FLOPs."""
    kernels = [op for op in ops if isinstance(op, Gemm | Attention)]
    counts = Counter(op.name for op in kernels)
    return counts, sum(number(op.flops) for op in kernels)


@pytest.mark.parametrize("strategy", [PLAIN, SHARDED, PIPELINED])
@pytest.mark.parametrize(
    ("n_layers", "n_stages", "n_virtual"),
    [(2, 4, 1), (6, 4, 1), (8, 4, 1), (8, 2, 2), (8, 2, 4), (14, 4, 1), (14, 4, 2), (14, 2, 4)],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_stages_together_do_what_one_rank_would(strategy, n_layers, n_stages, n_virtual, recompute):
    """Two layers in four stages: those of embedding and head have none."""
    model = replace(MODEL, n_layers=n_layers)
    options = {"recompute": recompute, "data": 2}
    alone = plan_of(strategy, model, JOB, **options)
    split = plan_of(strategy, model, JOB, n_virtual=n_virtual, pipeline=n_stages, **options)
    stages = split.pipeline
    n_middle = n_stages * n_virtual - 2
    counts, flops = Counter(), 0.0
    for stage, times in ((stages.first, 1), (stages.middle, n_middle), (stages.last, 1)):
        of_stage, of_stage_flops = work(operations(*stage.passes))
        counts += Counter({name: times * count for name, count in of_stage.items()})
        flops += times * of_stage_flops
    expected, expected_flops = work(operations(alone.microstep))
    assert counts == expected
    assert flops == approx(expected_flops)


@pytest.mark.parametrize(("n_layers", "n_stages", "n_virtual"), [(8, 2, 1), (8, 2, 2), (14, 4, 2)])
def test_a_micro_step_of_a_pipeline_is_what_the_last_rank_does(n_layers, n_stages, n_virtual):
    model = replace(MODEL, n_layers=n_layers)
    plan = plan_of(PLAIN, model, JOB, n_virtual=n_virtual, pipeline=n_stages)
    middle, last = plan.pipeline.middle, plan.pipeline.last
    names = Counter(op.name for op in operations(*last.passes))
    for _ in range(n_virtual - 1):
        names += Counter(op.name for op in operations(*middle.passes))
    assert Counter(op.name for op in operations(plan.microstep)) == names


def test_where_layers_may_be_cut():
    """Evenly, or evenly with embedding and head as layers; virtual stages in whole rounds.

    An odd number of layers may leave less to the last stage.
    """
    for strategy in (PLAIN, PIPELINED):
        for n_layers in range(1, 17):
            model = replace(MODEL, n_layers=n_layers)
            for n_stages in (2, 3, 4):
                for n_virtual in (2, 3, 4):
                    for n_micro in (2, 3, 4, 6, 8):
                        chunks = n_stages * n_virtual
                        even = n_layers % chunks == 0 and n_layers >= chunks
                        counted = (n_layers + 2) % chunks == 0
                        rest = n_layers - math.ceil(n_layers / chunks) * (chunks - 1)
                        odd = n_layers % 2 == 1 and rest > 0
                        admitted = (even or counted or odd) and n_micro % n_stages == 0
                        job = Job(n_stages, n_micro, 128)
                        assert can_run(
                            strategy, model, job, n_virtual=n_virtual, pipeline=n_stages
                        ) == (admitted)
        assert can_run(strategy, MODEL, JOB, pipeline=8)
        assert not can_run(strategy, MODEL, JOB, n_virtual=2)


# Nothing is left unawaited -----------------------------------------------------------------------


@pytest.mark.parametrize("model", [MODEL, LLAMA])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize(("strategy", "sizes"), LAYOUTS)
def test_every_collective_of_a_micro_step_is_awaited_in_it(
    model, recompute, overlap, strategy, sizes
):
    job = replace(JOB, overlap=overlap)
    plan = plan_of(strategy, model, job, recompute=recompute, **sizes)
    under_way = []
    for op in operations(plan.microstep):
        for name in op.waits_for:
            # Collectives of one group run one after another.
            places = [i for i, other in enumerate(under_way) if other.name == name]
            if places:
                group, last = under_way[places[-1]].axis, places[-1]
                under_way = [
                    other for i, other in enumerate(under_way) if other.axis != group or i > last
                ]
        if isinstance(op, Collective):
            under_way.append(op)
    assert not [op.name for op in under_way]


# Kernels of the 4D grid and of Megatron-LM --------------------------------------------------


def bytes_of(ops):
    """Bytes of each memory-bound kernel by name."""
    return {op.name: number(op.nbytes) for op in ops if isinstance(op, MemoryBound)}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("strategy", "sizes", "x", "y"),
    [(AXONN, {"x": 2, "y": 4}, 2, 4), (PLAIN, {"tensor": 4}, 1, 4), (SHARDED, {"tensor": 4}, 4, 4)],
)
def test_dropout_draws_keeps_and_applies_a_mask_of_bytes(dtype, strategy, sizes, x, y):
    """Read two addends, write the sum; a mask of a byte for each element is written forward and
    read backward, where the gradient before the dropped addend is read and written too."""
    job = replace(JOB, dtype=dtype, attention="unfused", dropout=True)
    element, tokens = 4.0 if dtype == "fp32" else 2.0, 3 * 128
    stream = tokens * 256 / x
    scores = tokens * 128 * 8 / y
    kernels = bytes_of(operations(plan_of(strategy, MODEL, job, 3, **sizes).microstep))
    for name in ("residual1", "residual2"):
        assert kernels[f"forward.{name}"] == approx(stream * (3 * element + 1))
        assert kernels[f"backward.{name}"] == approx(stream * (5 * element + 1))
    for chain in ("forward", "backward"):
        assert kernels[f"{chain}.attention_dropout"] == approx(scores * (2 * element + 1))
    without = bytes_of(
        operations(plan_of(strategy, MODEL, replace(job, dropout=False), 3, **sizes).microstep)
    )
    assert without["forward.residual1"] == without["backward.residual2"] == 3 * element * stream
    assert "forward.attention_dropout" not in without
    fused = replace(job, attention="flash")
    ops = operations(plan_of(strategy, MODEL, fused, 3, **sizes).microstep)
    assert "forward.attention_dropout" not in bytes_of(ops)
    for job_of_case, drops in ((job, False), (fused, True), (replace(fused, dropout=False), False)):
        ops = operations(plan_of(strategy, MODEL, job_of_case, 3, **sizes).microstep)
        assert {op.dropout for op in ops if isinstance(op, Attention)} == {drops}


@pytest.mark.parametrize("model", [MODEL, LLAMA])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("n_stages", [1, 2])
def test_the_end_of_a_step_of_the_4d_grid_by_hand(model, dtype, sharded, n_stages):
    """Gradients in fp32 are summed over data, clipped, and update what the rank owns."""
    strategy = Axonn4D(pipelined=True, sharded_optimizer=sharded)
    job = replace(JOB, dtype=dtype, n_gpus=96 * n_stages, global_batch=24)
    plan = plan_of(strategy, model, job, x=2, y=4, z=4, data=3, pipeline=n_stages)
    h, n_layers, is_last = 256, 8 // n_stages, n_stages == 1
    qkv, up = (8 + 2 * model.n_kv_heads) * 32, 1024 * (2 if model.gated_mlp else 1)
    norm = h * (2 if model.norm == "layer" else 1)
    n_embeddings = 2 if is_last and not model.tied_embeddings else 1
    matrices = n_layers * h * (qkv + h + up + 1024) + n_embeddings * 1024 * h
    stream = n_layers * (2 * norm + (2 * h if model.bias else 0)) + (norm if is_last else 0)
    stream += 128 * h if model.position == "learned" else 0
    wide = n_layers * (qkv + up) if model.bias else 0
    vectors = stream / 2 + wide / 4
    stored = matrices / (2 * 4 * 4) + vectors
    owned = stored / (3 if sharded else 1)
    weight = 4.0 if dtype == "fp32" else 2.0
    master = dtype != "fp32"
    updated = 2 * 4.0 + 2 * (12.0 if master else 8.0) + weight * (1 if master else 2)
    assert bytes_of(operations(plan.step_end)) == approx(
        {
            "gradient.norm": 4.0 * owned,
            "gradient.clip": 2 * 4.0 * owned,
            "optimizer.step": owned * updated,
        }
    )
    kind = "reduce_scatter" if sharded else "all_reduce"
    wanted = {
        "gradient.vectors.all_reduce": ("all_reduce", "z", approx(4.0 * vectors)),
        f"gradient.{kind}": (kind, "data", approx(4.0 * stored)),
    }
    summed = ("x", "y", "z", "pipeline", "data") if sharded else ("x", "y", "z", "pipeline")
    for axis in summed:
        wanted[f"gradient.norm.all_reduce_{axis}"] = ("all_reduce", axis, 4.0)
    if sharded:
        wanted["weights.all_gather"] = ("all_gather", "data", approx(weight * stored))
    if model.tied_embeddings and not is_last:
        shared = ("send_recv", "pipeline", 4.0 * 1024 * h / (2 * 4 * 4))
        wanted["gradient.embedding.send_recv"] = shared
    sent = {
        op.name: (op.kind, op.axis, number(op.nbytes))
        for op in operations(plan.step_end)
        if isinstance(op, Collective)
    }
    assert sent == wanted
    # Each micro-step adds its gradients to the sums: read both, write one.
    phases = plan.microstep if is_last else plan.pipeline.first.backward
    added = bytes_of(operations(phases))
    assert added["gradient.accumulate"] == approx(stored * (weight + 2 * 4.0))
    if is_last and model.tied_embeddings:
        assert added["gradient.tied"] == approx(3 * weight * 1024 * h / (2 * 4 * 4))
    else:
        assert "gradient.tied" not in added


def stage_elements(model, tensor, n_layers, first, last):
    """Elements that a rank of Megatron-LM stores: in blocks, and outside of them."""
    h, d = model.hidden_size, model.head_dim
    qkv = (model.n_heads + 2 * model.n_kv_heads) * d
    up = model.ffn_hidden_size * (2 if model.gated_mlp else 1)
    norm = h * (2 if model.norm == "layer" else 1)
    matrices = h * (qkv + model.n_heads * d + up + model.ffn_hidden_size)
    block = matrices / tensor + 2 * norm
    if model.bias:
        block += (qkv + up) / tensor + 2 * h
    outside = 0.0
    if first:
        outside += 1024 * h / tensor + (128 * h if model.position == "learned" else 0)
    if last:
        outside += norm + (0 if first and model.tied_embeddings else 1024 * h / tensor)
    return n_layers * block, outside


@pytest.mark.parametrize("model", [MODEL, LLAMA])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("n_stages", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("fp32_gradients", [False, True])
def test_the_end_of_megatrons_step_by_hand(
    model, dtype, n_stages, sequence_parallel, distributed, overlapped, fp32_gradients
):
    """The first stage reduces what it has not reduced beside the last backward pass, clips, and
    updates what it owns."""
    options = {"fp32_gradients": fp32_gradients, "engine": SMALL_BUCKETS}
    strategy = Megatron3D(sequence_parallel, distributed, overlapped, **options)
    job = replace(JOB, dtype=dtype)
    plan = plan_of(strategy, model, job, tensor=2, context=2, data=4, pipeline=n_stages)
    blocks, outside = stage_elements(model, 2, 8 // n_stages, True, n_stages == 1)
    stored = blocks + outside
    weight = 4.0 if dtype == "fp32" else 2.0
    gradient = 4.0 if fp32_gradients else weight
    owned = stored / (8 if distributed else 1)
    left = outside if overlapped else stored
    master = dtype != "fp32"
    states = 12.0 if master else 8.0
    kernels = bytes_of(operations(plan.step_end))
    expected = {
        "gradient.norm": owned * gradient,
        "gradient.clip": 2 * owned * gradient,
        # Read gradients, read and write states, write weights; without a master copy read them
        # too; clear all gradients.
        "optimizer.step": owned * (gradient + 2 * states + weight * (1 if master else 2))
        + stored * gradient,
    }
    if distributed:
        expected["weights.copy"] = 2 * left * weight
    assert kernels == approx(expected)
    sent = {
        op.name: (op.kind, op.axis, number(op.nbytes))
        for op in operations(plan.step_end)
        if isinstance(op, Collective)
    }
    replicas = "context*data"
    kind = "reduce_scatter" if distributed else "all_reduce"
    wanted = {
        "gradient.reduce": (kind, replicas, approx(left * gradient)),
        "gradient.norm.all_reduce_tensor": ("all_reduce", "tensor", 4.0),
        "gradient.norm.all_reduce_pipeline": ("all_reduce", "pipeline", 4.0),
    }
    if distributed:
        wanted["weights.all_gather"] = ("all_gather", replicas, approx(left * weight))
        wanted["gradient.norm.all_reduce_context*data"] = ("all_reduce", replicas, 4.0)
    if model.tied_embeddings and n_stages > 1:
        shared = 1024 * 256 * gradient / 2
        wanted["gradient.embedding.send_recv"] = ("send_recv", "pipeline", shared)
    if sequence_parallel:
        final = 1 if n_stages == 1 else 0
        norms = (2 * (8 // n_stages) + final) * 256 * (2 if model.norm == "layer" else 1)
        # Biases after row-parallel products are added by every rank of the tensor group.
        norms += model.bias * 2 * (8 // n_stages) * 256
        wanted["gradient.norms.all_reduce"] = ("all_reduce", "tensor", norms * gradient)
    assert sent == wanted
    names = [op.name for op in operations(plan.step_end)]
    assert names.index("gradient.reduce") < names.index("gradient.norm")
    assert names.index("gradient.clip") < names.index("optimizer.step")


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("n_stages", [1, 2])
def test_blocks_are_reduced_and_gathered_beside_one_micro_step(distributed, n_stages):
    strategy = replace(SHARDED, distributed_optimizer=distributed, engine=SMALL_BUCKETS)
    plan = plan_of(strategy, MODEL, JOB, tensor=2, context=2, data=4, pipeline=n_stages)
    parts = [plan.sync_microstep]
    if plan.pipeline is not None:
        parts = plan.pipeline.sync.passes
    sync = Counter(op.name for op in operations(*parts))
    of_replicas = [
        op for op in operations(*parts) if isinstance(op, Collective) and "context*" in op.axis
    ]
    block, _ = stage_elements(MODEL, 2, 1, False, False)
    n_layers = 8 // n_stages
    assert sync["gradient.block.reduce"] == n_layers
    assert sync["weights.block.all_gather"] == (n_layers if distributed else 0)
    for op in of_replicas:
        is_gather = op.kind == "all_gather"
        assert number(op.nbytes) == approx(block * (2.0 if is_gather else 4.0))
        assert op.kind in ("all_gather", "reduce_scatter" if distributed else "all_reduce")
    usual = [plan.microstep]
    if plan.pipeline is not None:
        usual = plan.pipeline.first.passes
    rest = sync - Counter(op.name for op in operations(*usual))
    assert set(rest) <= {"gradient.block.reduce", "weights.block.all_gather"}


def of_program(**facts):
    """An ideal engine whose program has some facts of its own."""
    return replace(IDEAL, megatron=MegatronProgram(**facts))


@pytest.mark.parametrize("gathers", [False, True])
def test_gradients_travel_in_buckets_of_forty_million_elements(gathers):
    """Whole ones, the last one perhaps not full; Megatron-Core without overlap has a single one."""
    wide = Model("wide", 8, 2048, 16, 64_000, 128)
    strategy = Megatron3D(False, True, False, fp32_gradients=False)
    bucketed = replace(strategy, engine=of_program(buckets_without_overlap=True))
    name = "weights.all_gather" if gathers else "gradient.reduce"
    whole, op = (
        next(op for op in operations(plan_of(each, wide, JOB, data=16).step_end) if op.name == name)
        for each in (strategy, bucketed)
    )
    h = 2048
    elements = 8 * (12 * h * h + 13 * h) + 64_000 * h + 128 * h + 2 * h
    assert number(op.nbytes) == 2.0 * elements
    assert number(op.n_calls) == math.ceil(elements / 40e6) > 2
    assert (number(whole.nbytes), number(whole.n_calls)) == (number(op.nbytes), 1.0)


@pytest.mark.parametrize(("least", "mean"), [(1.5, 4.0), (4.5, 93 / 15), (100.0, 100.0)])
def test_a_bucket_ends_with_the_weight_that_fills_it(least, mean):
    """In widths squared, a layer's weights are 4, 4, 1 and 3, in the order of their gradients.

    Each of the first two fills a small bucket, and the others one together. Buckets of 4.5 at least
    are filled with 8, 8, 5 and then six times 7 and 5, which leaves 3 of all 96.
    """
    width = MODEL.hidden_size**2
    engine = of_program(
        buckets_without_overlap=True,
        bucket_elements=least * width,
        bucket_elements_per_replica=0.0,
        fills_buckets=True,
    )
    model = replace(MODEL, bias=False, qkv_bias=False, proj_bias=False)
    plan = plan_of(replace(PLAIN, engine=engine), model, JOB, data=16)
    (reduced,) = (op for op in operations(plan.step_end) if op.name == "gradient.reduce")
    assert number(reduced.n_calls) == math.ceil(number(reduced.nbytes) / 4.0 / (mean * width))


def test_autocast_casts_weights_and_gradients_in_each_microstep():
    """The weights to two bytes, their gradients to four; a sum of two is read and written."""
    engine = of_program(autocasts=True)
    strategy = replace(PLAIN, fused_accumulation=False, engine=engine)
    kernels = bytes_of(operations(plan_of(strategy, MODEL, JOB, data=16).microstep))
    stored = sum(stage_elements(MODEL, 1, MODEL.n_layers, True, True))
    assert kernels["weights.autocast"] == approx(stored * (4.0 + 2.0))
    assert kernels["gradient.autocast"] == approx(stored * (2.0 + 4.0))
    assert kernels["gradient.accumulate"] == approx(stored * (4.0 + 4.0 + 4.0))


@pytest.mark.parametrize("data", [1, 4])
def test_gradients_are_looked_through_and_divided_before_they_are_reduced(data):
    """Only such programs do so, and they divide gradients where there are replicas."""
    engine = of_program(checks_gradients=True, scales_gradients=True)
    usual, prepared = (
        list(operations(plan_of(strategy, MODEL, JOB, tensor=4, data=data).step_end))
        for strategy in (PLAIN, replace(PLAIN, engine=engine))
    )
    (reduced,) = (number(op.nbytes) for op in usual if op.name == "gradient.reduce")
    kernels = bytes_of(prepared)
    assert kernels.pop("gradient.reduce.check") == approx(reduced)
    assert kernels.pop("gradient.reduce.scale") == approx(2.0 * reduced * (data > 1))
    assert kernels == bytes_of(usual)


@pytest.mark.parametrize("n_virtual", [1, 2])
def test_unfused_accumulation_reads_both_gradients_and_writes_the_sum(n_virtual):
    strategy = replace(PLAIN, fused_accumulation=False)
    options = {"n_virtual": n_virtual, "tensor": 2, "data": 4, "pipeline": 2}
    plan = plan_of(strategy, MODEL, JOB, **options)
    blocks, outside = stage_elements(MODEL, 2, 4, True, False)
    kernels = bytes_of(operations(plan.pipeline.first.backward))
    # A pass is of one of the virtual stages, among which the stage's parameters are shared.
    expected = (blocks + outside) * (2.0 + 4.0 + 4.0) / n_virtual
    assert kernels["gradient.accumulate"] == approx(expected)


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_no_product_adds_the_gradient_of_the_embedding(position):
    """So a kernel does, on the stage that has it (DistributedDataParallel of Megatron-Core)."""
    model = replace(MODEL, position=position)
    plan = plan_of(PLAIN, model, JOB, tensor=2, data=4, pipeline=2)
    rows = model.head.parameters / 2 + model.position_parameters
    of_first, of_last = (
        bytes_of(operations(stage.backward)) for stage in (plan.pipeline.first, plan.pipeline.last)
    )
    assert of_first["gradient.accumulate"] == approx(rows * (2.0 + 4.0 + 4.0))
    assert "gradient.accumulate" not in of_last


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_without_sequence_parallelism_a_stage_gathers_what_it_was_sent(sequence_parallel):
    """SC21, section 4.1: each rank of the tensor group sends its part of the stream."""
    strategy = replace(PLAIN, sequence_parallel=sequence_parallel)
    plan = plan_of(strategy, MODEL, JOB, 3, tensor=4, data=2, pipeline=2)
    stream = 3 * 128 * 256 * 2.0
    assert number(plan.pipeline.transfer.nbytes) == stream / 4
    for phases, chain in (
        (plan.pipeline.last.forward, "forward"),
        (plan.pipeline.first.backward, "backward"),
    ):
        ops = {op.name: op for op in operations(phases)}
        assert (f"{chain}.pipeline.all_gather" in ops) != sequence_parallel
        if not sequence_parallel:
            gather = ops[f"{chain}.pipeline.all_gather"]
            assert (gather.axis, number(gather.nbytes)) == ("tensor", stream)
            copy = ops[f"{chain}.pipeline.copy"]
            assert number(copy.nbytes) == 2 * stream
            assert gather.name in copy.waits_for


# The ZeRO family ---------------------------------------------------------------------------------


def zero_elements(model):
    """Elements of one block, and of all that lies outside of blocks."""
    block, _ = stage_elements(model, 1, 1, False, False)
    _, root = stage_elements(model, 1, 0, True, True)
    return block, root


# A group of 2048 numbers is sent with its scale, one fp16 number.
INT8_BYTES = (2048 * 1 + 2) / 2048
INT4_BYTES = (2048 / 2 + 2) / 2048


@pytest.mark.parametrize("model", [MODEL, LLAMA])
def test_deepspeed_gathers_every_matrix_of_a_block_alone(model):
    """Biases and norms have less than 100,000 elements, so that every rank keeps them whole."""
    for engine, expected in ((BY_MATRIX, 4), (IDEAL, 1)):
        plan = plan_of(zero3(engine), model, JOB, shard=16)
        for op in operations(plan.microstep):
            if isinstance(op, Collective):
                is_block = ".block." in op.name
                assert number(op.n_calls) == (expected if is_block else 1), op.name


def moved_by_zero(plan, kind, *names):
    """Calls and bytes of the collectives of a kind whose names begin so, in a whole plan."""
    found = [
        op
        for op in operations(plan.microstep, plan.step_end)
        if isinstance(op, Collective) and op.kind == kind and op.name.startswith(names)
    ]
    return sum(number(op.n_calls) for op in found), sum(number(op.nbytes) for op in found)


@pytest.mark.parametrize(
    ("model", "blocks_in_bucket", "n_per_block"),
    # In a tenth of a block fit proj and vectors only: down, up and qkv are alone, and between them
    # are vectors, with proj in one place; without biases there are none between down and up.
    [(MODEL, 0.1, 6), (LLAMA, 0.1, 5), (MODEL, 5.0, 1 / 5), (LLAMA, 5.0, 1 / 5)],
)
def test_buckets_share_reductions_among_units_and_leave_their_bytes(
    model, blocks_in_bucket, n_per_block
):
    block, root = zero_elements(model)
    strategy = zero3(by_matrix(bucket_elements=blocks_in_bucket * block))
    alone, shared = (plan_of(each, model, JOB, shard=16) for each in (zero3(BY_MATRIX), strategy))
    of_alone, of_shared = (moved_by_zero(plan, "reduce_scatter", "") for plan in (alone, shared))
    assert of_shared[1] == of_alone[1]
    of_root = min(1, root / block / blocks_in_bucket)
    wanted = model.n_layers * n_per_block + of_root
    # The last bucket of the blocks is a share of a reduction, and others are not full.
    assert wanted - 1 < of_shared[0] < wanted + 1


@pytest.mark.parametrize(
    ("prefetched", "n_per_block"),
    # In units of h^2 a block has matrices of 3, 1, 4 and 4.
    [(0, 4), (3, 3), (4.5, 2), (8, 1.5), (12, 1), (1e6, 1 / 12)],
)
def test_matrices_join_a_gather_that_has_too_few_elements(prefetched, n_per_block):
    """Gathers need not end with a block, and their bytes and the reductions stay what they are.

    A rank has room for all matrices. The last gather may bring one for the next pass, too, and then
    counts in part.
    """
    model = replace(MODEL, n_layers=12)
    elements = prefetched * model.hidden_size**2
    facts = {"prefetch_elements": elements, "live_elements": 1e12}
    strategies = zero3(BY_MATRIX), zero3(by_matrix(**facts))
    alone, together = (plan_of(each, model, JOB, shard=16) for each in strategies)
    for kind in ("all_gather", "reduce_scatter"):
        moved = [moved_by_zero(plan, kind, "forward.block", "grad") for plan in (alone, together)]
        assert moved[1][1] == moved[0][1]
        if kind == "all_gather":
            assert moved[1][0] == pytest.approx(12 * n_per_block - 0.25, abs=0.26)
        else:
            assert moved[1][0] == moved[0][0]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_last_blocks_stay_gathered_where_they_fit_next_to_the_head(recompute):
    block, _ = zero_elements(MODEL)
    for kept in (0, 1, 2.5, MODEL.n_layers, 2 * MODEL.n_layers):
        live_elements = MODEL.head.parameters + kept * block
        strategy = zero3(by_matrix(live_elements=live_elements))
        plan = plan_of(strategy, MODEL, JOB, 1, recompute, shard=16)
        forward = moved_by_zero(plan, "all_gather", "forward.block")
        again = moved_by_zero(plan, "all_gather", "recompute.block", "backward.block")
        share = max(0, 1 - kept / MODEL.n_layers)
        assert again == pytest.approx([share * each for each in forward])


@pytest.mark.parametrize("model", [MODEL, LLAMA])
def test_vectors_that_are_kept_whole_are_gathered_once_a_step_each_alone(model):
    plans = [
        plan_of(strategy, model, JOB, shard=16)
        for strategy in (zero3(BY_MATRIX), zero3(by_matrix(keeps_vectors=True)))
    ]
    (_, everything), (_, matrices) = (moved_by_zero(p, "all_gather", "forward") for p in plans)
    n_calls, vectors = moved_by_zero(plans[1], "all_gather", "weights.vectors")
    assert matrices + vectors == everything and vectors > 0
    per_norm = 2 if model.norm == "layer" else 1
    per_block = 2 * per_norm + sum(linear.bias for linear in model.block_linears)
    assert n_calls == model.n_layers * per_block + per_norm


def test_deepspeed_holds_gathered_what_it_may():
    """The shared embedding is held all the time, and so is half its gradient in the end."""
    block, largest = MODEL.block_matmul_parameters, 4 * 256**2
    ends = (1024 + 128) * 256

    def held(live_elements, bucket_elements=1.0, shard=16):
        engine = by_matrix(
            live_elements=live_elements,
            prefetch_elements=1.0,
            bucket_elements=bucket_elements,
            keeps_vectors=True,
        )
        terms = memory_terms(zero3(engine), MODEL, JOB, 1, "full", shard=shard, replica=16 // shard)
        return terms["gathered_weights"] / JOB.element_bytes

    matrix_alone = ends + largest + 1.0
    assert held(1.0) == ends + largest + matrix_alone
    assert held(1.0, shard=1) == matrix_alone
    for n_blocks in (1, 2, 3):
        limit = ends + n_blocks * block
        assert limit + ends < held(limit) <= limit + largest + matrix_alone
    everything = MODEL.n_layers * block + ends
    assert held(1e15) == everything + matrix_alone
    # All gradients of blocks are copied once more when they leave the bucket.
    assert held(1.0, 1e9) == 1e9 + 2 * (ends + largest)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shard", [1, 2, 4])
def test_zero3_copies_what_it_gathers_and_packs_what_it_reduces(dtype, shard):
    """FSDP copies gathered weights to their tensors, and gradients into one buffer."""
    job = replace(JOB, dtype=dtype)
    element = 4.0 if dtype == "fp32" else 2.0
    plan = plan_of(zero3(), MODEL, job, shard=shard, replica=16 // shard)
    kernels = bytes_of(operations(plan.microstep))
    block, root = zero_elements(MODEL)
    is_split = shard > 1
    for unit, elements in (("block", block), ("root", root)):
        assert kernels[f"forward.{unit}.copy"] == is_split * 2 * element * elements
        assert kernels[f"gradient.{unit}.shard.pack"] == is_split * 2 * element * elements
        # Add the shard's gradients to the sums: read both, write one.
        assert kernels[f"gradient.{unit}.accumulate"] == 3 * element * elements / shard
    assert kernels["backward.block.copy"] == is_split * 2 * element * block


@pytest.mark.parametrize("shard", [1, 2, 4])
def test_fsdp2_casts_a_reduced_shard_to_the_type_of_its_weights(shard):
    """It reads a gradient in bf16 and writes it in fp32; a rank alone has reduced nothing."""
    strategy = zero3(load_engine("fsdp2"))
    plan = plan_of(strategy, MODEL, replace(JOB, n_gpus=shard, global_batch=shard), shard=shard)
    kernels = bytes_of(operations(plan.sync_microstep))
    elements, _ = zero_elements(MODEL)
    assert kernels["gradient.block.accumulate"] == (shard > 1) * (2 + 4) * elements / shard


def test_zeropp_quantises_its_shard_and_restores_the_whole():
    plan = plan_of(zeropp(), MODEL, JOB, secondary=8, across=2)
    kernels, sync = (bytes_of(operations(p)) for p in (plan.microstep, plan.sync_microstep))
    sent = {
        op.name: (op.kind, op.axis, number(op.nbytes))
        for op in operations(plan.sync_microstep)
        if isinstance(op, Collective)
    }
    for unit, elements in zip(("block", "root"), zero_elements(MODEL), strict=True):
        # Before the second copy exists: each rank quantises a sixteenth, then unpacks all.
        assert sync[f"forward.{unit}.quantise"] == elements * (2 + INT8_BYTES) / 16
        assert sync[f"forward.{unit}.dequantise"] == elements * (INT8_BYTES + 2)
        gathered = ("all_gather", "secondary*across", elements * INT8_BYTES)
        assert sent[f"forward.{unit}.all_gather"] == gathered
        # From the second copy the weights come as they are.
        assert f"forward.{unit}.quantise" not in kernels
        assert kernels[f"forward.{unit}.copy"] == 2 * 2.0 * elements
        # Gradients: INT4 inside the node, then an eighth of them across.
        for group, left, size in (("secondary", elements, 8), ("across", elements / 8, 2)):
            name = f"gradient.{unit}.{group}"
            assert kernels[f"{name}.pack"] == approx(left * (2 + INT4_BYTES))
            unpacked = left * INT4_BYTES + 2 * left / size
            assert kernels[f"{name}.dequantise"] == approx(unpacked)
            exchanged = ("all_to_all", group, approx(left * INT4_BYTES))
            assert sent[f"{name}.reduce"] == exchanged
        assert kernels[f"gradient.{unit}.accumulate"] == approx(3 * 2.0 * elements / 16)


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_ranks_quantise_their_share_of_what_they_gather_if_there_are_two(n_ranks):
    plan = plan_of(zeropp(), MODEL, replace(JOB, n_gpus=n_ranks), across=n_ranks)
    sync = bytes_of(operations(plan.sync_microstep))
    elements, _ = zero_elements(MODEL)
    expected = (n_ranks > 1) * elements * (2 + INT8_BYTES) / n_ranks
    assert sync["forward.block.quantise"] == approx(expected)


@pytest.mark.parametrize(("secondary", "across"), [(1, 16), (16, 1), (2, 8), (8, 2)])
def test_a_group_of_one_rank_packs_nothing(secondary, across):
    plan = plan_of(zeropp(), MODEL, JOB, secondary=secondary, across=across)
    kernels = bytes_of(operations(plan.microstep))
    for group, size in (("secondary", secondary), ("across", across)):
        assert (kernels[f"gradient.block.{group}.pack"] > 0) == (size > 1)
        # Inside the only node gradients travel as they are, and none are unpacked.
        is_quantised = size > 1 and across > 1
        assert (kernels[f"gradient.block.{group}.dequantise"] > 0) == is_quantised


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("strategy", "sizes", "n_owners"),
    [
        (zero3(), {"shard": 4, "replica": 4}, 4),
        (zeropp(), {"secondary": 8, "across": 2}, 16),
        (zero_topo(), {"weights": 2, "gradients": 4, "states": 2}, 16),
    ],
)
def test_the_end_of_a_sharded_step_by_hand(dtype, strategy, sizes, n_owners):
    job = replace(JOB, dtype=dtype)
    plan = plan_of(strategy, MODEL, job, **sizes)
    element, master = (4.0, False) if dtype == "fp32" else (2.0, True)
    block, root = zero_elements(MODEL)
    owned = (8 * block + root) / n_owners
    states = 12.0 if master else 8.0
    updated = 2 * element + 2 * states + element * (1 if master else 2)
    assert bytes_of(operations(plan.step_end)) == approx(
        {
            "gradient.norm": owned * element,
            "gradient.clip": 2 * owned * element,
            # Read and clear the gradient, read and write the states, write the weight.
            "optimizer.step": owned * updated,
        }
    )
    sent = {
        op.name: (op.kind, group_size(plan, op.axis), number(op.nbytes))
        for op in operations(plan.step_end)
        if isinstance(op, Collective)
    }
    wanted = {"gradient.norm.all_reduce": ("all_reduce", n_owners, 4.0)}
    if "weights" in sizes:
        whole = 8 * block + root
        of_states = approx(whole * element / 8)
        of_weights = approx(whole * element / 2)
        wanted["gradient.states.reduce_scatter"] = ("reduce_scatter", 2, of_states)
        wanted["weights.all_gather"] = ("all_gather", 8, of_weights)
    assert sent == wanted


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("strategy", [zero3(), zero3(BY_MATRIX), zeropp(), zeropp(secondary=False)])
def test_how_often_a_block_is_gathered_and_reduced(recompute, overlap, strategy):
    """Once forward, once backward (what full recomputation gathers is still there), once
    reduced over each group; embedding and head once."""
    names = strategy.axes.names
    sizes = dict(zip(names, (8, 2), strict=True))
    plan = plan_of(strategy, MODEL, replace(JOB, overlap=overlap), recompute=recompute, **sizes)
    calls = Counter()
    for op in collectives(plan, plan.microstep):
        calls[op.name.split(".")[0], op.name.split(".")[1], op.kind == "all_gather"] += 1
    again = "recompute" if recompute == "full" else "backward"
    reductions = 2 if strategy.name == "zeropp" else 1
    assert calls == {
        ("forward", "root", True): 1,
        ("forward", "block", True): 8,
        (again, "block", True): 8,
        ("gradient", "block", False): 8 * reductions,
        ("gradient", "root", False): reductions,
    }


@pytest.mark.parametrize(("model", "kernel"), [(MODEL, "gelu"), (LLAMA, "swiglu")])
@pytest.mark.parametrize(("strategy", "sizes"), LAYOUTS[:4])
def test_the_activation_is_the_models(strategy, sizes, model, kernel):
    plan = plan_of(strategy, model, JOB, **sizes)
    kernels = {
        op.kernel
        for op in operations(plan.microstep)
        if isinstance(op, MemoryBound) and "activation" in op.name
    }
    assert kernels == {kernel, f"{kernel}_backward"}


def test_a_weight_gradient_waits_for_the_tokens_that_it_needs():
    plan = plan_of(SHARDED, MODEL, JOB, tensor=2, data=8)
    waits = {op.name: op.waits_for for op in operations(plan.microstep)}
    for layer in ("qkv", "up"):
        needed = f"backward.{layer}.all_gather"
        assert needed in waits and needed in waits[f"backward.{layer}.gemm_weight"]
    for layer in ("proj", "down"):
        assert waits[f"backward.{layer}.gemm_weight"] == ()


@pytest.mark.parametrize("strategy", [PLAIN, SHARDED])
def test_only_an_untied_embedding_clears_its_gradient(strategy):
    """A tied one adds to the gradient of the head, which is there already."""

    def scattered_bytes(tied):
        model = replace(MODEL, tied_embeddings=tied)
        plan = plan_of(strategy, model, JOB, tensor=2, data=8)
        return sum(
            number(op.nbytes) for op in operations(plan.microstep) if "scatter_add" in op.name
        )

    bf16_bytes_of_a_half = 2 * MODEL.vocab_size * MODEL.hidden_size / 2
    assert scattered_bytes(False) - scattered_bytes(True) == approx(bf16_bytes_of_a_half)


@pytest.mark.parametrize(("strategy", "sizes"), LAYOUTS)
def test_a_collective_is_of_the_kind_that_its_name_says(strategy, sizes):
    plan = plan_of(strategy, MODEL, JOB, **sizes)
    said = [
        (op.name, op.kind, op.name.rsplit(".", 1)[-1])
        for op in operations(plan.microstep)
        if isinstance(op, Collective)
    ]
    kinds = {"all_gather", "all_reduce", "reduce_scatter", "all_to_all", "send_recv"}
    assert [name for name, kind, suffix in said if suffix in kinds and suffix != kind] == []
    assert any(suffix in kinds for _, _, suffix in said)


# One price for one name --------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_engines())
@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b"])
def test_operations_of_one_name_have_the_same_sizes_in_the_whole_plan(name, model):
    """Prices are kept by the name of an operation, and the group of a collective."""
    engine = load_engine(name)
    model = replace(load_model(model), n_layers=4)
    names = strategies_of(model, engine.strategies)
    if not model.is_dense and not (engine.zero.is_fsdp2 or "megatron" in names):
        pytest.skip("the engine does not spread experts")
    for strategy_name in names:
        strategy = strategy_named(strategy_name, engine=engine, has_experts=not model.is_dense)
        search = replace(SEARCH, scenario=replace(SEARCH.scenario, model=model, strategy=strategy))
        table, _ = with_micro_batches(search, legal_placements(search)[0])
        for each in executions(search, table):
            plan = search.scenario.plan(each)
            sizes = {}
            for part in plan.parts:
                for operation in operations(part):
                    key = operation.name, getattr(operation, "axis", "")
                    of_one = sizes.setdefault(key, operation)
                    for field, size in vars(operation).items():
                        if field != "waits_for":
                            assert np.array_equal(size, getattr(of_one, field)), (key, field)
