"""Megatron-LM and the ZeRO family: what they send, what they hold, what they refuse."""

from dataclasses import replace

import numpy as np
import pytest
from worlds import BY_MATRIX

from axonn_tune.api.searching import build_search
from axonn_tune.search.candidates import legal_placements
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.search.rank import rank_candidates
from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.engine import IDEAL
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Collective, Gemm
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.explain import explain
from axonn_tune.step.predict import predict
from axonn_tune.step.timeline import step_timeline
from axonn_tune.strategies.axonn.axonn4d import AXONN, Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.named import STRATEGIES, strategy_named
from axonn_tune.strategies.switches import Switches
from axonn_tune.strategies.zero.communication import INT4_BYTES
from axonn_tune.strategies.zero.gathers import INT8_BYTES
from axonn_tune.strategies.zero.zero import zero3, zero_topo, zeropp

MODEL = Model("m", n_layers=8, hidden_size=256, n_heads=8, vocab_size=1024, seq_len=128)
JOB = Job(16, 32, 128)
PLAIN = Megatron3D(False, False, False, True)
SEQUENCE = replace(PLAIN, sequence_parallel=True)


def table(strategy, micro_batch=1, **sizes):
    whole = {axis: sizes.get(axis, 1) for axis in strategy.axes.names}
    return CandidateTable.single(
        Configuration(Layout(whole), micro_batch=micro_batch), strategy.axes
    )


def plan_of(strategy, job=JOB, micro_batch=1, **sizes):
    return strategy.plan(MODEL, job, table(strategy, micro_batch, **sizes).executed("none", 1))


@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [(PLAIN, {"all_reduce"}), (SEQUENCE, {"all_gather", "reduce_scatter"})],
)
def test_collectives_of_a_block_are_what_their_names_say(strategy, kinds):
    """Sequence parallelism gathers inputs and scatters sums; without it sums are all-reduced."""
    phases = plan_of(strategy, tensor=4, data=4).microstep.phases
    in_block = [
        op
        for phase in phases
        if phase.name.startswith("forward")
        for op in phase.operations
        if isinstance(op, Collective) and op.axis == "tensor"
    ]
    assert {op.kind for op in in_block} == kinds
    for op in in_block:
        assert op.name.endswith(op.kind)
        is_sum = ".proj." in op.name or ".down." in op.name
        if len(kinds) == 2 and is_sum:
            assert op.kind == "reduce_scatter"


def sent(phases, candidates, only="", but=""):
    """Bytes that a rank's ring carries: by group, of collectives over more than one rank."""
    total = {}
    for phase in phases:
        for op in phase.operations:
            if not isinstance(op, Collective) or only not in op.name or (but and but in op.name):
                continue
            n = float(candidates.size(op.axis)[0])
            if n > 1:
                passes = 2.0 if op.kind == "all_reduce" else 1.0
                share = 1.0 if op.kind == "send_recv" else (n - 1) / n
                nbytes = phase.repeats * passes * share * float(np.ravel(op.nbytes)[0])
                total[op.axis] = total.get(op.axis, 0.0) + nbytes
    return total


# Megatron-LM -----------------------------------------------------------------------------


def test_a_layer_of_tensor_parallelism_sums_the_stream_four_times():
    """Two all-reduces forward, two backward (Shoeybi et al., arXiv 1909.08053, section 3)."""
    plan = plan_of(PLAIN, tensor=4, data=4)
    blocks = [p for p in plan.microstep.phases if p.name.startswith(("forward", "backward"))]
    stream = 128 * 256 * 2.0
    assert sent(blocks, plan.candidates)["tensor"] == 8 * 4 * 2 * 0.75 * stream


def test_sequence_parallelism_sends_as_much_and_gathers_the_input_once_more():
    """Korthikanti et al., section 4.2.2; the input of dW is gathered again beside dI."""
    with_, without = (plan_of(s, tensor=4, data=4) for s in (SEQUENCE, PLAIN))
    blocks = [
        sent(
            [p for p in plan.microstep.phases if p.name.startswith(("forward", "backward"))],
            plan.candidates,
        )["tensor"]
        for plan in (with_, without)
    ]
    stream = 128 * 256 * 2.0
    assert blocks[0] - blocks[1] == 8 * 2 * 0.75 * stream


