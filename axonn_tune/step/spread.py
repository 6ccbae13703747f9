"""How far a predicted time can be trusted.

Every number of a profile is uncertain by its spread. Numbers that all candidates share, such
as a link's bandwidth, move their times together; a product between measured ones is off by an
error of its own; and what the model leaves out differs from one candidate to the next. Times are
linearised in the logarithms of these.
"""

from __future__ import annotations

import numpy as np

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.machine import Quantity
from axonn_tune.spec.plan import Array
from axonn_tune.spec.resources import Resource, resources
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import Evaluator

# Relative standard deviations of numbers that state none. Conventions, not measurements: repeated
# benchmarks differ by a few percent, published figures between papers by about a tenth, and a
# guess is trusted to a third.
UNSTATED_SPREAD = {"measured": 0.05, "published": 0.10, "assumed": 0.30}
# What the model leaves out, as a relative standard deviation of a step time apart from what is
# common to all: a convention, so that candidates within a percent or two are not told apart.
MODEL_ERROR = 0.02


def spread_of(quantity: Quantity) -> float:
    """Return the stated spread of a quantity, or the convention for its origin."""
    return quantity.spread_fraction or UNSTATED_SPREAD[quantity.origin]


def deviations(scenario: Scenario, table: CandidateTable) -> tuple[Array, Array]:
    """Return how a deviation of each number of the machine moves candidates that are alike.

    Returns
    -------
    effects : shape (resources, C)
        Change of the logarithm of the step time for one standard deviation of each resource.
    own_error : shape (C,)
        Standard deviation that comes from products which were not timed.
    """
    placements = table.placements.take(table.placement)
    rows = np.arange(len(table))
    alone = CandidateTable(placements, rows, table.micro_batch, table.recompute, table.n_virtual)
    evaluator = Evaluator.of(scenario, alone)
    base = evaluator.evaluate().step_seconds
    effects = np.stack([_effect(evaluator, r, base) for r in resources(scenario.machine)])
    products = evaluator.product_seconds() * alone.n_microsteps(scenario.job.global_batch)
    error = evaluator.kernels.prices.interpolation_error
    return effects, error * np.sqrt(((products / base) ** 2).sum(axis=0))


def _effect(evaluator: Evaluator, resource: Resource, base: Array) -> Array:
    """Return the change of log step time for one standard deviation less of a resource."""
    less = float(np.exp(-spread_of(resource.quantity)))
    worse = evaluator.on(resource.improved(less)).evaluate().step_seconds
    return np.log(worse / base)


def spread(effects: Array, own_error: Array) -> Array:
    """Return the standard deviation of the logarithm of the step time, shape (C,).

    Parameters
    ----------
    effects, own_error
        The results of `deviations`.
    """
    return np.sqrt((effects**2).sum(axis=0) + own_error**2 + MODEL_ERROR**2)
