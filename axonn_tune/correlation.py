"""How alike two orders of the same items are.

scipy.stats has it, too, but takes seconds to import, which `score` and `reproduce` would spend.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def rank_correlation(first: npt.ArrayLike, second: npt.ArrayLike) -> float | None:
    """Return Spearman's rho; None where all values of a side are equal."""
    of_first, of_second = _ranks(np.asarray(first)), _ranks(np.asarray(second))
    if np.ptp(of_first) == 0 or np.ptp(of_second) == 0:
        return None
    return float(np.corrcoef(of_first, of_second)[1, 0])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value; equal values share the mean of their ranks."""
    _, number, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - 0.5 * (counts - 1))[number]
