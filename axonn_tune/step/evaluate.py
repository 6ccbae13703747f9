"""The time of a step for columns of candidates, in chunks that fit the cache.

What repeats among candidates is computed once: links by placement, plans and the times of kernels
by layout (`step.schedules`). All candidates of a chunk share one schedule and are played together,
whichever lanes their axes occupy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from axonn_tune.cost.placements import placement_links
from axonn_tune.cost.prices import (
    CollectivePrices,
    KernelPrices,
    Links,
    SentSeconds,
    host_seconds,
    issued_seconds,
    lanes,
)
from axonn_tune.errors import InputError
from axonn_tune.processes import mapped
from axonn_tune.simulate.interference import Interference
from axonn_tune.simulate.player import Played, play
from axonn_tune.simulate.program import OpIndex
from axonn_tune.simulate.step import PlayedStep, played_step
from axonn_tune.spec.candidates import CandidateTable, Ints
from axonn_tune.spec.gpu import KernelRates
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import (
    Array,
    Collective,
    Gemm,
    HostCopy,
    Part,
    Phase,
    Size,
    StepPlan,
    Transfer,
)
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.schedules import KernelTimes, Schedules, names_of

CHUNK_ROWS = 8192
# A group of at least this many candidates that issue the same phases is played by itself, which
# takes less time than to play it together with candidates that issue other phases.
OWN_ROWS = 2048
T = TypeVar("T")


class Evaluation(NamedTuple):
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
    """Evaluates candidates that one plan describes, on one machine.

    scenario
        Model, job, machine and strategy of the candidates.
    kernels
        Plan of the candidates' layouts, its compiled schedules, and the times of its kernels.
    candidates
        The candidates, whose layouts may stand in several rank orders.
    rows
        Row of each candidate in the table of the plan, shape (C,).
    links
        What the groups of each axis get, by placement of the candidates.
    sent
        Times of collectives over these links that are known.
    """

    scenario: Scenario
    kernels: KernelTimes
    candidates: CandidateTable
    rows: Ints
    links: Links
    sent: SentSeconds = field(default_factory=dict)

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
        kernels = KernelTimes(Schedules(scenario, table), prices or KernelPrices.of(scenario))
        return cls(scenario, kernels, table, np.arange(len(table)), links)

    @property
    def schedules(self) -> Schedules:
        """The plan of the candidates and its compiled schedules, which know no machine."""
        return self.kernels.schedules

    def on(self, machine: Machine) -> Evaluator:
        """Return the evaluator of the same candidates on another machine."""
        before = self.scenario.machine
        there = replace(self.scenario, machine=machine)
        links, sent = self.links, self.sent
        kernels = self.kernels
        if not _share(before, machine, "links", "link_points", "ring_bandwidths"):
            placements = self.candidates.placements
            links, sent = placement_links(machine, placements, self.scenario.sent_once), {}
        same_rates = _without_slowdowns(before.kernels) == _without_slowdowns(machine.kernels)
        if not (same_rates and _share(before, machine, "gpu", "gemm", "host", "jitter_fraction")):
            kernels = KernelTimes(self.schedules, KernelPrices.of(there))
        return replace(self, scenario=there, kernels=kernels, links=links, sent=sent)

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

    def runs_ahead(self) -> np.ndarray:
        """Return whether hosts issue the passes of a micro-step before the GPU has run them.

        The result has shape (C,). In a pipeline the slowest stage holds up all, and its host is the
        slowest, too. Kernels and collectives count as if none hid another.
        """
        plan = self.schedules.plan
        table = self.schedules.table
        (prices,) = _collectives([self])
        of_gpu = of_hosts = np.zeros(len(self.rows))
        for passes in plan.all_passes:
            gpu = host = np.zeros(len(self.rows))
            for part in passes:
                issued = host_seconds_of(self.scenario, plan, part, part.phases, table)
                host = host + np.broadcast_to(issued, len(table))[self.rows]
                run = _kernel_seconds(self.kernels, part)
                gpu = gpu + np.broadcast_to(run, len(table))[self.rows]
                gpu = gpu + _collective_seconds(prices, part, self.rows)
            of_gpu = np.maximum(of_gpu, gpu)
            of_hosts = np.maximum(of_hosts, host)
        return of_gpu > of_hosts

    def squared_product_seconds(self) -> Array:
        """Return the squares of the times of all products of a micro-step, added up, shape (C,).

        The calls of a product in the repeats of a phase have one time together.
        """
        shape_of = self.schedules.shape_of
        total = np.zeros(shape_of.shape)
        for times, parts in self.schedules.plan.last_passes:
            for part in parts:
                for phase in part.phases:
                    for operation in phase.operations:
                        if isinstance(operation, Gemm):
                            seconds = phase.repeats * self.kernels.of_shapes(operation)[shape_of]
                            total += times * seconds**2
        return total[self.rows]


def play_together(evaluators: Sequence[Evaluator]) -> list[PlayedStep]:
    """Return the played parts of the step of every candidate, on each of several machines.

    The evaluators are one of them and what `Evaluator.on` returns for machines whose links form the
    same levels. All are played at once.

    Raises
    ------
    InputError
        Numbers of a machine are so far off that a time is infinite or no number.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        steps = _play_chunks(evaluators)
        for evaluator, step in zip(evaluators, steps, strict=True):
            _check_finite(evaluator.scenario.machine, step)
    return steps


