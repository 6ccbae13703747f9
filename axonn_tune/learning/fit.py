"""The robust and regularised fit of factors to the errors of predicted steps.

The logarithm of a step time is linear in the logarithms of the factors, as far as one step of the
fit goes. Each factor is drawn to 1 by its stated spread, so that what no run tells stays as it is.
Runs beyond the usual scatter pull less (Huber, "Robust Estimation of a Location Parameter", 1964);
one that all others contradict is set aside.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.plan import Array

# Scatter of the logarithm of measured over predicted steps that is expected before any run is seen,
# and the number of runs that this expectation counts for: conventions. Engines whose predictions
# were compared scatter by 3 to 14 percent.
EXPECTED_SCATTER = 0.1
EXPECTED_SCATTER_RUNS = 4
# Errors above this number of scatters pull no more than one of this size does.
_HUBER = 1.5
# Mean square of a standard normal deviate that is cut there (Huber's proposal 2).
_MEAN_SQUARE_CUT = 0.7785
# A run is set aside where the others predict it this many standard deviations away.
CONTRADICTED = 3.0
# One run in so many may be set aside.
RUNS_PER_BAD_RUN = 5
# How much of a factor's stated spread the fit uses: what predicts each run best from the others.
_STRENGTHS = (1.0, 0.5, 0.0)
# A prediction from others is not judged by how far beyond this error it is.
_LARGEST_ERROR = 0.3
_N_REWEIGHTINGS = 15


@dataclass(frozen=True, eq=False)
class Fit:
    """Factors that explain the errors of some runs.

    log_factors
        Logarithms of the factors, shape (F,).
    covariance
        Covariance of the logarithms, shape (F, F).
    scatter
        Standard deviation of the errors that remain.
    is_set_aside
        Whether a run was left out, shape (N,).
    """

    log_factors: Array
    covariance: Array
    scatter: float
    is_set_aside: np.ndarray


def fitted(slopes: Array, errors: Array, spreads: Array) -> Fit:
    """Return the factors that explain errors.

    Parameters
    ----------
    slopes : array, shape (N, F)
        Change of the logarithm of each step for that of each factor.
    errors : array, shape (N,)
        Logarithm of measured over predicted steps.
    spreads : array, shape (F,)
        Stated standard deviation of the logarithm of each factor.
    """
    scaled = slopes * spreads
    used = _used(scaled, errors)
    strength = min(_STRENGTHS, key=lambda share: _error_of_others(share * scaled, errors, used))
    log_factors, _, scatter = _solution(strength * scaled, errors, used)
    # A fit that trusts the profile does not make it surer than the runs do.
    _, covariance, _ = _solution(scaled, errors, used)
    return Fit(
        strength * spreads * log_factors,
        covariance * np.outer(spreads, spreads),
        scatter,
        ~used,
    )


def _used(scaled: Array, errors: Array) -> np.ndarray:
    """Return which runs are used: all but those that the others contradict."""
    used = np.ones(errors.size, dtype=bool)
    for _ in range(errors.size // RUNS_PER_BAD_RUN):
        strangeness = [
            abs(error) / spread
            for error, spread in (_from_others(scaled, errors, used, i) for i in range(errors.size))
        ]
        strangest = int(np.argmax(np.where(used, strangeness, 0.0)))
        if strangeness[strangest] < CONTRADICTED:
            break
        used[strangest] = False
    return used


def _error_of_others(scaled: Array, errors: Array, used: np.ndarray) -> float:
    """Return the mean error with which the other runs predict each run that is used."""
    left = [abs(_from_others(scaled, errors, used, i)[0]) for i in np.flatnonzero(used).tolist()]
    return float(np.minimum(left, _LARGEST_ERROR).mean())


def _from_others(scaled: Array, errors: Array, used: np.ndarray, index: int) -> tuple[float, float]:
    """Return by how much the other runs miss a run, and the standard deviation of this miss."""
    others = used.copy()
    others[index] = False
    factors, covariance, scatter = _solution(scaled, errors, others)
    own = scaled[index]
    spread = np.sqrt(scatter**2 + own @ covariance @ own)
    return float(errors[index] - own @ factors), float(spread)


def _solution(scaled: Array, errors: Array, used: np.ndarray) -> tuple[Array, Array, float]:
    """Return the factors in units of their spreads, their covariance, and the scatter."""
    scatter = EXPECTED_SCATTER
    weights = used.astype(np.float64)
    covariance: Array
    for _ in range(_N_REWEIGHTINGS):
        weighted = scaled.T * (weights / scatter**2)
        covariance = np.asarray(np.linalg.inv(weighted @ scaled + np.eye(scaled.shape[1])))
        factors = covariance @ (weighted @ errors)
        left = errors - scaled @ factors
        expected = EXPECTED_SCATTER_RUNS * EXPECTED_SCATTER**2
        n_runs = EXPECTED_SCATTER_RUNS + _MEAN_SQUARE_CUT * used.sum()
        cut = np.minimum(np.abs(left), _HUBER * scatter)
        scatter = float(np.sqrt((expected + used @ cut**2) / n_runs))
        weights = used * np.minimum(1.0, _HUBER * scatter / np.maximum(np.abs(left), 1e-12))
    return factors, covariance, scatter
