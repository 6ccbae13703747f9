"""The uncertainty of a predicted time.

Every number of a profile is uncertain by its spread. A number that all candidates share, such as a
link's bandwidth, moves their times together; the price of a product between measured ones has an
error of its own; and effects that the model leaves out differ from one candidate to the next. The
logarithm of the time is linearised in the logarithms of these numbers.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from axonn_tune.simulate.step import PlayedStep
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.machine import Machine, Quantity
from axonn_tune.spec.plan import Array
from axonn_tune.spec.resources import Resource
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import Evaluator

# Standard deviations from the middle to the ends of an interval of 90 %.
NORMAL_90 = 1.645
# Relative standard deviations of numbers that state none. Conventions, not measurements: repeated
# benchmarks differ by a few percent, published figures between papers by about a tenth, and a
# guess is trusted to a third.
UNSTATED_SPREAD = {"measured": 0.05, "published": 0.10, "fitted": 0.10, "assumed": 0.30}
# Relative standard deviation of a step time due to effects that the model leaves out and that
# candidates do not share: a convention, so that candidates within a percent or two count as equal.
MODEL_ERROR = 0.02


def spread_of(quantity: Quantity) -> float:
    """Return the stated spread of a quantity, or the convention for its origin."""
    return quantity.spread_fraction or UNSTATED_SPREAD[quantity.origin]


def deviations(scenario: Scenario, table: CandidateTable) -> tuple[Array, Array]:
    """Return how a deviation of each number of the machine moves candidates that are alike.

    Returns
    -------
    effects : array, shape (resources, C)
        Change of the logarithm of the step time for one standard deviation of each resource.
    own_error : array, shape (C,)
        Standard deviation that comes from products that were not timed.
    """
    placements = table.placements.take(table.placement)
    rows = np.arange(len(table))
    # The table may hold many placements that none of its candidates has.
    compact = CandidateTable(placements, rows, table.micro_batch, table.recompute, table.n_virtual)
    evaluator = Evaluator.of(scenario, compact)
    worse = [evaluator.on(_worse(resource)) for resource in scenario.resources]
    # All machines' pipelines have the same schedule and are played at once.
    step = reduce(PlayedStep.joined, [each.play() for each in (evaluator, *worse)])
    seconds, _, _ = step.times()
    base, *others = seconds.reshape(-1, len(compact))
    effects = np.stack([np.log(other / base) for other in others])
    products = evaluator.product_seconds() * compact.n_microsteps(scenario.job.global_batch)
    error = evaluator.kernels.prices.interpolation_error
    return effects, error * np.sqrt(((products / base) ** 2).sum(axis=0))


def _worse(resource: Resource) -> Machine:
    """Return the machine with one standard deviation less of a resource."""
    return resource.improved(float(np.exp(-spread_of(resource.quantity))))


def spread(scenario: Scenario, effects: Array, own_error: Array) -> Array:
    """Return the standard deviation of the logarithm of the step time, shape (C,).

    It is what the profile tells or what published runs show, whichever is larger. The profiles of
    those runs are uncertain, too, so that the sum of both would count that twice.

    Parameters
    ----------
    effects, own_error : arrays
        Results of `deviations`.
    """
    of_profile = np.sqrt((effects**2).sum(axis=0) + own_error**2 + MODEL_ERROR**2)
    return np.maximum(of_profile, scenario.track_record_spread)
