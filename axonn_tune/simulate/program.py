"""The compiled schedule of a plan, without its sizes.

Candidates whose axes occupy the same lanes share it. Collectives over one rank and waits that can
never hold anything up are left out, and kernels that run back to back are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import (
    FROM_HOST,
    TO_HOST,
    Collective,
    HostCopy,
    Operation,
    Phase,
    Transfer,
)

# The lane of each axis; 0 means a group of one rank.
AxisLanes: TypeAlias = Mapping[str, int]
# The lanes of the two directions of the link to the host; no axis has a lane below zero.
HOST_LANES = {TO_HOST: -1, FROM_HOST: -2}
# The index of the phase, and of the operation in it, within a part of a plan.
OpIndex: TypeAlias = tuple[int, int]


class Kernels(NamedTuple):
    """Consecutive kernels between which nothing is issued or awaited.

    operations
        Indices of the kernels.
    waits_for
        Names of the collectives that end before the first kernel starts.
    concurrent
        Lanes on which collectives may run at the same time.
    pending
        Names of the collectives on these lanes that may not have ended.
    slowing
        Names of those among them that slow kernels; None if all collectives of the program do.
    """

    operations: tuple[OpIndex, ...]
    waits_for: tuple[str, ...]
    concurrent: tuple[int, ...]
    pending: tuple[str, ...]
    slowing: tuple[str, ...] | None


class Message(NamedTuple):
    """A collective, or a copy between GPU and host, on its lane."""

    operation: OpIndex
    name: str
    lane: int
    waits_for: tuple[str, ...]


Instruction: TypeAlias = Kernels | Message


@dataclass(frozen=True)
class PhaseProgram:
    """The schedule of one phase.

    instructions
        Instructions of one repeat, in order.
    carried
        Names of collectives that are awaited before the phase issues them: an earlier repeat or
        phase has issued them.
    slowing_before
        Names and lanes of collectives before the phase that may slow its kernels.
    quiet_lanes
        Lanes of the collectives of the program that slow no kernels.
    feeding_lanes
        Lanes that something in the phase waits for.
    """

    instructions: tuple[Instruction, ...]
    carried: tuple[str, ...]
    slowing_before: tuple[tuple[str, int], ...]
    quiet_lanes: frozenset[int]
    feeding_lanes: frozenset[int]

    @property
    def needed(self) -> frozenset[str]:
        """The names of the collectives whose ends something in the phase depends on."""
        names = {name for op in self.instructions for name in op.waits_for}
        kernels = (op for op in self.instructions if isinstance(op, Kernels))
        return frozenset(names.union(*(op.slowing or () for op in kernels)))

    @cached_property
    def drifting(self) -> tuple[Message, ...]:
        """The collectives of lanes for which nothing in the phase waits."""
        return tuple(each for each in self._messages if each.lane not in self.feeding_lanes)

    @cached_property
    def steady(self) -> frozenset[str]:
        """The names of the other collectives, whose lanes end each repeat as the phase does."""
        return frozenset(each.name for each in self._messages if each.lane in self.feeding_lanes)

    @property
    def _messages(self) -> Iterator[Message]:
        """The collectives and copies among the instructions."""
        return (op for op in self.instructions if isinstance(op, Message))


@dataclass(frozen=True)
class Program:
    """The schedule of phases that follow each other, with the number of times that each is played.

    Only `repeats` depends on how many layers a phase stands for; it is an array of shape (C,) where
    candidates differ. `needed` names for each phase the collectives on whose ends it, or a later
    one, depends.
    """

    phases: tuple[PhaseProgram, ...]
    lanes: tuple[int, ...]
    needed: tuple[frozenset[str], ...]
    repeats: tuple[int | Ints, ...]

    def of(self, rows: Ints) -> Program:
        """Return the schedule of the candidates in some rows, which may come more than once."""
        repeats = (each if isinstance(each, int) else each[rows] for each in self.repeats)
        return replace(self, repeats=tuple(repeats))


class Issue(NamedTuple):
    """What a schedule depends on of an operation.

    name
        Name of the operation.
    group
        Group of a collective, or direction of a copy; empty for a kernel.
    waits_for
        Names of operations that end before it starts.
    is_between_two
        Whether it is a message from one rank to another, which slows no kernel.
    """

    name: str
    group: str
    waits_for: tuple[str, ...]
    is_between_two: bool


class Issues(NamedTuple):
    """What a schedule depends on of a phase.

    operations
        Its operations.
    is_repeated
        Whether some candidate issues them more than once.
    is_optional
        Whether some candidate does not issue them.
    """

    operations: tuple[Issue, ...]
    is_repeated: bool
    is_optional: bool


def group_of(operation: Operation) -> str:
    """Return the group of a collective, or the direction of a copy; empty for a kernel."""
    if isinstance(operation, HostCopy):
        return operation.direction
    return operation.axis if isinstance(operation, Collective) else ""


def is_between_two(operation: Operation) -> bool:
    """Return whether an operation is a message from one rank to another, which slows no kernel."""
    return isinstance(operation, Collective) and operation.kind == "send_recv"


def _issue_of(operation: Operation) -> Issue:
    """Return what a schedule depends on of an operation."""
    if not isinstance(operation, Transfer):
        return Issue(operation.name, "", operation.waits_for, False)
    group = group_of(operation)
    return Issue(operation.name, group, operation.waits_for, is_between_two(operation))


def lane_of(transfer: Transfer, axis_lanes: AxisLanes) -> int:
    """Return the lane of a collective or of a copy; 0 for a collective over a single rank."""
    group = group_of(transfer)
    return HOST_LANES[group] if group in HOST_LANES else axis_lanes[group]


def compile_program(phases: Sequence[Phase], axis_lanes: AxisLanes) -> Program:
    """Return the schedule of phases that are played one after another.

    Parameters
    ----------
    phases : sequence of Phase
        The phases to play, in order.
    axis_lanes : mapping of str to int
        The lane of each axis.
    """
    issues = tuple(
        Issues(
            tuple([_issue_of(op) for op in phase.operations]),
            phase.is_repeated,
            phase.is_optional,
        )
        for phase in phases
    )
    repeats = tuple(phase.repeats for phase in phases)
    return Program(*_compiled(issues, tuple(axis_lanes.items())), repeats)


@lru_cache(maxsize=4096)
def _compiled(
    issues: tuple[Issues, ...], axis_lanes: tuple[tuple[str, int], ...]
) -> tuple[tuple[PhaseProgram, ...], tuple[int, ...], tuple[frozenset[str], ...]]:
    """Return all fields of a `Program` but `repeats`; the groups occupy these lanes."""
    lane_of_group = {**HOST_LANES, **dict(axis_lanes)}
    lanes = {
        issue.name: lane
        for phase in issues
        for issue in phase.operations
        if issue.group and (lane := lane_of_group[issue.group])
    }
    quiet = frozenset(
        issue.name for phase in issues for issue in phase.operations if issue.is_between_two
    )
    phases = []
    issued: dict[str, _Moment] = {}
    uncertain: set[str] = set()
    for index, phase in enumerate(issues):
        histories = _histories(index, phase, issued, frozenset(uncertain))
        compiler = _PhaseCompiler(index, lanes, quiet, histories)
        phases.append(compiler.compile(phase.operations))
        issued = compiler.issued
        names = {issue.name for issue in phase.operations}
        uncertain = uncertain | names if phase.is_optional else uncertain - names
    backwards = [phase.needed for phase in reversed(phases)]
    needed = list(accumulate(backwards, lambda later, own: later | own))
    return tuple(phases), tuple(sorted(set(lanes.values()))), tuple(reversed(needed))


# The phase, the repeat and the operation in which something was issued; empty for never.
_Moment: TypeAlias = tuple[int, ...]
_NEVER: _Moment = ()


class _History:
    """The moments at which collectives were issued, and up to which each lane is known to be done.

    Lanes work in order: who has waited for a collective has waited for all earlier ones too, unless
    it is uncertain whether the collective was issued at that moment.
    """

    def __init__(self, issued: dict[str, _Moment], uncertain: frozenset[str]) -> None:
        self.issued = issued
        self._uncertain = set(uncertain)
        self._done: dict[int, _Moment] = {}
        self._awaited: set[str] = set()

    def holds_up(self, name: str, lane: int) -> bool:
        """Return whether the collective may still be running."""
        if name in self._awaited:
            return False
        return self.issued.get(name, _NEVER) > self._done.get(lane, _NEVER)

    def issue(self, name: str, moment: _Moment) -> None:
        """Note that the collective has been issued."""
        self.issued[name] = moment
        self._uncertain.discard(name)
        self._awaited.discard(name)

    def wait(self, name: str, lane: int) -> None:
        """Note that the collective has been awaited."""
        if name in self._uncertain:
            self._awaited.add(name)
        elif self.holds_up(name, lane):
            self._done[lane] = self.issued[name]


def _histories(
    index: int, phase: Issues, issued: Mapping[str, _Moment], uncertain: frozenset[str]
) -> tuple[_History, ...]:
    """Return the history that the first repeat of a phase finds, and that of later repeats.

    `uncertain` are the collectives that some candidates have not issued when the others last did.
    """
    first = _History(dict(issued), uncertain)
    if not phase.is_repeated:
        return (first,)
    by_repeat = {issue.name: (index, 0, i) for i, issue in enumerate(phase.operations)}
    return first, _History({**issued, **by_repeat}, uncertain - by_repeat.keys())


class _PhaseCompiler:
    """Compiles one phase; `issued` carries what the next phase has to know."""

    def __init__(
        self,
        phase_index: int,
        lane_of: Mapping[str, int],
        quiet: frozenset[str],
        histories: tuple[_History, ...],
    ) -> None:
        self._phase_index = phase_index
        self._lane_of = lane_of
        self._quiet = quiet
        self._histories = histories
        self._instructions: list[Instruction] = []
        self._joined: list[OpIndex] = []
        self._joined_waits: tuple[str, ...] = ()
        # The lanes of what may still be running, in any repeat.
        self._pending = {name: lane for name, lane in lane_of.items() if self._holds_up(name, lane)}

    @property
    def issued(self) -> dict[str, _Moment]:
        """The moment at which every collective was last issued so far."""
        return self._histories[0].issued

    def compile(self, issues: Sequence[Issue]) -> PhaseProgram:
        """Return the schedule of the phase."""
        issued: set[str] = set()
        carried: dict[str, None] = {}
        feeding: set[int] = set()
        quiet_lanes = frozenset(self._lane_of[name] for name in self._quiet & self._lane_of.keys())
        slowing_before = tuple([(name, self._lane_of[name]) for name in self._slowing()])
        for index, (name, group, waits_for, _) in enumerate(issues):
            if group and name not in self._lane_of:
                continue
            waits: tuple[str, ...] = ()
            if waits_for:
                waits = tuple([other for other in waits_for if other in self._pending])
                carried |= {other: None for other in waits if other not in issued}
                feeding |= {self._lane_of[other] for other in waits}
            if group:
                self._message(name, index, waits)
                issued.add(name)
            else:
                self._kernel(index, waits)
        self._flush()
        return PhaseProgram(
            tuple(self._instructions),
            tuple(carried),
            slowing_before,
            quiet_lanes,
            frozenset(feeding),
        )

    def _slowing(self) -> tuple[str, ...]:
        """Return the names of what may still be running and slows kernels."""
        return tuple([name for name in self._pending if name not in self._quiet])

    def _holds_up(self, name: str, lane: int) -> bool:
        """Return whether an operation may still be running on its lane, in any repeat."""
        first, later = self._histories[0], self._histories[-1]
        return first.holds_up(name, lane) or later.holds_up(name, lane)

    def _wait(self, name: str) -> None:
        """Note that an operation, and with it all earlier ones of its lane, has been awaited."""
        awaited_lane = self._lane_of[name]
        for history in self._histories:
            history.wait(name, awaited_lane)
        on_lane = [other for other, lane in self._pending.items() if lane == awaited_lane]
        for other in on_lane:
            if not self._holds_up(other, awaited_lane):
                del self._pending[other]

    def _message(self, name: str, index: int, waits: tuple[str, ...]) -> None:
        """Append a collective or a copy."""
        self._flush()
        lane = self._lane_of[name]
        self._instructions.append(Message((self._phase_index, index), name, lane, waits))
        for history in self._histories:
            history.issue(name, (self._phase_index, 1, index))
        self._pending[name] = lane

    def _kernel(self, index: int, waits: tuple[str, ...]) -> None:
        """Join a kernel to those before it, or begin a new run of kernels if it waits."""
        if waits:
            self._flush()
            self._joined_waits = waits
            for name in waits:
                self._wait(name)
        self._joined.append((self._phase_index, index))

    def _flush(self) -> None:
        """Append the kernels that have been joined so far."""
        if self._joined:
            concurrent = tuple(sorted(set(self._pending.values())))
            pending = tuple(self._pending)
            slowing = self._slowing() if self._quiet else None
            kernels = Kernels(tuple(self._joined), self._joined_waits, concurrent, pending, slowing)
            self._instructions.append(kernels)
            self._joined = []
            self._joined_waits = ()
