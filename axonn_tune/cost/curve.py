"""Read a time between measured ones."""

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
