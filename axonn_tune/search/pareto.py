"""Candidates that no other beats in both time and memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pareto_front(
    step_seconds: Sequence[float], memory_bytes: Sequence[float], fits: Sequence[bool]
) -> list[int]:
    """Rows that fit and that none is faster than without more memory, the fastest first.

    Parameters
    ----------
    step_seconds, memory_bytes, fits : shape (C,)
    """
    rows = np.flatnonzero(np.asarray(fits, dtype=bool))
    seconds, nbytes = np.asarray(step_seconds)[rows], np.asarray(memory_bytes)[rows]
    order = np.lexsort((nbytes, seconds))
    least_before = np.minimum.accumulate(np.concatenate([[np.inf], nbytes[order][:-1]]))
    return [int(row) for row in rows[order[nbytes[order] < least_before]]]
