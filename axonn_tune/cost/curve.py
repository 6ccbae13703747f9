"""Interpolation between measured times.

A time that depends on one size follows straight lines between the measured points
(`Curve`). A ratio that depends on several sizes, such as measured over computed time of
a product, follows a smooth surface through the points (`Spline`). Neither leaves what was measured
far behind: beyond the points a line keeps its slope, and a surface stays level.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.normal import NORMAL_FROM_MEDIAN
from axonn_tune.spec.plan import Array, Size


class Curve(NamedTuple):
    """Interpolates along straight lines between the sizes that were measured, shape (points,).

    A latency and a bandwidth make a straight line, so that between points of one regime this
    is exact. Work below the smallest measured size takes as long as that size. Work above the
    largest size follows the last line, whose slope is held between level and proportional.

    nbytes
        Measured sizes, in growing order.
    seconds
        Time for each of them.
    last_slope
        Slope beyond the largest size.
    """

    nbytes: Array
    seconds: Array
    last_slope: float

    @classmethod
    def through(cls, sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
        """Return the curve through points in any order; those of one size count with their mean."""
        known, index = np.unique(np.asarray(sizes, dtype=np.float64), return_inverse=True)
        mean = np.bincount(index, np.asarray(seconds, dtype=np.float64)) / np.bincount(index)
        return cls(known, mean, _last_slope(known, mean))

    def at(self, work: Size) -> Array:
        """Return the time of some work, bytes of shape (C,)."""
        work = np.asarray(work, dtype=np.float64)
        beyond = np.maximum(work - self.nbytes[-1], 0.0)
        return np.asarray(np.interp(work, self.nbytes, self.seconds) + beyond * self.last_slope)


def used_curves(curve_of: Ints, curves: Sequence[Curve]) -> list[tuple[Curve, Ints]]:
    """Return each curve that holds for at least one group, with the rows of its groups.

    `curve_of` holds the index of each group's curve, -1 where it has none, shape (P,).
    """
    used = np.flatnonzero(np.bincount(curve_of[curve_of >= 0])).tolist()
    return [(curves[number], np.flatnonzero(curve_of == number)) for number in used]


def _last_slope(sizes: Array, seconds: Array) -> float:
    """Return the slope of the line through the two largest sizes, from level to proportional."""
    proportional = float(seconds[-1] / sizes[-1])
    if sizes.size == 1:
        return proportional
    slope = float((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
    return min(max(slope, 0.0), proportional)


class Spline:
    """A smooth function through points in several dimensions; beyond them it stays level.

    It is the polyharmonic spline of order one, a sum of distances to the points and a linear
    function: of all functions through the points, the one that bends least (Duchon, 1977,
    "Splines minimizing rotation-invariant semi-norms in Sobolev spaces"). Its values are clipped
    to the range of the points' values.

    Parameters
    ----------
    points : array, shape (N, D)
        Places where the function is known; for equal points the mean of their values counts.
    values : array, shape (N,)
        Values of the function there.
    """

    def __init__(self, points: Array, values: Array) -> None:
        points, index = np.unique(points, axis=0, return_inverse=True)
        counts = np.bincount(index.ravel())
        values = np.bincount(index.ravel(), values) / counts
        self._points = points
        self._low = points.min(axis=0)
        self._high = points.max(axis=0)
        self._least = values.min()
        self._most = values.max()
        self._columns = _independent_columns(points)
        linear = self._linear(points)
        n = len(points)
        n_linear = linear.shape[1]
        system = np.zeros((n + n_linear, n + n_linear))
        system[:n, :n] = _distances(points, points)
        system[:n, n:] = linear
        system[n:, :n] = linear.T
        self._inverse = np.linalg.inv(system)
        self._weights = self._inverse @ np.concatenate([values, np.zeros(n_linear)])

    def __call__(self, points: Array) -> Array:
        """Return the values at points of shape (K, D), shape (K,)."""
        inside = np.clip(points, self._low, self._high)
        n = len(self._points)
        bent = _distances(inside, self._points) @ self._weights[:n]
        value = bent + self._linear(inside) @ self._weights[n:]
        return np.clip(value, self._least, self._most)

    def leave_one_out_error(self) -> float:
        """Return the robust standard deviation of the error at a point that is left out.

        The weight of a point over its entry on the diagonal of the inverse is the error without
        the point (Rippa, 1999, "An algorithm for selecting a good value for the parameter c in
        radial basis function interpolation").
        """
        n = len(self._points)
        if n <= 1 + len(self._columns):
            return 0.0
        errors = self._weights[:n] / np.diag(self._inverse)[:n]
        return float(NORMAL_FROM_MEDIAN * np.median(np.abs(errors)))

    def _linear(self, points: Array) -> Array:
        """Return one and the independent coordinates of each point, shape (K, 1 + columns)."""
        ones = np.ones((len(points), 1))
        return np.concatenate([ones, points[:, self._columns]], axis=1)


def spline_through(points: Array, values: Array) -> Spline:
    """Return the spline through these points, which is made once: jobs share their machines."""
    return _spline(points.shape, points.tobytes(), values.tobytes())


@lru_cache(maxsize=256)
def _spline(shape: tuple[int, ...], points: bytes, values: bytes) -> Spline:
    """Return the spline through points of this shape, from the bytes of both arrays."""
    return Spline(np.frombuffer(points).reshape(shape), np.frombuffer(values))


def _independent_columns(points: Array) -> list[int]:
    """Return the coordinates that are not linear functions of the coordinates before them."""
    kept: list[int] = []
    for column in range(points.shape[1]):
        matrix = np.concatenate([np.ones((len(points), 1)), points[:, [*kept, column]]], axis=1)
        if np.linalg.matrix_rank(matrix) == matrix.shape[1]:
            kept.append(column)
    return kept


def _distances(a: Array, b: Array) -> Array:
    """Return the distance of each point of `a` to each point of `b`, shape (len(a), len(b))."""
    return np.sqrt(sum((a[:, None, i] - b[None, :, i]) ** 2 for i in range(a.shape[1])))
