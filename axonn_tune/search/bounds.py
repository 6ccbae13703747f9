"""Time only the candidates that may be the best of their placement.

The passes of a pipeline bound the time of a step from below (`PlayedStep.least_seconds`), and to
play them through the pipeline takes longer than all else. So the candidate with the least bound of
each placement is played first. Its time rules out others, and only those that are left are played,
too. Where only some of the best placements are wanted, as many are played first, and no candidate
whose bound is above all of their times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axonn_tune.simulate.step import PlayedStep
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import Array

# Bounds and times are sums of many numbers: a bound counts as above a time only beyond this.
ROUNDING = 1e-9


def every_time(steps: Sequence[PlayedStep]) -> tuple[Ints, Array]:
    """Return the rows and the times of all candidates of some tables; see `contender_times`."""
    rows = np.arange(sum(step.seconds.size for step in steps))
    return rows, _times_of(steps, rows)


def contender_times(
    steps: Sequence[PlayedStep], placement: Ints, fits: np.ndarray, n_best: int | None = None
) -> tuple[Ints, Array]:
    """Return the rows, and the times, of the candidates that may be the best of their placement.

    The best of those that fit counts, and of those that nearly fit whatever is faster than that.

    Parameters
    ----------
    steps : sequence of PlayedStep
        Candidates of some tables; rows are counted through all of them.
    placement, fits : arrays, shape (C,)
        Columns of these candidates.
    n_best : int or None
        How many of the placements that fit are wanted, the fastest ones; None for all.

    Returns
    -------
    rows : array of int, shape (R,)
        Rows of these candidates, in ascending order.
    times : array, shape (3, R)
        Times of a step, of its exposed communication and of its bubble.
    """
    if all(step.passes is None for step in steps):
        return every_time(steps)
    least = np.concatenate([step.least_seconds() for step in steps])
    times = np.full((3, least.size), np.inf)

    def play(may_be_best: np.ndarray) -> None:
        rows = np.flatnonzero(may_be_best & np.isinf(times[0]))
        times[:, rows] = _times_of(steps, rows)

    group = 2 * placement + fits
    by_bound = np.argsort(least, kind="stable")
    _, first = np.unique(group[by_bound], return_index=True)
    is_likeliest = np.zeros(least.size, dtype=bool)
    is_likeliest[by_bound[first]] = True
    may_be_wanted = np.ones(least.size, dtype=bool)
    fitting = by_bound[(is_likeliest & fits)[by_bound]]
    if n_best is not None and fitting.size > n_best:
        best = fitting[:n_best]
        play(np.isin(np.arange(least.size), best))
        may_be_wanted = least <= times[0, best].max() * (1.0 + ROUNDING)
    play(is_likeliest & may_be_wanted)
    to_beat = np.full(2 * (int(placement.max()) + 1), np.inf)
    to_beat[group[is_likeliest]] = times[0, is_likeliest]
    nearly_fit, fit = to_beat[0::2], to_beat[1::2]
    np.minimum(nearly_fit, fit, out=nearly_fit)
    play((least <= to_beat[group] * (1.0 + ROUNDING)) & may_be_wanted)
    rows = np.flatnonzero(np.isfinite(times[0]))
    return rows, times[:, rows]


def _times_of(steps: Sequence[PlayedStep], rows: Ints) -> Array:
    """Return the times of some candidates, whose rows ascend, shape (3, R)."""
    sizes = np.array([step.seconds.size for step in steps])
    ends = np.cumsum(sizes)
    of_tables = np.split(rows, np.searchsorted(rows, ends[:-1]))
    found = zip(steps, of_tables, ends - sizes, strict=True)
    chosen = [step.take(own - start) for step, own, start in found if own.size]
    times = [np.stack(step.times()) for step in chosen]
    return np.concatenate([np.zeros((3, 0)), *times], axis=1)
