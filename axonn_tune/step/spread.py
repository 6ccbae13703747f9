"""The uncertainty of a predicted time.

Every number of a profile is uncertain by its spread. A number that all candidates share, such as a
link's bandwidth, moves their times together; the price of a product between measured ones has an
error of its own; and effects that the model leaves out differ from one candidate to the next. The
logarithm of the time is linearised in the logarithms of these numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.learnable import learnable
from axonn_tune.spec.learned import Learned
from axonn_tune.spec.machine import Quantity
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
    effects : array, shape (causes, C)
        Change of the logarithm of the step time for one standard deviation of each independent
        cause: a number of the profile, or numbers that were learned together.
    own_error : array, shape (C,)
        Standard deviation that comes from products that were not timed, or what learning left.
    """
    placements = table.placements.take(table.placement)
    rows = np.arange(len(table))
    # The table may hold many placements that none of its candidates has.
    compact = CandidateTable(placements, rows, table.micro_batch, table.recompute, table.n_virtual)
    evaluator = Evaluator.of(scenario, compact)
    base = evaluator.evaluate().step_seconds
    learned = scenario.learned
    if learned is not None:
        of_learned = learned.root @ _slopes(evaluator, learned, base)
        of_host = _stated_effects(evaluator, scenario.of_host, base)
        effects = np.concatenate([of_learned, of_host])
        return effects, np.full(len(table), learned.scatter_fraction)
    effects = _stated_effects(evaluator, scenario.resources, base)
    products = evaluator.product_seconds() * compact.n_microsteps(scenario.job.global_batch)
    error = evaluator.kernels.prices.interpolation_error
    return effects, error * np.sqrt(((products / base) ** 2).sum(axis=0))


def _stated_effects(evaluator: Evaluator, resources: Sequence[Resource], base: Array) -> Array:
    """Return the effects of resources whose spreads the profile states, shape (resources, C)."""
    effects = [_effect(evaluator, each, base, spread_of(each.quantity)) for each in resources]
    return np.array(effects).reshape(-1, base.size)


def _slopes(evaluator: Evaluator, learned: Learned, base: Array) -> Array:
    """Return how log step time falls with the logarithm of each learned factor, (factors, C)."""
    learnt = zip(learnable(evaluator.scenario.machine), learned.factors, strict=True)
    return np.stack(
        [_effect(evaluator, each, base, factor.spread) / factor.spread for each, factor in learnt]
    )


def _effect(evaluator: Evaluator, resource: Resource, base: Array, deviation: float) -> Array:
    """Return the change of log step time for a deviation downwards of the log of a resource."""
    factor = float(np.exp(-deviation))
    worse = evaluator.on(resource.improved(factor)).evaluate().step_seconds
    return np.log(worse / base)


def spread(scenario: Scenario, effects: Array, own_error: Array) -> Array:
    """Return the standard deviation of the logarithm of the step time, shape (C,).

    It is what the profile tells or what published runs show, whichever is larger. The profiles of
    those runs are uncertain, too, so that the sum of both would count that twice. A machine
    that has learned from runs of the engine needs no runs of others.

    Parameters
    ----------
    effects, own_error : arrays
        Results of `deviations`.
    """
    of_profile = np.sqrt((effects**2).sum(axis=0) + own_error**2 + MODEL_ERROR**2)
    if scenario.learned is not None:
        return of_profile
    return np.maximum(of_profile, scenario.track_record_spread)
