"""Play a step plan on a compute stream and the links, for all candidates at once.

`simulate` is the fast, vectorised player; `timeline` plays one candidate operation by
operation and is its plain twin. Both follow the rules of `spec.plan`: in-order streams,
an operation starts when its stream is free and everything that it waits for has ended,
a collective over one rank is not issued. Collectives queue on the links that they
occupy: those that stay inside nodes on one lane, those that cross on another, as
process groups of their own do. While any of them runs, kernels run slower by the
machine's interference (a collective takes multiprocessors and memory bandwidth).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from axonn_tune.spec.plan import (
    COMPUTE,
    Array,
    Collective,
    Operation,
    Phase,
    StepPlan,
)

AxisLanes: TypeAlias = Mapping[str, int]  # lane of each axis; 0 means a group of one rank
OpIndex: TypeAlias = tuple[int, int]  # (phase, operation) of a plan

# Two successive repeats of a phase count as equal if they agree to this, relative.
PERIODIC_TOLERANCE = 1e-13
# Repeats played for all candidates before those that are not yet periodic are played alone.
COMMON_REPEATS = 6


# The program: a plan without its sizes, for candidates whose axes occupy the same lanes -----


@dataclass(frozen=True)
class _Kernels:
    """Consecutive kernels between which nothing is issued or awaited."""

    operations: tuple[OpIndex, ...]
    waits_for: tuple[str, ...]


@dataclass(frozen=True)
class _Message:
    operation: OpIndex
    name: str
    lane: int
    waits_for: tuple[str, ...]


_Instruction: TypeAlias = _Kernels | _Message


@dataclass(frozen=True)
class _PhaseProgram:
    instructions: tuple[_Instruction, ...]
    repeats: int
    carried: tuple[str, ...]  # collectives that a later repeat or phase waits for
    feeding_lanes: frozenset[int]  # lanes that something in the phase waits for


@dataclass(frozen=True)
class Program:
    """The schedule of a plan, shared by all candidates with the same lanes."""

    microstep: tuple[_PhaseProgram, ...]
    step_end: tuple[_PhaseProgram, ...]


def compile_program(plan: StepPlan, axis_lanes: AxisLanes) -> Program:
    """Drop collectives over one rank and join kernels that run back to back."""
    n_microstep = len(plan.microstep)
    lane_of = {
        op.name: axis_lanes[op.axis]
        for phase in plan.phases
        for op in phase.operations
        if isinstance(op, Collective) and axis_lanes[op.axis]
    }
    compiled = tuple(
        _compile_phase(phase, index, lane_of) for index, phase in enumerate(plan.phases)
    )
    return Program(compiled[:n_microstep], compiled[n_microstep:])


def _compile_phase(phase: Phase, phase_index: int, lane_of: Mapping[str, int]) -> _PhaseProgram:
    instructions: list[_Instruction] = []
    pending: list[OpIndex] = []  # kernels that run back to back
    pending_waits: tuple[str, ...] = ()
    issued: set[str] = set()
    carried: dict[str, None] = {}
    feeding: set[int] = set()

    def flush() -> None:
        if pending:
            instructions.append(_Kernels(tuple(pending), pending_waits))
            pending.clear()

    for index, op in enumerate(phase.operations):
        is_message = isinstance(op, Collective)
        if is_message and op.name not in lane_of:
            continue
        waits: tuple[str, ...] = ()
        if op.waits_for:
            waits = tuple(name for name in op.waits_for if name in lane_of)
            carried |= {name: None for name in waits if name not in issued}
            feeding |= {lane_of[name] for name in waits}
        if is_message:
            flush()
            instructions.append(_Message((phase_index, index), op.name, lane_of[op.name], waits))
            issued.add(op.name)
            continue
        if waits:
            flush()
        if not pending:
            pending_waits = waits
        pending.append((phase_index, index))
    flush()
    return _PhaseProgram(tuple(instructions), phase.repeats, tuple(carried), frozenset(feeding))


# The player -------------------------------------------------------------------------------


@dataclass
class _State:
    """When the compute stream and each lane are free, and when collectives ended; shape (C,)."""

    compute: Array
    idle: Array  # how long the compute stream has stood still so far
    lane: dict[int, Array]
    ended: dict[str, Array] = field(default_factory=dict)

    def rows(self, rows: np.ndarray) -> _State:
        return _State(
            self.compute[rows],
            self.idle[rows],
            {lane: free[rows] for lane, free in self.lane.items()},
            {name: end[rows] for name, end in self.ended.items()},
        )

    def write(self, rows: np.ndarray, other: _State) -> None:
        self.compute[rows] = other.compute
        self.idle[rows] = other.idle
        for lane, free in other.lane.items():
            self.lane[lane][rows] = free
        for name, end in other.ended.items():
            self.ended[name][rows] = end

    def drain(self) -> None:
        """Let the compute stream wait for every lane."""
        end = np.maximum.reduce([self.compute, *self.lane.values()])
        self.idle = self.idle + (end - self.compute)
        self.compute = end


_Durations: TypeAlias = Sequence[Array]


def _play(
    phase: _PhaseProgram, durations: _Durations, state: _State, slowdown_fraction: float
) -> None:
    compute, lane, ended = state.compute, state.lane, state.ended
    for instruction, seconds in zip(phase.instructions, durations, strict=True):
        ends = [ended[name] for name in instruction.waits_for if name in ended]
        if isinstance(instruction, _Kernels):
            if ends:
                start = np.maximum.reduce([compute, *ends])
                state.idle = state.idle + (start - compute)
                compute = start
            if slowdown_fraction and lane:
                beside = np.maximum.reduce(list(lane.values())) - compute
                compute = compute + slowed_seconds(seconds, beside, slowdown_fraction)
            else:
                compute = compute + seconds
        else:
            start = np.maximum.reduce([lane[instruction.lane], compute, *ends])
            start += seconds
            lane[instruction.lane] = ended[instruction.name] = start
    state.compute = compute


def slowed_seconds(seconds: Array, beside_seconds: Array, slowdown_fraction: float) -> Array:
    """Duration of a kernel beside which collectives run for its first `beside_seconds`.

    Until they end it takes 1 + s seconds for each second of work; shape (C,).
    """
    slowed = np.minimum(np.maximum(beside_seconds, 0.0), seconds * (1.0 + slowdown_fraction))
    return seconds + slowed * (slowdown_fraction / (1.0 + slowdown_fraction))


def _play_repeated(
    phase: _PhaseProgram, durations: _Durations, state: _State, slowdown_fraction: float
) -> None:
    """Play a phase `repeats` times; once its state repeats, add the period for the rest.

    The player is a deterministic function of its state up to a common shift, so from the
    first repeat that ends in the state in which it began (shifted) every further one adds
    the same. A lane that nothing in the phase waits for may run further ahead at its own
    constant rate. Candidates that take longer to settle are played to the end.
    """
    before, idle_before = _snapshot(phase, state), state.idle
    settled_before = np.zeros(state.compute.shape, dtype=bool)
    for played in range(1, phase.repeats + 1):
        _play(phase, durations, state, slowdown_fraction)
        remaining = phase.repeats - played
        if remaining == 0:
            return
        after = _snapshot(phase, state)
        settled = _is_periodic(phase, before, after)
        if played >= 2 and (settled & settled_before).all():
            _extrapolate(state, before, after, idle_before, remaining)
            return
        if played == COMMON_REPEATS:
            settled &= settled_before
            rows = np.flatnonzero(~settled)
            others = state.rows(rows)
            _extrapolate(state, before, after, idle_before, remaining)
            _play_apart(phase, durations, others, rows, remaining, slowdown_fraction)
            state.write(rows, others)
            return
        before, settled_before, idle_before = after, settled, state.idle


def _snapshot(phase: _PhaseProgram, state: _State) -> dict[str | int, Array]:
    """The part of the state on which the next repeat depends; compute under the key 0.

    Whatever comes next is issued after the computation so far, so a lane or a collective
    that ended before it counts as ending with it.
    """
    carried = {name: state.ended[name] for name in phase.carried if name in state.ended}
    ends: dict[str | int, Array] = {**state.lane, **carried}
    compute = state.compute
    return {0: compute, **{key: np.maximum(end, compute) for key, end in ends.items()}}


def _is_periodic(
    phase: _PhaseProgram, before: dict[str | int, Array], after: dict[str | int, Array]
) -> np.ndarray:
    period = after[0] - before[0]
    tolerance = PERIODIC_TOLERANCE * after[0]
    settled = np.ones(period.shape, dtype=bool)
    for key, now in after.items():
        if key == 0:
            continue
        drift = now - before[key] - period
        behind = drift < -tolerance
        if isinstance(key, int) and key not in phase.feeding_lanes:
            settled &= ~behind
        else:
            settled &= ~behind & (drift <= tolerance)
    return settled


def _extrapolate(
    state: _State,
    before: dict[str | int, Array],
    after: dict[str | int, Array],
    idle_before: Array,
    remaining: int,
) -> None:
    state.idle = state.idle + remaining * (state.idle - idle_before)
    state.compute = after[0] + remaining * (after[0] - before[0])
    for lane in state.lane:
        state.lane[lane] = after[lane] + remaining * (after[lane] - before[lane])
    state.ended = {
        name: after[name] + remaining * (after[name] - before[name]) if name in after else end.copy()
        for name, end in state.ended.items()
    }


def _play_apart(
    phase: _PhaseProgram,
    durations: _Durations,
    state: _State,
    rows: np.ndarray,
    repeats: int,
    slowdown_fraction: float,
) -> None:
    """Play the candidates of some rows, whose state is given, through further repeats."""
    if rows.size:
        theirs = [seconds[rows] for seconds in durations]
        for _ in range(repeats):
            _play(phase, theirs, state, slowdown_fraction)


@dataclass(frozen=True, eq=False)
class StepTimes:
    """Seconds of one step and of its standstills, arrays of shape (C,)."""

    step_seconds: Array
    exposed_seconds: Array


def simulate(
    program: Program,
    n_microsteps: Array,
    kernels_seconds: Callable[[tuple[OpIndex, ...]], Array],
    message_seconds: Callable[[OpIndex], Array],
    slowdown_fraction: float,
) -> StepTimes:
    """Play the program for all candidates.

    Parameters
    ----------
    n_microsteps : array, shape (C,)
    kernels_seconds, message_seconds : callables
        Seconds of consecutive kernels, and of a collective, shape (C,).
    slowdown_fraction : float
        How much longer a kernel takes beside a collective.
    """
    step, exposed = np.zeros((2, *n_microsteps.shape))
    for phases, times in ((program.microstep, n_microsteps), (program.step_end, 1.0)):
        used = {i.lane for phase in phases for i in phase.instructions if isinstance(i, _Message)}
        zeros = np.zeros(n_microsteps.shape)
        state = _State(zeros, zeros, {lane: zeros for lane in sorted(used)})
        for phase in phases:
            durations = [
                kernels_seconds(i.operations)
                if isinstance(i, _Kernels)
                else message_seconds(i.operation)
                for i in phase.instructions
            ]
            _play_repeated(phase, durations, state, slowdown_fraction)
        state.drain()
        step += times * state.compute
        exposed += times * state.idle
    return StepTimes(step, exposed)


# The plain twin ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """One operation of one candidate on the timeline."""

    phase: str
    operation: Operation
    lane: int  # 0 is the compute stream
    start_seconds: float
    end_seconds: float
    # How long the compute stream stood still for this collective.
    exposed_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_seconds - self.start_seconds


def timeline(
    phases: Sequence[Phase],
    seconds_of: Callable[[Operation], float],
    axis_lanes: AxisLanes,
    slowdown_fraction: float,
) -> list[Event]:
    """Every operation of one candidate with its start and end, all repeats, one micro-step.

    The time for which the compute stream stands still is charged to the collectives that
    ran meanwhile on the lane that held it up; so is what still runs when computation ends.
    """
    events: list[Event] = []
    on_lane: dict[int, list[int]] = {}
    latest: dict[str, int] = {}  # collective -> its latest event
    compute_free = 0.0
    for phase in phases:
        for _ in range(phase.repeats):
            for operation in phase.operations:
                ready, holding = compute_free, None
                for name in operation.waits_for:
                    if name in latest and events[latest[name]].end_seconds > ready:
                        holding = latest[name]
                        ready = events[holding].end_seconds
                if isinstance(operation, Collective):
                    lane = axis_lanes[operation.axis]
                    if not lane:
                        continue
                    queue = on_lane.setdefault(lane, [])
                    start = max(ready, events[queue[-1]].end_seconds if queue else 0.0)
                    latest[operation.name] = len(events)
                    queue.append(len(events))
                    end = start + seconds_of(operation)
                    events.append(Event(phase.name, operation, lane, start, end))
                    continue
                if holding is not None:
                    _charge(events, on_lane[events[holding].lane], holding, compute_free)
                busy_until = max((events[queue[-1]].end_seconds for queue in on_lane.values()), default=0.0)
                compute_free = ready + _beside(seconds_of(operation), busy_until - ready, slowdown_fraction)
                events.append(Event(phase.name, operation, 0, ready, compute_free))
    for last in sorted((queue[-1] for queue in on_lane.values()), key=lambda i: events[i].end_seconds):
        if events[last].end_seconds > compute_free:
            _charge(events, on_lane[events[last].lane], last, compute_free)
            compute_free = events[last].end_seconds
    return events


def _charge(events: list[Event], queue: list[int], holding: int, idle_from: float) -> None:
    """Charge the idle time up to the end of `holding` to it and to those before it on its lane.

    What is left over, where the lane itself waited, goes to `holding`.
    """
    left = events[holding].end_seconds - idle_from
    for index in reversed(queue[: queue.index(holding) + 1]):
        event = events[index]
        if event.end_seconds <= idle_from:
            break
        share = event.end_seconds - max(event.start_seconds, idle_from)
        events[index] = replace(event, exposed_seconds=event.exposed_seconds + share)
        left -= share
    event = events[holding]
    events[holding] = replace(event, exposed_seconds=event.exposed_seconds + left)


def _beside(seconds: float, beside_seconds: float, slowdown_fraction: float) -> float:
    """A kernel's duration, second by second: work done beside collectives, then the rest."""
    done_beside = max(beside_seconds, 0.0) / (1.0 + slowdown_fraction)
    if done_beside >= seconds:
        return seconds * (1.0 + slowdown_fraction)
    return max(beside_seconds, 0.0) + (seconds - done_beside)
