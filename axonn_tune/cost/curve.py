"""Read a time, or a ratio of times, between measured ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axonn_tune.spec.plan import Array, Size


def measured_seconds(work: Size, sizes: Sequence[float], seconds: Sequence[float]) -> Array:
    """Time of some work, by straight lines between the sizes that were measured.

    A latency and a bandwidth make a straight line, so that between points of one regime this
    is exact. Less work than the least takes as long as that; more than the most takes longer
    in proportion.

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
    result: Array = np.interp(work, known, mean) * np.maximum(work / known[-1], 1.0)
    return result


# Points whose mean corrects a formula between them, and distances held in memory at once.
NEIGHBOURS = 4
CHUNK_DISTANCES = 2**20


def interpolated(wanted: Sequence[Array], known: Sequence[Array], values: Array) -> Array:
    """A quantity between the points where it is known, by inverse squared distance.

    At a point its value comes out exactly; far from all points, the mean of the nearest.

    Parameters
    ----------
    wanted, known : sequences of arrays, shapes (K,) and (N,)
        Coordinates, such as logarithms of sizes.
    values : shape (N,)

    Returns
    -------
    ndarray, shape (K,)
    """
    n_wanted, n_known = wanted[0].size, values.size
    result = np.empty(n_wanted)
    n_rows = max(CHUNK_DISTANCES // n_known, 1)
    for start in range(0, n_wanted, n_rows):
        rows = slice(start, start + n_rows)
        distance2 = np.zeros((len(wanted[0][rows]), n_known))
        for own, others in zip(wanted, known, strict=True):
            distance2 += (own[rows, None] - others) ** 2
        count = min(NEIGHBOURS, n_known)
        nearest = np.argpartition(distance2, count - 1, axis=1)[:, :count]
        weight = 1.0 / np.maximum(np.take_along_axis(distance2, nearest, axis=1), 1e-12)
        result[rows] = (weight * values[nearest]).sum(axis=1) / weight.sum(axis=1)
    return result