@pytest.mark.parametrize("strategy", [PLAIN, SEQUENCE])
def test_products_do_not_depend_on_how_sums_travel(strategy):
    flops = sum(
        phase.repeats * float(np.ravel(op.flops)[0])
        for phase in plan_of(strategy, tensor=4, data=4).microstep.phases
        for op in phase.operations
        if isinstance(op, Gemm)
    )
    whole = MODEL.n_layers * MODEL.block_matmul_parameters + MODEL.head.parameters
    assert flops == 6.0 * 128 * whole / 4


@pytest.mark.parametrize("mask", [False, True])
def test_activations_are_those_of_korthikanti(mask):
    """Equations 1, 2 and 4 and full recomputation, for unfused attention with dropout."""
    job = replace(JOB, attention="unfused", dropout=mask)
    s, b, h, a, t = 128, 2, 256, 8, 4
    sbh, layers = s * b * h, MODEL.n_layers

    def activations(strategy, recompute):
        at = table(strategy, b, tensor=t, data=4)
        return float(strategy.memory(MODEL, job, at.executed(recompute, 1))["activations"][0])

    scores = (5 if mask else 2) * a * s / (h * t)
    stream, split = (10 if mask else 8), 24 / t
    assert activations(PLAIN, "none") == pytest.approx(sbh * (stream + split + scores) * layers)
    assert activations(PLAIN, "selective") == pytest.approx(sbh * (stream + split) * layers)
    assert activations(PLAIN, "full") == pytest.approx(sbh * 2 * layers)
    assert activations(SEQUENCE, "selective") == pytest.approx(sbh * (stream / t + split) * layers)
    assert activations(SEQUENCE, "full") == pytest.approx(sbh * 2 * layers / t)


def test_states_are_sharded_by_the_distributed_optimizer_only():
    sizes = {"tensor": 2, "data": 8}
    terms = [
        s.memory(MODEL, JOB, table(s, **sizes).executed("none", 1))
        for s in (PLAIN, replace(PLAIN, distributed_optimizer=True))
    ]
    assert terms[0]["optimizer_states"] == 8 * terms[1]["optimizer_states"]
    for term in ("weights", "gradients", "activations"):
        assert terms[0][term] == terms[1][term]
    # 2 + 4 + 12 bytes for each parameter, as in Korthikanti et al., Fig. 1.
    held = sum(terms[0][t] for t in ("weights", "gradients", "optimizer_states"))
    assert held == 18 * terms[0]["weights"] / 2


def test_gradients_and_weights_of_the_distributed_optimizer_move_once_a_step():
    overlapped = replace(PLAIN, distributed_optimizer=True, overlap_grad_reduce=True)
    plan = plan_of(overlapped, data=16)
    parameters = (
        float(
            overlapped.memory(MODEL, JOB, table(overlapped, data=16).executed("none", 1))[
                "weights"
            ][0]
        )
        / 2
    )
    once = sent((*plan.sync_microstep.phases, *plan.step_end.phases), plan.candidates, but="norm")
    assert once["context*data"] == pytest.approx((4 + 2) * parameters * 15 / 16, rel=0.01)
    assert "context*data" not in sent(plan.microstep.phases, plan.candidates)


def test_overlapped_reduction_is_faster_and_never_less_than_nothing():
    times = {}
    for overlap in (True, False):
        search = build_search(
            "gpt-5b",
            64,
            "dgx-a100",
            strategy="megatron",
            overlap_grad_reduce=overlap,
            virtual_stages=1,
            global_batch=64,
            micro_batch=1,
            recompute="full",
        )
        times[overlap] = best_of_layout(search, "tensor=2,data=32").step_seconds
    assert 0.5 * times[False] < times[True] < times[False]


