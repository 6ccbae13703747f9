"""The robust and careful fit of factors to the errors of predicted steps.

The logarithm of a step time is linear in the logarithms of the factors, as far as one step of the
fit goes. Each factor is drawn to 1 by its stated spread, so that what no run tells stays as it is.
What is left of the errors has Student's t distribution with few degrees of freedom, so that the
further off a run is, the less it pulls (Lange, Little and Taylor, "Robust Statistical Modeling
Using the t Distribution", 1989); one that all others contradict is set aside. The factors move only
so far that they predict better than the stated ones with a confidence of 95 percent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.plan import Array
from axonn_tune.step.spread import student_95

# Scatter of the logarithm of measured over predicted steps that is expected before any run is seen,
# and the number of runs that this expectation counts for: conventions. Engines whose predictions
# were compared scatter by 3 to 14 percent, and one of them by 120, so that it counts for little.
EXPECTED_SCATTER = 0.1
EXPECTED_SCATTER_RUNS = 1
# Degrees of freedom of the errors, by the convention of Lange, Little and Taylor.
_TAIL_FREEDOM = 4
# Errors above this number of scatters count as one of this size in the scatter, and the mean
# square of a standard normal deviate that is cut there (Huber's proposal 2, 1964).
_HUBER = 1.5
_MEAN_SQUARE_CUT = 0.7785
# A run is set aside where the others predict it this many standard deviations away.
CONTRADICTED = 3.0
# One run in so many may be set aside.
RUNS_PER_BAD_RUN = 5
_N_REWEIGHTINGS = 30


@dataclass(frozen=True, eq=False)
class Fit:
    """Holds the factors that explain the errors of some runs.

    log_factors
        Logarithms of the factors, shape (F,).
    covariance
        Covariance of the logarithms, shape (F, F).
    scatter
        Standard deviation of the errors of other steps.
    freedom
        Degrees of freedom of the estimate of the scatter.
    is_set_aside
        Whether a run was left out, shape (N,).
    """

    log_factors: Array
    covariance: Array
    scatter: float
    freedom: float
    is_set_aside: np.ndarray


@dataclass(frozen=True, eq=False)
class _Runs:
    """What runs show, in units of what is expected.

    slopes
        Change of each logarithm for a stated spread of each factor, shape (N, F).
    errors
        Logarithm of measured over predicted times, shape (N,).
    is_step
        Whether a time is that of a whole step, shape (N,).
    """

    slopes: Array
    errors: Array
    is_step: np.ndarray


def fitted(slopes: Array, errors: Array, spreads: Array, certainty: Array | None = None) -> Fit:
    """Return the factors that explain errors.

    Parameters
    ----------
    slopes : array, shape (N, F)
        Change of the logarithm of each time for that of each factor.
    errors : array, shape (N,)
        Logarithm of measured over predicted times.
    spreads : array, shape (F,)
        Stated standard deviation of the logarithm of each factor.
    certainty : array, shape (N,)
        How many times less than a step each time scatters by itself; those that are more certain
        than 1 are parts of steps, which do not tell how steps scatter. Without it, all are steps.
    """
    sure = np.ones(errors.size) if certainty is None else certainty
    runs = _Runs(slopes * spreads * sure[:, None], errors * sure, sure == 1.0)
    used = _used(runs)
    log_factors, covariance, scatter, freedom = _solution(runs, used)
    return Fit(
        _safe_share(runs.slopes[used], log_factors, covariance) * spreads * log_factors,
        covariance * np.outer(spreads, spreads),
        scatter,
        freedom,
        ~used,
    )


def _safe_share(scaled: Array, factors: Array, covariance: Array) -> float:
    """Return the part of the way to the factors that is better than staying, with confidence.

    The steps of the runs should change by some `change`, of which the fit expects `moved`. To go a
    share of it brings the prediction nearer wherever change * moved > share * moved**2 / 2. There
    are as many degrees of freedom as runs, since the expected scatter is no evidence.
    """
    moved = scaled @ factors
    square = float(moved @ moved)
    if square == 0.0:
        return 0.0
    deviation = float(np.sqrt(moved @ scaled @ covariance @ scaled.T @ moved))
    return min(1.0, max(0.0, 2.0 * (1.0 - student_95(len(scaled)) * deviation / square)))


def _used(runs: _Runs) -> np.ndarray:
    """Return which runs are used: all but those that the others contradict."""
    n_runs = runs.errors.size
    used = np.ones(n_runs, dtype=bool)
    for _ in range(n_runs // RUNS_PER_BAD_RUN):
        strangeness = [
            abs(error) / spread
            for error, spread in (_from_others(runs, used, i) for i in range(n_runs))
        ]
        strangest = int(np.argmax(np.where(used, strangeness, 0.0)))
        if strangeness[strangest] < CONTRADICTED:
            break
        used[strangest] = False
    return used


def _from_others(runs: _Runs, used: np.ndarray, index: int) -> tuple[float, float]:
    """Return by how much the other runs miss a run, and the standard deviation of this miss."""
    others = used.copy()
    others[index] = False
    factors, covariance, scatter, _ = _solution(runs, others)
    own = runs.slopes[index]
    spread = np.sqrt(scatter**2 + own @ covariance @ own)
    return float(runs.errors[index] - own @ factors), float(spread)


def _solution(runs: _Runs, used: np.ndarray) -> tuple[Array, Array, float, float]:
    """Return the factors in units of their spreads, their covariance, and the scatter.

    The last number is that of the degrees of freedom that tell the scatter: a run that pulls the
    factors towards itself tells less of it.
    """
    scatter = EXPECTED_SCATTER
    steps = used & runs.is_step
    scaled = runs.slopes
    # It begins with the stated factors, so that of several explanations the nearest is found.
    factors, covariance = np.zeros(scaled.shape[1]), np.eye(scaled.shape[1])
    for _ in range(_N_REWEIGHTINGS):
        left = np.abs(runs.errors - scaled @ factors)
        weights = used * (_TAIL_FREEDOM + 1) / (_TAIL_FREEDOM + (left / scatter) ** 2)
        weighted = scaled.T * (weights / scatter**2)
        covariance = np.asarray(np.linalg.inv(weighted @ scaled + np.eye(scaled.shape[1])))
        factors = np.asarray(covariance @ (weighted @ runs.errors))
        leverage = ((scaled @ covariance) * weighted.T).sum(axis=1)
        n_free = max(0.0, float(steps @ (1.0 - leverage)))
        cut = np.minimum(np.abs(runs.errors - scaled @ factors), _HUBER * scatter)
        square = EXPECTED_SCATTER_RUNS * EXPECTED_SCATTER**2 + float(steps @ cut**2)
        scatter = math.sqrt(square / (EXPECTED_SCATTER_RUNS + _MEAN_SQUARE_CUT * n_free))
    return factors, covariance, scatter, EXPECTED_SCATTER_RUNS + n_free
