"""Play a compiled program for all candidates at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeAlias

import numpy as np

from axonn_tune.simulate.interference import Interference
from axonn_tune.simulate.program import Kernels, OpIndex, PhaseProgram, Program
from axonn_tune.spec.plan import Array

# Two successive repeats of a phase count as equal if they agree to this, relative.
PERIODIC_TOLERANCE = 1e-13
# Repeats played for all candidates before those that are not yet periodic are played alone.
COMMON_REPEATS = 6


@dataclass(frozen=True, eq=False)
class Played:
    """Seconds of a program and of the compute stream's standstills in it, shape (C,)."""

    seconds: Array
    exposed_seconds: Array


def play(
    program: Program,
    shape: tuple[int, ...],
    kernels_seconds: Callable[[tuple[OpIndex, ...]], Array],
    message_seconds: Callable[[OpIndex], Array],
    interference: Interference,
    least_seconds: Array | float = 0.0,
) -> Played:
    """Play the program from idle streams until all are idle again.

    Parameters
    ----------
    program : Program
    shape : (C,)
    kernels_seconds, message_seconds : callables
        Seconds of consecutive kernels, and of a collective, shape (C,).
    interference : Interference
        How much kernels and collectives slow each other down.
    least_seconds : array, shape (C,)
        The links that the lanes share need at least so long.
    """
    zeros = np.zeros(shape)
    state = _State(zeros, zeros, dict.fromkeys(program.lanes, zeros))
    for phase in program.phases:
        durations = [
            kernels_seconds(i.operations)
            if isinstance(i, Kernels)
            else message_seconds(i.operation)
            for i in phase.instructions
        ]
        _play_repeated(_Playable(phase, durations, interference), state)
    end = np.maximum(_latest([state.compute, *state.lane.values()]), least_seconds)
    return Played(end, state.idle + (end - state.compute))


_Key: TypeAlias = str | int


@dataclass
class _State:
    """When the compute stream and each lane are free, and when collectives ended; shape (C,)."""

    compute: Array
    idle: Array  # how long the compute stream has stood still so far
    lane: dict[int, Array]
    ended: dict[str, Array] = field(default_factory=dict)

    def copy(self) -> _State:
        """Copy the state, not its arrays, which are never changed in place."""
        return _State(self.compute, self.idle, dict(self.lane), dict(self.ended))

    def extrapolate(self, earlier: _State, repeats: int) -> None:
        """Add what has passed since `earlier` that many times; every array is a new one."""

        def further(now: Array, before: Array) -> Array:
            return now + repeats * (now - before)

        self.compute = further(self.compute, earlier.compute)
        self.idle = further(self.idle, earlier.idle)
        self.lane = {lane: further(free, earlier.lane[lane]) for lane, free in self.lane.items()}
        self.ended = {
            name: further(end, earlier.ended.get(name, end)) for name, end in self.ended.items()
        }

    def rows(self, rows: np.ndarray) -> _State:
        """Pick the state of some candidates."""
        return _State(
            self.compute[rows],
            self.idle[rows],
            {lane: free[rows] for lane, free in self.lane.items()},
            {name: end[rows] for name, end in self.ended.items()},
        )

    def write(self, rows: np.ndarray, other: _State) -> None:
        """Put the state of some candidates back, in place."""
        self.compute[rows] = other.compute
        self.idle[rows] = other.idle
        for lane, free in other.lane.items():
            self.lane[lane][rows] = free
        for name, end in other.ended.items():
            self.ended[name][rows] = end


