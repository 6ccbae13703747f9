"""Read a time, or a ratio of times, between measured ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axonn_tune.spec.plan import Array, Size


def measured_seconds(work: Size, sizes: Sequence[float], seconds: Sequence[float]) -> Array:
    """Time of some work, by straight lines between the sizes that were measured.

    A latency and a bandwidth make a straight line, so that between points of one regime this
    is exact. Less work than the least takes as long as that; more than the most goes on along
    the last line, as long as that does not fall and passes above zero.

    Parameters
    ----------
    work : array_like, shape (C,)
        Bytes.
    sizes, seconds : sequences, shape (N,)
        Measured points in any order; those of one size count with their mean.
    """
    known, which = np.unique(np.asarray(sizes, dtype=np.float64), return_inverse=True)
    mean = np.bincount(which, np.asarray(seconds, dtype=np.float64)) / np.bincount(which)
    work = np.asarray(work, dtype=np.float64)
    beyond = np.maximum(work - known[-1], 0.0)
    result: Array = np.interp(work, known, mean) + beyond * _last_slope(known, mean)
    return result


def _last_slope(sizes: Array, seconds: Array) -> float:
    """Of the line through the two largest sizes; between level and proportional."""
    proportional = float(seconds[-1] / sizes[-1])
    if sizes.size == 1:
        return proportional
    slope = float((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
    return min(max(slope, 0.0), proportional)


# Standard deviation over the median absolute value, of a normal law.
NORMAL_FROM_MEDIAN = 1.4826


class Spline:
    """A smooth function through points in several dimensions; beyond them it stays level.

    It leaves the range of the points' values nowhere. The polyharmonic spline of order one, a
    sum of distances to the points and a linear function: of all functions through the points
    the one that bends least (Duchon, 1977, "Splines minimizing rotation-invariant semi-norms
    in Sobolev spaces").

    Parameters
    ----------
    points : shape (N, D)
        Where the function is known; of equal points the mean counts.
    values : shape (N,)
    """

    def __init__(self, points: Array, values: Array) -> None:
        points, which = np.unique(points, axis=0, return_inverse=True)
        counts = np.bincount(which.ravel())
        values = np.bincount(which.ravel(), values) / counts
        self._points, (self._low, self._high) = points, (points.min(axis=0), points.max(axis=0))
        self._least, self._most = values.min(), values.max()
        self._columns = _independent_columns(points)
        linear = self._linear(points)
        n, n_linear = len(points), linear.shape[1]
        system = np.zeros((n + n_linear, n + n_linear))
        system[:n, :n] = _distances(points, points)
        system[:n, n:], system[n:, :n] = linear, linear.T
        self._inverse = np.linalg.inv(system)
        self._weights = self._inverse @ np.concatenate([values, np.zeros(n_linear)])

    def __call__(self, points: Array) -> Array:
        """Values at points of shape (K, D), shape (K,)."""
        inside = np.clip(points, self._low, self._high)
        n = len(self._points)
        bent = _distances(inside, self._points) @ self._weights[:n]
        value = bent + self._linear(inside) @ self._weights[n:]
        within: Array = np.clip(value, self._least, self._most)
        return within

    def leave_one_out_error(self) -> float:
        """By how much points are missed when each in turn is left out: robust standard deviation.

        A point's own weight over the diagonal of the inverse is the error without it (Rippa,
        1999, "An algorithm for selecting a good value for the parameter c in radial basis
        function interpolation").
        """
        n = len(self._points)
        if n <= 1 + len(self._columns):
            return 0.0
        errors = self._weights[:n] / np.diag(self._inverse)[:n]
        return float(NORMAL_FROM_MEDIAN * np.median(np.abs(errors)))

    def _linear(self, points: Array) -> Array:
        ones = np.ones((len(points), 1))
        return np.concatenate([ones, points[:, self._columns]], axis=1)


def _independent_columns(points: Array) -> list[int]:
    """Coordinates of which none is a linear function of those before it."""
    kept: list[int] = []
    for column in range(points.shape[1]):
        tried = np.concatenate([np.ones((len(points), 1)), points[:, [*kept, column]]], axis=1)
        if np.linalg.matrix_rank(tried) == tried.shape[1]:
            kept.append(column)
    return kept


def _distances(a: Array, b: Array) -> Array:
    squares = sum((a[:, None, i] - b[None, :, i]) ** 2 for i in range(a.shape[1]))
    distances: Array = np.sqrt(squares)
    return distances
