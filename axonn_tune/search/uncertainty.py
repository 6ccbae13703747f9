"""The probability that each of the fastest candidates is the fastest.

The true times are drawn at random around the predicted ones. A number that all candidates share,
such as a link's bandwidth, moves their times together; the price of a product between measured ones
has an error of its own, which only candidates with the same products share; and effects that the
model leaves out differ from one candidate to the next (see `step.spread`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from axonn_tune.spec.candidates import CandidateTable, Ints
from axonn_tune.spec.plan import Array
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.schedules import distinct_shapes
from axonn_tune.step.spread import MODEL_ERROR, deviations, spread

# Number of the fastest rows that are compared; no other row has a chance.
N_ROWS = 32
# Number of random draws.
N_DRAWS = 4096


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
    """Return the share of random draws in which each row is the fastest; equal rows share it."""
    random = np.random.default_rng(0)
    drawn = random.standard_normal((N_DRAWS, effects.shape[0])) @ effects
    drawn += log_seconds
    per_shape = random.standard_normal((N_DRAWS, int(shape_of.max()) + 1))
    drawn += own_error * per_shape[:, shape_of]
    drawn += MODEL_ERROR * random.standard_normal((N_DRAWS, log_seconds.size))
    is_fastest = drawn <= drawn.min(axis=1, keepdims=True)
    return (is_fastest / is_fastest.sum(axis=1, keepdims=True)).mean(axis=0)


def tied(p_best: Array, share: float) -> int:
    """Return the number of likeliest rows that together hold a share of the probability."""
    held = np.cumsum(np.sort(p_best)[::-1])
    return int(np.searchsorted(held, share - 1e-12)) + 1
