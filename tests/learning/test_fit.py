"""The fit finds factors that made the errors, keeps what is not told, and names a bad run."""

import numpy as np
import pytest

from axonn_tune.learning.fit import EXPECTED_SCATTER, fitted

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


def test_a_factor_that_moves_no_run_stays_with_its_spread():
    slopes, errors = steps(6, np.array([0.2, 0.2, 0.0]))
    slopes[:, 2] = 0.0
    fit = fitted(slopes, errors, SPREADS)
    assert fit.log_factors[2] == 0.0
    assert fit.covariance[2, 2] == pytest.approx(SPREADS[2] ** 2)
    assert (np.diag(fit.covariance)[:2] < SPREADS[:2] ** 2).all()


def test_one_run_moves_less_than_its_error():
    fit = fitted(np.array([[-1.0, 0.0, 0.0]]), np.array([-0.2]), SPREADS)
    assert 0.0 < fit.log_factors[0] < 0.2


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


def test_a_lone_run_that_is_far_off_pulls_no_more_than_an_unusual_one():
    slopes = np.array([[-1.0, 0.0, 0.0]])
    far, farther = (fitted(slopes, np.array([error]), SPREADS) for error in (-1.0, -4.0))
    assert farther.log_factors == pytest.approx(far.log_factors, rel=0.02)
    assert farther.scatter < 2.0 * EXPECTED_SCATTER
