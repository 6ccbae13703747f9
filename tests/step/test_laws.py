"""Laws of one configuration: alone as among others, taken apart and put together again."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from build import (
    alone,
    every_table,
    group_size,
    layout_of,
    number,
    operations,
    plan_of,
    play_at_once,
    prediction_of,
    ranking_of,
    search_of,
    times_of,
    times_on,
)
from worlds import BY_MATRIX, SMALL_BUCKETS, machine_of, quantity

from axonn_tune.spec.job import Job
from axonn_tune.spec.links import Steps
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Collective, Gemm
from axonn_tune.spec.points import LinkPoint, StepPoint
from axonn_tune.spec.resources import resources
from axonn_tune.step.explain import explain
from axonn_tune.step.player import Player
from axonn_tune.step.timeline import drawn_passes, step_timeline
from axonn_tune.strategies.axonn.axonn4d import AXONN, Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.zero.zero import zero1, zero2, zero3, zero_topo, zeropp

MODEL = Model("m", 6, 256, 8, 1024, 128)
JOB = Job(8, 16, 128)
PIPELINED = Axonn4D(pipelined=True)
MEGATRON = Megatron3D(engine=SMALL_BUCKETS)
SHARING = [
    Axonn4D(False, True, True, "ulysses_ring"),
    Megatron3D(context_kind="ulysses_ring", shards_gradients=True),
]
ZERO = [zero1(), zero2(), zero3(), zeropp(), zero_topo()]
STRATEGIES = [AXONN, PIPELINED, MEGATRON, *SHARING, *ZERO]
# Memory so slow that kernels over what a rank stores weigh as much as products.
SLOW_MEMORY = machine_of(memory_bandwidth=2e10, slowdown=0.2, jitter=0.02)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_every_candidate_takes_as_long_alone_as_among_others(strategy, recompute):
    search = search_of(MODEL, JOB, SLOW_MEMORY, strategy)
    for table in every_table(search):
        together = times_of(search, table, recompute)
        for row in range(0, len(table), 5):
            one = times_of(search, alone(table, row), recompute)[:, 0]
            assert one == pytest.approx(together[:, row], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("strategy", [AXONN, MEGATRON, zeropp()])
def test_candidates_may_be_played_in_parts(strategy, monkeypatch):
    """However many are played at once, each takes as long."""
    search = search_of(MODEL, JOB, machine_of(slowdown=0.2), strategy)
    tables = every_table(search)
    together = [times_of(search, table) for table in tables]
    play_at_once(monkeypatch, 3)
    for table, expected in zip(tables, together, strict=True):
        assert times_of(search, table) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        (AXONN, {"x": 2, "y": 1, "z": 2, "data": 2}),
        (PIPELINED, {"z": 2, "data": 2, "pipeline": 2}),
        (MEGATRON, {"tensor": 2, "data": 2, "pipeline": 2}),
        (MEGATRON, {"tensor": 2, "context": 2, "data": 2}),
        (zero3(), {"shard": 4, "replica": 2}),
        (zero3(BY_MATRIX), {"shard": 8}),
        (zeropp(), {"secondary": 4, "across": 2}),
        (zero_topo(), {"weights": 2, "gradients": 2, "states": 2}),
    ],
)
@pytest.mark.parametrize("gap", [0.0, 1e-5])
@pytest.mark.parametrize("issue", [0.0, 1e-4])
def test_an_explanation_is_the_step_taken_apart(strategy, sizes, gap, issue):
    """Kernels, waits and the host make the step; each row is what the plan says of it."""
    machine = machine_of(slowdown=0.0)
    kernels = replace(machine.kernels, gap_seconds=quantity(gap), issue_seconds=quantity(issue))
    machine = replace(machine, kernels=kernels)
    search = search_of(MODEL, JOB, machine, strategy, micro_batch=1, recomputes=("full",))
    prediction = prediction_of(search, layout_of(strategy, **sizes))
    explained = explain(prediction, with_sensitivities=False)
    rows = {op.name: op for op in explained.operations}
    assert len(rows) == len(explained.operations)
    for op in explained.operations:
        assert op.total_seconds > 0 and op.seconds_per_call > 0 and op.rate_per_s > 0
        assert op.total_seconds == pytest.approx(op.n_calls * op.seconds_per_call, rel=1e-9)
        assert -1e-12 <= op.exposed_seconds <= op.total_seconds * (1 + 1e-9) + 1e-12
        if op.axis:
            assert op.hidden_seconds == pytest.approx(op.total_seconds - op.exposed_seconds)
        else:
            assert op.exposed_seconds == op.hidden_seconds == 0.0
    by_axis = explained.exposed_seconds_by_axis
    exposed = sum(op.exposed_seconds for op in explained.operations)
    assert sum(by_axis.values()) == pytest.approx(exposed)
    for axis, seconds in by_axis.items():
        own = [op.exposed_seconds for op in explained.operations if op.axis == axis]
        assert seconds == pytest.approx(sum(own))
    busy = sum(op.total_seconds for op in explained.operations if not op.axis)
    parts = busy + exposed + explained.host_seconds
    if "pipeline" not in sizes:
        assert parts == pytest.approx(prediction.step_seconds, rel=1e-9)
    elif not issue:
        # The work of a rank of the last stage, without its waits for other ranks.
        assert busy + exposed <= prediction.step_seconds
        own = busy + explained.host_seconds
        assert prediction.compute_seconds == pytest.approx(own, rel=1e-9)
    if not issue:
        n_kernels = sum(op.n_calls for op in explained.operations if not op.axis)
        assert explained.host_seconds == pytest.approx(n_kernels * gap)


@pytest.mark.parametrize(
    ("strategy", "sizes", "n_micro"),
    [
        (PIPELINED, {"z": 2, "data": 2, "pipeline": 2}, 4),
        (MEGATRON, {"tensor": 4, "pipeline": 2}, 16),
    ],
)
def test_transfers_between_stages_take_a_latency_and_their_bytes(strategy, sizes, n_micro):
    """One hop to the neighbour; the ranks that send at once share the links of their node."""
    machine = machine_of()
    search = search_of(MODEL, JOB, machine, strategy, micro_batch=1, recomputes=("none",))
    scenario = replace(search.scenario, strategy=replace(strategy, n_virtual=(1,)))
    search = replace(search, scenario=scenario)
    prediction = prediction_of(search, layout_of(strategy, **sizes))
    rows = {op.name: op for op in explain(prediction, with_sensitivities=False).operations}
    transfer = rows["pipeline.send_recv"]
    nbytes = 128 * 256 * 2.0 / sizes.get("tensor", 1)
    assert transfer.nbytes == nbytes
    # Forward and backward, once for each micro-batch.
    assert transfer.n_calls == 2 * n_micro
    if strategy is MEGATRON:
        # The four ranks of a node send at once through its link of 80e9 bytes/s.
        seconds = 1e-5 + nbytes / (80e9 / 4)
    else:
        # Stages are two ranks apart, each pair inside a node.
        seconds = 3e-6 + nbytes / 300e9
    assert transfer.seconds_per_call == pytest.approx(seconds)
    assert transfer.total_seconds == pytest.approx(2 * n_micro * seconds)
    assert 0 <= transfer.exposed_seconds <= transfer.total_seconds


def test_the_rate_of_a_measured_collective_is_what_its_rings_carried():
    """Measured kinds show bytes over time; others the bandwidth that they get."""
    sizes, seconds = (2**10, 2**26), (1e-4, 2e-2)
    points = tuple(
        LinkPoint(kind, 1, 4, 1, True, n, s)
        for kind in ("all_gather", "all_reduce")
        for n, s in zip(sizes, seconds, strict=True)
    )
    machine = replace(machine_of(), link_points=points)
    search = search_of(MODEL, replace(JOB, n_gpus=4), machine, AXONN, recomputes=("none",))
    for layout in ({"z": 4}, {"x": 4}, {"data": 4}):
        prediction = prediction_of(search, layout_of(AXONN, **layout))
        explained = explain(prediction, with_sensitivities=False)
        rows = [op for op in explained.operations if op.axis]
        assert rows
        for op in rows:
            passes = {"all_reduce": 2.0}.get(op.kind, 1.0)
            n_issues = op.n_calls
            moved = passes * 3 / 4 * op.nbytes
            if op.kind == "reduce_scatter":
                assert op.rate_per_s == 300e9
            elif op.name != "gradient.all_reduce":
                per_issue = op.total_seconds / n_issues
                assert op.rate_per_s == pytest.approx(moved / per_issue)
                between = np.interp(op.nbytes, sizes, seconds)
                assert per_issue == pytest.approx(between)


def test_the_rate_of_measured_steps_is_what_their_ring_carried():
    points = (StepPoint("", 0, 2.0**10, 1e-4), StepPoint("", 0, 2.0**26, 2e-2))
    inner, outer = machine_of().links
    outer = replace(outer, ring_steps=Steps("measured", "made up", points))
    machine = replace(machine_of(), links=(inner, outer))
    search = search_of(MODEL, replace(JOB, n_gpus=16), machine, AXONN, recomputes=("none",))
    explained = explain(prediction_of(search, layout_of(AXONN, z=16)), with_sensitivities=False)
    of_rings = [op for op in explained.operations if op.axis and op.kind != "all_reduce"]
    assert {op.kind for op in of_rings} == {"all_gather", "reduce_scatter"}
    for op in of_rings:
        assert op.rate_per_s == pytest.approx(15 / 16 * op.nbytes / op.seconds_per_call)


def test_rates_of_kernels_are_flops_and_bytes_over_their_time():
    search = search_of(MODEL, JOB, machine_of(), AXONN, micro_batch=1, recomputes=("none",))
    layout = layout_of(AXONN, x=2, y=2, z=2)
    explained = explain(prediction_of(search, layout), with_sensitivities=False)
    plan = plan_of(AXONN, MODEL, JOB, x=2, y=2, z=2)
    by_name = {op.name: op for op in operations(plan.microstep, plan.step_end)}
    for row in explained.operations:
        op = by_name[row.name]
        if isinstance(op, Gemm):
            m, n, k = (round(number(size)) for size in (op.m, op.n, op.k))
            assert row.shape == f"{m} x {n} x {k}" and row.kind == f"GEMM {op.mode}"
            assert row.rate_per_s == pytest.approx(2 * m * n * k / row.seconds_per_call)
            assert row.bound_by == "compute"
        elif row.kind == "memory-bound":
            assert row.nbytes == number(op.nbytes) and row.bound_by == "memory"
            assert row.rate_per_s == pytest.approx(row.nbytes / row.seconds_per_call)
        elif row.kind == "attention":
            heads, d = 8 / 2, 32
            assert row.shape == f"1 x {heads:.0f} heads x 128 x {d}"
            flops = (8 if op.backward else 4) * heads * 128**2 * d
            assert row.rate_per_s == pytest.approx(flops / row.seconds_per_call)
    calls = {row.name: row.n_calls for row in explained.operations}
    n_micro = 16 // 2
    assert calls["forward.qkv.gemm"] == 6 * n_micro and calls["optimizer.step"] == 1


def test_sensitivities_are_predictions_on_a_machine_with_more_of_one_thing():
    machine = machine_of(slowdown=0.2, jitter=0.02)
    search = search_of(MODEL, JOB, machine, AXONN, micro_batch=1, recomputes=("none",))
    layout = layout_of(AXONN, x=2, z=2, data=2)
    prediction = prediction_of(search, layout)
    explained = explain(prediction)
    saved = {s.resource: s.saved_seconds for s in explained.sensitivities}
    for resource in resources(machine):
        better = prediction_of(search.on(resource.improved(1.1)), layout)
        expected = prediction.step_seconds - better.step_seconds
        assert saved[resource.name] == pytest.approx(expected, abs=1e-12)
    assert list(saved.values()) == sorted(saved.values(), reverse=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_is_its_terms_with_fragmentation_and_reserve(strategy):
    """Reserved are 1e9 bytes, and a twentieth of all that is allocated."""
    search = search_of(MODEL, JOB, machine_of(), strategy)
    ranking = ranking_of(search)
    prediction = ranking.prediction(len(ranking) // 2)
    terms = dict(prediction.memory_terms_bytes)
    assert terms.pop("reserved") == 1e9
    fragmentation = terms.pop("fragmentation")
    assert fragmentation == pytest.approx(0.05 * sum(terms.values()))
    total = 1.05 * sum(terms.values()) + 1e9
    assert prediction.memory_bytes == pytest.approx(total)
    assert prediction.memory_terms_bytes[prediction.largest_memory_term] == max(
        prediction.memory_terms_bytes.values()
    )


# Timelines of pipelines --------------------------------------------------------------------------


def test_what_the_first_stage_synchronises_is_drawn_behind_the_passes():
    """Weights and gradients of its blocks over four replicas, with slow links between."""
    machine = machine_of(bandwidths=(30e9, 1e9))
    strategy = replace(MEGATRON, n_virtual=(1,))
    search = search_of(MODEL, JOB, machine, strategy, micro_batch=1, recomputes=("none",))
    prediction = prediction_of(search, layout_of(strategy, data=4, pipeline=2))
    timeline = step_timeline(prediction)
    assert timeline.seconds == pytest.approx(prediction.step_seconds)
    drawn = {op.name: op for op in timeline.operations}
    sync = drawn["synchronisation of the first stage"]
    passes = [op for op in timeline.operations if op.kind.endswith(" pass")]
    assert sync.start_seconds == max(op.end_seconds for op in passes)
    assert sync.end_seconds > sync.start_seconds
    after = [op for op in timeline.operations if op.start_seconds >= sync.end_seconds]
    assert "optimizer.step" in {op.name for op in after}
    # A rank with its own replica only has nothing to synchronise.
    alone = search_of(
        MODEL, replace(JOB, n_gpus=2), machine, strategy, micro_batch=1, recomputes=("none",)
    )
    timeline = step_timeline(prediction_of(alone, layout_of(strategy, pipeline=2)))
    assert "synchronisation of the first stage" not in {op.name for op in timeline.operations}


@pytest.mark.parametrize(("n_virtual", "global_batch"), [(1, 16), (3, 16), (1, 3)])
def test_a_drawing_of_passes_has_no_more_than_it_may(n_virtual, global_batch):
    strategy = replace(MEGATRON, n_virtual=(n_virtual,))
    job = Job(2, global_batch, 128)
    search = search_of(MODEL, job, machine_of(), strategy, micro_batch=1, recomputes=("none",))
    prediction = prediction_of(search, layout_of(strategy, pipeline=2))
    n_micro = prediction.n_microsteps
    of_round = 2 * 2 * n_virtual * 2  # both directions of two micro-batches on both ranks' stages
    for most in (1, of_round - 1, of_round, 2 * of_round - 1, 2 * of_round, 10**9):
        drawn = drawn_passes(Player(prediction), most)
        if drawn is None:
            assert most < of_round
            continue
        timeline, micro_batches = drawn
        assert most >= of_round
        assert len(timeline.operations) == 2 * 2 * n_virtual * micro_batches <= max(most, of_round)
        assert micro_batches == min(n_micro, 2 * min(most // of_round, 2))


def test_without_stages_there_are_no_passes_to_draw():
    search = search_of(MODEL, JOB, machine_of(), MEGATRON, micro_batch=1)
    assert drawn_passes(Player(prediction_of(search, layout_of(MEGATRON, data=8))), 10**9) is None


@pytest.mark.parametrize("most", [1, 2, 5, None])
def test_a_timeline_of_some_layers_is_that_of_a_smaller_model(most):
    """Equal layers repeat: drawing few of them is a model of fewer."""
    search = search_of(MODEL, JOB, machine_of(), AXONN, micro_batch=1, recomputes=("none",))
    layout = layout_of(AXONN, x=2, z=2, data=2)
    timeline = step_timeline(prediction_of(search, layout), most, 1)
    n_layers = 6 if most is None else min(most, 5) + 1
    smaller = search_of(
        replace(MODEL, n_layers=n_layers), replace(JOB, global_batch=4), machine_of(), AXONN,
        micro_batch=1, recomputes=("none",),
    )  # fmt: skip
    expected = step_timeline(prediction_of(smaller, layout))
    names = [op.name for op in timeline.operations if not op.name.startswith(("gradient", "opt"))]
    assert names == [
        op.name for op in expected.operations if not op.name.startswith(("gradient", "opt"))
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_timeline_issues_what_the_plan_says_and_shows_its_sizes(strategy):
    """One rank's operations, those over one rank or over nothing left out."""
    layouts = {
        "axonn": {"x": 2, "z": 2, "data": 2},
        "zero1": {"data": 8},
        "zero2": {"data": 8},
        "zero3": {"shard": 4, "replica": 2},
        "zeropp": {"secondary": 4, "across": 2},
        "zero-topo": {"weights": 2, "gradients": 2, "states": 2},
        "axonn-pipeline": {"x": 2, "z": 2, "data": 2},
        "megatron": {"tensor": 2, "data": 4},
    }
    sizes = layouts[strategy.name]
    gap = 3e-6
    machine = machine_of()
    machine = replace(machine, kernels=replace(machine.kernels, gap_seconds=quantity(gap)))
    search = search_of(MODEL, JOB, machine, strategy, micro_batch=1, recomputes=("none",))
    prediction = prediction_of(search, layout_of(strategy, **sizes))
    timeline = step_timeline(prediction)
    plan = plan_of(strategy, MODEL, JOB, **sizes)
    n_sync = 1 if plan.sync_microstep else 0
    parts = [plan.microstep] * (prediction.n_microsteps - n_sync)
    parts += [plan.sync_microstep] * n_sync + [plan.step_end]
    expected = []
    for part in parts:
        for op in operations(part):
            if isinstance(op, Collective):
                if group_size(plan, op.axis) > 1:
                    expected.append((op.name, op.axis, op.kind, number(op.nbytes), 0.0))
            elif hasattr(op, "flops"):
                kind = "gemm" if isinstance(op, Gemm) else "attention"
                if flops := number(op.flops):
                    expected.append((op.name, "compute", kind, 0.0, flops))
            elif number(op.nbytes) > 0:
                expected.append((op.name, "compute", "memory_bound", number(op.nbytes), 0.0))
    drawn = [(op.name, op.stream, op.kind, op.nbytes, op.flops) for op in timeline.operations]
    assert drawn == expected
    compute = [op for op in timeline.operations if op.stream == "compute"]
    for before, after in pairwise(compute):
        assert after.start_seconds - before.end_seconds >= gap * (1 - 1e-6)
    assert math.isclose(timeline.seconds, prediction.step_seconds, rel_tol=1e-2)


