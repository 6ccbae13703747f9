"""FSDP with experts that are spread over ranks, against lists and memory written out by hand."""

from dataclasses import replace

import numpy as np
import pytest
from build import collectives, group_size, memory_terms, number, operations, plan_of, table_of
from worlds import llama, machine_of

from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine
from axonn_tune.spec.blocks import Experts, LatentAttention
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.groups import AxisGroups
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.plan import Attention, Gemm, GroupedGemm, MemoryBound
from axonn_tune.spec.programs import ZeroProgram
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict
from axonn_tune.strategies.named import strategy_named
from axonn_tune.strategies.zero.zero import zero3

LAYERS, HIDDEN, SEQ, VOCAB, N_EXPERTS, TOP_K, INNER = 4, 256, 128, 1024, 8, 2, 128
MODEL = llama(
    n_layers=LAYERS,
    hidden_size=HIDDEN,
    n_heads=8,
    n_kv_heads=4,
    ffn_hidden_size=512,
    vocab_size=VOCAB,
    seq_len=SEQ,
    experts=Experts(N_EXPERTS, TOP_K, INNER),
)
LATENT = LatentAttention(kv_rank=64, q_rank=96, content_dim=32, position_dim=16, value_dim=32)
MODELS = {
    "mixture": MODEL,
    "shared": replace(MODEL, experts=replace(MODEL.experts, shared_hidden_size=64)),
    "one dense layer": replace(MODEL, experts=replace(MODEL.experts, first_layer=1)),
    "latent attention": replace(MODEL, n_kv_heads=8, latent_attention=LATENT),
}
ROUTED = N_EXPERTS * 3 * HIDDEN * INNER
OTHERS = HIDDEN * (2 * HIDDEN + HIDDEN + N_EXPERTS + 2)
ROOT = 2 * VOCAB * HIDDEN + HIDDEN
JOB = Job(16, 32, SEQ)
ENGINE = Engine(zero=ZeroProgram(is_fsdp2=True))
TITAN = Engine(zero=ZeroProgram(is_fsdp2=True, splits_layers=True, recomputes_products=True))
SPREAD, SPLIT = zero3(ENGINE, has_experts=True), zero3(TITAN, has_experts=True)
LAYOUTS = [
    {"shard": 16},
    {"shard": 16, "expert": 4},
    {"shard": 8, "replica": 2, "expert": 8},
]


def step(strategy, model=MODEL, job=JOB, **sizes):
    layout = Layout({axis: sizes.get(axis, 1) for axis in strategy.axes.sized})
    configuration = Configuration(layout, micro_batch=1, recompute="none")
    return predict(Scenario(model, job, machine_of(), strategy), configuration)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_a_rank_does_the_products_of_its_tokens(model, sizes):
    ops = operations(plan_of(SPREAD, model, JOB, **sizes).microstep)
    done = sum(number(op.flops) for op in ops if isinstance(op, Gemm | Attention | GroupedGemm))
    assert done == pytest.approx(model.model_flops(SEQ, SEQ), rel=1e-9)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("overlap", [Overlap(), Overlap(False, False, False)])