def test_context_parallelism_splits_tokens_and_brings_keys_and_values():
    whole, split = (plan_of(PLAIN, context=c, data=16 // c) for c in (1, 4))
    gemms = [
        [op for p in plan.microstep.phases for op in p.operations if isinstance(op, Gemm)]
        for plan in (whole, split)
    ]
    assert all(
        float(np.ravel(a.flops)[0]) == 4 * float(np.ravel(b.flops)[0])
        for a, b in zip(*gemms, strict=True)
    )
    kv = 128 * 2 * 256 * 2.0
    # Gathered forward and backward, its gradient scattered backward.
    assert sent(split.microstep.phases, split.candidates)["context"] == 8 * 3 * 0.75 * kv


def test_stages_share_the_layers_and_only_neighbours_talk():
    plan = plan_of(PLAIN, tensor=2, pipeline=4, data=2)
    pipeline = plan.pipeline
    assert plan.candidates.n_chunks == 4
    layers = [
        sum(p.repeats for p in stage.forward.phases if p.name.startswith("forward"))
        for stage in (pipeline.first, pipeline.middle, pipeline.last)
    ]
    assert layers == [2, 2, 2]
    assert pipeline.transfer.nbytes[0] == 128 * 256 * 2.0 / 2  # a rank's part of the stream
    names = [op.name for p in pipeline.first.forward.phases for op in p.operations]
    assert any("embedding" in n for n in names) and not any("head" in n for n in names)


def test_a_pipeline_may_count_embedding_and_head_as_layers():
    model = replace(MODEL, n_layers=14)
    search = Search(Scenario(model, JOB, build_search("tiny", 1).scenario.machine, PLAIN))
    placements, _ = legal_placements(search)
    stages = set(placements.size("pipeline").tolist())
    assert {1, 2, 4, 8, 16} >= stages and 8 in stages and 16 in stages


def test_interleaving_needs_stages_layers_and_whole_rounds_of_micro_batches():
    at = table(PLAIN, pipeline=4, data=4)
    assert PLAIN.admits(MODEL, JOB, at.executed("none", 2)).all()
    assert not PLAIN.admits(MODEL, JOB, at.executed("none", 3)).any()
    assert not PLAIN.admits(MODEL, replace(JOB, global_batch=8), at.executed("none", 2)).any()
    assert not PLAIN.admits(MODEL, JOB, table(PLAIN, data=16).executed("none", 2)).any()


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"tensor": 16}, "attention heads not divisible by tensor"),
        ({"pipeline": 16}, "not divisible by the stages"),
        ({"context": 16}, "sequence not divisible"),
    ],
)
def test_what_megatron_refuses_is_named(sizes, reason):
    model = replace(MODEL, seq_len=24)
    job = replace(JOB, seq_len=24)
    broken = PLAIN.rejections(model, job, table(PLAIN, **sizes).placements)
    assert any(reason in name and mask.all() for name, mask in broken.items())


# The ZeRO family: volumes of the papers, per rank ------------------------------------------


PSI = float(
    MODEL.n_layers
    * (
        MODEL.block_matmul_parameters
        + 2 * MODEL.norm_parameters
        + sum(linear.n_out for linear in MODEL.block_linears)
    )
    + MODEL.head.parameters
    + MODEL.position_parameters
    + MODEL.norm_parameters
)


def test_zero3_moves_the_weights_twice_and_the_gradients_once():
    """2 psi forward, 2 psi backward, 2 psi of gradients in every micro-batch; the embedding and
    the head, as FSDP's root, stay from forward to backward."""
    plan = plan_of(zero3(), shard=16)
    root = MODEL.head.parameters + MODEL.position_parameters + MODEL.norm_parameters
    got = sent(plan.microstep.phases, plan.candidates)["shard"]
    assert got == pytest.approx((6 * PSI - 2 * root) * 15 / 16, rel=1e-12)


