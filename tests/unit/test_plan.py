"""AxoNN's step plan: shapes, bytes, order of issue, and sums over all ranks."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from conftest import models, worlds
from hypothesis import given

from axonn_tune.spec.grid import CandidateTable, Grid
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Attention, Collective, Gemm
from axonn_tune.strategies import axonn4d

MODEL = Model("toy", n_layers=3, hidden_size=64, n_heads=4, vocab_size=256, seq_len=16)
GRID = Grid(2, 4, 2, 2)
JOB = Job(n_gpus=GRID.n_ranks, global_batch=16, seq_len=16)


def plan_of(recompute="none", job=JOB, model=MODEL, grid=GRID, micro_batch=2):
    table = CandidateTable.single(grid, micro_batch=micro_batch)
    return axonn4d.plan(model, job, recompute, table)


def operations(plan, phase=None):
    return [op for p in plan.phases for op in p.operations if phase in (None, p.name)]


def size(value):
    return float(np.ravel(value)[0])


def named(plan, name):
    return next(op for op in operations(plan) if op.name == name)


def test_shapes_of_a_normal_and_a_transposed_layer():
    """T = 2 x 16 tokens; qkv is 64 -> 192, proj 64 -> 64; X = 2, Y = 4."""
    plan = plan_of()
    shapes = {
        name: (*(size(getattr(named(plan, name), d)) for d in "mnk"), named(plan, name).mode)
        for name in (
            "forward.qkv.gemm",
            "backward.qkv.gemm_input",
            "backward.qkv.gemm_weight",
            "forward.down.gemm",
            "backward.down.gemm_input",
            "backward.down.gemm_weight",
            "forward.head.gemm",
        )
    }
    assert shapes == {
        "forward.qkv.gemm": (32, 192 / 4, 64 / 2, "NN"),
        "backward.qkv.gemm_input": (32, 64 / 2, 192 / 4, "NT"),
        "backward.qkv.gemm_weight": (64 / 2, 192 / 4, 32, "TN"),
        "forward.down.gemm": (32, 64 / 2, 256 / 4, "NN"),
        "backward.down.gemm_input": (32, 256 / 4, 64 / 2, "NT"),
        "backward.down.gemm_weight": (256 / 4, 64 / 2, 32, "TN"),
        "forward.head.gemm": (32, 256 / 4, 64 / 2, "NN"),
    }


def test_buffers_and_axes_are_the_designs_table():
    plan = plan_of()
    buffers = {
        op.name: (op.kind, op.axis, size(op.nbytes))
        for op in operations(plan)
        if isinstance(op, Collective)
    }
    block = 2 * 64 * 192 / 8  # the gathered qkv weight: bf16, over X and Y
    assert buffers["forward.qkv.all_gather"] == ("all_gather", "z", block)
    assert buffers["backward.qkv.all_gather"] == ("all_gather", "z", block)
    assert buffers["backward.qkv.reduce_scatter"] == ("reduce_scatter", "z", block)
    assert buffers["forward.qkv.all_reduce"] == ("all_reduce", "x", 2 * 32 * 192 / 4)
    assert buffers["backward.qkv.all_reduce"] == ("all_reduce", "y", 2 * 32 * 64 / 2)
    assert buffers["forward.down.all_reduce"] == ("all_reduce", "y", 2 * 32 * 64 / 2)
    assert buffers["backward.down.all_reduce"] == ("all_reduce", "x", 2 * 32 * 256 / 4)
    assert buffers["forward.embedding.all_reduce"] == ("all_reduce", "y", 2 * 32 * 64 / 2)
    assert buffers["forward.norm1.all_reduce"] == ("all_reduce", "x", 2 * 4 * 32)
    sharded, replicated = (size(v) for v in axonn4d.stored_parameters(MODEL, plan.candidates))
    assert buffers["gradient.all_reduce"] == ("all_reduce", "data", 4 * (sharded + replicated))


def test_heads_are_split_over_y():
    attention = named(plan_of(), "backward.attention")
    assert isinstance(attention, Attention) and attention.backward
    assert (size(attention.n_sequences), size(attention.n_heads), attention.head_dim) == (2, 1, 16)


def test_micro_steps_make_the_global_batch():
    assert size(plan_of().n_microsteps) == 16 / (2 * 2 * 2)


def issue_order(plan, phase, *parts):
    names = [op.name for op in operations(plan, phase)]
    return [name for name in names if name.endswith(parts)]


def waits(plan, name):
    return set(named(plan, name).waits_for) - {"compute"}


def with_overlap(**switches):
    off = {"oar": False, "ors": False, "oag": False}
    return plan_of(job=replace(JOB, overlap=Overlap(**{**off, **switches})))


def test_without_overlap_every_collective_is_awaited_at_once():
    for phase in with_overlap().microstep[:-1]:
        for here, following in pairwise(phase.operations):
            if isinstance(here, Collective):
                assert here.name in following.waits_for


def test_oar_moves_the_all_reduce_behind_the_weight_product():
    name = "backward.up.all_reduce"
    assert waits(with_overlap(), "backward.up.gemm_weight") == {name}
    on = with_overlap(oar=True)
    assert waits(on, "backward.up.gemm_weight") == set()
    # It is awaited before what needs its result.
    names = [op.name for op in operations(on, "backward")]
    after = names.index("backward.up.gemm_weight") + 1
    followers = [op for op in operations(on, "backward")[after:] if name in op.waits_for]
    assert followers[0].name == "backward.up.reduce_scatter"


def test_ors_waits_only_at_the_end_of_the_backward_pass():
    on = with_overlap(ors=True)
    waited = [n for op in operations(on) for n in op.waits_for if n.endswith("reduce_scatter")]
    assert waited == ["backward.embedding.reduce_scatter"]
    assert waits(on, "gradient.accumulate") == {"backward.embedding.reduce_scatter"}
    assert [p.name for p in on.microstep][-1] == "accumulate"


def test_oag_gathers_one_weight_ahead():
    on = with_overlap(oag=True)
    order = issue_order(on, "forward", ".all_gather", ".gemm")
    assert order == [
        "forward.proj.all_gather",
        "forward.qkv.gemm",
        "forward.up.all_gather",
        "forward.proj.gemm",
        "forward.down.all_gather",
        "forward.up.gemm",
        "forward.qkv.all_gather",
        "forward.down.gemm",
    ]
    awaited = [n for op in operations(on, "forward") for n in op.waits_for if "all_gather" in n]
    assert sorted(set(awaited)) == sorted(name for name in order if "gather" in name)
    assert issue_order(on, "forward_last", ".all_gather")[-1] == "forward.head.all_gather"
    assert issue_order(on, "backward_last", ".all_gather")[-1] == "backward.qkv.all_gather"


@pytest.mark.parametrize("oag", [True, False])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("keep", [True, False])
def test_how_often_a_weight_is_gathered(oag, recompute, keep):
    """Forward, backward, and once more in a recomputed forward; once if it is kept."""
    job = replace(JOB, overlap=Overlap(oag=oag), keep_gathered_weights=keep)
    plan = plan_of(recompute, job)
    gathers = {}
    for phase in plan.microstep:
        for op in phase.operations:
            if isinstance(op, Collective) and op.kind == "all_gather":
                weight = op.name.split(".")[1]
                gathers[weight] = gathers.get(weight, 0) + phase.repeats
    per_layer = 1 if keep else {"none": 2, "selective": 2, "full": 3}[recompute]
    assert gathers == {
        **dict.fromkeys(("qkv", "proj", "up", "down"), 3 * per_layer),
        "head": 1 if keep else 2,
        "embedding": 1,
    }


@given(worlds())
def test_every_gathered_weight_is_awaited_before_its_product(world):
    """Whatever the switches: play the host program and watch what has been awaited."""
    model, job, _, recompute, table = world
    plan = axonn4d.plan(model, job, recompute, table)
    awaited = set()
    for phase in plan.microstep:
        for _ in range(min(phase.repeats, 2)):
            for op in phase.operations:
                awaited |= set(op.waits_for)
                chain, _, rest = op.name.partition(".")
                if isinstance(op, Collective) and op.kind == "all_gather":
                    awaited.discard(op.name)
                elif isinstance(op, Gemm):
                    weight = rest.partition(".")[0]
                    use = "forward" if job.keep_gathered_weights else chain
                    assert f"{use}.{weight}.all_gather" in awaited


def flops_of_all_ranks(plan, kind):
    n_ranks = GRID.n_ranks if plan.candidates.placements.grid(0) == GRID else 1
    per_rank = sum(
        phase.repeats * size(op.flops)
        for phase in plan.microstep
        for op in phase.operations
        if isinstance(op, kind)
    )
    return per_rank * size(plan.n_microsteps) * n_ranks


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_flops_over_all_ranks_are_the_models(recompute):
    """Products exactly; attention once per X rank, since X replicates it; see the design."""
    plan = plan_of(recompute)
    tokens, heads = JOB.tokens, MODEL.n_heads * MODEL.head_dim
    passes = 4 if recompute == "full" else 3
    attention = passes * 4 * tokens * JOB.seq_len * heads * MODEL.n_layers
    products = MODEL.hardware_flops(tokens, JOB.seq_len, recompute) - attention
    assert flops_of_all_ranks(plan, Gemm) == pytest.approx(products, rel=1e-12)
    assert flops_of_all_ranks(plan, Attention) == pytest.approx(GRID.x * attention, rel=1e-12)


@given(worlds())
def test_products_of_random_models_add_up(world):
    model, job, _, recompute, table = world
    plan = axonn4d.plan(model, job, recompute, table)
    per_rank = np.zeros(len(table))
    for phase in plan.microstep:
        for op in phase.operations:
            if isinstance(op, Gemm):
                per_rank = per_rank + phase.repeats * op.flops
    heads = model.n_heads * model.head_dim
    passes = 4 if recompute == "full" else 3
    attention = passes * 4.0 * job.tokens * job.seq_len * heads * model.n_layers
    expected = model.hardware_flops(job.tokens, job.seq_len, recompute) - attention
    assert per_rank * plan.n_microsteps * job.n_gpus == pytest.approx(expected, rel=1e-12)


@given(models())
def test_stored_parameters_add_up_to_the_models(model):
    table = CandidateTable.single(Grid(2, 2, 1, 1))
    sharded, replicated = (size(v) for v in axonn4d.stored_parameters(model, table))
    n_embeddings = 1 if model.tied_embeddings else 2
    padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size * n_embeddings
    # Vectors are split over X or Y and replicated over the other: two ranks hold each.
    assert 4 * sharded + 2 * replicated == pytest.approx(model.parameters + padding, rel=1e-12)


def test_memory_by_hand():
    """Grid 2 x 4 x 2 x 2, bf16, T = 32 tokens, h = 64; bytes of one rank."""
    table = CandidateTable.single(GRID, micro_batch=2)
    terms = {k: size(v) for k, v in axonn4d.memory(MODEL, JOB, "none", table).items()}
    sharded, replicated = (size(v) for v in axonn4d.stored_parameters(MODEL, table))
    residual, qkv, up = 2 * 32 * 64 / 2, 2 * 32 * 192 / 4, 2 * 32 * 256 / 4
    attention_out = 2 * 32 * 64 / 4
    block = 4 * residual + qkv + attention_out + 2 * up
    assert terms["weights"] == 2 * (sharded + replicated)
    assert terms["gradients"] == 4 * (sharded + replicated)
    assert terms["optimizer_states"] == 12 * (sharded + replicated)
    assert terms["activations"] == 3 * block + residual
    assert terms["working_set"] == max(2 * up, 32 * 256 / 4 * (2 + 8))
    blocks = {"qkv": 64 * 192, "proj": 64 * 64, "up": 64 * 256, "down": 64 * 256}
    gathered = {name: 2 * kn / 8 for name, kn in blocks.items()}
    head = 2 * 64 * 256 / 8
    in_flight = max(gathered["up"] + gathered["down"], head + gathered["down"])
    assert terms["gathered_weights"] == in_flight + 2 * gathered["up"]


def test_recomputation_saves_activations_in_order():
    table = CandidateTable.single(GRID, micro_batch=2)
    held = [
        size(axonn4d.memory(MODEL, JOB, recompute, table)["activations"])
        for recompute in ("none", "selective", "full")
    ]
    assert held[0] > held[1] > held[2]


def test_unfused_attention_keeps_its_scores():
    table = CandidateTable.single(GRID, micro_batch=2)
    flash, unfused = (
        size(axonn4d.memory(MODEL, replace(JOB, attention=a), "none", table)["activations"])
        for a in ("flash", "unfused")
    )
    scores = 2 * 2 * 16 * 16 * 4 / 4  # bf16, sequences x s x s x heads over Y
    assert unfused - flash == 3 * 2 * scores
