"""Robust fits of measured times; pure functions of arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from axonn_tune.spec.normal import NORMAL_FROM_MEDIAN

Floats = npt.NDArray[np.float64]

# Timings whose relative difference is below this are as good as equal.
LEAST_RESIDUAL = 1e-4


@dataclass(frozen=True)
class Affine:
    """``seconds = intercept_seconds + seconds_per_unit * work``, with relative standard errors."""

    intercept_seconds: float
    seconds_per_unit: float
    intercept_spread_fraction: float
    slope_spread_fraction: float


def fit_affine(work: npt.ArrayLike, seconds: npt.ArrayLike) -> Affine:
    """Fit a latency and a rate to times that hold outliers.

    Minimises a robust loss of log(fit / measured), so that small and large messages count
    alike: first a convex one (soft L1) to get near, then Cauchy's, which all but ignores
    outliers, at the scale of the residuals.

    Parameters
    ----------
    work : array_like, shape (N,)
        Bytes or FLOPs, above zero, with at least two different values.
    seconds : array_like, shape (N,)
        Measured times, above zero.

    Raises
    ------
    ValueError
        There are fewer than two different amounts of work.
    """
    work = np.asarray(work, dtype=np.float64)
    seconds = np.asarray(seconds, dtype=np.float64)
    amounts = np.unique(work)
    if amounts.size < 2:
        raise ValueError("a latency and a rate need times of at least two sizes")

    def residuals(logs: Floats) -> Floats:
        return np.log((np.exp(logs[0]) + np.exp(logs[1]) * work) / seconds)

    smallest = np.median(seconds[work == amounts[0]])
    largest = np.median(seconds[work == amounts[-1]])
    logs = np.log([smallest, largest / amounts[-1]])
    logs = least_squares(residuals, logs, loss="soft_l1", f_scale=0.1).x
    scale = residual_scale(residuals(logs))
    logs = least_squares(residuals, logs, loss="cauchy", f_scale=scale).x
    intercept, slope = np.exp(logs)
    latency_share = intercept / (intercept + slope * work)
    gradient = np.stack((latency_share, 1.0 - latency_share), axis=1)
    spreads = _standard_errors(gradient, residuals(logs), scale)
    return Affine(float(intercept), float(slope), float(spreads[0]), float(spreads[1]))


def _standard_errors(gradient: Floats, residuals: Floats, scale: float) -> Floats:
    """Return standard errors of a fit with Cauchy's loss, at most 1, by the sandwich estimator.

    Huber, "Robust Statistics", section 6.3: A^-1 B A^-1 with A the mean curvature of the loss
    and B the mean square of its slope.
    """
    squares = (residuals / scale) ** 2
    slope = residuals / (1.0 + squares)
    curvature = (1.0 - squares) / (1.0 + squares) ** 2
    bread = np.linalg.pinv((gradient.T * curvature) @ gradient)
    covariance = bread @ ((gradient.T * slope**2) @ gradient) @ bread
    # Rounding makes the variances of a perfect fit negative now and then.
    variances = np.maximum(np.diag(covariance), 0.0)
    return np.minimum(np.sqrt(variances), 1.0)


def residual_scale(residuals: Floats) -> float:
    """Return the standard deviation of residuals, blind to outliers."""
    deviation = np.median(np.abs(residuals - np.median(residuals)))
    return float(max(NORMAL_FROM_MEDIAN * deviation, LEAST_RESIDUAL))


def robust_spread_fraction(samples: npt.ArrayLike) -> float:
    """Return the relative standard deviation about the median, blind to outliers."""
    values = np.asarray(samples, dtype=np.float64)
    middle = np.median(values)
    return float(NORMAL_FROM_MEDIAN * np.median(np.abs(values - middle)) / middle)
