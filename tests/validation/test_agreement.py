"""Predicted against measured configurations: errors, causes, order, regret, limits, reports."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from figures import assert_drawn
from validations import GRIDS, THREE, operation, outcome, validation

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.json_files import load_json, save_json
from axonn_tune.report.figure import FORMATS, figure_bytes
from axonn_tune.report.validate import (
    agreement_text,
    junit_text,
    outcome_records,
    validation_figure,
)
from axonn_tune.spec.layout import grid_layout
from axonn_tune.spec.validation import Validation
from axonn_tune.validation.agreement import agreement
from axonn_tune.validation.limits import check_limits


def test_errors_are_signed_and_relative_to_the_median_measured_step():
    errors = [o.error_fraction for o in THREE.measured]
    assert errors == pytest.approx([-0.2, 0.1, 0.5])
    found = agreement(THREE)
    assert found.mape == pytest.approx(0.8 / 3) and found.bias == pytest.approx(0.4 / 3)
    assert found.worst.configuration.layout == grid_layout(1, 8, 1, 1)
    assert found.memory_mape == pytest.approx(0.5)


def test_the_memory_of_tensors_is_compared_with_that_of_tensors():
    """A GPU counts neither the fragmentation nor what its driver reserves."""
    ran = outcome("1x1x1x8", 1, 1.0, [1.0], memory=8e9)
    said = replace(ran.predicted, memory_bytes=14e9, allocated_bytes=10e9, allocator_bytes=10.5e9)
    ran = replace(ran, predicted=said, held_memory_bytes=9e9)
    assert ran.memory_error_fraction == pytest.approx(0.25)
    assert agreement(validation(ran)).memory_mape == pytest.approx(0.25)
    (record,) = outcome_records(validation(ran))
    assert (record["predicted_allocated_bytes"], record["measured_held_bytes"]) == (10e9, 9e9)


def test_regret_is_of_the_suggestion_against_the_best_measured():
    found = agreement(THREE)
    assert found.regret == pytest.approx(0.25) and found.best.configuration.layout == grid_layout(
        1, 1, 8, 1
    )
    failed = replace(THREE.outcomes[0], step_seconds=(), failure="killed")
    assert agreement(validation(failed, *THREE.outcomes[1:])).regret is None


def test_rank_correlations_are_those_of_the_orders():
    predicted, measured = (1.0, 2.0, 3.0, 4.0), (10.0, 30.0, 20.0, 40.0)
    rows = zip(GRIDS, predicted, measured, strict=False)
    found = agreement(validation(*(outcome(g, i, p, [m]) for i, (g, p, m) in enumerate(rows, 1))))
    # One of six pairs is the other way round; differences of ranks 0, 1, 1, 0.
    assert found.kendall == pytest.approx(4 / 6) and found.spearman == pytest.approx(0.8)
    assert agreement(validation(*THREE.outcomes[:2])).spearman is None


def test_nothing_ran():
    nothing = validation(THREE.outcomes[3])
    assert agreement(nothing) is None
    assert not any(check.holds for check in check_limits(None, 0.2, 0.1))
    assert "nothing ran" in agreement_text(nothing, None, [])


@pytest.mark.parametrize(
    ("predicted", "cause"), [(1.0, "forward.qkv.all_reduce"), (4.0, "forward.qkv.gemm")]
)
def test_the_cause_is_the_operation_that_adds_most_in_the_direction_of_the_error(predicted, cause):
    operations = [
        operation("forward.qkv.gemm", "", 0.5, 1.5),
        # Longer than predicted by two seconds, but hidden: only what is exposed counts.
        operation("backward.qkv.reduce_scatter", "z", 3.0, 1.0, 0.1, 0.1),
        operation("forward.qkv.all_reduce", "x", 1.0, 1.0, 0.9, 0.2),
    ]
    one = outcome("1x1x1x8", 1, predicted, [2.0], operations=operations)
    assert one.cause.name == cause
    text = agreement_text(validation(one), agreement(validation(one)), [])
    assert ("exposed forward.qkv.all_reduce -35.0 %" in text) == (predicted == 1.0)


def test_excesses_sum_up_to_the_error():
    operations = [
        operation("gemm", "", 0.5, 0.7),
        operation("all_reduce", "x", 2.0, 1.0, 1.4, 0.8),
        operation("host", "", 0.1, 0.0),
    ]
    total = sum(op.excess_seconds for op in operations)
    assert total == pytest.approx((0.7 + 0.8 + 0.0) - (0.5 + 1.4 + 0.1))


def test_limits():
    found = agreement(THREE)
    checks = check_limits(found, 0.3, 0.2)
    assert [check.holds for check in checks] == [True, False]
    assert checks[1].text == "FAILED  regret 25.0 % > 20 %"
    assert check_limits(found, None, None) == []


def test_a_report_reads_back_as_it_was_written(tmp_path):
    path = tmp_path / "report.json"
    rich = replace(
        THREE,
        outcomes=(
            replace(THREE.outcomes[0], operations=(operation("gemm", "", 0.1, 0.2),)),
            *THREE.outcomes[1:],
        ),
    )
    save_json(path, rich)
    assert load_json(path, Validation) == rich
    json.loads(path.read_text())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: malformed JSON"),
        ("{}", "missing"),
        ("[1]", "allowed"),
        ('{"model": 3}', "model"),
    ],
)
def test_a_broken_report_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(FileError, match=said) as error:
        load_json(path, Validation)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_an_outcome_has_either_steps_or_a_failure():
    with pytest.raises(InputError, match="give either"):
        outcome("1x1x1x8", 1, 1.0, [])


def test_junit_counts_failed_runs_and_broken_limits():
    text = junit_text(THREE, check_limits(agreement(THREE), 0.3, 0.2))
    suite = ElementTree.fromstring(text).find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("6", "2")
    messages = [failure.get("message") for failure in suite.iter("failure")]
    assert messages == ["rank 3 failed: out of memory", "FAILED  regret 25.0 % > 20 %"]


def test_records_have_a_row_per_configuration():
    records = outcome_records(THREE)
    assert [record["error_fraction"] for record in records][3] is None
    assert records[3]["failure"] == "rank 3 failed: out of memory"
    assert records[0]["g_data"] == 8 and records[0]["measured_seconds"] == 1.25


@pytest.mark.parametrize("ending", FORMATS)
def test_the_figure_is_drawn(tmp_path, ending):
    path = tmp_path / f"figure.{ending}"
    path.write_bytes(figure_bytes(validation_figure(THREE), str(path)))
    assert_drawn(path)
    with pytest.raises(InputError, match="allowed endings"):
        figure_bytes(validation_figure(THREE), "figure.doc")
