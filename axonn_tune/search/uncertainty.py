"""How far predicted times can be trusted: intervals, and how likely each row is the fastest.

Every number of a profile is uncertain by its spread. Numbers that all candidates share, such
as a link's bandwidth, move their times together; a product between measured ones is off by an
error of its own, which only candidates with the same products share; and what the model leaves
out differs from one candidate to the next. Times are linearised in the logarithms of these and
drawn at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from axonn_tune.cost.gemm import interpolation_error
from axonn_tune.search.search import Search
from axonn_tune.spec.grid import PIPELINE, CandidateTable, Ints, distinct
from axonn_tune.spec.machine import Quantity
from axonn_tune.spec.plan import Array
from axonn_tune.spec.resources import Resource, resources
from axonn_tune.spec.variant import Variant
from axonn_tune.step.evaluate import Evaluator

# Relative standard deviations of numbers that state none. Conventions, not measurements: repeated
# benchmarks differ by a few percent, published figures between papers by about a tenth, and a
# guess is trusted to a third.
UNSTATED_SPREAD = {"measured": 0.05, "published": 0.10, "assumed": 0.30}
# What the model leaves out, as a relative standard deviation of a step time apart from what is
# common to all: a convention, so that candidates within a percent or two are not told apart.
MODEL_ERROR = 0.02
# Rows that are compared, the fastest first: no other one has a chance.
N_ROWS = 32
N_DRAWS = 4096


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """Of the fastest rows, arrays of shape (R,).

    spread: standard deviation of the logarithm of the step time. p_best: probability that no
    other row is faster.
    """

    rows: Ints
    spread: Array
    p_best: Array


def spread_of(quantity: Quantity) -> float:
    """The stated spread, or the convention for its origin."""
    return quantity.spread_fraction or UNSTATED_SPREAD[quantity.origin]


def uncertainty(
    search: Search, table: CandidateTable, variant: Ints, step_seconds: Array, fits: np.ndarray
) -> Uncertainty:
    """Compare the fastest rows that fit.

    Parameters
    ----------
    table, variant, step_seconds, fits : of the ranking, arrays of shape (C,)
    """
    candidates = np.flatnonzero(fits)
    rows = candidates[np.argsort(step_seconds[candidates], kind="stable")][:N_ROWS]
    if not rows.size:
        return Uncertainty(rows, np.zeros(0), np.zeros(0))
    parts = [
        _Part(search, table, rows, which, search.variants[int(index)])
        for index, which in _alike(table, rows, variant[rows])
    ]
    effects, own = np.zeros((len(resources(search.machine)), rows.size)), np.zeros(rows.size)
    for part in parts:
        effects[:, part.which] = part.effects
        own[part.which] = part.own_error
    key = [axis for axis in search.strategy.compute_key if axis != "micro_batch"]
    sizes = [table.placements.size(axis)[table.placement[rows]] for axis in key]
    _, shape_of = distinct(*sizes, table.micro_batch[rows])
    spread: Array = np.sqrt((effects**2).sum(axis=0) + own**2 + MODEL_ERROR**2)
    log_seconds = np.log(step_seconds[rows])
    return Uncertainty(rows, spread, _p_best(log_seconds, effects, own, shape_of))


def _alike(table: CandidateTable, rows: Ints, variant: Ints) -> Iterator[tuple[int, Ints]]:
    """Variant and places of rows that share it and the number of stages."""
    stages = np.ones(rows.size, dtype=np.int64)
    if PIPELINE in table.placements.axes.names:
        stages = table.placements.size(PIPELINE)[table.placement[rows]]
    first, group = distinct(variant, stages)
    for number, row in enumerate(first):
        yield int(variant[row]), np.flatnonzero(group == number)


class _Part:
    """Rows with one variant and number of stages: how a deviation of each number moves them."""

    def __init__(
        self, search: Search, table: CandidateTable, rows: Ints, which: Ints, variant: Variant
    ) -> None:
        self.which = which
        own_rows = rows[which]
        own_table = CandidateTable(
            table.placements.take(table.placement[own_rows]),
            np.arange(own_rows.size),
            table.micro_batch[own_rows],
        )
        evaluator = Evaluator(search, variant, own_table)
        base = evaluator.evaluate().step_seconds
        self.effects = [_effect(evaluator, r, base) for r in resources(search.machine)]
        products = evaluator.product_seconds() * own_table.n_microsteps(search.job.global_batch)
        error = interpolation_error(search.machine, search.job.dtype)
        self.own_error = error * np.sqrt(((products / base) ** 2).sum(axis=0))


def _effect(evaluator: Evaluator, resource: Resource, base: Array) -> Array:
    """Change of the logarithm of the step time for one standard deviation less of a resource."""
    less = float(np.exp(-spread_of(resource.quantity)))
    worse = evaluator.on(resource.improved(less)).evaluate().step_seconds
    change: Array = np.log(worse / base)
    return change


def _p_best(log_seconds: Array, effects: Array, own: Array, shape_of: Ints) -> Array:
    """Share of random draws in which a row is the fastest; equal ones share it."""
    random = np.random.default_rng(0)
    common = random.standard_normal((N_DRAWS, effects.shape[0])) @ effects
    per_shape = random.standard_normal((N_DRAWS, int(shape_of.max()) + 1))
    alone = MODEL_ERROR * random.standard_normal((N_DRAWS, log_seconds.size))
    drawn = log_seconds + common + own * per_shape[:, shape_of] + alone
    is_fastest = drawn <= drawn.min(axis=1, keepdims=True)
    shares: Array = (is_fastest / is_fastest.sum(axis=1, keepdims=True)).mean(axis=0)
    return shares


def tied(p_best: Array, share: float) -> int:
    """How many of the likeliest rows it takes to hold a share of the probability."""
    held = np.cumsum(np.sort(p_best)[::-1])
    return int(np.searchsorted(held, share - 1e-12)) + 1
