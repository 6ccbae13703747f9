"""The parts of one configuration's step, played operation by operation.

Candidates that are alike share a plan, whose operations are priced once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from axonn_tune.cost.placements import placement_links
from axonn_tune.cost.prices import CollectivePrices, KernelPrices, issued_seconds, lanes
from axonn_tune.simulate.durations import N_KINDS, PassSeconds, kind_of
from axonn_tune.simulate.interference import Interference
from axonn_tune.simulate.orders import FORWARD
from axonn_tune.simulate.pipeline import PlayedPass, passes
from axonn_tune.simulate.pipeline_schedule import PipelineShape
from axonn_tune.simulate.program import AxisLanes, group_of
from axonn_tune.simulate.timeline import Event, Sum, summed, timeline
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.measurement import HOST
from axonn_tune.spec.plan import (
    Array,
    Collective,
    Gemm,
    HostCopy,
    Operation,
    Part,
    Phase,
    Pipeline,
    Transfer,
    number,
)
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import host_seconds_of, interference
from axonn_tune.step.predict import candidate_table
from axonn_tune.step.prediction import Prediction


@dataclass(frozen=True)
class PlayedPart:
    """A part of a plan that was played once.

    events
        Operations with their times since the start of the part.
    repeats
        Number of times that the part is played in a step.
    seconds
        Time from idle streams to idle streams; because of the host it can be longer than the
        events take.
    issuing_seconds
        Time that the host needs to issue the part.
    """

    events: list[Event]
    repeats: int
    seconds: float
    issuing_seconds: float

    @property
    def host_seconds(self) -> float:
        """The time by which the host ends later than all events of the part."""
        return self.seconds - max((event.end_seconds for event in self.events), default=0.0)

    def at_pace(self, pace: float) -> PlayedPart:
        """Return the part with the time that it takes if each kernel takes `pace` times as long.

        This is the time of `Played.seconds_at`. All events become shorter evenly.
        """
        if pace == 1.0 or self.host_seconds > 0.0:
            return self
        awaited = [n for n, event in enumerate(self.events, 1) if event.operation.name == HOST]
        kernels = [event for event in self.events[max(awaited, default=0) :] if event.lane == 0]
        paced_seconds = sum(event.end_seconds - event.start_seconds for event in kernels)
        seconds = max(self.seconds + (pace - 1.0) * paced_seconds, self.issuing_seconds)
        events = [event.scaled(seconds / self.seconds) for event in self.events]
        return replace(self, events=events, seconds=seconds)


@dataclass(frozen=True)
class SummedPart:
    """A part of a plan whose events are added up.

    sums
        Events by the name of their operation.
    repeats
        Number of times that the part is played in a step.
    host_seconds
        Time by which the host holds up the part.
    """

    sums: Mapping[str, Sum]
    repeats: float
    host_seconds: float = 0.0


class PricedPlan:
    """The plan of candidates that are alike, whose operations are priced once for all of them."""

    def __init__(self, scenario: Scenario, table: CandidateTable) -> None:
        self._scenario = scenario
        self.table = table
        self.plan = scenario.plan(table)
        self.links = placement_links(scenario.machine, table.placements, scenario.sent_once)
        self.lanes = lanes(self.links)[:, table.placement]
        self._collectives = CollectivePrices(self.links, table)
        self._kernels = KernelPrices.of(scenario)
        self._seconds: dict[tuple[str, str], list[float]] = {}
        self._waits: dict[str, np.ndarray] = {}
        self._least: dict[tuple[str, int | None], tuple[Array, Array]] = {}
        self._issued: dict[tuple[str, int | None], list[Array]] = {}

    def seconds_of(self, operation: Operation) -> list[float]:
        """Return the price of an operation by row; those of one name and group cost the same."""
        key = (operation.name, group_of(operation))
        if key not in self._seconds:
            shape = self.table.placement.shape
            self._seconds[key] = np.broadcast_to(self._price(operation), shape).tolist()
        return self._seconds[key]

    def wait_for_issues(self, product: Gemm) -> np.ndarray:
        """Return whether the host's issues bound a product, for each row."""
        if product.name not in self._waits:
            waits = self._kernels.wait_for_issues(product)
            self._waits[product.name] = np.broadcast_to(waits, self.table.placement.shape)
        return self._waits[product.name]

    def pace(self, part: Part) -> list[float]:
        """Return how long kernels take in a part in terms of their prices, by row."""
        shape = self.table.placement.shape
        factor = self._kernels.last_stage_factor(self.table) if part.is_of_last_stage else 1.0
        return np.broadcast_to(factor, shape).tolist()

    def pace_among(self, n_ranks: Array) -> list[float]:
        """Return how long kernels take on the slowest of some ranks in terms of prices, by row."""
        return self._kernels.pace_among(n_ranks).tolist()

    def _price(self, operation: Operation) -> Array:
        """Return the price of an operation that has not been priced yet."""
        if isinstance(operation, Collective):
            return self._collectives.seconds(operation)
        if isinstance(operation, HostCopy):
            return self._kernels.copy_seconds(operation)
        return self._kernels.seconds(operation)

    def least_seconds(self, part: Part, most_layers: int | None) -> tuple[Array, Array]:
        """Return the least times that the links and the host need for a part, shape (C,)."""
        key = (part.name, most_layers)
        if key not in self._least:
            phases = shortened_phases(part, most_layers)
            of_host = host_seconds_of(self._scenario, self.plan, part, phases, self.table)
            self._least[key] = self._collectives.least_seconds(phases), of_host
        return self._least[key]

    def issued_seconds(self, part: Part, most_layers: int | None) -> list[Array]:
        """Return when the host has issued all phases of a part before each one, shape (C,) each."""
        key = (part.name, most_layers)
        if key not in self._issued:
            phases = shortened_phases(part, most_layers)
            self._issued[key] = issued_seconds(self._scenario, phases, self.table)
        return self._issued[key]