def _check_finite(machine: Machine, step: PlayedStep) -> None:
    """Raise InputError if a time is infinite or no number."""
    if not np.isfinite(step.least_seconds()).all():
        raise InputError(
            f"machine '{machine.name}': no time follows from its numbers; "
            "one is too large or too small"
        )


def _play_chunks(evaluators: Sequence[Evaluator]) -> list[PlayedStep]:
    """Play the candidates chunk by chunk, on all machines at once."""
    collectives = _collectives(evaluators)

    def played(chunk: slice) -> list[PlayedStep]:
        return _PlayedChunk(evaluators, collectives, chunk).steps()

    chunks = mapped(played, _chunks(evaluators[0]))
    return [reduce(PlayedStep.joined, steps) for steps in zip(*chunks, strict=True)]


def _chunks(evaluator: Evaluator) -> list[slice]:
    """Return the chunks of candidates that are played together.

    A chunk ends where others issue other phases, unless few stand before or after that.
    """
    n_candidates = evaluator.rows.size
    starts = [0]
    micro = evaluator.schedules.plan.whole_microstep
    repeats = [each.repeats for each in micro.phases] if micro is not None else []
    issues = [each[evaluator.rows] > 0 for each in repeats if isinstance(each, np.ndarray)]
    if issues:
        differs = reduce(np.logical_or, (each[1:] != each[:-1] for each in issues))
        for start in (np.flatnonzero(differs) + 1).tolist():
            if min(start - starts[-1], n_candidates - start) >= OWN_ROWS:
                starts.append(start)
    return [
        slice(first, min(first + CHUNK_ROWS, end))
        for start, end in pairwise([*starts, n_candidates])
        for first in range(start, end, CHUNK_ROWS)
    ]


def least_step(kernels: KernelTimes) -> PlayedStep:
    """Return the steps of a plan as if messages took no time, so that no step is shorter."""
    plan = kernels.schedules.plan
    zeros = np.zeros(kernels.schedules.shape_of.shape)
    known: dict[str, Played] = {}

    def played(part: Part) -> Played:
        if part.name not in known:
            seconds = _kernel_seconds(kernels, part) + zeros
            known[part.name] = Played(seconds, zeros, seconds)
        return known[part.name]

    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return played_step(plan, played, lambda transfer: zeros, kernels.prices.pace_among)


def _kernel_seconds(kernels: KernelTimes, part: Part) -> Size:
    """Return the time of all kernels of a part, one after another."""
    seconds: Size = 0.0
    shapes = kernels.schedules.shape_of
    rows = np.arange(shapes.size)
    for phase in part.phases:
        issued = [op for op in phase.operations if not isinstance(op, Transfer)]
        if issued:
            seconds += phase.repeats * kernels.in_a_row(issued, rows, shapes)
    return seconds * kernels.pace(part)


def _collective_seconds(prices: CollectivePrices, part: Part, rows: Ints) -> Array:
    """Return the time of all collectives of a part, one after another."""
    seconds = np.zeros(len(rows))
    for phase in part.phases:
        repeats = phase.repeats if isinstance(phase.repeats, int) else phase.repeats[rows]
        for operation in phase.operations:
            if isinstance(operation, Collective):
                seconds += repeats * prices.seconds(operation)
    return seconds


