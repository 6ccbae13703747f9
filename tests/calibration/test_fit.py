"""Fits recover what synthetic timings were made from, noise and outliers notwithstanding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axonn_tune.calibration.fit.robust import fit_affine, robust_spread_fraction

SIZES = 2.0 ** np.arange(10, 31)


def timings(alpha, beta, noise, outliers, seed, n_samples=9):
    random = np.random.default_rng(seed)
    work = np.repeat(SIZES, n_samples)
    seconds = (alpha + work / beta) * np.exp(noise * random.standard_normal(work.size))
    is_outlier = random.random(work.size) < outliers
    return work, np.where(is_outlier, seconds * random.uniform(1.5, 10.0, work.size), seconds)


@given(
    log_alpha=st.floats(-6, -4),
    log_crossover=st.floats(13, 20),  # log2 of the message that spends half its time on latency
    noise=st.floats(0, 0.02),
    outliers=st.floats(0, 0.1),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_latency_and_bandwidth_are_recovered_within_two_percent(
    log_alpha, log_crossover, noise, outliers, seed
):
    alpha = 10.0**log_alpha
    beta = 2.0**log_crossover / alpha
    fitted = fit_affine(*timings(alpha, beta, noise, outliers, seed))
    assert fitted.intercept_seconds == pytest.approx(alpha, rel=0.02)
    assert fitted.seconds_per_unit == pytest.approx(1 / beta, rel=0.02)


def test_standard_errors_cover_the_truth():
    errors = []
    for seed in range(200):
        fitted = fit_affine(*timings(2e-5, 1e10, 0.05, 0.05, seed))
        errors.append(
            (
                np.log(fitted.intercept_seconds / 2e-5) / fitted.intercept_spread_fraction,
                np.log(fitted.seconds_per_unit * 1e10) / fitted.slope_spread_fraction,
            )
        )
    # Standard deviations of normal deviates, within sampling error of 200.
    assert np.std(errors, axis=0) == pytest.approx([1.0, 1.0], abs=0.25)


def test_one_size_is_not_enough():
    with pytest.raises(ValueError, match="at least two sizes"):
        fit_affine([8.0, 8.0], [1.0, 1.1])


def test_spread_ignores_outliers():
    random = np.random.default_rng(0)
    samples = 3.0 * np.exp(0.04 * random.standard_normal(999))
    samples[:50] *= 20
    assert robust_spread_fraction(samples) == pytest.approx(0.04, rel=0.15)


def test_a_variance_that_rounds_to_less_than_zero_is_none():
    fitted = fit_affine([1024.0, 4096.0], [5.9166124925941745e-05, 0.0003253630590184347])
    assert 0.0 <= fitted.intercept_spread_fraction <= 1.0
    assert 0.0 <= fitted.slope_spread_fraction <= 1.0
