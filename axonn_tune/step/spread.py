"""The uncertainty of a predicted time.

Every number of a profile is uncertain by its spread. A number that all candidates share, such as a
link's bandwidth, moves their times together; the price of a product between measured ones has an
error of its own; and effects that the model leaves out differ from one candidate to the next. The
logarithm of the time is linearised in the logarithms of these numbers.
"""

from __future__ import annotations

import math

import numpy as np

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.learnable import learnable
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.normal import NORMAL_90
from axonn_tune.spec.plan import Array
from axonn_tune.spec.quantity import Quantity
from axonn_tune.spec.resources import Resource
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import Evaluator

# What Student's t exceeds with a probability of 5 percent, by the degrees of freedom.
_STUDENT_95 = {
    math.inf: NORMAL_90,
    10: 1.812,
    7: 1.895,
    5: 2.015,
    3: 2.353,
    2: 2.920,
    1.5: 3.705,
    1: 6.314,
}
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
    """Return how a deviation of each number of the machine moves candidates of one plan.

    Returns
    -------
    effects : array, shape (causes, C)
        Change of the logarithm of the step time for one standard deviation of each independent
        cause: a number of the profile, or numbers that were learned together.
    own_error : array, shape (C,)
        Standard deviation that comes from products that were not timed, or that remained after
        learning.
    """
    evaluator = Evaluator.of(scenario, table.compact())
    learned = scenario.learned
    resources = scenario.resources if learned is None else scenario.of_host
    causes = [(each, spread_of(each.quantity)) for each in resources]
    if learned is not None:
        factors = zip(learnable(scenario.machine), learned.factors, strict=True)
        causes = [*((each, factor.spread) for each, factor in factors), *causes]
    base, *worse = evaluator.seconds_on([scenario.machine, *(_worse(*cause) for cause in causes)])
    changes = np.log(np.array(worse).reshape(-1, len(table)) / base)
    if learned is not None:
        n_learned = len(learned.factors)
        spreads = np.array([deviation for _, deviation in causes[:n_learned]])
        slopes = changes[:n_learned] / spreads[:, None]
        effects = np.concatenate([learned.root @ slopes, changes[n_learned:]])
        return effects, np.full(len(table), learned.scatter_fraction)
    products = np.sqrt(evaluator.squared_product_seconds())
    share = products * table.n_microsteps(scenario.job.global_batch) / base
    return changes, evaluator.kernels.prices.interpolation_error * share


def _worse(resource: Resource, deviation: float) -> Machine:
    """Return the machine with less of a resource, by a deviation of its logarithm."""
    return resource.improved(float(np.exp(-deviation)))


def student_95(freedom: float) -> float:
    """Return what Student's t exceeds with a probability of 5 percent."""
    known = [1.0 / each for each in _STUDENT_95]
    return float(np.interp(1.0 / freedom, known, list(_STUDENT_95.values())))


def spread(scenario: Scenario, effects: Array, own_error: Array) -> Array:
    """Return the standard deviation of the logarithm of the step time, shape (C,).

    It is the spread that follows from the profile, or that of published runs, whichever is larger.
    The profiles of those runs are uncertain, too, so that the sum of both would count this twice. A
    machine that has learned from runs of the engine knows how these scatter, and needs no runs of
    others. If there were few runs, their scatter is widened, so that a normal distribution has the
    same interval of 90 % as Student's t.

    Parameters
    ----------
    effects, own_error : arrays
        Results of `deviations`.
    """
    learned = scenario.learned
    of_products = own_error if learned is None else 0.0
    of_profile = np.sqrt((effects**2).sum(axis=0) + of_products**2 + MODEL_ERROR**2)
    if learned is None:
        return np.maximum(of_profile, scenario.track_record_spread)
    return np.maximum(of_profile, own_error * student_95(learned.scatter_freedom) / NORMAL_90)
