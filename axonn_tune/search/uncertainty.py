"""The probability that each of the fastest candidates is the fastest.

True times scatter around the predicted ones by a normal law. A number that all candidates share,
such as a link's bandwidth, moves their times together; the price of a product between measured ones
has an error of its own, which only candidates with the same products share; and effects that the
model leaves out differ from one candidate to the next (see `step.spread`).

The law is represented by points that are spread evenly, the multiples of irrational numbers of
Richtmyer. They are closer to it than random ones, and `numpy.random`, which takes longer to import
than all of this to compute, is not needed.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from axonn_tune.spec.candidates import CandidateTable, Ints
from axonn_tune.spec.plan import Array
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.schedules import distinct_shapes
from axonn_tune.step.spread import MODEL_ERROR, deviations, spread

# Number of the fastest rows that are compared; no other row has a chance.
N_ROWS = 32
# Number of points of the normal law. In 41 searches the worst of the chances was off by 0.0035 on
# average and by 0.008 at most, against a million random draws; with as many random draws as points
# it was off by 0.0065 and 0.013 (measured).
N_POINTS = 4096
# Each coordinate of the points has a prime of its own.
PRIMES = [n for n in range(2, 132) if all(n % divisor for divisor in range(2, n))]


class Uncertainty(NamedTuple):
    """The uncertainty of the times of the fastest rows, arrays of shape (R,).

    rows
        The rows that were compared, the fastest first.
    spread
        Standard deviation of the logarithm of the step time.
    p_best
        Probability that no other row is faster.
    """

    rows: Ints
    spread: Array
    p_best: Array


def uncertainty(
    scenario: Scenario, table: CandidateTable, step_seconds: Array, fits: np.ndarray
) -> Uncertainty:
    """Return the uncertainty of the fastest rows that fit.

    Parameters
    ----------
    table, step_seconds, fits
        Columns of a ranking, of shape (C,).
    """
    candidates = np.flatnonzero(fits)
    rows = candidates[np.argsort(step_seconds[candidates], kind="stable")][:N_ROWS]
    if not rows.size:
        return Uncertainty(rows, np.zeros(0), np.zeros(0))
    fastest = table.take(rows)
    groups = scenario.planned_rows(fastest)
    of_groups = [deviations(scenario, fastest.take(group)) for group in groups]
    order = np.argsort(np.concatenate(groups))
    effects = np.concatenate([effects for effects, _ in of_groups], axis=1)[:, order]
    own_error = np.concatenate([error for _, error in of_groups])[order]
    _, shape_of = distinct_shapes(scenario.strategy.compute_key, fastest)
    log_seconds = np.log(step_seconds[rows])
    p_best = _p_best(log_seconds, effects, own_error, shape_of)
    return Uncertainty(rows, spread(scenario, effects, own_error), p_best)


def _p_best(log_seconds: Array, effects: Array, own_error: Array, shape_of: Ints) -> Array:
    """Return the share of points at which each row is the fastest; equal rows share it.

    The logarithms of the times have the covariance

        effects^T effects + own_error own_error^T (where the shapes are equal) + MODEL_ERROR^2 I
    """
    of_shapes = np.outer(own_error, own_error) * (shape_of[:, None] == shape_of)
    alone = MODEL_ERROR**2 * np.eye(log_seconds.size)
    root = np.linalg.cholesky(effects.T @ effects + of_shapes + alone)
    log_drawn = log_seconds[:, None] + root @ _normal_points(log_seconds.size)
    is_fastest = log_drawn <= log_drawn.min(axis=0)
    return is_fastest @ (1.0 / np.count_nonzero(is_fastest, axis=0)) / N_POINTS


@cache
def _normal_points(n_variables: int) -> Array:
    """Return points of independent standard normal variables, shape (n_variables, N_POINTS).

    Coordinate j of point i of a cube is the fractional part of i sqrt(PRIMES[j]). Two neighbours
    become two normal variables by the transform of Box and Muller.
    """
    roots = np.sqrt(PRIMES[: n_variables + n_variables % 2])
    multiples = roots[:, None] * np.arange(1.0, N_POINTS + 1.0)
    cube = multiples - np.floor(multiples)
    radius, angle = np.sqrt(-2.0 * np.log(cube[::2])), 2.0 * np.pi * cube[1::2]
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return pairs.reshape(-1, N_POINTS)[:n_variables]


def tied(p_best: Array, share: float) -> int:
    """Return the number of likeliest rows that together hold a share of the probability."""
    held = np.cumsum(np.sort(p_best)[::-1])
    return int(np.searchsorted(held, share - 1e-12)) + 1