def shortened_phases(part: Part, most_layers: int | None) -> tuple[Phase, ...]:
    """Return the phases of a part with at most `most_layers` equal layers in a row."""
    if most_layers is None:
        return part.phases
    return tuple(
        replace(phase, repeats=min(phase.common_repeats, most_layers)) for phase in part.phases
    )


def players_of(predictions: Sequence[Prediction]) -> list[Player]:
    """Return a player of each prediction; candidates of one scenario that are alike share a plan.

    They are alike if their stages and their recomputation are equal (`CandidateTable.alike`).
    """
    alike: dict[tuple[int, str, int, int], list[int]] = {}
    for i, prediction in enumerate(predictions):
        configuration = prediction.configuration
        execution = (configuration.recompute, configuration.n_virtual)
        key = (id(prediction.scenario), *execution, prediction.layout.n_stages)
        alike.setdefault(key, []).append(i)
    players: dict[int, Player] = {}
    for indices in alike.values():
        scenario = predictions[indices[0]].scenario
        configurations = [predictions[i].configuration for i in indices]
        priced = PricedPlan(scenario, CandidateTable.of(configurations, scenario.strategy.axes))
        players |= {i: Player(predictions[i], priced, row) for row, i in enumerate(indices)}
    return [players[i] for i in range(len(predictions))]


