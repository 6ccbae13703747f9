"""Measured operations: sums, medians, their comparison with a prediction, the trace."""

import json
from dataclasses import replace

import pytest
from recorded import LAST_STEP, MEASUREMENT

from axonn_tune.api.searching import build_search
from axonn_tune.report.run import run_document, run_text
from axonn_tune.report.trace import trace_document
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.measurement import COMPUTATION, Operation, exposed_seconds
from axonn_tune.spec.quantity import Quantity
from axonn_tune.step.explain import explain
from axonn_tune.step.timeline import step_timeline
from axonn_tune.validation.measured import operation_times


def search():
    return build_search("tiny", 2, "perlmutter", global_batch=1, micro_batch=1, recompute="none")


def test_the_warm_up_is_not_timed():
    assert MEASUREMENT.mean_step_seconds == 3.0 and MEASUREMENT.median_step_seconds == 3.0
    assert MEASUREMENT.operation_seconds["forward.qkv.gemm"] == 0.4
    short = replace(MEASUREMENT, steps=MEASUREMENT.steps[:2])
    assert short.mean_step_seconds == 85.0


def test_operations_are_joined_by_name_longest_first():
    explanation = explain(best_of_layout(search(), "2x1x1x1"))
    rows = operation_times(MEASUREMENT, explanation)
    names = ["forward.qkv.all_reduce", "forward.qkv.gemm", "unknown", "host"]
    assert [row.name for row in rows] == names
    all_reduce, gemm, unknown, host = rows
    assert (host.measured_seconds, host.predicted_seconds) == (0.1, 0.0)
    assert (gemm.n_calls, gemm.flops, gemm.axis, all_reduce.axis) == (2, 200.0, "", "x")
    predicted = {op.name: op.total_seconds for op in explanation.operations}
    assert gemm.predicted_seconds == pytest.approx(predicted["forward.qkv.gemm"], rel=1e-5)
    assert gemm.predicted_over_measured == pytest.approx(gemm.predicted_seconds / 0.4)
    assert unknown.predicted_seconds is None and unknown.predicted_over_measured is None


def over_x(name, kind="all_reduce"):
    return Operation(name, "x", kind, 1.0, 0.0, 0.0, 0.1)


def test_collectives_without_a_name_of_the_plan_are_compared_by_kind_and_axis():
    """What has a name of its own in the plan does not count among the others of its kind."""
    named = "forward.qkv.all_reduce"
    computation = Operation(COMPUTATION, "compute", COMPUTATION, 0.0, 0.0, 0.0, 0.1)
    last_step = (over_x(named), over_x("all_reduce over x"), computation)
    seconds = {op.name: 0.1 for op in last_step}
    steps = tuple(replace(step, operation_seconds=seconds) for step in MEASUREMENT.steps)
    measurement = replace(MEASUREMENT, last_step=last_step, steps=steps)
    explanation = explain(best_of_layout(search(), "2x1x1x1"))
    rows = {row.name: row for row in operation_times(measurement, explanation)}
    others = [op for op in explanation.operations if op.axis == "x" and op.name != named]
    predicted = rows["all_reduce over x"].predicted_seconds
    assert predicted == pytest.approx(sum(op.total_seconds for op in others), rel=1e-5)
    exposed = sum(op.exposed_seconds for op in explanation.operations)
    kernels = explanation.prediction.step_seconds - exposed
    assert rows[COMPUTATION].predicted_seconds == pytest.approx(kernels, rel=1e-5)


def test_without_a_profile_nothing_is_predicted():
    rows = operation_times(MEASUREMENT, None)
    assert all(row.predicted_seconds is None for row in rows)
    assert rows[0].measured_exposed_seconds == 1.0
    text = run_text(search().scenario, MEASUREMENT, rows, None, None)
    assert "no hardware profile" in text
    assert run_document(search().scenario, MEASUREMENT, rows, None)["prediction"] is None


def test_the_text_states_the_error_of_the_prediction():
    prediction = replace(best_of_layout(search(), "2x1x1x1"), step_seconds=2.4)
    text = run_text(
        search().scenario, MEASUREMENT, operation_times(MEASUREMENT, None), prediction, 1
    )
    assert "predicted 2.4 s on perlmutter (-20.0 % of the median)" in text
    assert "(3 more operations, 500.000 ms; --all shows them)" in text


