"""Mixtures of experts: what ranks compute and send together is what the model is."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pytest
from build import collectives, group_size, memory_terms, number, operations, plan_of, table_of
from worlds import machine_of, quantity

from axonn_tune.cost.prices import KernelPrices, host_seconds
from axonn_tune.search.candidates import legal_placements
from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.blocks import Experts, LatentAttention, attended_keys
from axonn_tune.spec.engine import Engine, MemoryForm
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Attention, Collective, Gemm, GroupedGemm, MemoryBound
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import Evaluator
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.pipeline import cut_layers

approx = partial(pytest.approx, rel=1e-9)

DENSE = Model(
    "dense", n_layers=4, hidden_size=256, n_heads=8, vocab_size=1024, seq_len=128,
    ffn_hidden_size=512, gated_mlp=True, norm="rms", position="rotary", bias=False,
    tied_embeddings=False,
)  # fmt: skip
EXPERTS = Experts(8, 2, 128)
MIXTURE = replace(DENSE, experts=EXPERTS)
LATENT = LatentAttention(kv_rank=64, q_rank=96, content_dim=32, position_dim=16, value_dim=32)
MODELS = {
    "mixture": MIXTURE,
    "shared": replace(MIXTURE, experts=replace(EXPERTS, shared_hidden_size=64, shared_gate=True)),
    "one dense layer": replace(MIXTURE, experts=replace(EXPERTS, first_layer=1)),
    "every other layer": replace(MIXTURE, experts=replace(EXPERTS, first_layer=1, every=2)),
    "latent attention": replace(MIXTURE, latent_attention=LATENT),
    "whole queries": replace(DENSE, latent_attention=replace(LATENT, q_rank=0)),
    "windows": replace(DENSE, window=32, full_attention_every=2),
    "head norms": replace(MIXTURE, qk_norm="head"),
}
JOB = Job(16, 32, 128)
WHOLE = Megatron3D(has_experts=True)
SPLIT = Megatron3D(has_experts=True, splits_experts=True)
LAYOUTS = [
    {"data": 16},
    {"data": 16, "expert": 8},
    {"tensor": 2, "data": 8, "expert": 4},
    {"tensor": 2, "context": 2, "data": 2, "pipeline": 2, "expert": 4},
    {"tensor": 4, "data": 4, "expert": 2},
]


def of_kind(ops, kind):
    """The operations of a class."""
    return [op for op in ops if isinstance(op, kind)]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("strategy", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_ranks_together_do_the_models_products(model, strategy, sizes):
    """Latent vectors and routers, whose weights are not split, take each rank's own tokens."""
    sizes = {
        **sizes,
        "pipeline": 1,
        "data": 16 // (sizes.get("tensor", 1) * sizes.get("context", 1)),
    }
    plan = plan_of(strategy, model, JOB, **sizes)
    ops = operations(plan.microstep)
    done = sum(number(op.flops) for op in of_kind(ops, Gemm | Attention))
    tokens = JOB.seq_len / (sizes.get("tensor", 1) * sizes.get("context", 1))
    padded = model.model_flops(tokens, JOB.seq_len)
    assert done == approx(padded)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("strategy", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("sizes", LAYOUTS[:3], ids=str)
def test_ranks_together_hold_every_expert_as_often_as_it_has_replicas(model, strategy, sizes):
    plan = plan_of(strategy, model, JOB, **sizes)
    tensor = sizes.get("tensor", 1)
    held = memory_terms(strategy, model, JOB, **sizes)["weights"] / JOB.element_bytes
    n_layers = sum(block.has_experts for block in model.blocks)
    n_experts = model.experts.n_experts if model.experts else 0
    experts = n_layers * n_experts * model.expert_parameters
    n_copies = group_size(plan, "expert_replicas")
    of_ranks = 16 // group_size(plan, "expert") // (tensor if strategy.splits_experts else 1)
    assert n_copies == of_ranks
    others = model.parameters - experts
    assert held >= experts * n_copies / 16 + others / tensor - 1
    vectors = 4 * model.n_layers * (model.hidden_size + model.router_parameters + 20_000)
    assert held <= experts * n_copies / 16 + others / tensor + vectors


@pytest.mark.parametrize("strategy", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("imbalance", [1.0, 1.5])
def test_each_layer_sends_every_tokens_copies_there_and_back_twice(strategy, imbalance):
    job = replace(JOB, expert_imbalance=imbalance)
    sizes = {"tensor": 2, "data": 8, "expert": 4}
    plan = plan_of(strategy, MIXTURE, job, **sizes)
    exchanged = [op for op in collectives(plan, plan.microstep) if op.kind == "all_to_all"]
    sent = [op for op in exchanged if "probabilities" not in op.name]
    assert len(sent) == 4 * MIXTURE.n_layers
    copies = JOB.seq_len / 2 * EXPERTS.top_k * MIXTURE.hidden_size * JOB.element_bytes
    assert [number(op.nbytes) for op in sent] == [approx(imbalance * copies)] * len(sent)


def test_ranks_that_share_an_expert_gather_its_tokens_and_sum_its_results():
    """Results are summed, and their gradients gathered, in the type of the probabilities, fp32."""
    sizes = {"tensor": 4, "data": 4, "expert": 2}
    plan = plan_of(SPLIT, MIXTURE, JOB, **sizes)
    ops = collectives(plan, plan.microstep)
    names = ["forward.dispatch.all_gather", "forward.combine.reduce_scatter"]
    names += ["backward.combine.all_gather", "backward.dispatch.reduce_scatter"]
    copies = JOB.seq_len / 4 * EXPERTS.top_k * MIXTURE.hidden_size * JOB.element_bytes
    for name in names:
        found = [op for op in ops if op.name == name]
        assert len(found) == MIXTURE.n_layers
        element = 4.0 if "combine" in name else 2.0
        assert {number(op.nbytes) for op in found} == {4 * copies * element / 2.0}
    kernels = {
        op.name: number(op.nbytes) for op in of_kind(operations(plan.microstep), MemoryBound)
    }
    assert (
        kernels["forward.combine.to_fp32"] == kernels["backward.combine.from_fp32"] == 12 * copies
    )
    assert kernels["forward.combine.from_fp32"] == kernels["backward.combine.to_fp32"] == 3 * copies


def test_the_busiest_rank_multiplies_more_rows():
    usual, busy = (
        of_kind(operations(plan_of(WHOLE, MIXTURE, job, data=16, expert=8).microstep), GroupedGemm)
        for job in (JOB, replace(JOB, expert_imbalance=2.0))
    )
    assert [2 * number(op.flops) for op in usual] == approx([number(op.flops) for op in busy])


def test_experts_run_on_neighbouring_ranks_whatever_their_axes_are():
    table = table_of(WHOLE, tensor=2, context=2, data=4, expert=8)
    assert number(table.placements.stride("expert")) == 1
    assert number(table.placements.stride("expert_replicas")) == 8
    assert number(table.size("expert_replicas")) == 2
    split = table_of(SPLIT, tensor=2, context=2, data=4, expert=4)
    assert number(split.placements.stride("expert")) == 2
    assert number(split.size("expert_replicas")) == 2


@pytest.mark.parametrize(("strategy", "folded"), [(WHOLE, "tcd"), (SPLIT, "cd")])
def test_experts_are_spread_over_as_many_ranks_as_divide_them(strategy, folded):
    scenario = Scenario(MIXTURE, JOB, machine_of(), strategy)
    placements, _ = legal_placements(Search(scenario, Constraints()))
    sizes = {axis: placements.size(axis) for axis in strategy.axes.sized}
    assert set(sizes["expert"]) == {1, 2, 4, 8}
    ranks = sizes["context"] * sizes["data"]
    ranks = ranks * (sizes["tensor"] if "t" in folded else 1)
    assert (ranks % sizes["expert"] == 0).all()
    arranging = np.stack([sizes[axis] for axis in strategy.axes.names])
    assert (arranging.prod(axis=0) == 16).all()


def test_a_dense_layer_and_a_layer_with_experts_add_up():
    """A model whose first layers are dense costs what its layers cost, whatever stands beside."""
    mixed = MODELS["one dense layer"]
    flops = {}
    for name, model in {"mixed": mixed, "dense": DENSE, "experts": MIXTURE}.items():
        ops = operations(plan_of(WHOLE, model, JOB, data=16, expert=2).microstep)
        flops[name] = sum(number(op.flops) for op in of_kind(ops, Gemm | Attention))
    assert 4 * flops["mixed"] == approx(flops["dense"] + 3 * flops["experts"])


@pytest.mark.parametrize("recompute", ["full", "selective", "none"])
def test_a_recomputed_layer_routes_its_tokens_once_more(recompute):
    plan = plan_of(WHOLE, MIXTURE, JOB, recompute=recompute, data=16, expert=8)
    sent = [op for op in collectives(plan, plan.microstep) if op.kind == "all_to_all"]
    assert len(sent) == (9 if recompute == "full" else 6) * MIXTURE.n_layers


@pytest.mark.parametrize("sends_once", [False, True])
def test_numbers_and_probabilities_of_copies_travel_by_themselves(sends_once):
    """Unless a kernel sends them with the tokens."""
    strategy = replace(WHOLE, sends_once=sends_once)
    plan = plan_of(strategy, MIXTURE, JOB, tensor=2, data=8, expert=4)
    sent = {op.name: number(op.nbytes) for op in collectives(plan, plan.microstep)}
    copies = JOB.seq_len / 2 * EXPERTS.top_k
    wanted = {
        "forward.counts.all_gather": 4 * 8.0 * EXPERTS.n_experts,
        "forward.probabilities": 4.0 * copies,
        "backward.probabilities": 4.0 * copies,
    }
    found = {name: sent[name] for name in wanted if name in sent}
    assert found == ({} if sends_once else wanted)


@pytest.mark.parametrize("sends_once", [False, True])
def test_biases_of_experts_are_added_and_summed_expert_by_expert(sends_once):
    """Where tokens are sent once, the router's weights, and so these sums, are in fp32."""
    strategy = replace(WHOLE, sends_once=sends_once)
    biased = replace(MIXTURE, experts=replace(EXPERTS, bias=True))

    def kernels(model):
        ops = operations(plan_of(strategy, model, JOB, data=16, expert=4).microstep)
        kinds = ("expert_bias", "expert_bias_backward", "reduce")
        return {op.name: op for op in of_kind(ops, MemoryBound) if op.kernel in kinds}

    found = kernels(biased)
    output_bytes = JOB.seq_len * EXPERTS.top_k * biased.hidden_size * (4 if sends_once else 2)
    forward, backward = found["forward.experts_bias"], found["backward.experts_bias"]
    assert (forward.kernel, backward.kernel) == ("expert_bias", "expert_bias_backward")
    assert [number(op.nbytes) for op in (forward, backward)] == [2 * output_bytes, output_bytes]
    assert {number(op.n_launches) for op in (forward, backward)} == {EXPERTS.n_experts / 4}
    up_bytes = JOB.seq_len * EXPERTS.top_k * 2 * EXPERTS.hidden_size * 2
    assert number(found["backward.experts_up.bias"].nbytes) == up_bytes
    assert not any("experts" in name for name in kernels(MIXTURE))


def test_a_clamped_gate_and_a_scaled_rotation_have_kernels_of_their_own():
    """An engine that limits a gate by itself saves its input before and after it."""
    model = replace(MIXTURE, clamped_gate=True, scaled_rotary=True)
    plan = plan_of(WHOLE, model, JOB, data=16)
    kinds = Counter(op.kernel for op in of_kind(operations(plan.microstep), MemoryBound))
    n_layers = MIXTURE.n_layers
    assert kinds["clamped_swiglu"] == kinds["clamped_swiglu_backward"] == n_layers
    assert kinds["scaled_rotary"] == 2 * n_layers
    assert not kinds["swiglu"] + kinds["rotary"]

    def activation_bytes(saves, recompute="none"):
        engine = Engine(memory=MemoryForm(saves_unclamped=saves))
        strategy = replace(WHOLE, engine=engine)
        return memory_terms(strategy, model, JOB, recompute=recompute, data=16)["activations"]

    up_bytes = JOB.seq_len * EXPERTS.top_k * 2 * EXPERTS.hidden_size * 2
    assert activation_bytes(True) - activation_bytes(False) == approx(n_layers * up_bytes)
    again = [activation_bytes(saves, "selective:moe_act") for saves in (True, False)]
    assert again[0] == approx(again[1])


def test_gradients_of_experts_are_reduced_over_their_replicas_alone():
    sizes = {"tensor": 2, "data": 8, "expert": 4}
    plan = plan_of(WHOLE, MIXTURE, JOB, **sizes)
    reduced = [
        op for op in collectives(plan, plan.sync_microstep) if op.name == "gradient.experts.reduce"
    ]
    assert {op.axis for op in reduced} == {"expert_replicas"}
    of_rank = EXPERTS.n_experts * MIXTURE.expert_parameters / 4
    assert [number(op.nbytes) for op in reduced] == [approx(4 * of_rank)] * MIXTURE.n_layers


@pytest.mark.parametrize(
    ("seq_len", "window", "scores"), [(8, 3, 1 + 2 + 6 * 3), (5, 5, 15), (7, 1, 7), (4, 9, 10)]
)
def test_a_window_leaves_each_token_its_last_keys(seq_len, window, scores):
    """Counted one by one; the convention leaves out terms of one over the length."""
    counted = sum(min(query + 1, window) for query in range(seq_len))
    assert counted == scores
    by_convention = attended_keys(seq_len, window) * seq_len / 2
    assert abs(by_convention - counted) <= seq_len / 2


# Other dispatchers ---------------------------------------------------------------------------


@pytest.mark.parametrize(("n_experts", "top_k", "n_ranks"), [(4, 2, 2), (6, 3, 3), (8, 1, 4)])
def test_a_token_reaches_as_many_ranks_as_hold_any_of_its_experts(n_experts, top_k, n_ranks):
    """Counted over all choices of experts; an all-to-all would not send what stays on its rank."""
    of_rank = n_experts // n_ranks
    choices = list(combinations(range(n_experts), top_k))
    reached = [len({expert // of_rank for expert in choice}) for choice in choices]
    model = replace(DENSE, experts=Experts(n_experts, top_k, 128))
    once = replace(WHOLE, sends_once=True)
    job = Job(12, 12, 128)
    plan = plan_of(once, model, job, data=12, expert=n_ranks)
    sent = next(op for op in operations(plan.microstep) if op.name == "forward.dispatch")
    of_token = model.hidden_size * job.element_bytes
    mean = sum(reached) / len(choices)
    sent_share = 1 - 1 / n_ranks
    assert sent_share * number(sent.nbytes) == approx(mean * job.seq_len * of_token)


@pytest.mark.parametrize(
    ("n_groups", "top_groups", "n_ranks"),
    [
        (6, 2, 1),
        (6, 2, 2),
        (6, 2, 3),
        (6, 2, 6),
        (6, 2, 12),
        (4, 1, 4),
        (6, 2, 4),
        (4, 1, 6),
        (3, 2, 4),
    ],
)
def test_a_token_of_few_groups_reaches_fewer_ranks(n_groups, top_groups, n_ranks):
    """Counted over all choices of groups, and of three experts in these."""
    n_experts, top_k = 12, 3
    of_group = n_experts // n_groups
    reached = []
    for groups in combinations(range(n_groups), top_groups):
        experts = [group * of_group + i for group in groups for i in range(of_group)]
        for choice in combinations(experts, top_k):
            reached.append(len({expert * n_ranks // n_experts for expert in choice}))
    limited = Experts(n_experts, top_k, 128, n_groups=n_groups, top_groups=top_groups)
    assert limited.n_reached(n_ranks) == approx(sum(reached) / len(reached))


def kernels_that_wait(strategy, recompute, part="microstep"):
    """The exchanges for which kernels of a part of a plan wait, by kernel."""
    plan = plan_of(strategy, MIXTURE, JOB, recompute=recompute, data=16, expert=8)
    ops = operations(getattr(plan, part))
    sent = {op.name for op in of_kind(ops, Collective) if op.kind == "all_to_all"}
    kernels = [op for op in ops if not isinstance(op, Collective)]
    return {op.name: sent & set(op.waits_for) for op in kernels if sent & set(op.waits_for)}


def test_exchange_beside_another_micro_batch_may_last_until_the_next_one():
    """The other one's attention, or its experts, compute beside it (Megatron-Core's schedule)."""
    of_experts = {"forward.dispatch", "forward.probabilities"}
    assert kernels_that_wait(replace(WHOLE, overlaps_experts=True), "none") == {
        "forward.sort": {"forward.combine"},
        "forward.norm1": of_experts,
        "backward.unsort": {"backward.dispatch", "backward.probabilities"},
        "backward.permute": {"backward.combine"},
    }
    alone = kernels_that_wait(WHOLE, "none")
    assert alone["forward.sort"] == of_experts
    assert alone["forward.unpermute"] == {"forward.combine"}


@pytest.mark.parametrize("overlap_grad_reduce", [False, True])
def test_the_first_forward_and_the_last_backward_pass_exchange_alone(overlap_grad_reduce):
    """No other micro-batch runs beside them; one micro-step stands for both."""
    strategy = replace(WHOLE, overlaps_experts=True, overlap_grad_reduce=overlap_grad_reduce)
    lone = kernels_that_wait(strategy, "none", "sync_microstep")
    assert lone == kernels_that_wait(WHOLE, "none")


@pytest.mark.parametrize("schedule", ["zb-h1", "dualpipe"])
def test_other_schedules_hide_the_exchanges_of_passes_that_reduce_gradients_too(schedule):
    """What travels between replicas does not change what hides exchanges of tokens."""
    strategy = replace(WHOLE, overlaps_experts=True, overlap_grad_reduce=True, schedule=schedule)
    pipeline = plan_of(strategy, MIXTURE, JOB, data=8, pipeline=2, expert=8).pipeline
    assert pipeline.sync is not pipeline.first and not pipeline.alone
    sync, usual = (
        [op.name for op in operations(stage.forward) if op.name.startswith("forward.")]
        for stage in (pipeline.sync, pipeline.first)
    )
    assert sync == usual and usual.index("forward.combine") < usual.index("forward.norm1")


def test_a_backward_pass_that_runs_alone_forms_gradients_of_weights_beside_an_exchange():
    """They are those of experts, which nothing else needs (--delay-wgrad-compute)."""
    strategy = replace(WHOLE, overlaps_experts=True)
    plan = plan_of(strategy, MIXTURE, JOB, data=16, expert=8)

    def after_exchange(part):
        of_layer = [op.name for op in operations(part) if op.name.startswith("backward.")]
        start = of_layer.index("backward.dispatch")
        return of_layer[start + 1 : start + 4]

    of_weights = ["backward.experts_down.gemm_weight", "backward.experts_up.gemm_weight"]
    assert after_exchange(plan.sync_microstep) == [*of_weights, "backward.permute"]
    assert after_exchange(plan.microstep)[0] == "backward.permute"
    lone, usual = (
        Counter(op.name for op in operations(part) if op.name.startswith(("forward", "backward")))
        for part in (plan.sync_microstep, plan.microstep)
    )
    assert lone == usual


def test_no_exchange_is_left_at_the_end_of_a_forward_pass_beside_another_micro_batch():
    """The last one runs beside the other micro-batch's attention, like all of its kind."""
    sizes = {"data": 8, "pipeline": 2, "expert": 8}
    of_middle = [
        [op.name for op in operations(plan.pipeline.middle.forward)]
        for plan in (
            plan_of(replace(WHOLE, overlaps_experts=beside), MIXTURE, JOB, n_virtual=2, **sizes)
            for beside in (False, True)
        )
    ]
    alone, beside = (names.index("forward.combine") for names in of_middle)
    first, last = (names.index("forward.norm1") for names in of_middle)
    assert alone > first
    assert beside < last
    assert sorted(of_middle[0]) == sorted(of_middle[1])


@pytest.mark.parametrize("n_virtual", [1, 2])
def test_a_rank_of_the_last_stage_runs_a_round_alone_in_each_virtual_stage_but_the_last(n_virtual):
    sizes = {"data": 4, "pipeline": 2, "tensor": 2, "expert": 4}
    strategy = replace(WHOLE, overlaps_experts=True)
    plan = plan_of(strategy, MIXTURE, JOB, n_virtual=n_virtual, **sizes)
    n_micro = number(plan.n_microsteps)
    counts = {parts[0].name: number(times) for times, parts in plan.work_of_last_rank}
    n_alone = 2 * (n_virtual - 1)
    assert counts == {
        "middle.forward": (n_virtual - 1) * n_micro - n_alone,
        "middle.alone.forward": n_alone,
        "last.forward": n_micro,
        "last.alone.forward": 0,
    }


def test_what_is_recomputed_exchanges_alone():
    """It is no part of the schedule in which two micro-batches take turns."""
    overlapped = kernels_that_wait(replace(WHOLE, overlaps_experts=True), "full")
    alone = kernels_that_wait(WHOLE, "full")
    of_recomputation = {name for name in alone if name.startswith("recompute.")}
    assert of_recomputation == {"recompute.sort", "recompute.unpermute"}
    assert all(overlapped[name] >= alone[name] for name in of_recomputation)


@pytest.mark.parametrize("bandwidth", [1e8, 1e9, 1e10, 1e11])
def test_an_exchange_beside_another_micro_batch_hides_in_part_or_whole(bandwidth):
    """A step is shorter by what hides, and at least as long as its kernels."""
    machine = machine_of(bandwidths=(bandwidth, bandwidth))
    table = table_of(WHOLE, 1, "none", 1, data=16, expert=8)

    def times_of(strategy):
        return Evaluator.of(Scenario(MIXTURE, JOB, machine, strategy), table).evaluate()

    alone = times_of(WHOLE)
    beside = times_of(replace(WHOLE, overlaps_experts=True))
    hidden = alone.step_seconds - beside.step_seconds
    assert 0.0 < hidden[0] <= alone.exposed_communication_seconds[0]
    within_kernels = alone.step_seconds - alone.exposed_communication_seconds
    assert beside.step_seconds[0] >= within_kernels[0] * (1 - 1e-12)


def test_the_host_issues_forward_products_of_experts_one_by_one():
    """It has waited for the numbers of tokens, so that no kernel is issued ahead."""
    engine = Engine(expert_issue_seconds=quantity(50e-6))
    plan = engine.as_run(plan_of(WHOLE, MIXTURE, JOB, data=16, expert=2))
    grouped = of_kind(operations(plan.microstep), GroupedGemm)
    for op in grouped:
        assert op.issue_seconds == (50e-6 if op.mode == "NN" else 0.0)
    prices = KernelPrices(machine_of(), JOB)
    tiny = next(op for op in grouped if op.mode == "NN")
    assert number(prices.seconds(tiny)) == approx(4 * 50e-6)


def host_seconds_of(mixture, expert, issue_factor):
    """The host's time for a micro-step of an engine with these times, and the micro-step."""
    expert_seconds = None if expert is None else quantity(expert)
    engine = Engine(mixture_issue_seconds=quantity(mixture), expert_issue_seconds=expert_seconds)
    scenario = Scenario(MIXTURE, JOB, machine_of(), replace(WHOLE, engine=engine))
    plan = scenario.plan(table_of(WHOLE, 1, "none", 1, data=16, expert=2))
    phases = plan.microstep.phases
    seconds = host_seconds(phases, plan.candidates, scenario.issue_seconds, issue_factor)
    return seconds[0], plan.microstep


def test_the_host_takes_a_time_of_its_own_for_forward_products_of_experts():
    """Each of a rank's four experts has a product; on a slower host each takes longer."""
    usual, _ = host_seconds_of(3.0, None, 1.0)
    assert host_seconds_of(3.0, 3.0, 1.0)[0] == approx(usual)
    slow, microstep = host_seconds_of(3.0, 5.0, 2.0)
    n_forward = sum(op.mode == "NN" for op in of_kind(operations(microstep), GroupedGemm))
    assert slow - usual == approx(4 * n_forward * (2.0 * 5.0 - 3.0))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_host_issues_more_where_it_pairs_layers_of_two_micro_batches(recompute):
    """Both passes of each layer do, but the first forward and the last backward pass run alone."""
    program = MegatronProgram(combined_issues=quantity(10.0))
    usual = replace(WHOLE, overlaps_experts=True)
    paired = replace(usual, engine=Engine(megatron=program))
    sizes = {"data": 8, "pipeline": 2, "expert": 2}

    def issues_of(strategy, *, alone):
        plan = plan_of(strategy, MIXTURE, JOB, 1, recompute, 2, **sizes)
        stages = plan.pipeline.alone if alone else plan.pipeline.stages
        of_pass = [host_seconds(p.phases, plan.candidates, 1.0)[0] for p in stages[1].passes]
        return np.array(of_pass)

    n_layers = MIXTURE.n_layers / 4
    more = issues_of(paired, alone=False) - issues_of(usual, alone=False)
    assert more == approx([10.0 * n_layers] * 2)
    assert issues_of(paired, alone=True) == approx(issues_of(usual, alone=True))
    without = replace(paired, overlaps_experts=False)
    assert issues_of(without, alone=False) == approx(issues_of(WHOLE, alone=False))


@pytest.mark.parametrize(("precision", "n_issues"), [("fp8-current", 2.0), ("mxfp8", 1.0)])
def test_the_host_issues_casts_of_experts_that_no_call_casts_together(precision, n_issues):
    """An input is cast for its product, a gradient for dI; dW needs no other cast."""
    engine = Engine(expert_issue_seconds=quantity(50e-6))
    job = replace(JOB, precision=precision)
    plan = engine.as_run(plan_of(WHOLE, MIXTURE, job, data=16, expert=2))
    grouped = of_kind(operations(plan.microstep), GroupedGemm)
    for op in grouped:
        assert op.n_issues == (1.0 if op.mode == "TN" else n_issues)
    prices = KernelPrices(machine_of(), JOB)
    tiny = replace(next(op for op in grouped if op.mode == "NN"), number_format="")
    assert number(prices.seconds(tiny)) == approx(n_issues * 4 * 50e-6)


@pytest.mark.parametrize("n_layers", [5, 7, 13, 61])
@pytest.mark.parametrize("n_chunks", [2, 4, 8, 16])
def test_an_odd_number_of_layers_leaves_the_last_stage_the_rest(n_layers, n_chunks):
    layers = cut_layers(n_layers, n_chunks)
    most = -(-n_layers // n_chunks)
    is_possible = most * (n_chunks - 1) < n_layers
    if is_possible or (n_layers + 2) % n_chunks == 0:
        assert sum(layers) == n_layers and max(layers) == most and min(layers) > 0
        assert layers[1:-1] == [most] * (n_chunks - 2)


def test_the_fullest_stage_may_be_one_in_the_middle():
    """The first stage has the dense layers, the last one fewer layers."""
    experts = replace(EXPERTS, n_experts=64, first_layer=2)
    model = replace(DENSE, n_layers=8, experts=experts)
    sizes = {"data": 4, "pipeline": 4}
    held = memory_terms(WHOLE, model, JOB, **sizes)["weights"] / JOB.element_bytes
    of_experts = 64 * model.expert_parameters
    assert held >= 2 * of_experts
    dense_first = memory_terms(
        WHOLE, replace(model, experts=replace(experts, first_layer=0)), JOB, **sizes
    )
    assert held < dense_first["weights"] / JOB.element_bytes


@pytest.mark.parametrize("expert", [2, 4, 8])
def test_no_rank_takes_more_than_all_tokens_of_its_group(expert):
    """With two choices among eight experts a rank has at most four times the mean."""
    largest = min(expert, EXPERTS.n_experts / EXPERTS.top_k)
    sent = []
    for imbalance in (largest, 100.0):
        job = replace(JOB, expert_imbalance=imbalance)
        plan = plan_of(WHOLE, MIXTURE, job, data=16, expert=expert)
        sent.append([number(op.nbytes) for op in collectives(plan, plan.microstep)])
    assert sent[0] == sent[1]


@pytest.mark.parametrize("precision", ["bf16", "fp8-current", "mxfp8"])
@pytest.mark.parametrize("sends_once", [False, True])
def test_rows_of_experts_are_padded_for_low_products(precision, sends_once):
    """Tokens are copied there and back, and so are gradients, unless they have come padded."""
    strategy, job = replace(WHOLE, sends_once=sends_once), replace(JOB, precision=precision)
    plan = plan_of(strategy, MIXTURE, job, tensor=2, data=8, expert=4)
    copies = JOB.seq_len / 2 * EXPERTS.top_k * MIXTURE.hidden_size * JOB.element_bytes
    found = {
        op.name: number(op.nbytes)
        for op in of_kind(operations(plan.microstep), MemoryBound)
        if op.name.endswith("pad")
    }
    names = ["forward.pad", "forward.unpad", "backward.unpad", "backward.pad"]
    is_padded = precision != "bf16" and not sends_once
    assert found == ({name: approx(2 * copies) for name in names} if is_padded else {})


def sums_of(model, recompute="none"):
    """The bytes of what adds two tensors, besides the residual connections, in a micro-step."""
    plan = plan_of(WHOLE, model, JOB, recompute=recompute, tensor=2, data=8, expert=4)
    adds = [op for op in operations(plan.microstep) if getattr(op, "kernel", "") == "add"]
    sums = Counter()
    for op in adds:
        if "residual" not in op.name and "accumulate" not in op.name:
            sums[op.name] += number(op.nbytes)
    return +sums


def test_tensors_that_several_layers_read_have_sums_of_their_gradients():
    """Router, copies and shared experts read the output of one norm (core/transformer/moe).

    The weights that form the latent vectors read that of another (multi_latent_attention.py).
    """
    one = 3.0 * JOB.seq_len / 2 * MIXTURE.hidden_size * JOB.element_bytes * MIXTURE.n_layers
    router = {"backward.router.input_gradient": approx(one)}
    shared = {"backward.shared_up.input_gradient": approx(one)}
    output = {"forward.shared_sum": approx(one)}
    latent = {"backward.norm1.input_gradient": approx(one)}
    assert sums_of(DENSE) == {}
    assert sums_of(MIXTURE) == router
    assert sums_of(MODELS["shared"]) == router | shared | output
    assert sums_of(MODELS["latent attention"]) == router | latent
    assert sums_of(MODELS["whole queries"]) == latent


@pytest.mark.parametrize("recompute", ["full", "selective:moe", "selective:shared_experts"])
def test_outputs_of_experts_are_summed_again_where_both_are_formed_again(recompute):
    again = {name for name in sums_of(MODELS["shared"], recompute) if name.startswith("recompute")}
    assert again == (set() if "shared" in recompute else {"recompute.shared_sum"})


@pytest.mark.parametrize(
    ("sizes", "is_sorted"), [({}, True), ({"expert": 4}, True), ({"expert": 8}, False)]
)
def test_copies_are_sorted_wherever_a_rank_has_several_experts(sizes, is_sorted):
    plan = plan_of(WHOLE, MIXTURE, JOB, data=16, **sizes)
    copies = JOB.seq_len * EXPERTS.top_k * MIXTURE.hidden_size * JOB.element_bytes
    found = [number(op.nbytes) for op in operations(plan.microstep) if op.name.endswith("sort")]
    assert found == [approx(2 * copies * is_sorted)] * 4 * MIXTURE.n_layers
