"""The step of one configuration, operation by operation: played, and as a timeline to draw."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from axonn_tune.cost.links import placement_links
from axonn_tune.cost.prices import (
    CollectivePrices,
    KernelPrices,
    issued_seconds,
    lanes,
)
from axonn_tune.simulate.interference import Interference
from axonn_tune.simulate.orders import BACKWARD, FORWARD, INPUT, WEIGHT
from axonn_tune.simulate.pipeline import (
    N_KINDS,
    PlayedPass,
    kind_of,
    passes,
    source_of,
)
from axonn_tune.simulate.program import AxisLanes, group_of
from axonn_tune.simulate.timeline import Event, Sum, summed, timeline
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.measurement import HOST
from axonn_tune.spec.measurement import Operation as MeasuredOperation
from axonn_tune.spec.plan import (
    COMPUTE,
    Array,
    Attention,
    Collective,
    Gemm,
    HostCopy,
    HostKernel,
    HostWork,
    MemoryBound,
    Operation,
    Part,
    Phase,
    Pipeline,
    Size,
    StepPlan,
)
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.schedule import DUALPIPE
from axonn_tune.step.evaluate import host_seconds_of, interference
from axonn_tune.step.predict import candidate_table
from axonn_tune.step.prediction import Prediction

RANK_OF_PIPELINE = "pipeline rank"
PASS_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "gradients of inputs",
    WEIGHT: "gradients of weights",
}


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
    """

    events: list[Event]
    repeats: int
    seconds: float

    @property
    def host_seconds(self) -> float:
        """The time by which the host ends later than all events of the part."""
        return self.seconds - max((event.end_seconds for event in self.events), default=0.0)


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


@dataclass(frozen=True)
class StepTimeline:
    """A step in the form in which the runtime records one.

    operations
        Operations in the order of issue; the passes of each stage of a pipeline have a stream.
    waits_for
        Names of the operations whose results an operation needs, by its name.
    """

    operations: list[MeasuredOperation]
    waits_for: Mapping[str, tuple[str, ...]]

    @property
    def seconds(self) -> float:
        """The time at which the last operation ends."""
        return max((op.end_seconds for op in self.operations), default=0.0)


def step_timeline(
    prediction: Prediction, most_layers: int | None = None, most_microsteps: int | None = None
) -> StepTimeline:
    """Return the predicted step of one rank.

    In a pipeline it is a rank of the last stage, and the passes of all ranks are included.

    Parameters
    ----------
    most_layers, most_microsteps : int or None
        Largest number of equal layers in a row, and of micro-steps, that are drawn. This is the
        schedule of a smaller model or batch, which begins, repeats and ends as the whole one does.
        With virtual stages the number of micro-steps is a multiple of the stages.
    """
    player = Player(prediction).shortened(most_layers)
    n_micro = whole_rounds(prediction, most_microsteps or prediction.n_microsteps)
    if player.plan.pipeline is not None:
        return player.pipelined(player.plan.pipeline, n_micro)
    return player.sequential(n_micro)


