"""The step of one configuration as a timeline, in the form in which the runtime records one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from axonn_tune.simulate.orders import BACKWARD, FORWARD, INPUT, WEIGHT
from axonn_tune.simulate.pipeline import PlayedPass
from axonn_tune.simulate.pipeline_schedule import source_of
from axonn_tune.simulate.timeline import Event
from axonn_tune.spec.measurement import Operation as MeasuredOperation
from axonn_tune.spec.plan import (
    COMPUTE,
    Collective,
    Gemm,
    HostCopy,
    HostKernel,
    HostWork,
    MemoryBound,
    Operation,
    Pipeline,
    StepPlan,
    is_launched,
    number,
)
from axonn_tune.spec.schedule import DUALPIPE
from axonn_tune.step.player import PlayedPart, Player
from axonn_tune.step.prediction import Prediction

RANK_OF_PIPELINE = "pipeline rank"
PASS_NAMES = {
    FORWARD: "forward",
    BACKWARD: "backward",
    INPUT: "gradients of inputs",
    WEIGHT: "gradients of weights",
}


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
        return pipelined_timeline(player, player.plan.pipeline, n_micro)
    return sequential_timeline(player, n_micro)


def sequential_timeline(player: Player, n_micro: int) -> StepTimeline:
    """Return the parts one after another as a timeline."""
    operations: list[MeasuredOperation] = []
    origin = 0.0
    for part in player.parts(n_micro):
        for _ in range(part.repeats):
            operations += _measured(player, part, origin)
            origin += part.seconds
    return StepTimeline(operations, waits_of(player.plan))


def pipelined_timeline(player: Player, pipeline: Pipeline, n_micro: int) -> StepTimeline:
    """Return the passes of every rank, and operations of the rank of the last stage."""
    played, parts = player.passes(pipeline, n_micro)
    last = player.table.n_chunks - 1
    operations = [_pass_operation(played_pass) for played_pass in played]
    for played_pass in played:
        if played_pass.rank == player.n_stages - 1:
            part = parts[played_pass.part]
            operations += _measured(player, part, played_pass.end_seconds - part.seconds)
    end = max(played_pass.end_seconds for played_pass in played)
    sync_seconds = sum(player.sync_seconds(pipeline))
    if sync_seconds > 0:
        operations.append(_sync_operation(end, end + sync_seconds))
        end += sync_seconds
    operations += _measured(player, player.play(player.plan.step_end, 1), end)
    waits = {**waits_of(player.plan), **_waits_of_passes(played, last)}
    return StepTimeline(operations, waits)


def drawn_passes(player: Player, most_passes: int) -> tuple[StepTimeline, int] | None:
    """Return the passes of a pipeline's ranks for some micro-batches, and their number.

    The result is None where there is no pipeline, or where one round of micro-batches already
    has more passes than `most_passes`.
    """
    pipeline = player.plan.pipeline
    if pipeline is None:
        return None
    n_rounds = most_passes // (2 * player.table.n_chunks) // player.n_stages
    n_micro = whole_rounds(player.prediction, min(n_rounds, 2) * player.n_stages)
    if not n_micro:
        return None
    played, _ = player.passes(pipeline, n_micro)
    return StepTimeline([_pass_operation(played_pass) for played_pass in played], {}), n_micro


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


def _measured(player: Player, part: PlayedPart, origin: float) -> list[MeasuredOperation]:
    """Return the events of a part that starts at `origin`."""
    gap = player.prediction.scenario.machine.kernels.gap_seconds.value
    operations = {event.operation.name: event.operation for event in part.events}
    recorded = {
        name: _recorded(operation, gap, player.row)
        for name, operation in operations.items()
        if is_launched(operation, player.row)
    }
    return [
        recorded[event.operation.name].at(event, origin)
        for event in part.events
        if event.operation.name in recorded
    ]


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