@pytest.mark.parametrize(
    ("strategy", "sizes", "states"),
    [
        (zero3(), {"shard": 16}, 16 / 16),
        (zero3(), {"shard": 4, "replica": 4}, 16 / 4),
        (zeropp(), {"secondary": 8, "across": 2}, 16 / 16 + 2 / 8),
        (zeropp(secondary=False), {"secondary": 8, "across": 2}, 16 / 16),
        (zero_topo(), {"weights": 2, "gradients": 4, "states": 2}, 2 / 2 + 2 / 8 + 12 / 16),
    ],
)
def test_model_states_are_those_of_the_papers(strategy, sizes, states):
    terms = strategy.memory(MODEL, JOB, table(strategy, **sizes).executed("none", 1))
    held = sum(float(terms[t][0]) for t in ("weights", "gradients", "optimizer_states"))
    assert held == pytest.approx(states * PSI, rel=1e-12)


def test_zeropp_goes_across_nodes_once_in_a_step_and_in_few_bytes():
    """INT8 gather over all ranks until the second copy exists; then inside the node; gradients
    in INT4, first inside the node, then an h-th of them across."""
    plan = plan_of(zeropp(), secondary=8, across=2)
    usual, sync = (
        sent(p, plan.candidates) for p in (plan.microstep.phases, plan.sync_microstep.phases)
    )
    everyone = "secondary*across"
    assert everyone not in usual
    assert sync[everyone] == pytest.approx(INT8_BYTES * PSI * 15 / 16, rel=1e-12)
    assert usual["across"] == pytest.approx(INT4_BYTES * PSI / 8 / 2, rel=1e-12)
    gradients = sent(plan.microstep.phases, plan.candidates, only="gradient")
    assert gradients["secondary"] == pytest.approx(INT4_BYTES * PSI * 7 / 8, rel=1e-12)


@pytest.mark.parametrize("off", ["qwz", "hpz", "qgz"])
def test_each_part_of_zeropp_is_switched_alone(off):
    switches = {"qwz": True, "hpz": True, "qgz": True, off: False}
    strategy = strategy_named("zeropp", Switches(**switches))
    plan = plan_of(strategy, secondary=8, across=2)
    sync = sent((plan.sync_microstep or plan.microstep).phases, plan.candidates)
    usual = sent(plan.microstep.phases, plan.candidates)
    kinds = {
        op.kind for p in plan.microstep.phases for op in p.operations if isinstance(op, Collective)
    }
    everyone = "secondary*across"
    if off == "qwz":
        assert sync[everyone] == pytest.approx(2 * PSI * 15 / 16, rel=1e-12)
    elif off == "hpz":
        assert usual[everyone] > 0 and plan.sync_microstep is None
    else:
        assert "all_to_all" not in kinds and usual[everyone] == pytest.approx(2 * PSI * 15 / 16)


def test_gradients_are_quantised_across_nodes_only():
    plan = plan_of(zeropp(), secondary=16)
    gradients = sent(plan.microstep.phases, plan.candidates, only="gradient")
    assert gradients == {"secondary": pytest.approx(2 * PSI * 15 / 16, rel=1e-12)}


def test_three_levels_stay_in_the_node_until_the_step_ends():
    plan = plan_of(zero_topo(), weights=2, gradients=4, states=2)
    usual = sent(plan.microstep.phases, plan.candidates)
    assert set(usual) == {"weights", "weights*gradients"}
    root = MODEL.head.parameters + MODEL.position_parameters + MODEL.norm_parameters
    gathered = sent(plan.microstep.phases, plan.candidates, only="all_gather")["weights"]
    assert gathered == pytest.approx(INT8_BYTES * (2 * PSI - root) / 2, rel=1e-12)
    assert usual["weights*gradients"] == pytest.approx(INT4_BYTES * PSI * 7 / 8, rel=1e-12)
    end = sent(plan.step_end.phases, plan.candidates, but="norm")
    assert end["states"] == pytest.approx(2 * PSI / 8 / 2, rel=1e-12)
    assert end["gradients*states"] == pytest.approx(2 * PSI / 2 * 7 / 8, rel=1e-12)


def test_replicas_are_summed_once_in_a_step():
    plan = plan_of(zero3(), shard=4, replica=4)
    assert "replica" not in sent(plan.microstep.phases, plan.candidates)
    once = sent(plan.sync_microstep.phases, plan.candidates)["replica"]
    assert once == pytest.approx(2 * 0.75 * 2 * PSI / 4, rel=1e-12)