class _PlayedChunk:
    """The played parts of one chunk of candidates on M machines; each part is played once."""

    def __init__(
        self,
        evaluators: Sequence[Evaluator],
        collectives: Sequence[CollectivePrices],
        chunk: slice,
    ) -> None:
        self._evaluators = evaluators
        self._collectives = collectives
        self._chunk = chunk
        self._schedules = evaluators[0].schedules
        self._rows = evaluators[0].rows[chunk]
        self._shapes = self._schedules.shape_of[self._rows]
        candidates = evaluators[0].candidates.take(chunk)
        self._plan = self._schedules.plan.of(candidates, self._rows)
        self._kernel_seconds: dict[tuple[str, ...], Array] = {}
        self._kernel_times = [evaluator.kernels for evaluator in evaluators]
        self._message_seconds: dict[tuple[str, str], Array] = {}
        slowdowns = [_slowdowns(evaluator.scenario.machine) for evaluator in evaluators]
        self._interference = Interference.of_machines(slowdowns, self._rows.size)
        group_lanes = lanes(evaluators[0].links).take(candidates.placement, axis=1)
        self._lanes = np.tile(group_lanes, len(evaluators))
        self._played: dict[str, list[Played]] = {}

    def steps(self) -> list[PlayedStep]:
        """Return the step on each machine."""
        each = zip(self._collectives, self._kernel_times, strict=True)
        return [
            played_step(
                self._plan,
                partial(self._part, i),
                partial(prices.seconds, chunk=self._chunk),
                kernels.prices.pace_among,
            )
            for i, (prices, kernels) in enumerate(each)
        ]

    def _part(self, machine: int, part: Part) -> Played:
        """Return a part on one of the machines."""
        if part.name not in self._played:
            self._played[part.name] = self._play(part)
        return self._played[part.name][machine]

    def _play(self, part: Part) -> list[Played]:
        """Play a part on all machines, for the candidates on the first machine first."""
        issued = replace(part, phases=tuple(self._issued(part.phases)))
        least = _on_machines(
            self._collectives, lambda prices: prices.least_seconds(issued.phases, self._chunk)
        )
        n_machines = len(self._evaluators)
        rows = np.tile(self._rows, n_machines)
        program, sharing = self._schedules.program(issued, rows, self._lanes)
        played = play(
            program,
            (least.size,),
            partial(self._kernels, issued),
            lambda index: self._message(issued, index).ravel(),
            self._interference,
            least.ravel(),
            sharing,
            self._issued_seconds(issued),
        )
        seconds = played.seconds.reshape(least.shape)
        exposed = played.exposed_seconds.reshape(least.shape)
        paced = played.paced_seconds.reshape(least.shape)
        of_host = [self._host_seconds(each.scenario, part) for each in self._evaluators]
        return [
            Played(np.maximum(seconds_on, of_host_on), exposed_on, paced_on, of_host_on)
            for seconds_on, exposed_on, paced_on, of_host_on in zip(
                seconds, exposed, paced, of_host, strict=True
            )
        ]

    def _issued(self, phases: Iterable[Phase]) -> Iterator[Phase]:
        """Yield the phases that a candidate of the chunk issues.

        Where all of them repeat a phase equally often, its schedule is as simple as theirs alone.
        """
        for phase in phases:
            if isinstance(phase.repeats, int):
                yield phase
                continue
            repeats = phase.repeats[self._rows]
            most = int(repeats.max())
            if most:
                yield replace(phase, repeats=most) if (repeats == most).all() else phase

    def _kernels(self, part: Part, indices: tuple[OpIndex, ...]) -> Array:
        """Return the time of kernels that run back to back, shape (M * chunk,).

        Phases repeat what others issue, so that the kernels may be known by their names.
        """
        operations = [part.phases[i].operations[j] for i, j in indices]
        issued = [op for op in operations if not isinstance(op, Transfer)]
        key = names_of(issued)
        if key not in self._kernel_seconds:
            self._kernel_seconds[key] = _on_machines(
                self._kernel_times, lambda times: times.in_a_row(issued, self._rows, self._shapes)
            ).ravel()
        seconds = self._kernel_seconds[key]
        return seconds * self._paces(part) if part.is_of_last_stage else seconds

    def _paces(self, part: Part) -> Array:
        """Return how long kernels take in a part in terms of their prices, shape (M * chunk,)."""
        return _on_machines(
            self._kernel_times, lambda times: np.broadcast_to(times.pace(part), self._plan_shape)
        )[:, self._rows].ravel()

    @property
    def _plan_shape(self) -> tuple[int, ...]:
        """The shape of what the plan has for each of its rows."""
        return self._schedules.table.placement.shape

    def _message(self, part: Part, index: OpIndex) -> Array:
        """Return the time of a collective or of a copy of a part, shape (M, chunk)."""
        phase_index, operation_index = index
        operation = part.phases[phase_index].operations[operation_index]
        if isinstance(operation, Collective):
            key = (operation.name, operation.axis)
            if key not in self._message_seconds:
                self._message_seconds[key] = _on_machines(
                    self._collectives, lambda prices: prices.seconds(operation, self._chunk)
                )
            return self._message_seconds[key]
        assert isinstance(operation, HostCopy)
        plan_shape = self._plan_shape
        return _on_machines(
            self._kernel_times,
            lambda kernels: np.broadcast_to(kernels.prices.copy_seconds(operation), plan_shape)[
                self._rows
            ],
        )

    def _issued_seconds(self, part: Part) -> list[Array]:
        """Return when the host has issued all phases before each one, on all machines in turn."""
        table = self._schedules.table
        of_machines = (issued_seconds(e.scenario, part.phases, table) for e in self._evaluators)
        return [
            np.concatenate([seconds[self._rows] for seconds in of_phase])
            for of_phase in zip(*of_machines, strict=True)
        ]

    def _host_seconds(self, scenario: Scenario, part: Part) -> Size:
        """Return how long the host needs to issue a part.

        Where stages make it wait, layouts have one rank order, that of the plan.
        """
        plan, table = self._schedules.plan, self._schedules.table
        if not scenario.issue_seconds and not np.any(scenario.waits_in(plan, part)):
            return 0.0
        return host_seconds_of(scenario, plan, part, part.phases, table)[self._rows]


