"""A step as a timeline: it is as long as predicted, and nothing starts before what it needs."""

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from build import LAYOUTS_OF_64

from axonn_tune.api.searching import build_search
from axonn_tune.report.trace import trace_document
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.search.rank import rank_candidates
from axonn_tune.simulate.durations import N_KINDS, PassSeconds
from axonn_tune.simulate.pipeline import passes, pipeline_seconds
from axonn_tune.simulate.pipeline_schedule import PipelineShape, source_of
from axonn_tune.spec.measurement import Operation
from axonn_tune.step.explain import explain_played
from axonn_tune.step.player import Player, players_of
from axonn_tune.step.timeline import (
    drawable_microsteps,
    drawn_passes,
    pipelined_timeline,
    sequential_timeline,
    step_timeline,
)


def timeline_of(strategy, **limits):
    search = build_search("5b", 64, global_batch=128, strategy=strategy)
    prediction = best_of_layout(search, LAYOUTS_OF_64[strategy])
    return prediction, step_timeline(prediction, **limits)


@pytest.mark.parametrize("strategy", LAYOUTS_OF_64)
def test_a_timeline_is_as_long_as_the_predicted_step(strategy):
    prediction, timeline = timeline_of(strategy)
    assert timeline.seconds == pytest.approx(prediction.step_seconds, rel=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "zb-h1"},
        {"schedule": "dualpipe"},
        {"stage_layout": "Et*7|t*6|t*6|t*5L"},
        {"stage_layout": "E|t*4|t*3|t*3|t*3|t*5|t*4|t*2L", "virtual_stages": 2},
    ],
)
def test_timelines_of_schedules_and_layouts_are_as_long_as_their_steps(options):
    given = {"strategy": "megatron", "virtual_stages": 1, **options}
    prediction = best_of_layout(
        build_search("5b", 64, global_batch=128, **given), LAYOUTS_OF_64["megatron"]
    )
    timeline = step_timeline(prediction)
    assert timeline.seconds == pytest.approx(prediction.step_seconds, rel=1e-9)
    assert timeline.waits_for


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("grid", "virtual_stages"), [("data=16,expert=8", 1), ("data=4,pipeline=4,expert=4", 4)]
)
def test_steps_of_experts_are_as_long_as_their_timelines_and_explanations(
    grid, virtual_stages, overlaps
):
    """With overlap, passes of the warm-up and of the drain take longer than all others."""
    options = {"overlaps_experts": True} if overlaps else {}
    search = build_search(
        "qwen3-30b-a3b", 16, global_batch=128, strategy="megatron", machine="dgx-h100",
        virtual_stages=virtual_stages, micro_batch=1, recompute="none", **options,
    )  # fmt: skip
    prediction = best_of_layout(search, grid)
    expected = pytest.approx(prediction.step_seconds, rel=1e-9)
    assert step_timeline(prediction).seconds == expected
    player = Player(prediction)
    played = explain_played(player)
    exposed = sum(cost.exposed_seconds for cost in played.operations)
    assert exposed == pytest.approx(prediction.exposed_communication_seconds, rel=1e-6)


@pytest.mark.parametrize("strategy", LAYOUTS_OF_64)
def test_a_stream_does_one_thing_at_a_time(strategy):
    _, timeline = timeline_of(strategy, most_layers=3, most_microsteps=4)
    streams = defaultdict(list)
    for op in timeline.operations:
        streams[op.stream].append((op.start_seconds, op.end_seconds))
    for spans in streams.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end - 1e-12


@pytest.mark.parametrize("strategy", LAYOUTS_OF_64)
def test_nothing_starts_before_the_latest_of_what_it_needs(strategy):
    _, timeline = timeline_of(strategy, most_layers=3, most_microsteps=4)
    latest = {}
    n_needs = 0
    for op in sorted(timeline.operations, key=lambda op: op.start_seconds):
        for name in timeline.waits_for.get(op.name, ()):
            if name in latest:
                n_needs += 1
                assert op.start_seconds >= latest[name].end_seconds - 1e-12
        latest[op.name] = op
    assert n_needs > 10


def test_a_shorter_timeline_has_fewer_equal_layers_and_the_same_kinds_of_work():
    _, whole = timeline_of("axonn")
    _, short = timeline_of("axonn", most_layers=2, most_microsteps=1)
    assert len(short.operations) < len(whole.operations) / 5
    assert {op.name for op in short.operations} == {op.name for op in whole.operations}
    assert sum(op.name == "optimizer.step" for op in short.operations) == 1


def test_virtual_stages_take_micro_steps_in_rounds():
    options = {"virtual_stages": 2, "fix": {"pipeline": 4}}
    search = build_search("5b", 64, global_batch=128, strategy="megatron", **options)
    prediction = rank_candidates(search).prediction(0)
    assert prediction.configuration.n_virtual == 2
    timeline = step_timeline(prediction, 2, 3)
    micro_batches = {op.name.split()[1] for op in timeline.operations if "pass" in op.kind}
    assert micro_batches == {"0", "1", "2", "3"}
    whole = step_timeline(prediction)
    assert whole.seconds == pytest.approx(prediction.step_seconds)


