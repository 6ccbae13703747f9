"""One configuration's step, operation by operation: played, and as a timeline to draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from axonn_tune.cost.links import AxisLinks, placement_links
from axonn_tune.cost.prices import (
    CollectivePrices,
    compute_seconds,
    gap_seconds,
    issue_seconds,
    lanes,
)
from axonn_tune.search.search import Search
from axonn_tune.simulate.pipeline import (
    BACKWARD,
    FIRST,
    FORWARD,
    N_KINDS,
    PlayedPass,
    kind_of,
    passes,
    source_of,
)
from axonn_tune.simulate.timeline import Event, timeline
from axonn_tune.spec.grid import PIPELINE, CandidateTable
from axonn_tune.spec.measurement import Operation as MeasuredOperation
from axonn_tune.spec.plan import (
    COMPUTE,
    Collective,
    Gemm,
    MemoryBound,
    Operation,
    Phase,
    Pipeline,
    StepPlan,
)
from axonn_tune.step.evaluate import interference
from axonn_tune.step.prediction import Prediction

RANK_OF_PIPELINE = "pipeline rank"
PASS_NAMES = {FORWARD: "forward", BACKWARD: "backward"}


@dataclass(frozen=True)
class Part:
    """Phases that are played together, so many times; the host may need longer than they."""

    events: list[Event]
    repeats: int
    seconds: float

    @property
    def host_seconds(self) -> float:
        """By how much the host holds up the part."""
        return self.seconds - max((event.end_seconds for event in self.events), default=0.0)


@dataclass(frozen=True)
class PlayedStep:
    """A step's parts; the transfers of a pipeline, which no part holds; links, the candidate."""

    parts: list[Part]
    transfers: list[Part]
    links: Mapping[str, AxisLinks]
    table: CandidateTable


@dataclass(frozen=True)
class StepTimeline:
    """A step as the runtime records one.

    operations : in the order of issue; the passes of a pipeline's stages have a stream each
    waits_for : by name of an operation, names of those whose results it needs
    """

    operations: list[MeasuredOperation]
    waits_for: Mapping[str, tuple[str, ...]]

    @property
    def seconds(self) -> float:
        """When the last operation ends."""
        return max((op.end_seconds for op in self.operations), default=0.0)


def play_step(search: Search, prediction: Prediction) -> PlayedStep:
    """Play each part of a step."""
    player = _Player(search, prediction)
    plan = player.plan
    transfers = []
    if plan.pipeline is not None:
        transfer, n_passes = plan.pipeline.transfer, 2 * plan.pipeline.n_virtual
        seconds = player.seconds_of(transfer)
        lane = player.axis_lanes[transfer.axis]
        event = Event("transfer", transfer, lane, 0.0, seconds)
        transfers.append(Part([event], n_passes * prediction.n_microsteps, seconds))
    parts = player.parts(prediction.n_microsteps)
    return PlayedStep(parts, transfers, player.links, player.table)


def step_timeline(
    search: Search,
    prediction: Prediction,
    most_layers: int | None = None,
    most_microsteps: int | None = None,
) -> StepTimeline:
    """The predicted step, in a pipeline with the passes of all ranks.

    Operations are those of one rank, in a pipeline of one of the last stage.

    Parameters
    ----------
    most_layers, most_microsteps : int or None
        Draw no more equal layers in a row, or micro-steps, than these: the schedule of a
        smaller model or batch, which begins, repeats and ends as the whole one does. Virtual
        stages take micro-steps in multiples of the stages.
    """
    player = _Player(search, prediction, most_layers)
    n_micro = _whole_rounds(prediction, most_microsteps or prediction.n_microsteps)
    if player.plan.pipeline is not None:
        return player.pipelined(player.plan.pipeline, n_micro)
    return player.sequential(n_micro)


def microstep_timeline(search: Search, prediction: Prediction, most_layers: int) -> StepTimeline:
    """One micro-step of a rank, of the last stage in a pipeline, and the end of the step."""
    return _Player(search, prediction, most_layers).sequential(1)