def test_without_overlap_every_collective_is_exposed():
    search = build_search(
        "tiny", 8, "frontier", strategy="zero3", global_batch=8, micro_batch=1, recompute="none"
    )
    job = replace(search.scenario.job, overlap=Overlap(False, False, False))
    search = replace(search, scenario=replace(search.scenario, job=job))
    explained = explain(best_of_layout(search, "shard=8"))
    for op in explained.operations:
        if op.axis:
            assert op.exposed_seconds == pytest.approx(op.total_seconds, rel=1e-9)


def test_parameters_gathered_one_by_one_pay_latency_for_each():
    together, each = (
        Search(
            Scenario(
                MODEL, JOB, build_search("tiny", 1, "frontier").scenario.machine, zero3(engine)
            ),
            Constraints({"replica": 1}),
            ("none",),
        )
        for engine in (IDEAL, BY_MATRIX)
    )
    assert (
        rank_candidates(each).prediction(0).step_seconds
        > rank_candidates(together).prediction(0).step_seconds
    )


# Every strategy ----------------------------------------------------------------------------

LAYOUTS = {
    "axonn": "2x1x4x2",
    "axonn-pipeline": "1x1x4x2x2",
    "megatron": "tensor=2,context=2,data=2,pipeline=2",
    "zero1": "data=16",
    "zero2": "data=16",
    "zero3": "shard=4,replica=4",
    "zeropp": "secondary=8,across=2",
    "zero-topo": "weights=2,gradients=4,states=2",
}


def search_of(name, machine="frontier", **options):
    arguments = {"global_batch": 64, "micro_batch": 1, "recompute": "full", **options}
    return build_search("gpt-5b", 16, machine, strategy=name, **arguments)


def test_every_name_has_a_layout_here():
    assert set(LAYOUTS) == set(STRATEGIES)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_operations_and_waits_make_up_the_step(name, recompute):
    search = search_of(name, recompute=recompute)
    prediction = best_of_layout(search, LAYOUTS[name])
    explained = explain(prediction)
    kernels = sum(op.total_seconds for op in explained.operations if not op.axis)
    exposed = sum(op.exposed_seconds for op in explained.operations)
    parts = prediction.compute_seconds + prediction.exposed_communication_seconds
    assert parts + prediction.bubble_seconds == pytest.approx(prediction.step_seconds)
    if not prediction.bubble_seconds:
        # Kernels are slower beside collectives; their sum is what they took.
        assert kernels + exposed == pytest.approx(prediction.step_seconds, rel=1e-6)
        ends = max(op.end_seconds for op in step_timeline(prediction).operations)
        assert ends == pytest.approx(prediction.step_seconds, rel=1e-6)


def test_explain_has_one_row_of_a_name_and_the_transfers_of_a_pipeline():
    search = search_of("zeropp")
    names = [op.name for op in explain(best_of_layout(search, LAYOUTS["zeropp"])).operations]
    assert len(names) == len(set(names))
    search = search_of("megatron")
    prediction = best_of_layout(search, LAYOUTS["megatron"])
    rows = {op.name: op for op in explain(prediction).operations}
    n_passes = 2 * prediction.configuration.n_virtual * prediction.n_microsteps
    assert rows["pipeline.send_recv"].n_calls == n_passes


# Strategies with switches that bring further kernels into their plans.
SWITCHED = [
    *((name, {}) for name in LAYOUTS),
    ("axonn", {"overlap_grad_reduce": True}),
    ("axonn", {"overlap_grad_reduce": True, "ors": False}),
    ("axonn", {"shard_gradients": True}),
    ("megatron", {"overlap_grad_reduce": False, "distributed_optimizer": False}),
    ("megatron", {"shard_gradients": True, "context_kind": "ring"}),
    ("zeropp", {"qwz": False, "qgz": False}),
    ("zeropp", {"hpz": False, "engine": "deepspeed-eager"}),
    ("zero3", {"engine": "fsdp2-eager"}),
]