@pytest.mark.parametrize(("n_stages", "n_virtual"), [(2, 1), (2, 3), (4, 1)])
def test_a_pass_needs_the_one_before_it_of_its_micro_batch(n_stages, n_virtual):
    """Forward from stage to stage, at the last one around, and backward again."""
    strategy = replace(MEGATRON, n_virtual=(n_virtual,))
    model = replace(MODEL, n_layers=12)
    search = search_of(
        model, JOB, machine_of(), strategy, micro_batch=1, recomputes=("none",)
    )  # fmt: skip
    layout = layout_of(strategy, pipeline=n_stages, data=8 // n_stages)
    prediction = prediction_of(search, layout)
    waits = step_timeline(prediction).waits_for
    n_chunks = n_stages * n_virtual
    for micro in range(prediction.n_microsteps):
        passes = [f"forward {micro} of stage {stage}" for stage in range(n_chunks)]
        passes += [f"backward {micro} of stage {stage}" for stage in reversed(range(n_chunks))]
        assert passes[0] not in waits
        for before, after in pairwise(passes):
            assert waits[after] == (before,)


def test_what_is_prepared_on_one_machine_holds_on_another():
    """Machines with one thing more, and one of which every number is another."""
    machine = machine_of(slowdown=0.2, jitter=0.02)
    search = search_of(MODEL, JOB, machine, AXONN)
    (table,) = every_table(search)
    other = machine_of(
        bandwidths=(100e9, 9e9),
        latencies=(5e-6, 5e-5),
        rings=((1, 2, 77e9),),
        slowdown=0.5,
        jitter=0.1,
        peak=100e12,
        memory_bandwidth=5e11,
        modes=(1.0, 0.5, 0.7),
    )
    other = replace(other, link_points=(LinkPoint("all_gather", 1, 4, 1, True, 2**20, 1e-3),))
    for changed in (other, *(resource.improved(0.5) for resource in resources(machine))):
        expected = times_of(search.on(changed), table)
        assert times_on(search, table, changed) == pytest.approx(expected, rel=1e-12)
