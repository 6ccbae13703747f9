"""Peak memory of one rank."""

from __future__ import annotations

import numpy as np

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.plan import Array
from axonn_tune.spec.scenario import Scenario


def memory_bytes(scenario: Scenario, table: CandidateTable) -> tuple[Array, dict[str, Array]]:
    """Return the peak memory of one rank, and its terms, of candidates that are alike.

    The terms are those of the strategy, and what the machine's profile says of fragmentation and
    of memory that training cannot use.

    Returns
    -------
    total : shape (C,) [bytes]
    terms : by name, shape (C,) [bytes]
    """
    reserve = scenario.machine.memory_reserve
    terms = scenario.strategy.memory(scenario.model, scenario.job, table)
    allocated = sum(terms.values(), start=np.zeros(len(table)))
    terms["fragmentation"] = allocated * reserve.fragmentation_fraction.value
    terms["reserved"] = np.full(len(table), reserve.reserved_bytes.value)
    return allocated + terms["fragmentation"] + terms["reserved"], terms