@pytest.mark.parametrize("replica", [1, 2])
def test_experts_over_one_rank_are_as_if_there_were_no_such_axis(model, overlap, replica):
    job = replace(JOB, overlap=overlap)
    sizes = {"shard": 16 // replica, "replica": replica}
    whole = step(zero3(ENGINE), model, job, **sizes)
    spread = step(SPREAD, model, job, **sizes)
    assert spread.step_seconds == pytest.approx(whole.step_seconds, rel=1e-12)
    assert spread.memory_bytes == pytest.approx(whole.memory_bytes, rel=1e-12)


def bytes_over(axis, kind, **sizes):
    plan = plan_of(SPREAD, MODEL, JOB, **sizes)
    found = collectives(plan, plan.microstep)
    return sorted(number(op.nbytes) for op in found if (op.axis, op.kind) == (axis, kind))


@pytest.mark.parametrize("expert", [2, 4, 8])
def test_experts_are_gathered_and_reduced_over_the_ranks_that_hold_the_same_ones(expert):
    sizes = {"shard": 16, "expert": expert}
    local = 2 * ROUTED / expert
    assert bytes_over("expert_replicas", "all_gather", **sizes) == [local] * 2 * LAYERS
    assert bytes_over("expert_replicas", "reduce_scatter", **sizes) == [local] * LAYERS
    dense = sorted([2 * OTHERS] * 2 * LAYERS + [2 * ROOT])
    assert bytes_over("shard", "all_gather", **sizes) == dense
    copies = 2 * SEQ * TOP_K * HIDDEN
    counts = 8 * N_EXPERTS
    sent = [counts, *[copies] * 4] * LAYERS
    assert sorted(bytes_over("expert", "all_to_all", **sizes)) == sorted(sent)


def test_replicas_sum_the_shards_of_experts_once_in_a_step():
    sizes = {"shard": 8, "replica": 2, "expert": 4}
    plan = plan_of(SPREAD, MODEL, JOB, **sizes)
    sums = {
        op.name: number(op.nbytes)
        for op in collectives(plan, plan.sync_microstep)
        if op.axis == "replica"
    }
    assert sums["gradient.experts.all_reduce"] == 2 * ROUTED / 8
    assert sums["gradient.block.all_reduce"] == 2 * OTHERS / 8
    assert bytes_over("replica", "all_reduce", **sizes) == []


def test_ranks_of_a_group_of_experts_are_neighbours():
    table = table_of(SPREAD, shard=8, replica=2, expert=4)
    groups = AxisGroups.of(table.placements, "expert")
    assert list(groups.ranks(0)) == [0, 1, 2, 3] and len(groups) == 4
    assert list(AxisGroups.of(table.placements, "expert_replicas").ranks(0)) == [0, 4]
    split = table_of(SPLIT, tensor=2, shard=8, expert=4)
    assert list(AxisGroups.of(split.placements, "expert_replicas").ranks(0)) == [0, 4, 8, 12]


@pytest.mark.parametrize("expert", [1, 2, 4, 8])
def test_states_are_shared_by_all_ranks_however_experts_are_spread(expert):
    """What is gathered shrinks: the experts of a rank, and no longer all of them."""
    terms = memory_terms(SPREAD, MODEL, JOB, shard=16, expert=expert)
    weights = LAYERS * (ROUTED + OTHERS) + ROOT
    assert terms["weights"] == 4 * weights / 16
    assert terms["optimizer_states"] == 8 * weights / 16
    whole = OTHERS + ROUTED / expert
    assert 2 * (ROOT + whole) <= terms["gathered_weights"] <= 2 * (3 * ROOT + 4 * whole)


def test_saved_activations_by_hand():
    """A block saves norms, q, k, v, attention, the experts' inputs and features, and scores."""
    terms = memory_terms(SPREAD, MODEL, JOB, shard=16, expert=8)
    widths = 2 * 2 * HIDDEN + 2 * HIDDEN + HIDDEN + TOP_K * (HIDDEN + 3 * INNER)
    saved = 2 * SEQ * widths + 4 * SEQ * N_EXPERTS
    n_saved = (terms["activations"] - 2 * SEQ * HIDDEN) / saved
    assert n_saved == pytest.approx(round(n_saved)) and 1 <= n_saved <= LAYERS


def test_busier_experts_take_longer_where_they_are_spread():
    busy = replace(JOB, expert_imbalance=2.0)
    for sizes in LAYOUTS:
        longer = step(SPREAD, job=busy, **sizes).step_seconds
        usual = step(SPREAD, **sizes).step_seconds
        assert (longer > usual) == (sizes.get("expert", 1) > 1)


def test_gathered_experts_are_cast_in_both_passes():
    job = replace(JOB, precision="fp8-current")
    ops = operations(plan_of(SPREAD, MODEL, job, shard=16, expert=4).microstep)
    casts = [
        op for op in ops if isinstance(op, MemoryBound) and "experts_up.cast_weight" in op.name
    ]
    assert len(casts) == 2 * LAYERS
    assert {number(op.nbytes) for op in casts} == {(2 * 2 + 1) * ROUTED * 2 / 3 / 4}


def test_experts_are_spread_over_whole_tensor_groups():
    sizes = [[2, 2], [8, 8], [1, 1], [2, 1]]
    placements = table_of(SPLIT, tensor=2, shard=8).placements
    placements = replace(placements, sizes=np.array(sizes), order=np.zeros(2, np.int64))
    broken = SPLIT.rejections(MODEL, JOB, placements)["expert not divisible by tensor"]
    assert broken.tolist() == [False, True]
    plan = plan_of(SPLIT, MODEL, JOB, tensor=2, shard=8, expert=4)
    assert group_size(plan, "expert_replicas") == 4
    sent = {
        op.name.rpartition(".")[2]: number(op.nbytes)
        for op in collectives(plan, plan.microstep)
        if op.kind == "all_to_all"
    }
    copies = 2 * SEQ / 2 * TOP_K * HIDDEN
    assert sent == {"dispatch": copies, "combine": copies, "counts": 8 * N_EXPERTS}


def test_recomputation_of_every_second_product_is_not_tried_with_experts():
    selective = table_of(SPLIT, recompute="selective", shard=16)
    assert not SPLIT.admits(MODEL, JOB, selective).any()
    assert SPLIT.admits(replace(MODEL, experts=None), JOB, selective).all()
    assert SPLIT.admits(MODEL, JOB, table_of(SPLIT, recompute="full", shard=16)).all()


def test_engines_without_fsdp2_spread_no_experts():
    with pytest.raises(InputError, match="engine deepspeed does not spread experts"):
        strategy_named("zero3", engine=load_engine("deepspeed"), has_experts=True)


# NeMo AutoModel ------------------------------------------------------------------------------


def with_facts(engine=None, **facts):
    """FSDP2 with experts and facts of how the engine communicates."""
    program = ZeroProgram(is_fsdp2=True, **facts)
    return zero3(replace(engine or Engine(), zero=program), has_experts=True)


def of_kinds(plan, part):
    """Number of gathers and of reductions over shards in a micro-step."""
    found = [op.kind for op in collectives(plan, part) if op.axis == "shard"]
    return found.count("all_gather"), found.count("reduce_scatter")


def test_blocks_that_stay_gathered_are_gathered_once_in_a_micro_step():
    plan = plan_of(with_facts(keeps_mixtures=True), MODEL, JOB, shard=16, expert=4)
    assert of_kinds(plan, plan.microstep) == (LAYERS + 1, LAYERS + 1)
    dense = replace(MODEL, experts=None)
    whole = zero3(Engine(zero=ZeroProgram(is_fsdp2=True, keeps_mixtures=True)))
    plan = plan_of(whole, dense, JOB, shard=16)
    assert of_kinds(plan, plan.microstep) == (2 * LAYERS + 1, LAYERS + 1)


def test_a_step_gathers_once_and_reduces_once():
    plan = plan_of(with_facts(syncs_mixtures_once=True), MODEL, JOB, shard=16, expert=4)
    assert of_kinds(plan, plan.microstep) == (0, 0)
    assert of_kinds(plan, plan.sync_microstep) == (LAYERS + 1, LAYERS + 1)
    once = step(with_facts(syncs_mixtures_once=True), shard=16, expert=4)
    assert once.step_seconds < step(with_facts(), shard=16, expert=4).step_seconds


@pytest.mark.parametrize("facts", [{"keeps_mixtures": True}, {"syncs_mixtures_once": True}])
def test_what_stays_gathered_takes_memory(facts):
    """All blocks are gathered at the loss; their whole gradients are fp32 sums if none is sent."""
    sizes = {"shard": 16, "expert": 8}
    usual = memory_terms(with_facts(), MODEL, JOB, **sizes)
    kept = memory_terms(
        with_facts(reduced_element_bytes=4.0, **facts),
        MODEL,
        replace(JOB, global_batch=16),
        **sizes,
    )
    block = OTHERS + ROUTED / 8
    assert kept["gathered_weights"] >= 2 * (ROOT + (LAYERS - 1) * block)
    assert usual["gathered_weights"] < kept["gathered_weights"]
    if "syncs_mixtures_once" in facts:
        accumulating = memory_terms(
            with_facts(reduced_element_bytes=4.0, **facts), MODEL, JOB, **sizes
        )
        sums = 4 * (ROOT + LAYERS * block)
        assert accumulating["gathered_weights"] >= 2 * (ROOT + (LAYERS - 1) * block) + sums


def test_states_in_the_jobs_type_have_no_copies_in_fp32():
    low = with_facts(Engine(low_states=True))
    sizes = {"shard": 16, "expert": 8}
    weights = LAYERS * (ROUTED + OTHERS) + ROOT
    terms = memory_terms(low, MODEL, JOB, **sizes)
    assert terms["weights"] == terms["gradients"] == 2 * weights / 16
    assert terms["optimizer_states"] == 4 * weights / 16
    end = operations(plan_of(low, MODEL, JOB, **sizes).step_end)
    update = next(op for op in end if op.name == "optimizer.step")
    # Reads the gradient, both moments and the weight, and writes all but the gradient.
    assert number(update.nbytes) == pytest.approx(2 * 7 * weights / 16)


def test_experts_that_nobody_shares_are_not_copied():
    """Eight ranks that hold an expert each work with what they store."""
    low = with_facts(Engine(low_states=True))
    few = replace(JOB, n_gpus=8, global_batch=8)
    gathered = memory_terms(low, MODEL, few, shard=8, expert=8)["gathered_weights"]
    assert gathered < memory_terms(with_facts(), MODEL, few, shard=8, expert=8)["gathered_weights"]
    assert gathered <= 2 * (3 * ROOT + 4 * OTHERS)


@pytest.mark.parametrize("recomputes", [True, False])
def test_a_checkpoint_may_stop_before_results_travel_back(recomputes):
    engine = Engine(recomputes_combine=recomputes)
    plan = plan_of(with_facts(engine), MODEL, JOB, recompute="full", shard=16, expert=4)
    names = {op.name for op in operations(plan.microstep)}
    behind = {"recompute.combine", "recompute.unpermute", "recompute.residual2"}
    assert names & behind == (behind if recomputes else set())
    assert "recompute.dispatch" in names


def test_biases_of_first_products_may_be_added_by_kernels():
    biased = replace(MODEL, experts=replace(MODEL.experts, bias=True))
    added = operations(
        plan_of(
            with_facts(Engine(adds_expert_biases=True)), biased, JOB, shard=16, expert=4
        ).microstep
    )
    kernels = {
        op.name: op for op in added if isinstance(op, MemoryBound) and "first_bias" in op.name
    }
    features = 2 * SEQ * TOP_K * 2 * INNER
    assert {name: number(op.nbytes) for name, op in kernels.items()} == {
        "forward.experts_first_bias": 4 * features,
        "backward.experts_first_bias": 2 * features,
    }
    assert number(kernels["forward.experts_first_bias"].n_launches) == N_EXPERTS / 4 + 1
    usual = operations(plan_of(SPREAD, biased, JOB, shard=16, expert=4).microstep)
    assert not [op for op in usual if "first_bias" in op.name]


def test_tokens_may_be_sent_once_to_each_rank():
    plan = plan_of(with_facts(sends_once=True), MODEL, JOB, shard=16, expert=4)
    ops = operations(plan.microstep)
    assert not [op for op in ops if "counts" in op.name or "permute" in op.name]
    sent = next(op for op in ops if op.name == "forward.dispatch")
    # Two of eight experts are on one of four ranks in one of seven choices: 13/7 ranks on average.
    n_ranks = 13 / 7 * 4 / 3
    assert number(sent.nbytes) == pytest.approx(2 * SEQ * HIDDEN * n_ranks)