@pytest.mark.parametrize(("name", "switches"), SWITCHED)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_kernels_of_one_name_are_alike_in_all_phases(name, switches, recompute):
    search = search_of(name, recompute=recompute, include_oom=True, **switches)
    ranking = rank_candidates(search)
    for alike in ranking.table.alike():
        known = {}
        for op in search.scenario.plan(ranking.table.take(alike)).operations:
            if not isinstance(op, Collective):
                sizes = [vars(op)[k] for k in vars(op) if k not in ("name", "waits_for")]
                sizes = [v.tolist() if isinstance(v, np.ndarray) else v for v in sizes]
                assert known.setdefault(op.name, sizes) == sizes, op.name


@pytest.mark.parametrize(("name", "switches"), SWITCHED)
def test_a_layout_is_the_same_alone_and_among_others(name, switches):
    search = search_of(name, **switches)
    ranking = rank_candidates(replace(search, every_configuration=True, include_oom=True))
    for row in range(0, len(ranking), max(len(ranking) // 8, 1)):
        among = ranking.prediction(row)
        alone = predict(search.scenario, among.configuration)
        assert alone.memory_terms_bytes == pytest.approx(among.memory_terms_bytes, rel=1e-9)
        assert alone.step_seconds == pytest.approx(among.step_seconds, rel=1e-9)
        assert alone.memory_bytes == pytest.approx(among.memory_bytes, rel=1e-9)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_faster_network_never_slows_a_step(name):
    search = search_of(name)
    machine = search.scenario.machine
    faster = replace(
        machine,
        links=tuple(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s.scaled(4.0))
            for link in machine.links
        ),
        ring_bandwidths=(),
    )
    slow = best_of_layout(search.on(replace(machine, ring_bandwidths=())), LAYOUTS[name])
    assert best_of_layout(search.on(faster), LAYOUTS[name]).step_seconds <= (
        slow.step_seconds * (1 + 1e-9)
    )


def test_one_rank_does_the_same_whatever_the_strategy_is_called():
    """There are no collectives, and kernels differ only in copies and in how gradients are held:
    FSDP2's shards are in fp32.

    The time in which the host issues an operation is left out: it is known of few engines.
    """
    times = {}
    for name in LAYOUTS:
        search = build_search(
            "tiny", 1, "perlmutter", strategy=name, global_batch=1, recompute="none"
        )
        job = replace(search.scenario.job, attention="flash")
        strategy = search.scenario.strategy
        strategy = replace(strategy, engine=replace(strategy.engine, issue_seconds=None))
        search = replace(search, scenario=replace(search.scenario, job=job, strategy=strategy))
        times[name] = rank_candidates(search).prediction(0).step_seconds
    assert max(times.values()) < 1.07 * min(times.values())


def test_axonn_with_one_stage_is_axonn():
    pipelined, plain = (search_of(name) for name in ("axonn-pipeline", "axonn"))
    a, b = best_of_layout(pipelined, "2x1x4x2"), best_of_layout(plain, "2x1x4x2")
    assert a.step_seconds == b.step_seconds and a.memory_terms_bytes == b.memory_terms_bytes


def test_sharded_states_take_less_memory_and_the_same_bytes():
    sharded = Axonn4D(sharded_optimizer=True)
    at = table(AXONN, x=1, y=1, z=4, data=4)
    a, b = (s.memory(MODEL, JOB, at.executed("none", 1)) for s in (AXONN, sharded))
    assert a["optimizer_states"] == 4 * b["optimizer_states"] and a["weights"] == b["weights"]
    ends = [s.plan(MODEL, JOB, at.executed("none", 1)).step_end.phases for s in (AXONN, sharded)]
    moved = [sent(end, at, but="norm")["data"] for end in ends]
    # fp32 gradients scattered and 2-byte weights gathered, instead of gradients both ways.
    assert moved[1] / moved[0] == pytest.approx((4 + 2) / 8)


def test_what_is_tried_or_assumed_where_nothing_is_said():
    assert strategy_named("megatron").n_virtual == (1, 2, 4)
    assert strategy_named("megatron", Switches(virtual_stages=3)).n_virtual == (3,)
    assert all(zero().engine.zero.gathers_blocks for zero in (zero3, zeropp))
