"""Price the operations of a step plan on a machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from axonn_tune.cost.attention import attention_seconds
from axonn_tune.cost.collectives import collective_seconds
from axonn_tune.cost.curve import measured_seconds
from axonn_tune.cost.gemm import gemm_seconds
from axonn_tune.cost.links import AxisLinks, KindLinks, axis_links
from axonn_tune.cost.memory_bound import memory_bound_seconds
from axonn_tune.spec.grid import CandidateTable, Ints
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import (
    Array,
    Attention,
    Collective,
    Compute,
    Gemm,
    MemoryBound,
    Phase,
    Size,
)

Links: TypeAlias = Mapping[str, AxisLinks]


def slowest_rank_factor(machine: Machine, n_ranks: int) -> float:
    """How much slower than the mean the slowest of N equal GPUs computes.

    The expected largest of N normal deviates is about sigma sqrt(2 ln N) (Galambos, "The
    Asymptotic Theory of Extreme Order Statistics"); a synchronous step waits for it.
    """
    return 1.0 + machine.jitter_fraction.value * math.sqrt(2.0 * math.log(max(n_ranks, 1)))


def compute_seconds(operation: Compute, machine: Machine, job: Job) -> Array:
    """Seconds of one kernel, slowest rank included, in the shape of its sizes."""
    if isinstance(operation, Gemm):
        seconds = gemm_seconds(
            operation.m,
            operation.n,
            operation.k,
            operation.mode,
            machine,
            job.dtype,
            job.kernel_tuning,
        )
    elif isinstance(operation, Attention):
        seconds = attention_seconds(operation, machine, job.dtype)
    else:
        seconds = memory_bound_seconds(operation.nbytes, machine, operation.kernel, job.dtype)
    return seconds * slowest_rank_factor(machine, job.n_gpus)


def gap_seconds(kernel_seconds: Array, machine: Machine) -> Array:
    """Host time behind each kernel, in which nothing else runs; none where nothing is launched."""
    gap: Array = np.where(kernel_seconds > 0, machine.kernels.gap_seconds.value, 0.0)
    return gap


def issue_seconds(phases: Sequence[Phase], table: CandidateTable, machine: Machine) -> Array:
    """Host time to issue all operations of the phases, shape (C,)."""
    count = np.zeros(len(table))
    for phase in phases:
        for op in phase.operations:
            if isinstance(op, Collective):
                count += phase.repeats * (table.size(op.axis) > 1)
            elif isinstance(op, MemoryBound):
                count += phase.repeats * (np.asarray(op.nbytes) > 0)
            else:
                count += phase.repeats
    return count * machine.kernels.issue_seconds.value


def lanes(links: Links) -> np.ndarray:
    """The lane that each group's collectives occupy: shape (G, P), 0 for a group of one rank.

    Groups whose outermost links are of the same level share them, and queue; others have the
    links that bound them for themselves. A lane has the number of the first axis on it.
    """
    level = np.stack([of_group.level for of_group in links.values()])
    first_on_it: np.ndarray = 1 + (level[None] == level[:, None]).argmax(axis=1)
    return np.where(level < 0, 0, first_on_it)


class CollectivePrices:
    """Prices the collectives of a table of candidates."""

    def __init__(self, links: Links, table: CandidateTable) -> None:
        self._links, self._table = links, table
        self._terms: dict[tuple[str, str], tuple[Array, Array, Array]] = {}
        # A plan moves the same buffer several times; operations then share the array of sizes.
        # The operation stands beside its price so that the arrays, and so their ids, live on.
        self._known: dict[tuple[str, str, int, int], tuple[Collective, Array]] = {}

    def __call__(self, operation: Collective) -> Array:
        """Seconds of one collective, shape (C,)."""
        key = (operation.axis, operation.kind, id(operation.nbytes), id(operation.n_calls))
        if key not in self._known:
            self._known[key] = (operation, self._price(operation))
        return self._known[key][1]

    def _price(self, operation: Collective) -> Array:
        bandwidth, ring, tree = self._axis_terms(operation.axis, operation.kind)
        seconds = collective_seconds(
            operation.kind,
            operation.nbytes,
            operation.n_calls,
            self._table.size(operation.axis),
            bandwidth,
            ring,
            tree,
        )
        links = self._links[operation.axis].kinds[operation.kind]
        if links.curves:
            _take_measured(seconds, links, links.curve[self._table.placement], operation)
        return seconds

    def busiest_link_seconds(self, phases: Sequence[Phase]) -> Array:
        """Least time in which the links can carry what the phases send, shape (C,).

        Collectives of different axes may run at the same time, on lanes of their own, and
        still pass through the same links, those of a GPU itself for one.
        """
        carried = {group: np.zeros(len(self._table)) for group in self._links}
        for phase in phases:
            for op in phase.operations:
                if isinstance(op, Collective):
                    passes = 2.0 if op.kind == "all_reduce" else 1.0
                    carried[op.axis] = carried[op.axis] + (phase.repeats * passes) * op.nbytes
        rows = self._table.placement
        by_level = sum(
            (1.0 - 1.0 / self._table.size(axis))
            * sent
            * self._links[axis].occupied_s_per_byte[:, rows]
            for axis, sent in carried.items()
        )
        busiest: Array = np.max(by_level, axis=0)
        return busiest

    def _axis_terms(self, axis: str, kind: str) -> tuple[Array, Array, Array]:
        key = (axis, kind)
        if key not in self._terms:
            links, rows = self._links[axis].kinds[kind], self._table.placement
            self._terms[key] = (
                links.bandwidth_bytes_per_s[rows],
                links.ring_seconds[rows],
                links.tree_seconds[rows],
            )
        return self._terms[key]


def _take_measured(seconds: Array, links: KindLinks, curve_of: Ints, operation: Collective) -> None:
    """Replace the times of groups that were measured, in place; `curve_of` has shape (C,)."""
    n_calls = np.broadcast_to(np.asarray(operation.n_calls, dtype=np.float64), seconds.shape)
    nbytes = np.broadcast_to(np.asarray(operation.nbytes, dtype=np.float64), seconds.shape)
    for number in np.unique(curve_of[curve_of >= 0]):
        rows, curve = curve_of == number, links.curves[number]
        each = measured_seconds(nbytes[rows] / n_calls[rows], curve.nbytes, curve.seconds)
        seconds[rows] = n_calls[rows] * each


def group_seconds(machine: Machine, kind: str, stride: int, size: int, nbytes: Size) -> Array:
    """Seconds of one collective while all groups of (stride, size) do the same.

    Parameters
    ----------
    nbytes : array_like, shape (N,)
        Full buffers.

    Returns
    -------
    ndarray, shape (N,) [s]
    """
    sizes = np.atleast_1d(np.asarray(nbytes, dtype=np.float64))
    stride_, size_ = (np.full(sizes.shape, value) for value in (stride, size))
    links = axis_links(machine, stride_, size_).kinds[kind]
    seconds = collective_seconds(
        kind,
        sizes,
        1.0,
        size_.astype(np.float64),
        links.bandwidth_bytes_per_s,
        links.ring_seconds,
        links.tree_seconds,
    )
    _take_measured(seconds, links, links.curve, Collective("", kind, sizes, ""))
    return seconds
