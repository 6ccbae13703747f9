"""Every configuration that is tried, in tables of candidates that are alike: memory and steps.

Candidates that differ only in their rank order take the same memory, and often the same time: each
is worked out once. So layouts come in one order at first, and stand for all of them. Where
recomputing more cannot make a step faster, it is timed only where recomputing less does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from typing import NamedTuple

import numpy as np

from axonn_tune.cost.placements import PairedLinks
from axonn_tune.cost.prices import KernelPrices, SentSeconds
from axonn_tune.processes import mapped
from axonn_tune.search.candidates import executions
from axonn_tune.search.search import Search
from axonn_tune.simulate.step import PlayedStep
from axonn_tune.spec.candidates import CandidateTable, Ints, Rows, distinct
from axonn_tune.spec.plan import Array
from axonn_tune.spec.recomputation import partial_recomputes, repeats_less
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import Evaluator, least_step
from axonn_tune.step.memory import host_memory_bytes, memory_bytes, memory_interval_bytes
from axonn_tune.step.schedules import KernelTimes, Schedules

# Fewer candidates are played sooner by one process than by several.
LEAST_SHARED_ROWS = 4096


@dataclass(frozen=True, eq=False)
class SizedPart:
    """Holds candidates that are alike, with what they take of memory.

    Numbers of candidates count all rank orders that the search tries.

    table, memory, fits
        The candidates that fit, or nearly, or with `include_oom` all of them, with their peak
        memory and whether it suffices.
    n_oom
        Number of all candidates that do not fit in their GPUs.
    least_bytes
        Smallest peak memory of all candidates.
    n_out_of_host
        Number of the other candidates that do not fit in the memory of their nodes' hosts.
    least_host_bytes
        Least that a candidate which fits in its GPUs takes of a host's memory.
    n_slower
        Number of candidates that fit and are left out, since the same ones that recompute less are
        at least as fast.
    """

    table: CandidateTable
    memory: Array
    fits: np.ndarray
    n_oom: int
    least_bytes: float
    n_out_of_host: int
    least_host_bytes: float
    n_slower: int = 0

    def take(self, rows: Rows) -> SizedPart:
        """Return the part with some of its candidates."""
        table, memory, fits = self.table.take(rows), self.memory[rows], self.fits[rows]
        return replace(self, table=table, memory=memory, fits=fits)


def sized_parts(search: Search, table: CandidateTable) -> list[SizedPart]:
    """Return every configuration of a table that may be the best.

    The table has each layout in one of the orders that the search tries.
    """
    scenario = search.scenario
    sizes = [_sizes(scenario, part) for part in executions(search, table)]
    if search.partial_recompute:
        without = [each for each in sizes if each.table.common_recompute == "none"]
        sizes += (more for less in without for more in _partial_sizes(scenario, less))
    n_orders = table.placements.n_orders(search.constraints.orders)
    parts = [_part(search, each, n_orders) for each in sizes]
    if search.times_all or not scenario.strategy.recomputing_takes_time:
        return parts
    alike: dict[tuple[int, int], list[SizedPart]] = {}
    for part in parts:
        alike.setdefault(_stages(part.table), []).append(part)
    return [_without_slower(part, alike[_stages(part.table)], n_orders) for part in parts]


class OrderedPart(NamedTuple):
    """Holds the candidates of a part, with each layout in every order that is searched.

    part
        The part.
    rows
        Row of each candidate in the part.
    table
        The candidates.
    """

    part: SizedPart
    rows: Ints
    table: CandidateTable

    @property
    def memory(self) -> Array:
        """The peak memory of the candidates."""
        return self.part.memory[self.rows]

    @property
    def fits(self) -> np.ndarray:
        """Whether the memory suffices for each candidate, bool of shape (C,)."""
        return self.part.fits[self.rows]


def in_orders(
    parts: Sequence[SizedPart], orders: Sequence[str], taken: Sequence[Rows]
) -> list[OrderedPart]:
    """Return the rows `taken` of each part, once for every rank order of their layouts.

    Their placements have no other layouts.
    """
    layouts = parts[0].table.placements
    rows_of = [np.arange(len(part.table))[rows] for part, rows in zip(parts, taken, strict=True)]
    is_used = np.zeros(len(layouts), dtype=bool)
    for part, rows in zip(parts, rows_of, strict=True):
        is_used[part.table.placement[rows]] = True
    used = layouts.take(is_used)
    n_orders = used.n_orders(orders)
    first = np.cumsum(n_orders) - n_orders
    number = np.cumsum(is_used) - 1
    placements = used.in_orders(orders)
    ordered = []
    for part, rows in zip(parts, rows_of, strict=True):
        layout = number[part.table.placement[rows]]
        times = n_orders[layout]
        place = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        placement = np.repeat(first[layout], times) + place
        rows = np.repeat(rows, times)
        table = replace(part.table.take(rows), placements=placements, placement=placement)
        ordered.append(OrderedPart(part, rows, table))
    return ordered


def _stages(table: CandidateTable) -> tuple[int, int]:
    """Return the stages, and the virtual stages of each rank, of candidates that are alike."""
    return table.n_stages, table.common_n_virtual


def _without_slower(part: SizedPart, others: Sequence[SizedPart], n_orders: Ints) -> SizedPart:
    """Return a part without the candidates that cannot be the best of their placement.

    They take at least as long as the same candidates that recompute less. They are left out where
    those fit, too, and where they do not take less memory. The others have as many stages, and the
    part is one of them.
    """
    table = part.table
    recompute = table.common_recompute
    is_slower = np.zeros(len(table), dtype=bool)
    for other in others:
        less = other.table
        if len(less) and repeats_less(less.common_recompute, recompute):
            _, rows, same = np.intersect1d(
                _numbers(table), _numbers(less), assume_unique=True, return_indices=True
            )
            is_leaner = other.memory[same] <= part.memory[rows]
            is_slower[rows] |= is_leaner | other.fits[same]
    n_slower = int(n_orders[table.placement[part.fits & is_slower]].sum())
    return replace(part.take(~is_slower), n_slower=n_slower)


def _numbers(table: CandidateTable) -> Ints:
    """Return a number for each candidate; those that differ in recomputation alone share it."""
    return (table.placement << 32) + table.micro_batch


class _Sizes(NamedTuple):
    """Holds candidates that are alike, and the memory that they need, arrays of shape (C,).

    least_memory
        The lower end of the interval of the memory.
    """

    table: CandidateTable
    memory: Array
    least_memory: Array
    host_memory: Array


def _sizes(scenario: Scenario, table: CandidateTable) -> _Sizes:
    """Return candidates that are alike with what they take of memory."""
    memory, terms = memory_bytes(scenario, table)
    least, _ = memory_interval_bytes(scenario, memory, terms)
    return _Sizes(table, memory, least, host_memory_bytes(scenario, table))


def _partial_sizes(scenario: Scenario, less: _Sizes) -> Iterator[_Sizes]:
    """Yield candidates that recompute a part of the layers since recomputing less does not fit."""
    n_layers = math.ceil(scenario.model.n_layers / less.table.n_chunks)
    for recompute in partial_recomputes(n_layers):
        too_large = less.memory > scenario.memory_capacity_bytes
        if not too_large.any():
            return
        table = less.table.take(too_large).executed(recompute, less.table.common_n_virtual)
        less = _sizes(scenario, table)
        yield less


def _part(search: Search, sizes: _Sizes, n_orders: Ints) -> SizedPart:
    """Return the candidates that are ranked."""
    table, memory, least_memory, host_memory = sizes
    capacity = search.scenario.memory_capacity_bytes
    fits_in_gpu = memory <= capacity
    fits_in_host = host_memory <= search.scenario.host_memory_capacity_bytes
    ranked = (least_memory <= capacity) & fits_in_host
    if search.include_oom:
        ranked = np.ones(len(table), dtype=bool)
    n_each = n_orders[table.placement]
    return SizedPart(
        table.take(ranked),
        memory[ranked],
        fits=(fits_in_gpu & fits_in_host)[ranked],
        n_oom=int(n_each[~fits_in_gpu].sum()),
        least_bytes=float(memory.min()),
        n_out_of_host=int(n_each[fits_in_gpu & ~fits_in_host].sum()),
        least_host_bytes=float(host_memory[fits_in_gpu].min(initial=np.inf)),
    )


@dataclass(frozen=True, eq=False)
class PlannedParts:
    """Holds parts that one plan describes; it has their candidates one part after another.

    first_rows
        Row of the plan with the first candidate of a part, by the number of the part.
    kernels
        A function that makes the plan and prices its kernels.
    """

    first_rows: dict[int, int]
    kernels: Callable[[], KernelTimes]

    def kept(self) -> PlannedParts:
        """Return the same parts with a plan that is made once and stays in memory."""
        return replace(self, kernels=cache(self.kernels))


def planned_parts(scenario: Scenario, parts: Sequence[SizedPart]) -> list[PlannedParts]:
    """Return the parts that one plan describes, group by group.

    To play a wide table takes hardly longer than a narrow one.
    """
    prices = KernelPrices.of(scenario)
    planned = []
    for numbers in scenario.planned_together([part.table for part in parts]):
        tables = [parts[number].table for number in numbers]
        ends = np.cumsum([len(table) for table in tables]).tolist()
        first_rows = dict(zip(numbers, [0, *ends], strict=False))
        planned.append(PlannedParts(first_rows, partial(_kernels, scenario, tables, prices)))
    return planned


def _kernels(
    scenario: Scenario, tables: Sequence[CandidateTable], prices: KernelPrices
) -> KernelTimes:
    """Return the plan of the candidates of some tables, with the prices of its kernels."""
    return KernelTimes(Schedules(scenario, reduce(CandidateTable.joined, tables)), prices)


def least_seconds(planned: Sequence[PlannedParts], parts: Sequence[SizedPart]) -> list[Array]:
    """Return times below which no step can be, whatever its order, for the candidates of each part.

    They are those of kernels and pipelines, without any message.
    """
    least = [np.zeros(0) for _ in parts]
    for group in planned:
        seconds = least_step(group.kernels()).least_seconds()
        for number, first in group.first_rows.items():
            least[number] = seconds[first : first + len(parts[number].table)]
    return least


def played_parts(
    scenario: Scenario,
    planned: Sequence[PlannedParts],
    ordered: Sequence[OrderedPart],
    links: PairedLinks,
) -> list[PlayedStep]:
    """Return the played parts of the step of every candidate, for each part.

    If several candidates differ only in orders that take equally long on all links, one of them is
    played for all.
    """
    alike = links.alike()
    sent: SentSeconds = {}

    def play(group: PlannedParts) -> list[PlayedStep]:
        tables, plan_rows, rows_of = [], [], []
        for number, first in group.first_rows.items():
            part = ordered[number]
            rows, row_of = distinct(alike[part.table.placement], part.table.micro_batch)
            tables.append(part.table.take(rows))
            plan_rows.append(first + part.rows[rows])
            rows_of.append(row_of)
        together = reduce(CandidateTable.joined, tables)
        step = Evaluator(
            scenario, group.kernels(), together, np.concatenate(plan_rows), links.placed, sent
        ).play()
        starts = np.cumsum([0, *map(len, tables[:-1])])
        return [step.take(start + rows) for start, rows in zip(starts, rows_of, strict=True)]

    steps = [PlayedStep(*np.zeros((2, 0))) for _ in ordered]
    groups = [
        group for group in planned if any(len(ordered[number].table) for number in group.first_rows)
    ]
    is_shared = sum(len(part.table) for part in ordered) >= LEAST_SHARED_ROWS
    played_groups = mapped(play, groups) if is_shared else map(play, groups)
    for group, played in zip(groups, played_groups, strict=True):
        for number, step in zip(group.first_rows, played, strict=True):
            steps[number] = step
    return steps
