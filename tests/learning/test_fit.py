"""The fit finds factors that made the errors, keeps what is not told, and names a bad run."""

import numpy as np
import pytest
from scipy.stats import t as student

from axonn_tune.learning.fit import EXPECTED_SCATTER, EXPECTED_SCATTER_RUNS, fitted
from axonn_tune.spec.normal import NORMAL_90
from axonn_tune.step.spread import student_95

RANDOM = np.random.default_rng(1)
SPREADS = np.array([0.2, 0.3, 0.1])


def steps(n_runs, log_factors, noise=0.0):
    """Slopes of steps that are shared by three factors, and the errors that these cause."""
    slopes = -RANDOM.dirichlet([1.0, 1.0, 1.0], n_runs)
    return slopes, slopes @ log_factors + noise * RANDOM.standard_normal(n_runs)


def test_many_runs_find_the_factors():
    log_factors = np.array([0.1, -0.3, 0.05])
    fit = fitted(*steps(400, log_factors, 0.03), SPREADS)
    assert fit.log_factors == pytest.approx(log_factors, abs=0.02)
    assert fit.scatter == pytest.approx(0.03, abs=0.01)
    assert fit.is_set_aside.mean() < 0.02


@pytest.mark.slow
def test_what_is_found_is_as_uncertain_as_it_says():
    log_factors = np.array([0.1, -0.2, 0.05])
    misses = []
    for _ in range(60):
        fit = fitted(*steps(60, log_factors, EXPECTED_SCATTER), SPREADS)
        misses.append((fit.log_factors - log_factors) / np.sqrt(np.diag(fit.covariance)))
    assert np.mean(np.square(misses)) == pytest.approx(1.0, abs=0.5)


@pytest.mark.parametrize("n_runs", [2, 5, 8])
def test_other_steps_lie_in_their_intervals_whatever_their_scatter(n_runs):
    """Nine in ten over scatters from a third of the expected one to half as much again."""
    inside = []
    for noise in EXPECTED_SCATTER * np.repeat([0.3, 0.6, 1.0, 1.5], 25):
        log_factors = SPREADS * RANDOM.standard_normal(3)
        fit = fitted(*steps(n_runs, log_factors, noise), SPREADS)
        slopes, errors = steps(40, log_factors, noise)
        left = np.abs(errors - slopes @ fit.log_factors)
        of_factors = NORMAL_90 * np.sqrt(((slopes @ fit.covariance) * slopes).sum(axis=1))
        of_scatter = student_95(fit.freedom) * fit.scatter
        inside.append((left <= np.maximum(of_factors, of_scatter)).mean())
    assert 0.85 < np.mean(inside) < 0.97


def test_runs_that_decide_the_factors_tell_little_of_the_scatter():
    """Three runs fix three factors and tell nothing else; nine more tell the scatter."""
    slopes = -np.eye(3)
    few, many = (
        fitted(np.tile(slopes, (n, 1)), np.tile([0.3, -0.3, 0.3], n), np.full(3, 10.0))
        for n in (1, 4)
    )
    assert few.freedom < 1.5 * EXPECTED_SCATTER_RUNS
    assert many.freedom > EXPECTED_SCATTER_RUNS + 8.0
    assert many.scatter < 0.5 * few.scatter


def test_a_factor_that_moves_no_run_stays_with_its_spread():
    slopes, errors = steps(6, np.array([0.2, 0.2, 0.0]))
    slopes[:, 2] = 0.0
    fit = fitted(slopes, errors, SPREADS)
    assert fit.log_factors[2] == 0.0
    assert fit.covariance[2, 2] == pytest.approx(SPREADS[2] ** 2)
    assert (np.diag(fit.covariance)[:2] < SPREADS[:2] ** 2).all()


def test_a_lone_run_moves_nothing_and_runs_that_agree_move_less_than_their_error():
    slopes = np.array([[-1.0, 0.0, 0.0]] * 5)
    alone, together = (fitted(slopes[:n], np.full(n, -0.3), SPREADS) for n in (1, 5))
    assert alone.log_factors[0] == 0.0
    assert 0.15 < together.log_factors[0] < 0.3


def test_two_runs_hardly_ever_make_it_worse_than_none():
    """Machines are drawn as the profile states, and their scatter as it is expected to be."""
    changes = []
    for _ in range(300):
        log_factors = SPREADS * RANDOM.standard_normal(3)
        fit = fitted(*steps(2, log_factors, EXPECTED_SCATTER), SPREADS)
        slopes, errors = steps(50, log_factors)
        left = np.abs(errors - slopes @ fit.log_factors).mean()
        changes.append(left - np.abs(errors).mean())
    assert np.mean(np.array(changes) > 0.0) < 0.05
    assert np.mean(changes) < -0.002


def test_two_runs_leave_a_profile_alone_that_was_right():
    moved = [
        fitted(*steps(2, np.zeros(3), EXPECTED_SCATTER), SPREADS).log_factors.any()
        for _ in range(300)
    ]
    assert np.mean(moved) < 0.05


@pytest.mark.parametrize("freedom", [1, 1.5, 2, 3, 4, 5, 6, 8, 10, 11, 30, 200])
def test_the_quantile_is_that_of_students_distribution(freedom):
    assert student_95(freedom) == pytest.approx(student.ppf(0.95, freedom), rel=0.006)


def test_a_bad_run_in_five_is_set_aside_and_pulls_no_other():
    slopes, errors = steps(5, np.array([0.1, -0.1, 0.0]), 0.02)
    clean = fitted(slopes[1:], errors[1:], SPREADS)
    spoilt = errors + np.array([0.6, 0.0, 0.0, 0.0, 0.0])
    fit = fitted(slopes, spoilt, SPREADS)
    assert fit.is_set_aside.tolist() == [True, False, False, False, False]
    assert fit.log_factors == pytest.approx(clean.log_factors)


def test_runs_that_contradict_each_other_move_nothing():
    slopes = np.array([[-1.0, 0.0, 0.0]] * 2)
    fit = fitted(slopes, np.array([0.2, -0.2]), SPREADS)
    assert fit.log_factors.tolist() == [0.0, 0.0, 0.0]


def test_a_run_that_is_far_off_pulls_less_the_further_it_is():
    slopes = np.array([[-1.0, 0.0, 0.0]] * 4)
    fits = [fitted(slopes, np.array([*[-0.3] * 3, far]), SPREADS) for far in (-0.3, -1.0, -4.0)]
    near, far, farther = (fit.log_factors[0] for fit in fits)
    assert near * 0.8 < farther < far < near * 1.3
    assert fits[2].scatter < 2.5 * EXPECTED_SCATTER