def pass_timeline(
    search: Search, prediction: Prediction, most_passes: int
) -> tuple[StepTimeline, int] | None:
    """The passes of a pipeline's ranks for some of the micro-batches, and for how many.

    None where there is no pipeline, or already one round of micro-batches has more passes.
    """
    if prediction.grid.sizes.get(PIPELINE, 1) == 1:
        return None
    player = _Player(search, prediction)
    pipeline = player.plan.pipeline
    assert pipeline is not None, "a layout with stages has a pipeline"
    each = 2 * pipeline.n_stages * pipeline.n_virtual
    n_micro = min(most_passes // each, 2 * pipeline.n_stages) // pipeline.n_stages
    n_micro = _whole_rounds(prediction, n_micro * pipeline.n_stages)
    if not n_micro:
        return None
    every, _ = player.passes(pipeline, n_micro)
    return StepTimeline([_of_pass(one) for one in every], {}), n_micro


def drawable_microsteps(search: Search, prediction: Prediction, most_operations: int) -> int:
    """Micro-steps of which a whole step's timeline has about so many operations, at least one."""
    player = _Player(search, prediction)
    each = len(player.play(player.plan.microstep, 1).events)
    if player.plan.pipeline is not None:
        each += 2 * player.plan.pipeline.n_stages * player.plan.pipeline.n_virtual
    return _whole_rounds(prediction, max(most_operations // each, 1))


def _whole_rounds(prediction: Prediction, n_micro: int) -> int:
    """So many micro-steps, but multiples of the stages where those are virtual ones."""
    if prediction.variant.n_virtual > 1:
        stages = prediction.grid.sizes[PIPELINE]
        n_micro = -(-n_micro // stages) * stages
    return min(n_micro, prediction.n_microsteps)


def waits_of(plan: StepPlan) -> dict[str, tuple[str, ...]]:
    """By name of an operation, names of those for which it waits in any phase."""
    waits: dict[str, dict[str, None]] = {}
    for phase in plan.phases:
        for op in phase.operations:
            waits.setdefault(op.name, {}).update(dict.fromkeys(op.waits_for))
    return {name: tuple(needed) for name, needed in waits.items() if needed}


def is_launched(operation: Operation) -> bool:
    """Whether anything runs: a kernel over nothing is none."""
    return not isinstance(operation, MemoryBound) or number(operation.nbytes) > 0


def number(size: object) -> float:
    """The only entry of a size."""
    return float(np.ravel(np.asarray(size, dtype=np.float64))[0])


class _Player:
    """Plays phases of one configuration; those with many equal layers with fewer, if wanted."""

    def __init__(
        self, search: Search, prediction: Prediction, most_layers: int | None = None
    ) -> None:
        self._search, self._prediction, self._most_layers = search, prediction, most_layers
        self.table = single_candidate(search, prediction)
        self.plan = search.strategy.plan(search.model, search.job, prediction.variant, self.table)
        self.links = placement_links(search.machine, self.table.placements)
        self._collective = CollectivePrices(self.links, self.table)
        used = lanes(self.links)[:, 0]
        self.axis_lanes = {group: int(lane) for group, lane in zip(self.links, used, strict=True)}
        self._known: dict[int, float] = {}

    def seconds_of(self, operation: Operation) -> float:
        """Price of an operation."""
        if id(operation) not in self._known:
            if isinstance(operation, Collective):
                seconds = self._collective(operation)
            else:
                seconds = compute_seconds(operation, self._search.machine, self._search.job)
                seconds = seconds + gap_seconds(seconds, self._search.machine)
            self._known[id(operation)] = number(seconds)
        return self._known[id(operation)]

    def play(self, phases: tuple[Phase, ...], repeats: int) -> Part:
        """Play phases from idle streams to idle streams."""
        if self._most_layers is not None:
            phases = tuple(
                replace(phase, repeats=min(phase.repeats, self._most_layers)) for phase in phases
            )
        machine = self._search.machine
        least = float(self._collective.busiest_link_seconds(phases)[0])
        events = timeline(phases, self.seconds_of, self.axis_lanes, interference(machine), least)
        host = float(issue_seconds(phases, self.table, machine)[0])
        end = max((event.end_seconds for event in events), default=0.0)
        return Part(events, repeats, max(host, end))

    def measured(self, part: Part, origin: float) -> list[MeasuredOperation]:
        """The events of a part that starts at `origin`."""
        gap = self._search.machine.kernels.gap_seconds.value
        return [
            _as_measured(event, origin, gap)
            for event in part.events
            if is_launched(event.operation)
        ]

    def parts(self, n_micro: int) -> list[Part]:
        """Micro-steps one after another, the last one with the step's synchronisation, the end."""
        plan = self.plan
        n_sync = int(bool(plan.sync_microstep))
        phases = (
            (plan.microstep, n_micro - n_sync),
            (plan.sync_microstep, n_sync),
            (plan.step_end, 1),
        )
        return [self.play(part, repeats) for part, repeats in phases if repeats]

    def sequential(self, n_micro: int) -> StepTimeline:
        """The parts as a timeline."""
        operations: list[MeasuredOperation] = []
        origin = 0.0
        for part in self.parts(n_micro):
            for _ in range(part.repeats):
                operations += self.measured(part, origin)
                origin += part.seconds
        return StepTimeline(operations, waits_of(self.plan))

    def passes(self, pipeline: Pipeline, n_micro: int) -> tuple[list[PlayedPass], dict[int, Part]]:
        """Passes of every rank, and the parts that they consist of, by `kind_of`."""
        of_place = (pipeline.first, pipeline.middle, pipeline.last)
        played = {
            kind_of(direction, place): self.play(stage.parts[direction], 1)
            for place, stage in enumerate(of_place)
            for direction in (FORWARD, BACKWARD)
        }
        seconds = np.array([played[kind].seconds for kind in range(N_KINDS)])
        transfer = self.seconds_of(pipeline.transfer)
        every = passes(pipeline.n_stages, pipeline.n_virtual, n_micro, seconds, transfer)
        return every, played

    def pipelined(self, pipeline: Pipeline, n_micro: int) -> StepTimeline:
        """Passes of every rank, and the operations of the rank of the last stage in its own."""
        every, played = self.passes(pipeline, n_micro)
        transfer = self.seconds_of(pipeline.transfer)
        last = pipeline.n_stages * pipeline.n_virtual - 1
        operations = [_of_pass(each) for each in every]
        for each in every:
            if each.rank == pipeline.n_stages - 1:
                operations += self.measured(played[each.kind], each.start_seconds + transfer)
        end = max(each.end_seconds for each in every)
        longer = sum(
            self.play(sync, 1).seconds - played[kind_of(direction, FIRST)].seconds
            for direction, sync in zip((FORWARD, BACKWARD), pipeline.sync.parts, strict=True)
        )
        if longer > 0:
            operations.append(_of_sync(end, end + longer))
            end += longer
        operations += self.measured(self.play(self.plan.step_end, 1), end)
        return StepTimeline(operations, {**waits_of(self.plan), **_waits_of_passes(every, last)})


def single_candidate(search: Search, prediction: Prediction) -> CandidateTable:
    """The table that holds one configuration."""
    axes = search.strategy.axes
    return CandidateTable.single(prediction.grid, prediction.order, prediction.micro_batch, axes)


def _as_measured(event: Event, origin: float, gap: float) -> MeasuredOperation:
    op, flops = event.operation, 0.0
    if isinstance(op, Collective):
        stream, kind, nbytes = op.axis, op.kind, number(op.nbytes)
    elif isinstance(op, MemoryBound):
        stream, kind, nbytes = COMPUTE, "memory_bound", number(op.nbytes)
    else:
        kind = "gemm" if isinstance(op, Gemm) else "attention"
        stream, nbytes, flops = COMPUTE, 0.0, number(op.flops)
    end = event.end_seconds - (gap if stream == COMPUTE else 0.0)
    start = origin + event.start_seconds
    return MeasuredOperation(op.name, stream, kind, nbytes, flops, start, origin + end)


def _pass_name(direction: int, stage: int, micro_batch: int) -> str:
    return f"{PASS_NAMES[direction]} {micro_batch} of stage {stage}"


def _of_pass(each: PlayedPass) -> MeasuredOperation:
    name = _pass_name(each.direction, each.stage, each.micro_batch)
    ends = each.start_seconds, each.end_seconds
    kind = f"{PASS_NAMES[each.direction]} pass"
    return MeasuredOperation(name, f"{RANK_OF_PIPELINE} {each.rank}", kind, 0.0, 0.0, *ends)


def _of_sync(start: float, end: float) -> MeasuredOperation:
    """What the first stage's collectives for new weights and gradients add to the pipeline."""
    name, stream = "synchronisation of the first stage", f"{RANK_OF_PIPELINE} 0"
    return MeasuredOperation(name, stream, "exposed collectives", 0.0, 0.0, start, end)


def _waits_of_passes(every: list[PlayedPass], last: int) -> Mapping[str, tuple[str, ...]]:
    """A pass needs the one before it of its micro-batch."""
    waits = {}
    for each in every:
        source = source_of(each.direction, each.stage, each.micro_batch, last)
        if source is not None:
            name = _pass_name(each.direction, each.stage, each.micro_batch)
            waits[name] = (_pass_name(*source),)
    return waits
