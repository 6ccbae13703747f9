"""The time of a step for columns of candidates, in chunks that fit the cache.

Prices that repeat among candidates are computed once: links by placement, kernels by the columns
on which their sizes depend (`Strategy.compute_key`). All candidates of a chunk share one schedule
and are played together, whichever lanes their axes occupy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce

import numpy as np

from axonn_tune.cost.links import placement_links
from axonn_tune.cost.prices import CollectivePrices, KernelPrices, Links, host_seconds, lanes
from axonn_tune.errors import InputError
from axonn_tune.simulate.interference import Interference
from axonn_tune.simulate.lanes import LaneSharing, shared_lanes
from axonn_tune.simulate.player import Played, play
from axonn_tune.simulate.program import OpIndex, Program, compile_program
from axonn_tune.simulate.step import PlayedStep, played_step
from axonn_tune.spec.candidates import CandidateTable, Ints, Rows, distinct
from axonn_tune.spec.machine import KernelRates, Machine
from axonn_tune.spec.plan import (
    Array,
    Collective,
    Compute,
    Gemm,
    HostCopy,
    Operation,
    Part,
    Size,
    StepPlan,
    Transfer,
    sized,
)
from axonn_tune.spec.scenario import Scenario

CHUNK_ROWS = 16384


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The predicted times of candidates, arrays of shape (C,).

    step_seconds
        Time of a training step.
    exposed_communication_seconds
        Time in which the compute stream stands still for a collective.
    bubble_seconds
        Time in which a rank of the last stage waits for its pipeline.
    """

    step_seconds: Array
    exposed_communication_seconds: Array
    bubble_seconds: Array


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates candidates that are alike, on one machine.

    scenario
        Model, job, machine and strategy of the candidates.
    schedules
        Plans of the candidates and their compiled schedules, which do not depend on the machine.
    links
        What the groups of each axis get, by placement.
    kernels
        Prices of kernels by shape.
    """

    scenario: Scenario
    schedules: Schedules
    links: Links
    kernels: ShapePrices

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        table: CandidateTable,
        links: Links | None = None,
        prices: KernelPrices | None = None,
    ) -> Evaluator:
        """Return the evaluator of a table.

        The links of its placements and the prices of kernels may be known already.
        """
        links = links or placement_links(scenario.machine, table.placements, scenario.sent_once)
        schedules = Schedules(scenario, table)
        prices = prices or KernelPrices.of(scenario)
        return cls(scenario, schedules, links, ShapePrices(schedules, prices))

    def on(self, machine: Machine) -> Evaluator:
        """Return the evaluator of the same candidates on another machine."""
        before = self.scenario.machine
        there = replace(self.scenario, machine=machine)
        links = self.links
        kernels = self.kernels
        if not _share(before, machine, "links", "link_points", "ring_bandwidths"):
            placements = self.schedules.table.placements
            links = placement_links(machine, placements, self.scenario.sent_once)
        same_rates = _without_slowdowns(before.kernels) == _without_slowdowns(machine.kernels)
        if not (same_rates and _share(before, machine, "gpu", "gemm", "host", "jitter_fraction")):
            kernels = ShapePrices(self.schedules, KernelPrices.of(there))
        return Evaluator(there, self.schedules, links, kernels)

    def evaluate(self) -> Evaluation:
        """Return the times of every candidate of the table; see `play`."""
        return Evaluation(*self.play().times())

    def play(self) -> PlayedStep:
        """Return the played parts of the step of every candidate; see `play_together`."""
        return play_together([self])[0]

    def seconds_on(self, machines: Sequence[Machine]) -> Array:
        """Return the step time on each of several machines, shape (M, C); see `play_together`.

        All machines' pipelines have the same schedule and are played at once.
        """
        steps = play_together([self.on(machine) for machine in machines])
        seconds, _, _ = reduce(PlayedStep.joined, steps).times()
        return seconds.reshape(len(machines), -1)

    def squared_product_seconds(self) -> Array:
        """Return the squares of the times of all products of a micro-step, added up, shape (C,).

        The calls of a product in the repeats of a phase have one time together.
        """
        shape_of = self.schedules.shape_of
        total = np.zeros(shape_of.shape)
        for times, parts in self.schedules.plan(np.arange(shape_of.size)).last_passes:
            for part in parts:
                for i, phase in enumerate(part.phases):
                    for j, operation in enumerate(phase.operations):
                        if isinstance(operation, Gemm):
                            seconds = phase.repeats * self.kernels.seconds(part, (i, j))[shape_of]
                            total += times * seconds**2
        return total


def play_together(evaluators: Sequence[Evaluator]) -> list[PlayedStep]:
    """Return the played parts of the step of every candidate, on each of several machines.

    The evaluators are one of them and what `Evaluator.on` returns for machines whose links form the
    same levels. Those whose kernels and collectives slow each other equally are played at once.

    Raises
    ------
    InputError
        Numbers of a machine are so far off that a time is infinite or no number.
    """
    alike: dict[Interference, list[int]] = {}
    for i, evaluator in enumerate(evaluators):
        alike.setdefault(interference(evaluator.scenario.machine), []).append(i)
    steps: dict[int, PlayedStep] = {}
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for indices in alike.values():
            steps |= zip(indices, _play_chunks([evaluators[i] for i in indices]), strict=True)
        for i, step in steps.items():
            _check_finite(evaluators[i].scenario.machine, step)
    return [steps[i] for i in range(len(evaluators))]


def _check_finite(machine: Machine, step: PlayedStep) -> None:
    """Raise InputError if a time is infinite or no number."""
    if not np.isfinite(step.least_seconds()).all():
        raise InputError(
            f"machine '{machine.name}': no time follows from its numbers; "
            "one is too large or too small"
        )


def _play_chunks(evaluators: Sequence[Evaluator]) -> list[PlayedStep]:
    """Play the candidates chunk by chunk, on all machines at once."""
    schedules = evaluators[0].schedules
    rows = np.arange(len(schedules.table))
    chunks = [
        _PlayedChunk(evaluators, rows[start : start + CHUNK_ROWS]).steps()
        for start in range(0, rows.size, CHUNK_ROWS)
    ]
    return [reduce(PlayedStep.joined, steps) for steps in zip(*chunks, strict=True)]


class Schedules:
    """The plans of candidates that are alike, and their compiled schedules."""

    def __init__(self, scenario: Scenario, table: CandidateTable) -> None:
        self.table = table
        self._scenario = scenario
        self.shape_rows, self.shape_of = distinct_shapes(scenario.strategy.compute_key, table)
        self._is_one_chunk = len(table) <= CHUNK_ROWS
        # Where every candidate has a shape of its own, its operations are those of its shape.
        self.shapes_are_rows = self._is_one_chunk and self.shape_rows.size == len(table)
        if self.shapes_are_rows:
            self.shape_rows = self.shape_of = np.arange(len(table))
        rows = slice(None) if self._is_one_chunk else self.shape_rows
        # Where candidates come in chunks, only shapes have one plan for all of them.
        self.shape_plan = self._planned(rows)

    @cached_property
    def _shape_operations(self) -> dict[str, dict[str, Operation]]:
        """The operations of the plan of the shapes, by the names of their part and their own."""
        return {
            part.name: {op.name: op for phase in part.phases for op in phase.operations}
            for part in self.shape_plan.parts
        }

    def plan(self, rows: Ints) -> StepPlan:
        """Return the plan of the rows of a chunk."""
        return self.shape_plan if self._is_one_chunk else self._planned(rows)

    def _planned(self, rows: Rows) -> StepPlan:
        """Make the plan of some rows."""
        return self._scenario.plan(self.table.take(rows))

    def shape_operation(self, part: Part, index: OpIndex) -> Operation | None:
        """Return an operation of a part with its sizes for each distinct shape, shape (K,).

        None says that no row which stands for a shape has the operation: where only some candidates
        of a shape recompute, a chunk's plan has other phases than the plan of the shapes.
        """
        operation = _operation(part, index)
        if self.shapes_are_rows:
            return operation
        if self._is_one_chunk:
            return sized(operation, self.shape_rows)
        return self._shape_operations.get(part.name, {}).get(operation.name)

    def program(self, part: Part, group_lanes: Ints) -> tuple[Program, LaneSharing]:
        """Return the compiled schedule of a part for candidates whose groups have these lanes.

        Parameters
        ----------
        part : Part
        group_lanes : array of int, shape (G, C)
            Lane of each group, as `cost.prices.lanes` returns them.

        Returns
        -------
        Program
            One schedule for all of the candidates.
        LaneSharing
            What the candidates do not share of its lanes.
        """
        groups = self.table.placements.axes.groups
        axes = {
            op.axis
            for phase in part.phases
            for op in phase.operations
            if isinstance(op, Collective)
        }
        used = [i for i, group in enumerate(groups) if group in axes]
        axis_lanes, sharing = shared_lanes([groups[i] for i in used], group_lanes[used])
        return compile_program(part.phases, axis_lanes), sharing


class ShapePrices:
    """The times of kernels for each distinct shape, shape (K,); kernels alike are priced once."""

    def __init__(self, schedules: Schedules, prices: KernelPrices) -> None:
        self.prices = prices
        self._schedules = schedules
        self._seconds: dict[str, Array] = {}
        self._seconds_of_work: dict[Hashable, Array] = {}

    def seconds(self, part: Part, index: OpIndex) -> Array:
        """Return the time of a kernel of a part."""
        name = _operation(part, index).name
        if name not in self._seconds:
            operation = self._schedules.shape_operation(part, index)
            assert operation is not None and not isinstance(operation, Transfer)
            work = _work_of(operation)
            if work not in self._seconds_of_work:
                seconds = self.prices.seconds(operation)
                shape = self._schedules.shape_rows.shape
                self._seconds_of_work[work] = np.broadcast_to(seconds, shape)
            self._seconds[name] = self._seconds_of_work[work]
        return self._seconds[name]


def _operation(part: Part, index: OpIndex) -> Operation:
    """Return an operation of a part."""
    phase_index, operation_index = index
    return part.phases[phase_index].operations[operation_index]


def _work_of(kernel: Compute) -> Hashable:
    """Return all on which the price of a kernel depends: kernels of other names may be alike."""
    return type(kernel), *(
        value.tobytes() if isinstance(value, np.ndarray) else value
        for key, value in vars(kernel).items()
        if key not in ("name", "waits_for")
    )


class _ChunkShapes:
    """Tells which kernels of a chunk of candidates depend on the shapes of the candidates alone.

    The others run over what a rank stores, such as its share of the gradients.
    """

    def __init__(self, schedules: Schedules, rows: Ints) -> None:
        self.shape_of = schedules.shape_of[rows]
        self._schedules = schedules
        self._suffices: dict[str, bool] = {}

    def suffices(self, part: Part, index: OpIndex) -> bool:
        """Return whether candidates of one shape have one price of a kernel."""
        if self._schedules.shapes_are_rows:
            return True
        operation = _operation(part, index)
        if operation.name not in self._suffices:
            of_shapes = self._schedules.shape_operation(part, index)
            self._suffices[operation.name] = of_shapes is not None and all(
                np.array_equal(size, _entries(getattr(of_shapes, name), self.shape_of))
                for name, size in vars(operation).items()
                if isinstance(size, np.ndarray)
            )
        return self._suffices[operation.name]


def _entries(size: Size, rows: Ints) -> Size:
    """Return the entries of a size in some rows; one number stands for all."""
    return size[rows] if isinstance(size, np.ndarray) else np.full(rows.shape, size)


class _PlayedChunk:
    """The played parts of one chunk of candidates on M machines; each part is played once."""

    def __init__(self, evaluators: Sequence[Evaluator], rows: Ints) -> None:
        self._evaluators = evaluators
        self._schedules = evaluators[0].schedules
        self._plan = self._schedules.plan(rows)
        placement = self._schedules.table.placement[rows]
        self._lanes = np.tile(lanes(evaluators[0].links)[:, placement], len(evaluators))
        shapes = _ChunkShapes(self._schedules, rows)
        self._prices = [
            _ChunkPrices(evaluator.kernels, collectives, shapes)
            for evaluator, collectives in zip(
                evaluators, _collectives(evaluators, self._plan.candidates), strict=True
            )
        ]
        self._seconds: dict[tuple[str, OpIndex | tuple[OpIndex, ...]], Array] = {}
        self._played: dict[str, list[Played]] = {}

    def steps(self) -> list[PlayedStep]:
        """Return the step on each machine."""
        return [
            played_step(self._plan, partial(self._part, i), prices.collectives.seconds)
            for i, prices in enumerate(self._prices)
        ]

    def _part(self, machine: int, part: Part) -> Played:
        """Return a part on one of the machines."""
        if part.name not in self._played:
            self._played[part.name] = self._play(part)
        return self._played[part.name][machine]

    def _play(self, part: Part) -> list[Played]:
        """Play a part on all machines, for the candidates on the first machine first."""
        least = np.stack([prices.collectives.least_seconds(part.phases) for prices in self._prices])
        program, sharing = self._schedules.program(part, self._lanes)
        n_machines = len(self._prices)
        played = play(
            program.on_machines(n_machines),
            (least.size,),
            lambda indices: self._kernels(part, indices).ravel(),
            lambda index: self._message(part, index).ravel(),
            interference(self._evaluators[0].scenario.machine),
            least.ravel(),
            sharing,
        )
        seconds, exposed = (
            played.seconds.reshape(least.shape),
            played.exposed_seconds.reshape(least.shape),
        )
        for evaluator, seconds_on in zip(self._evaluators, seconds, strict=True):
            np.maximum(seconds_on, self._host_seconds(evaluator.scenario, part), out=seconds_on)
        return [Played(*on_machine) for on_machine in zip(seconds, exposed, strict=True)]

    def _kernels(self, part: Part, indices: tuple[OpIndex, ...]) -> Array:
        """Return the time of kernels that run back to back, shape (M, chunk)."""
        key = (part.name, indices)
        if key not in self._seconds:
            priced = [prices.kernels(part, indices) for prices in self._prices]
            self._seconds[key] = _on_machines(priced)
        return self._seconds[key]

    def _message(self, part: Part, index: OpIndex) -> Array:
        """Return the time of a collective or of a copy of a part, shape (M, chunk)."""
        key = (part.name, index)
        if key not in self._seconds:
            priced = [prices.message(part, index) for prices in self._prices]
            self._seconds[key] = _on_machines(priced)
        return self._seconds[key]

    def _host_seconds(self, scenario: Scenario, part: Part) -> Size:
        """Return how long the host needs to issue a part."""
        issue_seconds = scenario.issue_seconds
        wait_seconds = scenario.wait_seconds_per_rank(self._plan, part)
        if not issue_seconds and not np.any(wait_seconds):
            return 0.0
        factor = scenario.machine.kernels.issue_factor.value
        table = self._plan.candidates
        return host_seconds(part.phases, table, issue_seconds, factor, wait_seconds)


def _on_machines(priced: Sequence[Array]) -> Array:
    """Return the times of one operation on M machines as one array, shape (M, chunk)."""
    return priced[0][None] if len(priced) == 1 else np.stack(priced)


class _ChunkPrices:
    """The times of the operations of one chunk of candidates on a machine, of shape (chunk,)."""

    def __init__(
        self, kernels: ShapePrices, collectives: CollectivePrices, shapes: _ChunkShapes
    ) -> None:
        self.collectives = collectives
        self._by_shape = kernels
        self._shapes = shapes

    def kernels(self, part: Part, indices: tuple[OpIndex, ...]) -> Array:
        """Return the time of kernels that run back to back."""
        of_shapes, seconds = [], []
        for index in indices:
            if self._shapes.suffices(part, index):
                of_shapes.append(self._by_shape.seconds(part, index))
            else:
                kernel = _operation(part, index)
                assert not isinstance(kernel, Transfer)
                seconds.append(self._by_shape.prices.seconds(kernel))
        if of_shapes:
            seconds.append(sum(of_shapes[1:], start=of_shapes[0])[self._shapes.shape_of])
        return sum(seconds[1:], start=seconds[0])

    def message(self, part: Part, index: OpIndex) -> Array:
        """Return the time of a collective or of a copy of a part."""
        operation = _operation(part, index)
        if isinstance(operation, HostCopy):
            seconds = self._by_shape.prices.copy_seconds(operation)
            return np.broadcast_to(seconds, self._shapes.shape_of.shape)
        assert isinstance(operation, Collective)
        return self.collectives.seconds(operation)


def _collectives(evaluators: Sequence[Evaluator], table: CandidateTable) -> list[CollectivePrices]:
    """Return the prices on each machine; machines with the links of the first one share them."""
    links = evaluators[0].links
    first = CollectivePrices(links, table)
    return [
        first if evaluator.links is links else CollectivePrices(evaluator.links, table)
        for evaluator in evaluators
    ]


def interference(machine: Machine) -> Interference:
    """Return the slowdowns of kernels and collectives that run at the same time."""
    kernels = machine.kernels
    return Interference(kernels.slowdown_fraction.value, kernels.collective_slowdown_fraction.value)


def _without_slowdowns(kernels: KernelRates) -> KernelRates:
    """Return the rates that make the price of a kernel that runs alone."""
    none = kernels.slowdown_fraction.scaled(0.0)
    return replace(kernels, slowdown_fraction=none, collective_slowdown_fraction=none)


def _share(a: Machine, b: Machine, *fields: str) -> bool:
    """Return whether the fields of two machines are the same objects."""
    return all(getattr(a, name) is getattr(b, name) for name in fields)


def distinct_shapes(compute_key: tuple[str, ...], table: CandidateTable) -> tuple[Ints, Ints]:
    """Return the rows of distinct shapes, and each row's shape, as `distinct` does."""
    axes = [table.placements.size(axis) for axis in compute_key if axis != "micro_batch"]
    _, by_placement = distinct(*axes, np.zeros(len(table.placements), dtype=np.int64))
    return distinct(by_placement[table.placement], table.micro_batch)
