"""Seconds and bytes of every candidate, in chunks that fit the cache.

What repeats among candidates is priced once: links by placement, kernels by the shape
(G_x, G_y, micro-batch) on which their sizes depend. Candidates whose axes occupy the
same lanes share one schedule and are played together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from axonn_tune.cost.links import placement_links
from axonn_tune.cost.prices import (
    CollectivePrices,
    Links,
    compute_seconds,
    gap_seconds,
    issue_seconds,
    lanes,
)
from axonn_tune.search.search import Search
from axonn_tune.simulate.interference import Interference
from axonn_tune.simulate.player import Played, play
from axonn_tune.simulate.program import OpIndex, Program, compile_program
from axonn_tune.simulate.step import step_times
from axonn_tune.spec.grid import PIPELINE, CandidateTable, Ints, distinct
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array, Collective, Gemm, Operation, Phase, StepPlan
from axonn_tune.spec.variant import Variant

CHUNK_ROWS = 16384


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Predicted times of candidates, arrays of shape (C,).

    bubble_seconds: in which a rank of the last stage waits for its pipeline.
    """

    step_seconds: Array
    exposed_communication_seconds: Array
    bubble_seconds: Array


def rows_by_stages(search: Search, variant: Variant, table: CandidateTable) -> Iterator[Ints]:
    """Rows of candidates that the variant admits, those with as many stages together."""
    if PIPELINE not in table.placements.axes.names:
        yield np.arange(len(table))
        return
    stages = table.placements.size(PIPELINE)[table.placement]
    for n_stages in np.unique(stages):
        rows = np.flatnonzero(stages == n_stages)
        part = table.take(rows)
        admitted = rows[search.strategy.can_run(search.model, search.job, variant, part)]
        if admitted.size:
            yield admitted


def memory_bytes(
    search: Search, variant: Variant, table: CandidateTable
) -> tuple[Array, dict[str, Array]]:
    """Peak bytes of one rank with fragmentation and reserve, and its terms, shape (C,)."""
    reserve = search.machine.memory_reserve
    terms = search.strategy.memory(search.model, search.job, variant, table)
    allocated = sum(terms.values(), start=np.zeros(len(table)))
    terms["fragmentation"] = allocated * reserve.fragmentation_fraction.value
    terms["reserved"] = np.full(len(table), reserve.reserved_bytes.value)
    total: Array = allocated + terms["fragmentation"] + terms["reserved"]
    return total, terms