def drawable_microsteps(prediction: Prediction, most_operations: int) -> int:
    """Return how many micro-steps together have at most `most_operations`, but at least one."""
    player = Player(prediction)
    per_microstep = len(player.play(player.plan.microstep, 1).events)
    if player.plan.pipeline is not None:
        per_microstep += 2 * player.table.n_chunks
    return whole_rounds(prediction, max(most_operations // per_microstep, 1))


def whole_rounds(prediction: Prediction, n_micro: int) -> int:
    """Return a number of micro-steps that the schedule admits.

    With virtual stages it is a multiple of the number of stages, and with DualPipe of twice that
    number.
    """
    stages = prediction.layout.n_stages
    is_dual = stages > 1 and prediction.scenario.strategy.schedule == DUALPIPE
    if is_dual or prediction.configuration.n_virtual > 1:
        rounded = stages * (1 + is_dual)
        n_micro = -(-n_micro // rounded) * rounded
    return min(n_micro, prediction.n_microsteps)


def waits_of(plan: StepPlan) -> dict[str, tuple[str, ...]]:
    """Return, by name of an operation, the operations that it waits for in any phase."""
    waits: dict[str, dict[str, None]] = {}
    for op in plan.operations:
        waits.setdefault(op.name, {}).update(dict.fromkeys(op.waits_for))
    return {name: tuple(needed) for name, needed in waits.items() if needed}


def is_launched(operation: Operation, row: int = 0) -> bool:
    """Return whether an operation runs at all: what has nothing to do is not launched."""
    if isinstance(operation, MemoryBound | HostKernel | HostCopy | Collective):
        return number(operation.nbytes, row) > 0
    if isinstance(operation, Attention):
        return number(operation.n_launches, row) > 0
    return True


def number(size: Size, row: int = 0) -> float:
    """Return the entry of a size in one row of the table; one entry alone stands for all rows."""
    entries = np.ravel(size)
    return float(entries[row if entries.size > 1 else 0])


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
        self._least: dict[tuple[str, int | None], tuple[Array, Array]] = {}
        self._issued: dict[tuple[str, int | None], list[Array]] = {}

    def seconds_of(self, operation: Operation) -> list[float]:
        """Return the price of an operation by row; those of one name and group cost the same."""
        key = (operation.name, group_of(operation))
        if key not in self._seconds:
            shape = self.table.placement.shape
            self._seconds[key] = np.broadcast_to(self._price(operation), shape).tolist()
        return self._seconds[key]

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
    """Return the phases of a part with at most so many equal layers in a row."""
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
        self._n_stages = prediction.layout.n_stages
        self._n_virtual = prediction.configuration.n_virtual
        self.links = priced.links
        self.axis_lanes = dict(zip(self.links, priced.lanes[:, row].tolist(), strict=True))

    def shortened(self, most_layers: int | None) -> Player:
        """Return a player of the same plan with at most so many equal layers in a row."""
        player = copy(self)
        player._most_layers = most_layers
        return player

    def seconds_of(self, operation: Operation) -> float:
        """Return the price of an operation."""
        return self._priced.seconds_of(operation)[self.row]

    def play(self, part: Part, repeats: int) -> PlayedPart:
        """Play a part from idle streams to idle streams."""
        of_links, of_host = self._least_seconds(part)
        issued = self._issued_seconds(part)
        events = timeline(self.phases(part), *self._conditions, of_links, issued)
        end = max((event.end_seconds for event in events), default=0.0)
        return PlayedPart(events, repeats, max(of_host, end))

    def summed(self, part: Part, repeats: float) -> SummedPart:
        """Play a part and add up its events."""
        of_links, of_host = self._least_seconds(part)
        issued = self._issued_seconds(part)
        sums, end = summed(self.phases(part), *self._conditions, of_links, issued)
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

    @property
    def _conditions(self) -> tuple[Callable[[Operation], float], AxisLanes, Interference]:
        """The times of operations, their lanes, and how they slow each other."""
        return self.seconds_of, self.axis_lanes, interference(self._scenario.machine)

    def phases(self, part: Part) -> tuple[Phase, ...]:
        """Return the phases of a part as they are played, each with its number of repeats."""
        return shortened_phases(part, self._most_layers)

    def measured(self, part: PlayedPart, origin: float) -> list[MeasuredOperation]:
        """Return the events of a part that starts at `origin`."""
        gap = self._scenario.machine.kernels.gap_seconds.value
        operations = {event.operation.name: event.operation for event in part.events}
        recorded = {
            name: _recorded(operation, gap, self.row)
            for name, operation in operations.items()
            if is_launched(operation, self.row)
        }
        return [
            recorded[event.operation.name].at(event, origin)
            for event in part.events
            if event.operation.name in recorded
        ]

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
            self.summed(part, n_micro * n_each)
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
        n_chunks, n_stages = self.table.n_chunks, self._n_stages
        of_chunk = [seconds[id(pipeline.stage(number, n_chunks))] for number in range(n_chunks)]
        return [sum(of_chunk[stage::n_stages]) for stage in range(n_stages)]

    def n_synchronised(self, pipeline: Pipeline) -> list[float]:
        """Return how often a forward and a backward pass synchronise the step one after another."""
        counts = pipeline.n_synchronised(self.table)
        return [number(count, self.row) for count in counts]

    def _sync_seconds(self, pipeline: Pipeline) -> list[float]:
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
        first = pipeline.first.passes
        counts = self.n_synchronised(pipeline)
        for count, usual, sync in zip(counts, first, pipeline.sync.passes, strict=True):
            yield count, self._n_virtual if count else 0, usual, sync
        if pipeline.beside is not None:
            count = number(pipeline.n_beside, self.row)
            for usual, beside in zip(first, pipeline.beside.passes, strict=True):
                yield count, count, usual, beside

    def _synchronising_parts(self, pipeline: Pipeline) -> Iterator[SummedPart]:
        """Yield what the synchronising passes of a rank have and its other passes lack.

        It is exposed for as long as it lengthens the step, which it does in the first stage;
        kernels that run beside it are slower.
        """
        lengthened = zip(self._synchronising(pipeline), self._sync_seconds(pipeline), strict=True)
        for (_, count, usual, sync), lengthens in lengthened:
            known = self.summed(usual, 1).sums
            sums = {n: s for n, s in self.summed(sync, 1).sums.items() if n not in known}
            seconds = sum(each.seconds for each in sums.values())
            if not count or not seconds:
                continue
            for each in sums.values():
                each.exposed_seconds = each.seconds / seconds * lengthens / count
            yield SummedPart(sums, count)

    def sequential(self, n_micro: int) -> StepTimeline:
        """Return the parts one after another as a timeline."""
        operations: list[MeasuredOperation] = []
        origin = 0.0
        for part in self.parts(n_micro):
            for _ in range(part.repeats):
                operations += self.measured(part, origin)
                origin += part.seconds
        return StepTimeline(operations, waits_of(self.plan))

    def passes(
        self, pipeline: Pipeline, n_micro: int
    ) -> tuple[list[PlayedPass], dict[int, PlayedPart]]:
        """Return the passes of every rank, and the played part of each kind of pass."""
        parts = {
            kind_of(direction, place): self.play(part, 1)
            for place, stage in enumerate(pipeline.stages)
            for direction, part in enumerate(pipeline.passes_of(stage))
        }
        seconds = np.zeros(N_KINDS + kind_of(FORWARD, len(pipeline.others)))
        for kind, part in parts.items():
            seconds[kind] = part.seconds
        transfer = self.seconds_of(pipeline.transfer)
        sends_beside = number(pipeline.sends_beside, self.row)
        held, beside = (0.0, transfer) if sends_beside else (transfer, 0.0)
        shape = (self._n_stages, self._n_virtual, n_micro)
        places = pipeline.schedule, pipeline.places
        return passes(*shape, seconds, held, *places, beside), parts

    def drawn_passes(self, most_passes: int) -> tuple[StepTimeline, int] | None:
        """Return the passes of a pipeline's ranks for some micro-batches, and their number.

        The result is None where there is no pipeline, or where one round of micro-batches already
        has more passes than `most_passes`.
        """
        pipeline = self.plan.pipeline
        if pipeline is None:
            return None
        n_rounds = most_passes // (2 * self.table.n_chunks) // self._n_stages
        n_micro = whole_rounds(self.prediction, min(n_rounds, 2) * self._n_stages)
        if not n_micro:
            return None
        played, _ = self.passes(pipeline, n_micro)
        return StepTimeline([_pass_operation(played_pass) for played_pass in played], {}), n_micro

    def pipelined(self, pipeline: Pipeline, n_micro: int) -> StepTimeline:
        """Return the passes of every rank, and operations of the rank of the last stage."""
        played, parts = self.passes(pipeline, n_micro)
        last = self.table.n_chunks - 1
        operations = [_pass_operation(played_pass) for played_pass in played]
        for played_pass in played:
            if played_pass.rank == self._n_stages - 1:
                part = parts[played_pass.kind]
                operations += self.measured(part, played_pass.end_seconds - part.seconds)
        end = max(played_pass.end_seconds for played_pass in played)
        sync_seconds = sum(self._sync_seconds(pipeline))
        if sync_seconds > 0:
            operations.append(_sync_operation(end, end + sync_seconds))
            end += sync_seconds
        operations += self.measured(self.play(self.plan.step_end, 1), end)
        waits = {**waits_of(self.plan), **_waits_of_passes(played, last)}
        return StepTimeline(operations, waits)


@dataclass(frozen=True)
class _Recorded:
    """What the runtime records of every event of an operation, and the host's gap after each."""

    name: str
    stream: str
    kind: str
    nbytes: float = 0.0
    flops: float = 0.0
    gap_seconds: float = 0.0

    def at(self, event: Event, origin: float) -> MeasuredOperation:
        """Return an event as the runtime records it, without the host's gap after it."""
        start = origin + event.start_seconds
        end = origin + (event.end_seconds - self.gap_seconds)
        return MeasuredOperation(
            self.name, self.stream, self.kind, self.nbytes, self.flops, start, end
        )


def _recorded(op: Operation, gap: float, row: int) -> _Recorded:
    """Return what the runtime records of an operation; the host's own work has no `gap`."""
    if isinstance(op, Collective):
        return _Recorded(op.name, op.axis, op.kind, number(op.nbytes, row))
    if isinstance(op, HostCopy):
        return _Recorded(op.name, op.direction, "copy", number(op.nbytes, row))
    if isinstance(op, MemoryBound):
        nbytes = number(op.nbytes, row)
        return _Recorded(op.name, COMPUTE, "memory_bound", nbytes, gap_seconds=gap)
    if isinstance(op, HostKernel):
        return _Recorded(op.name, COMPUTE, "host", number(op.nbytes, row))
    if isinstance(op, HostWork):
        return _Recorded(op.name, COMPUTE, "host")
    kind = "gemm" if isinstance(op, Gemm) else "attention"
    return _Recorded(op.name, COMPUTE, kind, flops=number(op.flops, row), gap_seconds=gap)


def _pass_name(direction: int, stage: int, micro_batch: int) -> str:
    """Return the name of a pass on a timeline."""
    return f"{PASS_NAMES[direction]} {micro_batch} of stage {stage}"


def _pass_operation(played: PlayedPass) -> MeasuredOperation:
    """Return a pass as an operation on the stream of its rank."""
    return MeasuredOperation(
        name=_pass_name(played.direction, played.stage, played.micro_batch),
        stream=f"{RANK_OF_PIPELINE} {played.rank}",
        kind=f"{PASS_NAMES[played.direction]} pass",
        nbytes=0.0,
        flops=0.0,
        start_seconds=played.start_seconds,
        end_seconds=played.end_seconds,
    )


def _sync_operation(start: float, end: float) -> MeasuredOperation:
    """Return the time that the first stage's exposed collectives add to a step, as an operation."""
    return MeasuredOperation(
        name="synchronisation of the first stage",
        stream=f"{RANK_OF_PIPELINE} 0",
        kind="exposed collectives",
        nbytes=0.0,
        flops=0.0,
        start_seconds=start,
        end_seconds=end,
    )


def _waits_of_passes(played: list[PlayedPass], last: int) -> Mapping[str, tuple[str, ...]]:
    """Return which pass of the same micro-batch each pass needs."""
    identities = [(each.direction, each.stage, each.micro_batch) for each in played]
    present = set(identities)
    waits = {}
    for identity in identities:
        source = source_of(*identity, last)
        if source is not None:
            direction, stage, micro = source
            is_split = direction == BACKWARD and (INPUT, stage, micro) in present
            named = _pass_name(INPUT if is_split else direction, stage, micro)
            waits[_pass_name(*identity)] = (named,)
    return waits
