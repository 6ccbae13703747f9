"""Predicted against measured configurations: errors, causes, order, regret, limits, baselines."""

import json
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from axonn_tune.api import build_search
from axonn_tune.errors import FileError, InputError
from axonn_tune.io.json_files import load_json, save_json
from axonn_tune.report.agreement import agreement_text, junit_text, outcome_records
from axonn_tune.report.plots import validation_figure
from axonn_tune.search.rank import run
from axonn_tune.spec.grid import Grid
from axonn_tune.spec.validation import (
    Configuration,
    OperationTime,
    Outcome,
    Predicted,
    Validation,
)
from axonn_tune.validate.agreement import agreement
from axonn_tune.validate.choice import choose, choose_grids
from axonn_tune.validate.limits import check_limits
from axonn_tune.validate.regression import check_regressions

GRIDS = ("1x1x1x8", "1x1x8x1", "1x8x1x1", "8x1x1x1", "2x2x2x1", "2x2x1x2")


def operation(name, axis, measured, predicted, measured_exposed=0.0, predicted_exposed=0.0):
    kind = "all_reduce" if axis else "gemm"
    return OperationTime(
        name, kind, axis, 1, 8.0, 0.0, measured, measured_exposed, predicted, predicted_exposed
    )


def outcome(grid, rank, predicted, steps, failure="", operations=(), memory=None):
    configuration = Configuration(Grid.parse(grid), "xyzd", 1, "none")
    said = Predicted(rank, predicted, 2.0**30, 0.9 * predicted, 1.1 * predicted)
    return Outcome(configuration, said, tuple(steps), memory, tuple(operations), failure)


def validation(*outcomes):
    return Validation(
        model="tiny",
        machine="mini",
        n_ranks=8,
        global_batch=8,
        seq_len=64,
        dtype="fp32",
        attention="flash",
        overlap="OAR",
        device="CPU",
        backend="gloo",
        date="2026-11-21T00:00:00+00:00",
        command_line="axonn-tune validate",
        n_ranked=20,
        outcomes=outcomes,
    )


def noisy(seconds, spread=0.01, n=20, seed=0):
    random = np.random.default_rng(seed)
    return (seconds * np.exp(spread * random.standard_normal(n))).tolist()


THREE = validation(
    outcome("1x1x1x8", 1, 1.0, [1.0, 1.25, 1.5], memory=2.0**31),
    outcome("1x1x8x1", 2, 1.1, [1.0]),
    outcome("1x8x1x1", 3, 3.0, [2.0]),
    outcome("8x1x1x1", 4, 4.0, [], failure="rank 3 failed: out of memory"),
)


def test_errors_are_signed_and_relative_to_the_median_measured_step():
    errors = [o.error_fraction for o in THREE.measured]
    assert errors == pytest.approx([-0.2, 0.1, 0.5])
    found = agreement(THREE)
    assert found.mape == pytest.approx(0.8 / 3) and found.bias == pytest.approx(0.4 / 3)
    assert found.worst.configuration.grid == Grid(1, 8, 1, 1)
    assert (found.n_measured, found.n_failed) == (3, 1)
    assert found.memory_mape == pytest.approx(0.5)


def test_regret_is_of_the_suggestion_against_the_best_measured():
    found = agreement(THREE)
    assert found.regret == pytest.approx(0.25) and found.best.configuration.grid == Grid(1, 1, 8, 1)
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


# Which configurations run -----------------------------------------------------------


def ranking():
    return run(build_search("tiny", 8, "dgx-a100", global_batch=8))


def test_choices_of_configurations():
    ranked = ranking()
    everything = choose(ranked, "all")
    assert len(everything) == len(ranked) == 20
    assert [p.rank for p in choose(ranked, "top:3")] == [1, 2, 3]
    assert [p.rank for p in choose(ranked, "spread:3")] == [1, 11, 20]
    assert [p.rank for p in choose(ranked, "spread:1")] == [1]
    assert choose(ranked, "spread:99") == everything
    for wrong in ("some", "top:0", "top:", "spread:-1"):
        with pytest.raises(InputError, match="allowed: all, top:N or spread:N"):
            choose(ranked, wrong)


def test_explicit_grids_come_with_the_suggestion():
    ranked = ranking()
    best, worst = ranked.prediction(0), ranked.prediction(19)
    assert [p.rank for p in choose_grids(ranked, [str(worst.grid)])] == [1, 20]
    assert [p.rank for p in choose_grids(ranked, [str(best.grid)])] == [1]
    with pytest.raises(InputError, match="3x1x1x1 is not among the 20"):
        choose_grids(ranked, ["3x1x1x1"])


# Against a baseline -----------------------------------------------------------------


def series(scale=1.0, predicted=1.0, seed=0, slow=None):
    """Six configurations; one may be slower than the others."""
    return validation(
        *(
            outcome(
                grid,
                i + 1,
                predicted * (1.0 + i),
                noisy((1.0 + i) * (scale if slow is None or i == slow else 1.0), seed=seed + i),
            )
            for i, grid in enumerate(GRIDS)
        )
    )


def failed(before, after, least_change=0.05):
    return [check for check in check_regressions(before, after, least_change) if not check.holds]


def test_an_unchanged_machine_passes():
    alarms = sum(bool(failed(series(), series(seed=100 * i))) for i in range(1, 41))
    assert alarms == 0


def test_one_slower_configuration_is_found():
    (check,) = failed(series(), series(1.2, seed=50, slow=2))
    assert check.text.startswith("FAILED  1x8x1x1 xyzd") and "% slower" in check.text


def test_a_slower_machine_is_found_even_if_each_configuration_is_noisy():
    def noisier(scale, seed):
        outcomes = [
            replace(o, step_seconds=tuple(noisy(scale * o.measured_seconds, 0.1, 9, seed + i)))
            for i, o in enumerate(series().outcomes)
        ]
        return validation(*outcomes)

    names = [check.name for check in failed(noisier(1.0, 0), noisier(1.3, 60))]
    assert "steps on average" in names


def test_small_changes_are_none_however_sure():
    assert failed(series(), series(1.04, seed=0)) == []
    assert failed(series(), series(1.04, seed=0), least_change=0.01)


def test_a_worse_prediction_is_found_though_the_steps_are_the_same():
    assert [check.name for check in failed(series(), series(predicted=1.3))] == ["prediction"]
    assert failed(series(predicted=1.3), series()) == []


def test_a_faster_machine_fails_by_its_prediction_only():
    assert [check.name for check in failed(series(), series(0.7, seed=9))] == ["prediction"]


def test_what_ran_before_and_fails_now_is_found():
    after = series()
    broken = replace(after.outcomes[1], step_seconds=(), failure="killed")
    found = failed(series(), validation(after.outcomes[0], broken, *after.outcomes[2:]))
    assert len(found) == 1 and "fails now" in found[0].text


def test_another_job_is_no_baseline():
    (check,) = failed(series(), replace(series(), global_batch=16))
    assert "baseline has global_batch 8, this validation 16" in check.text
    other = validation(outcome("4x2x1x1", 1, 1.0, [1.0]))
    (check,) = failed(series(), other)
    assert "no configuration" in check.text


# Reports ----------------------------------------------------------------------------


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


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_the_figure_is_drawn(ending):
    assert len(validation_figure(THREE, f"figure.{ending}")) > 1000
    with pytest.raises(InputError, match="allowed endings"):
        validation_figure(THREE, "figure.doc")
