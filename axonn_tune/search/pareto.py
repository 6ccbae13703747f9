"""The candidates that no other candidate beats in both time and memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pareto_front(
    step_seconds: Sequence[float], memory_bytes: Sequence[float], fits: Sequence[bool]
) -> list[int]:
    """Return the rows that fit and that no faster row beats in memory, the fastest first.

    Parameters
    ----------
    step_seconds, memory_bytes, fits : sequences, shape (C,)
        Columns of a ranking.
    """
    rows = np.flatnonzero(np.asarray(fits, dtype=bool))
    seconds = np.asarray(step_seconds)[rows]
    nbytes = np.asarray(memory_bytes)[rows]
    order = np.lexsort((nbytes, seconds))
    least_before = np.minimum.accumulate(np.concatenate([[np.inf], nbytes[order][:-1]]))
    return [int(row) for row in rows[order[nbytes[order] < least_before]]]