class Evaluator:
    """Evaluates the candidates of one table, which have the same variant and stages."""

    def __init__(
        self, search: Search, variant: Variant, table: CandidateTable, links: Links | None = None
    ) -> None:
        machine = search.machine
        self._search, self._variant, self._table = search, variant, table
        self._groups = table.placements.axes.groups
        self._links = placement_links(machine, table.placements) if links is None else links
        self._lane_code = _lane_code(lanes(self._links))
        self._shape_rows, self._shape_of = _distinct_shapes(search.strategy.compute_key, table)
        self._shape_plan = self._plan(table.take(self._shape_rows))
        self._shape_seconds: dict[str, Array] = {}
        self._programs: dict[tuple[int, int, int], Program] = {}
        self._only_plan: StepPlan | None = None

    def on(self, machine: Machine) -> Evaluator:
        """The same candidates on a machine with other numbers; plans and schedules are shared."""
        other, before = copy(self), self._search.machine
        other._search = replace(self._search, machine=machine)
        if not _same(before, machine, "links", "link_points", "ring_bandwidths"):
            other._links = placement_links(machine, self._table.placements)
        if not _same(before, machine, "gpu", "gemm", "kernels", "jitter_fraction"):
            other._shape_seconds = {}
        return other

    def evaluate(self) -> Evaluation:
        """Times of every candidate of the table."""
        lane_code = self._lane_code[self._table.placement]
        by_lanes = np.argsort(lane_code, kind="stable")
        step, exposed, bubble = np.empty((3, len(self._table)))
        for start in range(0, len(self._table), CHUNK_ROWS):
            rows = by_lanes[start : start + CHUNK_ROWS]
            plan = self._chunk_plan(rows)
            prices = _ChunkPrices(self, plan, self._shape_of[rows])
            play = partial(self._play, prices, lane_code[rows])
            step[rows], exposed[rows], bubble[rows] = step_times(plan, play, prices.message)
        return Evaluation(step, exposed, bubble)

    def _play(
        self, prices: _ChunkPrices, lane_code: Ints, phases: Sequence[Phase], first: int
    ) -> Played:
        """Phases of a chunk, the first of which has that index; same lanes together."""
        seconds, exposed = np.zeros((2, *lane_code.shape))
        least = prices.busiest_link_seconds(phases)
        for run, run_code in _runs(self._used_code(phases, lane_code)):
            program = self._program(phases, first, run_code)
            played = prices.play(program, run, least[run])
            seconds[run], exposed[run] = played.seconds, played.exposed_seconds
        if self._search.machine.kernels.issue_seconds.value:
            host = issue_seconds(phases, prices.table, self._search.machine)
            np.maximum(seconds, host, out=seconds)
        return Played(seconds, exposed)

    def _used_code(self, phases: Sequence[Phase], lane_code: Ints) -> Ints:
        """The code without the lanes of groups over which the phases run no collective."""
        used = {op.axis for p in phases for op in p.operations if isinstance(op, Collective)}
        digits = np.unravel_index(lane_code, _lane_shape(len(self._groups)))
        return _lane_code(
            np.stack([d * (g in used) for d, g in zip(digits, self._groups, strict=True)])
        )

    def _chunk_plan(self, rows: Ints) -> StepPlan:
        """The plan of a chunk; it is kept where there is but one."""
        if rows.size < len(self._table):
            return self._plan(self._table.take(rows))
        if self._only_plan is None:
            self._only_plan = self._plan(self._table.take(rows))
        return self._only_plan

    def _plan(self, table: CandidateTable) -> StepPlan:
        search = self._search
        return search.strategy.plan(search.model, search.job, self._variant, table)

    def _program(self, phases: Sequence[Phase], first: int, lane_code: int) -> Program:
        """The schedule of phases, the first of which has that index in the plan."""
        key = (first, len(phases), lane_code)
        if key not in self._programs:
            codes = np.unravel_index(lane_code, _lane_shape(len(self._groups)))
            axis_lanes = {group: int(lane) for group, lane in zip(self._groups, codes, strict=True)}
            self._programs[key] = compile_program(phases, axis_lanes, first)
        return self._programs[key]

    def product_seconds(self) -> Array:
        """Seconds of each product of the micro-step, all its calls together, shape (ops, C)."""
        return np.stack(
            [
                phase.repeats * self.shape_seconds((i, j))[self._shape_of]
                for i, phase in enumerate(self._shape_plan.microstep)
                for j, operation in enumerate(phase.operations)
                if isinstance(operation, Gemm)
            ]
        )

    @property
    def shape_of(self) -> Ints:
        """Which candidates have kernels of the same sizes, shape (C,)."""
        return self._shape_of

    def shape_seconds(self, index: OpIndex) -> Array:
        """Seconds of a kernel for each distinct shape, shape (K,).

        Kernels of one name have the same sizes in all phases of a plan.
        """
        phase, op = index
        operation = self._shape_plan.phases[phase].operations[op]
        if operation.name not in self._shape_seconds:
            seconds = self.kernel_seconds(operation)
            self._shape_seconds[operation.name] = np.broadcast_to(seconds, self._shape_rows.shape)
        return self._shape_seconds[operation.name]

    @property
    def interference(self) -> Interference:
        """How much kernels and collectives slow each other down."""
        return interference(self._search.machine)

    @property
    def links(self) -> Links:
        """Links of each axis by placement."""
        return self._links

    def kernel_seconds(self, operation: Operation) -> Array:
        """Seconds of one kernel in the shape of its sizes."""
        assert not isinstance(operation, Collective)
        machine = self._search.machine
        seconds = compute_seconds(operation, machine, self._search.job)
        return seconds + gap_seconds(seconds, machine)