@dataclass(frozen=True)
class _Playable:
    """A phase with its durations, each of shape (C,)."""

    phase: PhaseProgram
    durations: Sequence[Array]
    interference: Interference

    def rows(self, rows: np.ndarray) -> _Playable:
        theirs = [seconds[rows] for seconds in self.durations]
        return _Playable(self.phase, theirs, self.interference)

    def play(self, state: _State) -> None:
        compute, idle, lane, ended = state.compute, state.idle, state.lane, state.ended
        interference = self.interference
        for instruction, seconds in zip(self.phase.instructions, self.durations, strict=True):
            ends = [ended[name] for name in instruction.waits_for if name in ended]
            if isinstance(instruction, Kernels):
                if ends:
                    start = _latest([compute, *ends])
                    idle = idle + (start - compute)
                    compute = start
                if interference.of_kernels and instruction.beside:
                    remaining = _latest([lane[i] for i in instruction.beside]) - compute
                    seconds = interference.kernel_seconds(seconds, remaining)
                if interference.of_collectives and instruction.beside:
                    self._delay(instruction, compute, seconds, state)
                compute = compute + seconds
            else:
                start = _latest([lane[instruction.lane], compute, *ends])
                end = start + seconds
                lane[instruction.lane] = ended[instruction.name] = end
        state.compute, state.idle = compute, idle

    def _delay(self, beside: Kernels, start: Array, seconds: Array, state: _State) -> None:
        """Move the ends of collectives beside which kernels run."""

        def later(end: Array) -> Array:
            return end + self.interference.delay_seconds(seconds, end - start)

        for lane in beside.beside:
            state.lane[lane] = later(state.lane[lane])
        for name in beside.pending:
            if name in state.ended:
                state.ended[name] = later(state.ended[name])

    def snapshot(self, state: _State) -> dict[_Key, Array]:
        """The part of the state on which the next repeat depends; compute under the key 0.

        Whatever comes next is issued after the computation so far, so a lane or a
        collective that ended before it counts as ending with it.
        """
        carried = {name: state.ended[name] for name in self.phase.carried if name in state.ended}
        ends: list[tuple[_Key, Array]] = [*state.lane.items(), *carried.items()]
        compute = state.compute
        return {0: compute, **{key: np.maximum(end, compute) for key, end in ends}}

    def is_periodic(self, before: dict[_Key, Array], after: dict[_Key, Array]) -> np.ndarray:
        """Whether a repeat ended in the state in which it began, shifted in time."""
        period = after[0] - before[0]
        tolerance = PERIODIC_TOLERANCE * after[0]
        # A collective that was awaited for the first time says nothing of the next repeat.
        settled = np.full(period.shape, before.keys() == after.keys())
        for key, now in after.items():
            if key == 0 or key not in before:
                continue
            drift = now - before[key] - period
            settled &= drift >= -tolerance
            if not isinstance(key, int) or key in self.phase.feeding_lanes:
                settled &= drift <= tolerance
        return settled


def _latest(times: Iterable[Array]) -> Array:
    return reduce(np.maximum, times)


def _play_repeated(playable: _Playable, state: _State) -> None:
    """Play a phase `repeats` times; once its state repeats, add the period for the rest.

    The player is a deterministic function of its state up to a common shift, so from the
    first repeat that ends in the state in which it began (shifted) every further one adds
    the same. A lane that nothing in the phase waits for may run further ahead at its own
    constant rate, which shows one repeat later. Candidates that take longer to settle are
    played to the end.
    """
    enough = 3 if playable.phase.drifting_lanes else 2
    before, earlier = playable.snapshot(state), state.copy()
    n_settled = np.zeros(state.compute.shape, dtype=np.int64)  # repeats in a row
    repeats = playable.phase.repeats
    for played in range(1, repeats + 1):
        playable.play(state)
        if played == repeats:
            return
        after = playable.snapshot(state)
        n_settled = np.where(playable.is_periodic(before, after), n_settled + 1, 0)
        rows = np.flatnonzero(n_settled < enough)
        if not rows.size or played == COMMON_REPEATS:
            unsettled = state.rows(rows)
            state.extrapolate(earlier, repeats - played)
            if rows.size:
                alone = playable.rows(rows)
                for _ in range(repeats - played):
                    alone.play(unsettled)
                state.write(rows, unsettled)
            return
        before, earlier = after, state.copy()
