"""The schedule of a plan, without its sizes, for candidates whose axes occupy the same lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from axonn_tune.spec.plan import Collective, Operation, Phase

AxisLanes: TypeAlias = Mapping[str, int]  # lane of each axis; 0 means a group of one rank
OpIndex: TypeAlias = tuple[int, int]  # (phase, operation) within a part of a plan


@dataclass(frozen=True)
class Kernels:
    """Consecutive kernels between which nothing is issued or awaited."""

    operations: tuple[OpIndex, ...]
    waits_for: tuple[str, ...]
    beside: tuple[int, ...]  # lanes that may be running meanwhile
    pending: tuple[str, ...]  # collectives on them that may not have ended


@dataclass(frozen=True)
class Message:
    """A collective on its lane."""

    operation: OpIndex
    name: str
    lane: int
    waits_for: tuple[str, ...]


Instruction: TypeAlias = Kernels | Message


@dataclass(frozen=True)
class PhaseProgram:
    """The schedule of one phase."""

    instructions: tuple[Instruction, ...]
    repeats: int
    carried: tuple[str, ...]  # awaited before they are issued: by an earlier repeat or phase
    feeding_lanes: frozenset[int]  # lanes that something in the phase waits for

    @property
    def drifting_lanes(self) -> set[int]:
        """Lanes that the phase uses and nothing in it waits for."""
        used = {i.lane for i in self.instructions if isinstance(i, Message)}
        return used - self.feeding_lanes


@dataclass(frozen=True)
class Program:
    """The schedule of phases that follow each other."""

    phases: tuple[PhaseProgram, ...]
    lanes: tuple[int, ...]


def compile_program(phases: Sequence[Phase], axis_lanes: AxisLanes) -> Program:
    """Drop collectives over one rank and needless waits, join kernels that run back to back.

    Parameters
    ----------
    phases : sequence of Phase
        The phases to play, in order.
    axis_lanes : mapping of str to int
        The lane of each axis.
    """
    lane_of = {
        op.name: axis_lanes[op.axis]
        for phase in phases
        for op in phase.operations
        if isinstance(op, Collective) and axis_lanes[op.axis]
    }
    compiled = []
    latest: dict[int, str | None] = {}
    issued: dict[str, _Moment] = {}
    for index, phase in enumerate(phases):
        at_start = _latest_at_start(phase, lane_of, latest)
        compiler = _PhaseCompiler(index, lane_of, at_start, _histories(index, phase, issued))
        compiled.append(compiler.compile(phase))
        latest, issued = compiler.latest, compiler.issued
    return Program(tuple(compiled), tuple(sorted(set(lane_of.values()))))


def _latest_at_start(
    phase: Phase, lane_of: Mapping[str, int], before: Mapping[int, str | None]
) -> dict[int, str | None]:
    """The last collective issued on each lane; None where the repeats of the phase differ."""
    latest = dict(before)
    own = {lane_of[op.name]: op.name for op in phase.operations if op.name in lane_of}
    if phase.repeats > 1:
        latest |= {lane: None for lane, name in own.items() if latest.get(lane) != name}
    return latest


_Moment: TypeAlias = tuple[int, ...]  # phase, repeat, operation; empty for never
_NEVER: _Moment = ()


class _History:
    """When collectives were issued, and up to which one each lane is known to be done.

    Lanes are in order: whoever has waited for a collective has waited for those before it.
    """

    def __init__(self, issued: dict[str, _Moment]) -> None:
        self.issued = issued
        self._done: dict[int, _Moment] = {}

    def holds_up(self, name: str, lane: int) -> bool:
        return self.issued.get(name, _NEVER) > self._done.get(lane, _NEVER)

    def wait(self, name: str, lane: int) -> None:
        if self.holds_up(name, lane):
            self._done[lane] = self.issued[name]


def _histories(index: int, phase: Phase, issued: Mapping[str, _Moment]) -> tuple[_History, ...]:
    """What the first repeat of a phase finds, and what the later ones find."""
    first = _History(dict(issued))
    if phase.repeats == 1:
        return (first,)
    by_repeat = {op.name: (index, 0, i) for i, op in enumerate(phase.operations)}
    return first, _History({**issued, **by_repeat})


class _PhaseCompiler:
    def __init__(
        self,
        phase_index: int,
        lane_of: Mapping[str, int],
        latest: dict[int, str | None],
        histories: tuple[_History, ...],
    ) -> None:
        self._phase_index, self._lane_of = phase_index, lane_of
        self._histories = histories
        self.latest = latest
        self._running = set(latest)
        self._instructions: list[Instruction] = []
        self._joined: list[OpIndex] = []
        self._joined_waits: tuple[str, ...] = ()

    @property
    def issued(self) -> dict[str, _Moment]:
        """The latest issue of every collective so far."""
        return self._histories[0].issued

    def compile(self, phase: Phase) -> PhaseProgram:
        issued: set[str] = set()
        carried: dict[str, None] = {}
        feeding: set[int] = set()
        for index, op in enumerate(phase.operations):
            is_message = isinstance(op, Collective)
            if is_message and op.name not in self._lane_of:
                continue
            waits: tuple[str, ...] = ()
            if op.waits_for:
                waits = tuple([name for name in op.waits_for if self._holds_up(name)])
                carried |= {name: None for name in waits if name not in issued}
                feeding |= {self._lane_of[name] for name in waits}
            if is_message:
                self._message(op, index, waits)
                issued.add(op.name)
            else:
                self._kernel(index, waits)
        self._flush()
        return PhaseProgram(
            tuple(self._instructions), phase.repeats, tuple(carried), frozenset(feeding)
        )

    def _holds_up(self, name: str) -> bool:
        lane = self._lane_of.get(name)
        return lane is not None and any(h.holds_up(name, lane) for h in self._histories)

    def _message(self, op: Operation, index: int, waits: tuple[str, ...]) -> None:
        self._flush()
        lane = self._lane_of[op.name]
        self._instructions.append(Message((self._phase_index, index), op.name, lane, waits))
        self.latest[lane] = op.name
        for history in self._histories:
            history.issued[op.name] = (self._phase_index, 1, index)
        self._running.add(lane)

    def _kernel(self, index: int, waits: tuple[str, ...]) -> None:
        if waits:
            self._flush()
            self._joined_waits = waits
            # In-order lanes are idle once their latest collective has ended.
            ended = {self._lane_of[name] for name in waits if name in self.latest.values()}
            self._running -= ended
            for name in waits:
                for history in self._histories:
                    history.wait(name, self._lane_of[name])
        self._joined.append((self._phase_index, index))

    def _flush(self) -> None:
        if self._joined:
            beside = tuple(sorted(self._running))
            kernels = Kernels(tuple(self._joined), self._joined_waits, beside, self._pending())
            self._instructions.append(kernels)
            self._joined, self._joined_waits = [], ()

    def _pending(self) -> tuple[str, ...]:
        on_lanes = (n for n, lane in self._lane_of.items() if lane in self._running)
        return tuple(name for name in on_lanes if self._holds_up(name))
