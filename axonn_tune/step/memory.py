"""The peak memory of one rank, and how uncertain it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.engine import HELD_BACK, HOST_ACTIVATIONS, HOST_COPIES, QUEUED, WORKSPACES
from axonn_tune.spec.normal import NORMAL_90
from axonn_tune.spec.plan import Array
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.spread import spread_of

# Terms that never take any of the GPU's memory.
_ON_HOST_ONLY = (HOST_COPIES, HOST_ACTIVATIONS)
# The bytes of one configuration, or of each of many.
Bytes = TypeVar("Bytes", float, Array)


def memory_bytes(
    scenario: Scenario,
    table: CandidateTable,
    in_first_stage: bool = False,
    runs_ahead: np.ndarray | None = None,
) -> tuple[Array, dict[str, Array]]:
    """Return the peak memory of one rank, and its terms, for candidates that are alike.

    The strategy states most terms. The engine and the GPU add the workspaces of products, and the
    machine's profile the fragmentation, unless the engine counts what its allocator reserves, and
    the memory that training cannot use. Offloaded terms take no memory of the GPU. The allocator
    holds memory back only while there is room: before it fails, PyTorch's waits for the GPU, and
    returns all that it has cached (release_cached_blocks in c10/cuda/CUDACachingAllocator.cpp).

    Parameters
    ----------
    in_first_stage
        Whether the rank is one in the first stage, instead of the one that needs most.
    runs_ahead : bool array, shape (C,), optional
        Whether the host of a stage runs ahead of its GPU (`Evaluator.runs_ahead`). None means that
        no host does.

    Returns
    -------
    total : array, shape (C,) [bytes]
        Sum of all terms.
    terms : dict of str to array, shape (C,) [bytes]
        Each term by its name.
    """
    reserve = scenario.machine.memory_reserve
    terms = scenario.memory_terms(table, in_first_stage)
    terms |= {term: np.zeros(len(table)) for term in scenario.host_terms}
    for term in _ON_HOST_ONLY:
        terms.pop(term, None)
    held_back = terms.pop(HELD_BACK, None)
    queued = terms.pop(QUEUED, 0.0)
    if held_back is not None and runs_ahead is not None:
        held_back = held_back + queued * runs_ahead
    if scenario.workspace_bytes:
        terms[WORKSPACES] = np.full(len(table), scenario.workspace_bytes)
    allocated = sum(terms.values(), start=np.zeros(len(table)))
    is_counted = scenario.strategy.engine.memory.counts_segments
    terms["fragmentation"] = allocated * reserve.fragmentation_fraction.value * (not is_counted)
    terms["reserved"] = np.full(len(table), reserve.reserved_bytes.value)
    needed = allocated + terms["fragmentation"] + terms["reserved"]
    if held_back is None:
        return needed, terms
    with_all = needed + held_back
    total = np.where(with_all <= scenario.memory_capacity_bytes, with_all, needed)
    terms[HELD_BACK] = total - needed
    return total, terms


def host_memory_bytes(scenario: Scenario, table: CandidateTable) -> Array:
    """Return the bytes of the host's memory that a node's ranks take, shape (C,).

    The candidates are alike. Every rank counts like the one that needs most memory of its GPU.
    """
    nbytes = np.zeros(len(table))
    if not scenario.host_terms:
        return nbytes
    terms = scenario.memory_terms(table)
    of_rank = sum((terms[term] for term in scenario.host_terms if term in terms), start=nbytes)
    return scenario.ranks_on_node * of_rank


def fits_in_memory(scenario: Scenario, table: CandidateTable, nbytes: Array) -> np.ndarray:
    """Return which candidates fit in the memories of GPU and host, bool of shape (C,).

    `nbytes` is the peak memory of a rank (`memory_bytes`), shape (C,).
    """
    fits_in_host = host_memory_bytes(scenario, table) <= scenario.host_memory_capacity_bytes
    return (nbytes <= scenario.memory_capacity_bytes) & fits_in_host


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