def test_a_trace_has_a_row_for_each_stream_in_microseconds():
    document = json.loads(json.dumps(trace_document({"rank 0": LAST_STEP})))
    names = {
        e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"
    }
    events = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert [(names[e["tid"]], e["ts"], e["dur"]) for e in events[:2]] == [
        ("compute", 0.0, 250000.0),
        ("communication over x", 250000.0, 1000000.0),
    ]
    assert len(events) == len(LAST_STEP) and set(names.values()) == {
        "compute",
        "communication over x",
    }


def kernel(name, start, end):
    return Operation(name, "compute", "gemm", 0.0, 1.0, start, end)


def message(name, start, end):
    return Operation(name, "z", "all_gather", 1.0, 0.0, start, end)


def test_standstills_are_charged_to_what_ended_last_and_then_to_what_it_followed():
    operations = [
        message("first", 1.0, 3.0),
        kernel("a", 0.0, 2.0),
        message("second", 3.0, 4.5),
        kernel("b", 5.0, 6.0),
        message("late", 6.0, 7.0),
    ]
    exposed = exposed_seconds(operations, 8.0)
    assert exposed == {"host": 1.5, "first": 1.0, "second": 1.5, "late": 1.0}
    # The kernels and what is exposed make up the step.
    assert sum(exposed.values()) + 2.0 + 1.0 == 8.0


def test_a_hidden_collective_is_not_exposed_and_one_under_way_not_to_blame():
    operations = [
        message("hidden", 0.1, 0.9),
        message("under way", 0.5, 5.0),
        kernel("a", 0.0, 1.0),
        kernel("b", 2.0, 6.0),
    ]
    assert exposed_seconds(operations, 6.0) == {"host": 1.0}


def test_the_predicted_step_reads_as_a_recorded_one():
    chosen = build_search("tiny", 4, "perlmutter", global_batch=4, micro_batch=1, recompute="none")
    prediction = best_of_layout(chosen, "2x1x2x1")
    operations = step_timeline(prediction).operations
    ends = max(op.end_seconds for op in operations)
    assert ends == pytest.approx(prediction.step_seconds)
    exposed = exposed_seconds(operations, prediction.step_seconds)
    kernels = sum(op.seconds for op in operations if op.stream == "compute")
    assert sum(exposed.values()) + kernels == pytest.approx(prediction.step_seconds)
    explained = explain(prediction)
    for op in explained.operations:
        calls = [o for o in operations if o.name == op.name]
        assert len(calls) * max(op.n_calls // len(calls), 1) == op.n_calls
        assert sum(o.seconds for o in calls) == pytest.approx(op.total_seconds)


def test_the_host_takes_its_time_behind_each_kernel():
    chosen = build_search("tiny", 1, "perlmutter", global_batch=2, micro_batch=1, recompute="none")
    gap = 1e-3
    kernels = replace(
        chosen.scenario.machine.kernels, gap_seconds=Quantity(gap, "measured", "test")
    )
    slower = chosen.on(replace(chosen.scenario.machine, kernels=kernels))
    before, after = (best_of_layout(s, "1x1x1x1") for s in (chosen, slower))
    explained = explain(after)
    n_kernels = sum(op.n_calls for op in explained.operations)
    assert explained.host_seconds == pytest.approx(n_kernels * gap)
    assert after.step_seconds - before.step_seconds == pytest.approx(n_kernels * gap)
    assert [op.total_seconds for op in explained.operations] == pytest.approx(
        [op.total_seconds for op in explain(before).operations]
    )
    assert exposed_seconds(step_timeline(after).operations, after.step_seconds) == pytest.approx(
        {"host": n_kernels * gap}
    )


def test_a_host_that_issues_operations_slowly_bounds_the_step():
    chosen = build_search("tiny", 4, "perlmutter", global_batch=4, micro_batch=1, recompute="none")
    issue = 1e-3
    kernels = replace(
        chosen.scenario.machine.kernels, issue_seconds=Quantity(issue, "measured", "test")
    )
    slower = chosen.on(replace(chosen.scenario.machine, kernels=kernels))
    before, after = (best_of_layout(s, "2x1x2x1") for s in (chosen, slower))
    operations = step_timeline(after).operations
    assert after.step_seconds == pytest.approx(len(operations) * issue)
    assert after.exposed_communication_seconds == before.exposed_communication_seconds
    exposed = exposed_seconds(operations, after.step_seconds)
    busy = sum(op.seconds for op in operations if op.stream == "compute")
    assert sum(exposed.values()) + busy == pytest.approx(after.step_seconds)
    assert explain(after).host_seconds == pytest.approx(after.step_seconds - before.step_seconds)
