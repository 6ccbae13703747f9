"""The peak memory of one rank."""

from __future__ import annotations

import numpy as np

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.plan import Array
from axonn_tune.spec.scenario import Scenario


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