def test_only_kernels_count_their_operations():
    """A pass holds kernels, which are drawn on their own; its work is not counted twice."""
    _, timeline = timeline_of("megatron")
    of_passes = [op for op in timeline.operations if op.stream.startswith("pipeline rank")]
    assert of_passes and {(op.flops, op.nbytes) for op in of_passes} == {(0.0, 0.0)}


@pytest.mark.parametrize("machine", ["dgx2-1ib", "perlmutter"])
def test_exposed_collectives_of_the_first_stage_lengthen_the_step(machine):
    options = {"strategy": "megatron", "virtual_stages": 1, "machine": machine, "dtype": "fp16"}
    search = build_search("5b", 64, global_batch=128, **options)
    prediction = best_of_layout(search, LAYOUTS_OF_64["megatron"])
    timeline = step_timeline(prediction)
    assert any(op.kind == "exposed collectives" for op in timeline.operations)
    assert timeline.seconds == pytest.approx(prediction.step_seconds, rel=1e-9)


@pytest.mark.parametrize("machine", ["perlmutter", "dgx-b200"])
@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_exposed_collectives_of_a_pipeline_add_up(machine, virtual_stages):
    """The collectives of the passes that synchronise the step are among them."""
    options = {"strategy": "megatron", "virtual_stages": virtual_stages, "machine": machine}
    search = build_search("5b", 64, global_batch=128, **options)
    prediction = best_of_layout(search, LAYOUTS_OF_64["megatron"])
    explained = explain_played(Player(prediction))
    exposed = sum(op.exposed_seconds for op in explained.operations)
    assert exposed == pytest.approx(prediction.exposed_communication_seconds, rel=1e-6)
    assert any(op.name.startswith("gradient") and op.axis for op in explained.operations)


def test_pipelines_that_share_a_plan_have_queues_of_their_own():
    """Kernels of the second layout wait in one queue on H100, those of the first do not."""
    options = {"strategy": "megatron", "virtual_stages": 2, "machine": "dgx-h100"}
    search = build_search("5b", 64, global_batch=128, **options)
    layouts = ("tensor=1,data=16,pipeline=4", "tensor=4,data=4,pipeline=4")
    predictions = [best_of_layout(search, layout) for layout in layouts]
    sharing = [replace(each, scenario=predictions[0].scenario) for each in predictions]
    for player, prediction in zip(players_of(sharing), predictions, strict=True):
        n_micro = prediction.n_microsteps
        timeline = pipelined_timeline(player, player.plan.pipeline, n_micro)
        assert timeline.seconds == pytest.approx(prediction.step_seconds, rel=1e-9)


@pytest.mark.parametrize(("most_micro_batches", "n_micro"), [(1000, 8), (7, 4), (3, 0)])
def test_a_pipeline_is_drawn_for_two_rounds_of_micro_batches_at_most(most_micro_batches, n_micro):
    prediction, _ = timeline_of("megatron")
    per_micro_batch = 2 * 4 * prediction.configuration.n_virtual
    drawn = drawn_passes(Player(prediction), most_micro_batches * per_micro_batch)
    assert (drawn[1] if drawn else 0) == n_micro


def test_a_trace_draws_about_as_many_operations_as_it_may():
    search = build_search("5b", 64, global_batch=1024, micro_batch=1)
    prediction = best_of_layout(search, "1x4x8x2")
    n_micro = drawable_microsteps(prediction, 5000)
    assert 1 < n_micro < prediction.n_microsteps
    n_drawn = len(step_timeline(prediction, None, n_micro).operations)
    assert 0.5 * 5000 < n_drawn < 1.1 * 5000
    assert drawable_microsteps(prediction, 10**9) == prediction.n_microsteps


def test_passes_of_a_pipeline_end_when_the_pipeline_does():
    random = np.random.default_rng(1)
    for n_stages, n_virtual, n_micro in ((2, 1, 5), (4, 1, 8), (4, 2, 8), (8, 1, 3)):
        seconds = random.uniform(1.0, 2.0, N_KINDS)
        beside = 0.7 if n_virtual > 1 else 0.0
        shape = PipelineShape(n_stages, n_virtual)
        every = passes(shape, n_micro, PassSeconds.equal(seconds), 0.1, beside_seconds=beside)
        end = max(each.end_seconds for each in every)
        column, transfer = PassSeconds.equal(seconds[:, None]), np.array([0.1])
        whole = pipeline_seconds(
            shape, n_micro, column, transfer, beside_seconds=np.array([beside])
        )
        assert end == pytest.approx(float(whole[0]))
        assert any(each.is_sent_beside for each in every) == (beside > 0)
        last = n_stages * n_virtual - 1
        arrivals = {(e.direction, e.stage, e.micro_batch): e.arrival_seconds for e in every}
        for each in every:
            source = source_of(each.direction, each.stage, each.micro_batch, last)
            if source is not None and source[1] != each.stage:
                assert each.start_seconds >= arrivals[source] - 1e-9
        assert len(every) == 2 * n_stages * n_virtual * n_micro
        assert len({(e.stage, e.direction, e.micro_batch) for e in every}) == len(every)


