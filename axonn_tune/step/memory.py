"""The peak memory of one rank, and how uncertain what is assumed of it makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.plan import Array
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.spread import NORMAL_90, spread_of

# The bytes of one configuration, or of each of many.
Bytes = TypeVar("Bytes", float, Array)


def memory_bytes(scenario: Scenario, table: CandidateTable) -> tuple[Array, dict[str, Array]]:
    """Return the peak memory of one rank, and its terms, for candidates that are alike.

    The strategy states most terms. The machine's profile adds the fragmentation and the memory
    that training cannot use.

    Returns
    -------
    total : array, shape (C,) [bytes]
        Sum of all terms.
    terms : dict of str to array, shape (C,) [bytes]
        Each term by its name.
    """
    reserve = scenario.machine.memory_reserve
    terms = scenario.strategy.memory(scenario.model, scenario.job, table)
    allocated = sum(terms.values(), start=np.zeros(len(table)))
    terms["fragmentation"] = allocated * reserve.fragmentation_fraction.value
    terms["reserved"] = np.full(len(table), reserve.reserved_bytes.value)
    return allocated + terms["fragmentation"] + terms["reserved"], terms


def memory_interval_bytes(
    scenario: Scenario, total: Bytes, terms: Mapping[str, Bytes]
) -> tuple[Bytes, Bytes]:
    """Return the ends of the interval that holds the peak memory with 90 % probability.

    The terms of the strategy follow from the model; the profile's numbers of fragmentation and
    reserve have spreads.

    Parameters
    ----------
    total, terms
        Results of `memory_bytes`, of one configuration or of many.
    """
    reserve = scenario.machine.memory_reserve
    fragmentation = spread_of(reserve.fragmentation_fraction) * terms["fragmentation"]
    reserved = spread_of(reserve.reserved_bytes) * terms["reserved"]
    margin = NORMAL_90 * (fragmentation**2 + reserved**2) ** 0.5
    return total - margin, total + margin