def interference(machine: Machine) -> Interference:
    """What the profile says of kernels and collectives that run together."""
    kernels = machine.kernels
    return Interference(kernels.slowdown_fraction.value, kernels.collective_slowdown_fraction.value)


def _same(a: Machine, b: Machine, *fields: str) -> bool:
    return all(getattr(a, name) is getattr(b, name) for name in fields)


def _lane_shape(n_groups: int) -> tuple[int, ...]:
    return (n_groups + 1,) * n_groups


def _lane_code(group_lanes: Ints) -> Ints:
    """The lanes of the groups as one number, shape (P,)."""
    code: Ints = np.ravel_multi_index(tuple(group_lanes), _lane_shape(len(group_lanes)))
    return code


def _distinct_shapes(compute_key: tuple[str, ...], table: CandidateTable) -> tuple[Ints, Ints]:
    """`distinct` of the columns of the key: grid axes by placement, then micro-batch."""
    axes = [table.placements.size(axis) for axis in compute_key if axis != "micro_batch"]
    _, by_placement = distinct(*axes, np.zeros(len(table.placements), dtype=np.int64))
    return distinct(by_placement[table.placement], table.micro_batch)


def _runs(code: Ints) -> Iterator[tuple[slice, int]]:
    """Runs of equal values."""
    cuts = np.flatnonzero(np.diff(code)) + 1
    for start, end in zip([0, *cuts], [*cuts, code.size], strict=True):
        yield slice(int(start), int(end)), int(code[start])


class _ChunkPrices:
    """Seconds of the operations of one chunk of candidates."""

    def __init__(self, evaluator: Evaluator, plan: StepPlan, shape_of: Ints) -> None:
        self._evaluator, self._plan, self._shape_of = evaluator, plan, shape_of
        self.table = plan.candidates
        self._collective = CollectivePrices(evaluator.links, plan.candidates)
        self._kernels_seconds: dict[tuple[OpIndex, ...], Array] = {}

    def busiest_link_seconds(self, phases: Sequence[Phase]) -> Array:
        """Least time in which the links carry what the phases send, shape (chunk,)."""
        return self._collective.busiest_link_seconds(phases)

    def play(self, program: Program, run: slice, least_seconds: Array) -> Played:
        """Play the candidates of a run; each price is computed once for the whole chunk."""
        return play(
            program,
            (run.stop - run.start,),
            lambda indices: self._kernels(indices)[run],
            lambda index: self._message(index)[run],
            self._evaluator.interference,
            least_seconds,
        )

    def _kernels(self, indices: tuple[OpIndex, ...]) -> Array:
        """Seconds of kernels that run back to back, shape (chunk,)."""
        if indices not in self._kernels_seconds:
            phase = self._plan.phases[indices[0][0]]
            if phase.over_storage:
                each = [self._evaluator.kernel_seconds(phase.operations[op]) for _, op in indices]
                self._kernels_seconds[indices] = sum(each[1:], start=each[0])
            else:
                each = [self._evaluator.shape_seconds(index) for index in indices]
                self._kernels_seconds[indices] = sum(each[1:], start=each[0])[self._shape_of]
        return self._kernels_seconds[indices]

    def _message(self, index: OpIndex) -> Array:
        """Seconds of a collective, shape (chunk,)."""
        operation = self._plan.phases[index[0]].operations[index[1]]
        assert isinstance(operation, Collective)
        return self.message(operation)

    def message(self, operation: Collective) -> Array:
        """Seconds of a collective, shape (chunk,)."""
        return self._collective(operation)