def test_the_rank_of_the_last_stage_works_during_its_passes():
    _, timeline = timeline_of("megatron")
    last = "pipeline rank 3"
    passes_of_last = [op for op in timeline.operations if op.stream == last]
    kernels = [op for op in timeline.operations if op.stream == "compute"]
    end = max(op.end_seconds for op in timeline.operations if op.stream.startswith("pipeline rank"))
    within = [op for op in kernels if op.end_seconds <= end]
    assert len(within) > 0.9 * len(kernels)
    for op in within:
        assert any(
            p.start_seconds - 1e-9 <= op.start_seconds and op.end_seconds <= p.end_seconds + 1e-9
            for p in passes_of_last
        )


def test_a_trace_draws_flows_from_what_was_needed():
    def op(name, stream, start, end):
        return Operation(name, stream, "kind", 1.0, 0.0, start, end)

    steps = [
        op("gather", "z", 0.0, 1.0),
        op("product", "compute", 1.0, 2.0),
        op("gather", "z", 1.0, 3.0),
        op("product", "compute", 3.0, 4.0),
    ]
    waits_for = {"product": ("gather", "never issued")}
    document = trace_document({"predicted": steps, "measured": steps}, waits_for)
    events = json.loads(json.dumps(document))["traceEvents"]
    flows = [e for e in events if e["ph"] in "sf"]
    assert len(flows) == 2 * 4  # two products in each of two steps, a begin and an end each
    for begin, end in zip(flows[::2], flows[1::2], strict=True):
        assert (begin["ph"], end["ph"], begin["id"]) == ("s", "f", end["id"])
        source, target = (
            next(
                e
                for e in events
                if e["ph"] == "X"
                and (e["pid"], e["tid"]) == (flow["pid"], flow["tid"])
                and e["ts"] <= flow["ts"] < e["ts"] + e["dur"]
            )
            for flow in (begin, end)
        )
        assert (source["name"], target["name"]) == ("gather", "product")
        assert source["ts"] + source["dur"] <= target["ts"]
    assert len({e["id"] for e in flows}) == 4
    rows = {(e["pid"], e["args"]["name"]): e["tid"] for e in events if e["name"] == "thread_name"}
    assert rows[0, "compute"] == 0 and (1, "communication over z") in rows


def test_one_micro_step_is_drawn_however_many_operations_it_has():
    prediction = best_of_layout(build_search("20b", 16, global_batch=64, micro_batch=1), "1x1x16x1")
    assert prediction.n_microsteps > 1
    assert drawable_microsteps(prediction, 1) == 1


def test_candidates_that_share_a_plan_are_explained_and_drawn_as_each_alone():
    search = build_search("5b", 32, global_batch=128, every_configuration=True)
    predictions = rank_candidates(search).top(6)
    players = players_of(predictions)
    assert len({id(player.plan) for player in players}) < len(players)
    for player, prediction in zip(players, predictions, strict=True):
        alone = Player(prediction)
        together = {cost.name: cost for cost in explain_played(player).operations}
        for cost in explain_played(alone).operations:
            same = together.pop(cost.name)
            assert (same.shape, same.n_calls) == (cost.shape, cost.n_calls)
            assert same.total_seconds == pytest.approx(cost.total_seconds)
            assert same.exposed_seconds == pytest.approx(cost.exposed_seconds, abs=1e-12)
        assert not together
        drawn, expected = (sequential_timeline(each.shortened(2), 1) for each in (player, alone))
        assert [op.name for op in drawn.operations] == [op.name for op in expected.operations]
        assert drawn.seconds == pytest.approx(expected.seconds)


@pytest.mark.parametrize(
    ("model", "options", "layout"),
    [
        ("5b", {"strategy": "axonn-pipeline"}, "1x1x4x2x2"),
        ("5b", {"virtual_stages": 2}, "tensor=2,data=4,pipeline=2"),
        ("5b", {"virtual_stages": 1, "schedule": "zb-h1"}, "tensor=2,data=2,pipeline=4"),
        ("5b", {"virtual_stages": 1, "schedule": "dualpipe"}, "tensor=2,data=2,pipeline=4"),
        ("mixtral-8x7b", {"virtual_stages": 1}, "tensor=2,data=4,pipeline=2,expert=4"),
    ],
)
def test_axes_together_expose_what_the_prediction_does(model, options, layout):
    options = {"strategy": "megatron", "global_batch": 64, "micro_batch": 1, **options}
    prediction = best_of_layout(build_search(model, 16, "dgx-h100", **options), layout)
    exposed = explain_played(Player(prediction)).exposed_seconds_by_axis
    assert sum(exposed.values()) == pytest.approx(prediction.exposed_communication_seconds)