def host_seconds_of(
    scenario: Scenario, plan: StepPlan, part: Part, phases: Sequence[Phase], table: CandidateTable
) -> Array:
    """Return how long the host needs to issue some phases of a part, for each row of the plan."""
    waits = scenario.waits_in(plan, part)

    def wait_seconds_per_rank(axis: str) -> Size:
        return waits * scenario.wait_seconds_per_rank(plan.candidates, axis)

    return host_seconds(
        phases,
        table,
        scenario.issue_seconds,
        scenario.machine.kernels.issue_factor.value,
        wait_seconds_per_rank if np.any(waits) else None,
    )


def _on_machines(priced: Sequence[T], price: Callable[[T], Array]) -> Array:
    """Return times on M machines, shape (M, chunk), by calling `price` for each machine.

    What machines share with the first one is priced once.
    """
    first, *others = priced
    of_first = price(first)
    if not others:
        return of_first[None]
    return np.stack([of_first, *(of_first if each is first else price(each) for each in others)])


def _collectives(evaluators: Sequence[Evaluator]) -> list[CollectivePrices]:
    """Return the prices on each machine; machines with the links of the first one share them."""
    usual = evaluators[0]
    prices = CollectivePrices(usual.links, usual.candidates, usual.rows, usual.sent)
    return [
        prices
        if each.links is usual.links
        else CollectivePrices(each.links, each.candidates, each.rows, each.sent)
        for each in evaluators
    ]


def interference(machine: Machine) -> Interference:
    """Return the slowdowns of kernels and collectives that run at the same time."""
    return Interference(*_slowdowns(machine))


def _slowdowns(machine: Machine) -> tuple[float, float]:
    """Return the slowdown of kernels, and that of collectives."""
    kernels = machine.kernels
    return kernels.slowdown_fraction.value, kernels.collective_slowdown_fraction.value


def _without_slowdowns(kernels: KernelRates) -> KernelRates:
    """Return the rates without slowdowns, which price a kernel that runs alone."""
    none = kernels.slowdown_fraction.scaled(0.0)
    return replace(kernels, slowdown_fraction=none, collective_slowdown_fraction=none)


def _share(a: Machine, b: Machine, *fields: str) -> bool:
    """Return whether the fields of two machines are the same objects."""
    return all(getattr(a, name) is getattr(b, name) for name in fields)
