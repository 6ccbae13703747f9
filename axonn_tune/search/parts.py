"""Every configuration that is tried, in tables of candidates that are alike: memory and steps.

Candidates that differ only in their rank order take the same memory, and often the same time: each
is worked out once. So layouts come in one order at first, and stand for all of them. Where
recomputing more cannot make a step faster, it is timed only where recomputing less does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import numpy as np

from axonn_tune.cost.links import alike_placements
from axonn_tune.cost.prices import KernelPrices, Links
from axonn_tune.processes import mapped
from axonn_tune.search.candidates import executions
from axonn_tune.search.search import Search
from axonn_tune.simulate.step import PlayedStep
from axonn_tune.spec.candidates import CandidateTable, Ints, Rows, distinct
from axonn_tune.spec.plan import Array
from axonn_tune.spec.recomputation import is_partial, partial_recomputes, repeats_less
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import Evaluator
from axonn_tune.step.memory import host_memory_bytes, memory_bytes, memory_interval_bytes

# Fewer candidates are played sooner by one process than by several.
LEAST_SHARED_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Part:
    """Candidates that are alike.

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

    def take(self, rows: Rows) -> Part:
        """Return the part with some of its candidates."""
        table, memory, fits = self.table.take(rows), self.memory[rows], self.fits[rows]
        return replace(self, table=table, memory=memory, fits=fits)


def sized_parts(search: Search, table: CandidateTable) -> list[Part]:
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
    alike: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        alike.setdefault(_stages(part.table), []).append(part)
    return [_without_slower(part, alike[_stages(part.table)], n_orders) for part in parts]


def in_orders(parts: Sequence[Part], orders: Sequence[str]) -> list[Part]:
    """Return the parts with their layouts in every order, and no other layouts."""
    layouts = parts[0].table.placements
    is_used = np.zeros(len(layouts), dtype=bool)
    for part in parts:
        is_used[part.table.placement] = True
    used = layouts.take(is_used)
    n_orders = used.n_orders(orders)
    first = np.cumsum(n_orders) - n_orders
    number = np.cumsum(is_used) - 1
    placements = used.in_orders(orders)
    expanded = []
    for part in parts:
        layout = number[part.table.placement]
        times = n_orders[layout]
        rows = np.repeat(np.arange(layout.size), times)
        place = np.arange(rows.size) - np.repeat(np.cumsum(times) - times, times)
        part = part.take(rows)
        table = replace(part.table, placements=placements, placement=first[layout[rows]] + place)
        expanded.append(replace(part, table=table))
    return expanded


def _stages(table: CandidateTable) -> tuple[int, int]:
    """Return the stages, and the virtual stages of each rank, of candidates that are alike."""
    return table.n_stages, table.common_n_virtual


def _without_slower(part: Part, others: Sequence[Part], n_orders: Ints) -> Part:
    """Return a part without the candidates that cannot be the best of their placement.

    They take at least as long as the same candidates that recompute less. They are left out where
    those fit, too, if they recompute further layers, and where they do not take less memory. The
    others have as many stages, and the part is one of them.
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
            repeats_layers = recompute == "full" or is_partial(recompute)
            is_leaner = other.memory[same] <= part.memory[rows]
            is_slower[rows] |= is_leaner | (other.fits[same] & repeats_layers)
    n_slower = int(n_orders[table.placement[part.fits & is_slower]].sum())
    return replace(part.take(~is_slower), n_slower=n_slower)


def _numbers(table: CandidateTable) -> Ints:
    """Return a number for each candidate, whatever it recomputes."""
    return (table.placement << 32) + table.micro_batch


def _distinct_candidates(table: CandidateTable, alike: Ints) -> tuple[CandidateTable, Ints]:
    """Return candidates that stand for all of a table, and for each one the row of its own.

    `alike` numbers the placements of the table; those with one number are not told apart. The
    candidates of the table are alike.
    """
    rows, row_of = distinct(alike[table.placement], table.micro_batch)
    return table.take(rows), row_of


class _Sizes(NamedTuple):
    """Candidates that are alike, and what they take of memory, arrays of shape (C,).

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


def _part(search: Search, sizes: _Sizes, n_orders: Ints) -> Part:
    """Return the candidates that are ranked."""
    table, memory, least_memory, host_memory = sizes
    capacity = search.scenario.memory_capacity_bytes
    fits_in_gpu = memory <= capacity
    fits_in_host = host_memory <= search.scenario.host_memory_capacity_bytes
    ranked = (least_memory <= capacity) & fits_in_host
    if search.include_oom:
        ranked = np.ones(len(table), dtype=bool)
    n_each = n_orders[table.placement]
    return Part(
        table.take(ranked),
        memory[ranked],
        fits=(fits_in_gpu & fits_in_host)[ranked],
        n_oom=int(n_each[~fits_in_gpu].sum()),
        least_bytes=float(memory.min()),
        n_out_of_host=int(n_each[fits_in_gpu & ~fits_in_host].sum()),
        least_host_bytes=float(host_memory[fits_in_gpu].min(initial=np.inf)),
    )


def played_parts(scenario: Scenario, parts: Sequence[Part], links: Links) -> list[PlayedStep]:
    """Return the played parts of the step of every candidate, for each table.

    Tables that one plan can describe are played together, since to play a wide table takes hardly
    longer than a narrow one.
    """
    kernels = KernelPrices.of(scenario)
    alike = alike_placements(scenario.machine, parts[0].table.placements, scenario.sent_once)

    def play(tables: Sequence[CandidateTable]) -> list[PlayedStep]:
        played, rows_of = zip(*(_distinct_candidates(t, alike) for t in tables), strict=True)
        together = reduce(CandidateTable.joined, played)
        step = Evaluator.of(scenario, together, links, kernels).play()
        starts = np.cumsum([0] + [len(table) for table in played[:-1]])
        return [step.take(start + rows) for start, rows in zip(starts, rows_of, strict=True)]

    joined = scenario.planned_together([part.table for part in parts])
    tables = [[parts[number].table for number in numbers] for numbers in joined]
    steps = [PlayedStep(*np.zeros((2, 0))) for _ in parts]
    is_shared = sum(len(part.table) for part in parts) >= LEAST_SHARED_ROWS
    played_groups = mapped(play, tables) if is_shared else map(play, tables)
    for numbers, played in zip(joined, played_groups, strict=True):
        for number, step in zip(numbers, played, strict=True):
            steps[number] = step
    return steps
