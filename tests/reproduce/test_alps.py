"""Megatron-Core on Alps: two numbers that are fitted to six steps hold for the others."""

import numpy as np
import pytest
from reproduced import LOADERS, words_of_page

from axonn_tune.io.package_data import load_published
from axonn_tune.reproduce.alps import megatron_on_alps, steps_of_cscs
from axonn_tune.reproduce.results import predict_runs
from axonn_tune.spec.precision import FULL

ROWS = load_published("alps_megatron")
PAGE = words_of_page("validation.md")
OF_CLOCK = ("8b", "4", FULL)


@pytest.fixture(scope="module")
def runs():
    return list(megatron_on_alps(ROWS, LOADERS))


@pytest.fixture(scope="module")
def predicted(runs):
    return predict_runs(runs)


@pytest.fixture(scope="module")
def errors(predicted):
    """The error of each step."""
    measured = np.array([float(row["step_seconds"]) for row in ROWS])
    return np.array([p.step_seconds for p in predicted]) / measured - 1.0


def chosen(errors, holds):
    return np.array([error for row, error in zip(ROWS, errors, strict=True) if holds(row)])


def test_two_numbers_are_fitted_to_three_steps_each(runs, errors):
    fitted = [run.is_fitted for run in runs]
    of_gpu = chosen(errors, lambda row: (row["model"], row["gpus"], row["precision"]) == OF_CLOCK)
    of_host = chosen(errors, lambda row: int(row["seq_len"]) <= 2048)
    assert sum(fitted) == len(of_gpu) + len(of_host) == 6
    assert abs(of_gpu.mean()) < 0.01
    assert abs(of_host.mean()) < 0.01


def test_the_clock_of_one_node_holds_for_two_to_eight(errors):
    on_more = chosen(errors, lambda row: row["model"] == "8b" and int(row["gpus"]) > 4)
    assert len(on_more) == 3
    assert np.abs(on_more).max() < 0.02


def test_models_of_70_to_140_billion_parameters_are_met(errors):
    large = chosen(errors, lambda row: int(row["pipeline"]) > 1)
    assert len(large) == 3
    assert np.abs(large).max() < 0.03


def test_tensor_groups_of_14b_and_32b_take_longer_than_predicted(errors):
    """The page says by how much, and in which pass."""
    of_group = chosen(errors, lambda row: row["hidden"] == "5120" and int(row["seq_len"]) > 2048)
    assert len(of_group) == 12
    least, most = -100 * of_group.max(), -100 * of_group.min()
    assert f"are predicted {least:.0f} to {most:.0f} % too short" in PAGE


def test_what_the_page_says_of_all_that_was_not_fitted(runs, errors):
    judged = np.abs([e for run, e in zip(runs, errors, strict=True) if not run.is_fitted])
    assert f"the other {len(judged)} are met within {100 * judged.mean():.1f} %" in PAGE


def test_what_ran_fits(predicted):
    """Only 8B is predicted to need more: four bytes of its master weights count, and not two."""
    for row, prediction in zip(ROWS, predicted, strict=True):
        largest = 1.05 if row["moments"] == "fp32" else 1.0
        assert prediction.memory_bytes < largest * prediction.memory_capacity_bytes


def test_steps_of_cscs_tests_are_met_though_nothing_is_fitted_to_them():
    """8B has one bucket, which is reduced and gathered with nothing beside it: 16 % of its step."""
    tests = list(steps_of_cscs(load_published("alps_tests"), LOADERS))
    assert not any(test.is_fitted for test in tests)
    predictions = predict_runs(tests)
    published = [test.published["step_seconds"] for test in tests]
    errors = [p.step_seconds / t - 1.0 for p, t in zip(predictions, published, strict=True)]
    assert len(errors) == 3 and np.abs(errors).max() < 0.06
    assert all(p.memory_bytes < p.memory_capacity_bytes for p in predictions)