class Player:
    """Plays parts of one configuration's plan, which is a row of a priced plan."""

    def __init__(
        self, prediction: Prediction, priced: PricedPlan | None = None, row: int = 0
    ) -> None:
        scenario = prediction.scenario
        if priced is None:
            priced = PricedPlan(scenario, candidate_table(scenario, prediction.configuration))
        self.prediction = prediction
        self.row = row
        self._scenario = scenario
        self._priced = priced
        self._most_layers: int | None = None
        self.table = priced.table
        self.plan = priced.plan
        self.n_stages = prediction.layout.n_stages
        self._n_virtual = prediction.configuration.n_virtual
        self.links = priced.links
        self.axis_lanes = dict(zip(self.links, priced.lanes[:, row].tolist(), strict=True))

    def shortened(self, most_layers: int | None) -> Player:
        """Return a player of the same plan with at most `most_layers` equal layers in a row."""
        player = copy(self)
        player._most_layers = most_layers
        return player

    def seconds_of(self, operation: Operation) -> float:
        """Return the price of an operation."""
        return self._priced.seconds_of(operation)[self.row]

    def waits_for_issues(self, product: Gemm) -> bool:
        """Return whether the host's issues bound a product, and not the GPU."""
        return bool(self._priced.wait_for_issues(product)[self.row])

    def play(self, part: Part, repeats: int) -> PlayedPart:
        """Play a part from idle streams to idle streams."""
        of_links, of_host = self._least_seconds(part)
        issued = self._issued_seconds(part)
        events = timeline(self.phases(part), *self._conditions(part), of_links, issued)
        end = max((event.end_seconds for event in events), default=0.0)
        return PlayedPart(events, repeats, max(of_host, end), of_host)

    def summed(self, part: Part, repeats: float) -> SummedPart:
        """Play a part and add up its events."""
        of_links, of_host = self._least_seconds(part)
        issued = self._issued_seconds(part)
        sums, end = summed(self.phases(part), *self._conditions(part), of_links, issued)
        awaited = sums.pop(HOST, None)
        of_host = max(of_host - end, 0.0) + (awaited.seconds if awaited else 0.0)
        return SummedPart(sums, repeats, of_host)

    def _issued_seconds(self, part: Part) -> list[float]:
        """Return when the host has issued all phases of a part before each one."""
        issued = self._priced.issued_seconds(part, self._most_layers)
        return [number(seconds, self.row) for seconds in issued]

    def _least_seconds(self, part: Part) -> tuple[float, float]:
        """Return the least times that the links and the host need for a part."""
        of_links, of_host = self._priced.least_seconds(part, self._most_layers)
        return number(of_links, self.row), number(of_host, self.row)

    def _conditions(
        self, part: Part
    ) -> tuple[Callable[[Operation], float], AxisLanes, Interference]:
        """Return the times of operations in a part, their lanes, and how they slow each other."""
        pace = self._priced.pace(part)[self.row]

        def seconds_of(operation: Operation) -> float:
            seconds = self.seconds_of(operation)
            return seconds if isinstance(operation, Transfer) else pace * seconds

        return seconds_of, self.axis_lanes, interference(self._scenario.machine)

    def phases(self, part: Part) -> tuple[Phase, ...]:
        """Return the phases of a part as they are played, each with its number of repeats."""
        return shortened_phases(part, self._most_layers)

    def parts(self, n_micro: int) -> list[PlayedPart]:
        """Play micro-steps, the last of which may synchronise the step, and the step's end."""
        return [self.play(part, repeats) for part, repeats in self._repeated_parts(n_micro)]

    def _repeated_parts(self, n_micro: int) -> list[tuple[Part, int]]:
        """Return the parts of a step that run one after another, each with its repeats."""
        plan = self.plan
        if plan.sync_microstep is None:
            parts = [(plan.microstep, n_micro), (plan.step_end, 1)]
        else:
            parts = [(plan.microstep, n_micro - 1), (plan.sync_microstep, 1), (plan.step_end, 1)]
        return [(part, repeats) for part, repeats in parts if repeats]

    def summed_parts(self) -> list[SummedPart]:
        """Return all parts of the step, and the transfers of a pipeline, which are in none."""
        n_micro = self.prediction.n_microsteps
        pipeline = self.plan.pipeline
        if pipeline is None:
            return [self.summed(part, repeats) for part, repeats in self._repeated_parts(n_micro)]
        work = [
            self.summed(part, n_each)
            for times, parts in self.plan.work_of_last_rank
            if (n_each := number(times, self.row))
            for part in parts
        ]
        transfer = pipeline.transfer
        of_transfer = {transfer.name: Sum(transfer, 1, self.seconds_of(transfer))}
        transfers = SummedPart(of_transfer, 2 * self._n_virtual * n_micro)
        step_end = self.summed(self.plan.step_end, 1)
        return [*work, step_end, transfers, *self._synchronising_parts(pipeline)]

    def stage_seconds(self) -> list[float]:
        """Return how long all passes of a micro-batch take on a rank of each stage.

        Transfers and waits for other ranks are not counted.
        """
        pipeline = self.plan.pipeline
        if pipeline is None:
            return [0.0]
        seconds = {
            id(stage): sum(self.play(part, 1).seconds for part in stage.passes)
            for stage in pipeline.stages
        }
        n_chunks, n_stages = self.table.n_chunks, self.n_stages
        of_chunk = [seconds[id(pipeline.stage(number, n_chunks))] for number in range(n_chunks)]
        return [sum(of_chunk[stage::n_stages]) for stage in range(n_stages)]

    def n_synchronised(self, pipeline: Pipeline) -> list[float]:
        """Return how often a forward and a backward pass synchronise the step one after another."""
        counts = pipeline.n_synchronised(self.table)
        return [number(count, self.row) for count in counts]

    def sync_seconds(self, pipeline: Pipeline) -> list[float]:
        """Return by how much each of `_synchronising` lengthens the step."""
        return [
            count * (self.play(sync, 1).seconds - self.play(usual, 1).seconds)
            for count, _, usual, sync in self._synchronising(pipeline)
        ]

    def _synchronising(self, pipeline: Pipeline) -> Iterator[tuple[float, float, Part, Part]]:
        """Yield passes beside which replicas exchange weights or gradients.

        They come with the number of passes that lengthen the step one after another, the number
        that a rank has, and the usual pass.
        """
        counts = self.n_synchronised(pipeline)
        without_sync = pipeline.without_sync.passes
        for count, usual, sync in zip(counts, without_sync, pipeline.sync.passes, strict=True):
            yield count, self._n_virtual if count else 0, usual, sync
        if pipeline.beside is not None:
            count = number(pipeline.n_beside, self.row)
            for usual, beside in zip(pipeline.first.passes, pipeline.beside.passes, strict=True):
                yield count, count, usual, beside

    def _synchronising_parts(self, pipeline: Pipeline) -> Iterator[SummedPart]:
        """Yield what the synchronising passes of a rank have and its other passes lack.

        It is exposed for as long as it lengthens the step, which it does in the first stage;
        kernels that run beside it are slower.
        """
        lengthened = zip(self._synchronising(pipeline), self.sync_seconds(pipeline), strict=True)
        for (_, count, usual, sync), lengthens in lengthened:
            known = self.summed(usual, 1).sums
            sums = {n: s for n, s in self.summed(sync, 1).sums.items() if n not in known}
            seconds = sum(each.seconds for each in sums.values())
            if not count or not seconds:
                continue
            for each in sums.values():
                each.exposed_seconds = each.seconds / seconds * lengthens / count
            yield SummedPart(sums, count)

    def passes(
        self, pipeline: Pipeline, n_micro: int
    ) -> tuple[list[PlayedPass], dict[tuple[int, int], PlayedPart]]:
        """Return the passes of every rank, and the played part of each `PlayedPass.part`."""
        own_pace = self._priced.pace_among(pipeline.n_in_lockstep(self.table))[self.row]
        usual, lone = pipeline.stages, pipeline.alone or pipeline.stages
        filling = lone if self._n_virtual > 1 else usual
        settings = (usual, 1.0), (lone, 1.0), (filling, own_pace)
        played = {
            part.name: self.play(part, 1)
            for stage in {*usual, *lone}
            for part in pipeline.passes_of(stage)
        }
        parts = {
            (kind_of(direction, place), setting): played[part.name].at_pace(pace)
            for setting, (stages, pace) in enumerate(settings)
            for place, stage in enumerate(stages)
            for direction, part in enumerate(pipeline.passes_of(stage))
        }
        seconds = np.zeros((len(settings), N_KINDS + kind_of(FORWARD, len(pipeline.others))))
        for (kind, setting), part in parts.items():
            seconds[setting, kind] = part.seconds
        transfer = self.seconds_of(pipeline.transfer)
        sends_beside = number(pipeline.sends_beside, self.row)
        held, beside = (0.0, transfer) if sends_beside else (transfer, 0.0)
        shape = PipelineShape(self.n_stages, self._n_virtual, pipeline.schedule, pipeline.places)
        handover = pipeline.handover_seconds
        of_passes = PassSeconds(*seconds)
        return passes(shape, n_micro, of_passes, held, beside, handover), parts
