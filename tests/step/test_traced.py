"""A traced step beside its prediction."""

from dataclasses import replace

import pytest
from traces import traced_as_planned

from axonn_tune.api.searching import build_search
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.spec.traced import Trace, TracedOperation
from axonn_tune.step.explain import explain
from axonn_tune.step.traced import beside_trace

JOBS = {
    "zero3": ("shard=8", {"shard": 8}),
    "megatron": (
        "tensor=2,data=2,pipeline=2",
        {"tensor": 2, "context*data": 2, "pipeline": 2},
    ),
}


def explanation_of(strategy):
    options = {"global_batch": 16, "micro_batch": 1, "recompute": "none", "strategy": strategy}
    search = build_search("llama3-8b", 8, "dgx-h100", include_oom=True, **options)
    return explain(best_of_layout(search, JOBS[strategy][0]), with_sensitivities=False)


@pytest.mark.parametrize("strategy", JOBS)
def test_a_program_that_does_what_the_plan_says_leaves_nothing_over(strategy):
    explanation = explanation_of(strategy)
    lines = beside_trace(explanation, traced_as_planned(explanation, JOBS[strategy][1]))
    assert all(line.is_on_both_sides for line in lines)
    for line in lines:
        assert line.traced_calls == line.predicted_calls
        assert line.traced_seconds == pytest.approx(2 * line.predicted_seconds, rel=1e-6)
    planned = sum(op.total_seconds for op in explanation.operations if op.kind != "host")
    assert sum(line.predicted_seconds for line in lines) == pytest.approx(planned)


def test_calls_that_share_a_name_are_found_by_the_bytes_of_each():
    """DeepSpeed gathers its vectors one by one after the update."""
    search = build_search("llama3-8b", 8, "dgx-h100", strategy="zero3", engine="deepspeed")
    prediction = best_of_layout(replace(search, include_oom=True), "shard=8")
    explanation = explain(prediction, with_sensitivities=False)
    assert max(op.n_calls for op in explanation.operations if op.axis) > 100
    lines = beside_trace(explanation, traced_as_planned(explanation, {"shard": 8}))
    assert [line.size for line in lines if line.kind == "all_gather" and "other" in line.size] == []


def test_more_steps_count_as_one():
    explanation = explanation_of("zero3")
    trace = traced_as_planned(explanation, JOBS["zero3"][1])
    twice = Trace(trace.operations * 2, 2)
    lines = zip(beside_trace(explanation, twice), beside_trace(explanation, trace), strict=True)
    for two, one in lines:
        seconds = pytest.approx(one.traced_seconds)
        assert two.traced_seconds == seconds and two.traced_calls == one.traced_calls


def test_what_one_side_lacks_stays_alone():
    explanation = explanation_of("zero3")
    trace = traced_as_planned(explanation, JOBS["zero3"][1])
    kept = tuple(op for op in trace.operations if op.kind != "reduce_scatter")
    odd = (
        TracedOperation("gemm", "product", 1.0, (7, 11, 13)),
        TracedOperation("nccl", "all_to_all", 1.0, nbytes=5.0, n_ranks=4, group="mesh_ep"),
    )
    lines = beside_trace(explanation, replace(trace, operations=kept + odd))
    alone = {(line.kind, line.size) for line in lines if not line.predicted_names}
    assert alone == {("product", "7 x 11 x 13"), ("all_to_all", "mesh_ep of 4, other sizes")}
    missing = {line.kind for line in lines if not line.traced_names}
    assert missing == {"reduce_scatter"}


def test_products_of_unknown_sizes_stand_beside_those_that_are_left():
    explanation = explanation_of("zero3")
    trace = traced_as_planned(explanation, JOBS["zero3"][1])
    blind = tuple(replace(op, shape=()) if op.kind == "product" else op for op in trace.operations)
    (line,) = (
        line
        for line in beside_trace(explanation, replace(trace, operations=blind))
        if line.kind == "product"
    )
    planned = sum(op.total_seconds for op in explanation.operations if op.kind.startswith("GEMM"))
    assert line.predicted_seconds == pytest.approx(planned)
    assert line.traced_seconds == pytest.approx(2 * planned)


def test_other_bucket_sizes_are_one_line_for_their_group():
    explanation = explanation_of("zero3")
    trace = traced_as_planned(explanation, JOBS["zero3"][1])
    cut = tuple(
        replace(op, nbytes=op.nbytes / 3) if op.kind == "all_gather" else op
        for op in trace.operations
    )
    lines = beside_trace(explanation, replace(trace, operations=cut))
    gathers = [line for line in lines if line.kind == "all_gather"]
    assert [line.size for line in gathers] == ["shard (8), other sizes"]


def test_the_description_chooses_between_groups_of_one_size():
    explanation = explanation_of("megatron")
    trace = traced_as_planned(explanation, JOBS["megatron"][1])
    lines = beside_trace(explanation, trace)
    groups = {line.size.split(" (")[0] for line in lines if line.kind == "all_gather"}
    assert groups == {"tensor", "context*data"}
