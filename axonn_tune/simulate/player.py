"""Play a compiled program for all candidates at once.

The state of the player (`_State`) says when the compute stream and each lane of links will be free,
and when each collective ended, as arrays over candidates. `_Playable.play` walks once through the
instructions of a phase: kernels move the compute stream forward, and wait for collectives and run
slower while collectives run; a collective moves its lane forward.

A phase, such as the blocks of a model, is often repeated many times, but not played as often. The
walk depends on the state alone, so that once a repeat ends in the state in which it began, shifted
by a period (`_Playable.is_periodic`), all others do the same. `_play_repeated` then adds the period
for the remaining repeats, of which each candidate may have a number of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple, TypeAlias

import numpy as np

from axonn_tune.simulate.interference import Interference
from axonn_tune.simulate.lanes import ALIKE, LaneSharing
from axonn_tune.simulate.program import Kernels, OpIndex, PhaseProgram, Program
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import Array, Size

# Two successive repeats of a phase count as equal if they agree to this relative tolerance.
REPEAT_TOLERANCE = 1e-13
# Number of repeats that are played for all candidates together. After these, candidates that are
# not yet periodic are played without the others.
COMMON_REPEATS = 6


class Played(NamedTuple):
    """The times of a program, arrays of shape (C,).

    seconds, exposed_seconds
        Time of the program, and of the compute stream's standstills in it.
    paced_seconds
        How much of the time kernels take that do not end before the GPU waits for the host.
    host_seconds
        Time that the host needs to issue the program, below which no pace of the GPU brings it.
    """

    seconds: Array
    exposed_seconds: Array
    paced_seconds: Array
    host_seconds: Array | float = 0.0

    def seconds_at(self, pace: Size) -> Array:
        """Return the time if each kernel takes `pace` times as long, shape (C,).

        Standstills of the compute stream stay as long as they are.
        """
        return np.maximum(self.seconds + (pace - 1.0) * self.paced_seconds, self.host_seconds)


def play(
    program: Program,
    shape: tuple[int, ...],
    kernels_seconds: Callable[[tuple[OpIndex, ...]], Array],
    message_seconds: Callable[[OpIndex], Array],
    interference: Interference,
    least_seconds: Array | float = 0.0,
    sharing: LaneSharing = ALIKE,
    issued_seconds: Sequence[Array] = (),
) -> Played:
    """Play the program from idle streams until all are idle again.

    Parameters
    ----------
    program : Program
    shape : tuple of int
        Shape of all arrays, (C,).
    kernels_seconds, message_seconds : callables
        Functions that return the time of consecutive kernels, and of a collective, shape (C,).
    interference : Interference
        Slowdowns of kernels and collectives that run at the same time.
    least_seconds : array, shape (C,)
        Least time that the links which lanes share need.
    sharing : LaneSharing
        What the candidates do not share of the program's lanes.
    issued_seconds : sequence of array, shape (C,)
        Times at which the host has issued all phases before each one, which starts no earlier;
        empty if the host is ahead.
    """
    zeros = np.zeros(shape)
    state = _State(zeros, zeros, dict.fromkeys(program.lanes, zeros))
    busy_before = zeros
    phases = zip(program.phases, program.repeats, program.needed, strict=True)
    for i, (phase, repeats, needed) in enumerate(phases):
        durations = [
            kernels_seconds(instruction.operations)
            if isinstance(instruction, Kernels)
            else message_seconds(instruction.operation)
            for instruction in phase.instructions
        ]
        playable = _Playable(phase, durations, interference, sharing)
        if issued_seconds:
            start = np.maximum(state.compute, issued_seconds[i])
            busy_before = np.where(start > state.compute, start - state.idle, busy_before)
            state.compute = start
        _play_repeated(playable, repeats, state, needed)
    end = np.maximum(_latest([state.compute, *state.lane.values()]), least_seconds)
    paced = state.compute - state.idle - busy_before
    return Played(end, state.idle + (end - state.compute), paced)


_Key: TypeAlias = str | int | tuple[int, str]


@dataclass
class _State:
    """The state of the streams after some instructions, arrays of shape (C,).

    compute
        Time at which the compute stream is free.
    idle
        Time for which the compute stream has stood still so far.
    lane
        Time at which each lane is free.
    ended
        Time at which the latest collective of each name ended.
    """

    compute: Array
    idle: Array
    lane: dict[int, Array]
    ended: dict[str, Array] = field(default_factory=dict)

    def copy(self) -> _State:
        """Return a copy that shares the arrays; playing a phase changes no array in place."""
        return _State(self.compute, self.idle, dict(self.lane), dict(self.ended))

    def extrapolate(self, earlier: _State, repeats: int | Ints, steady: Container[str]) -> None:
        """Add the time since `earlier` as many times as given; every array is a new one.

        The ends of the steady collectives move as the compute stream does.
        """

        def extrapolated(now: Array, before: Array) -> Array:
            return now + repeats * (now - before)

        period = self.compute - earlier.compute
        self.lane = {
            # A lane that became free before the compute stream did holds nothing up. It is treated
            # as if both had become free together.
            lane: extrapolated(
                np.maximum(free, self.compute), np.maximum(earlier.lane[lane], earlier.compute)
            )
            for lane, free in self.lane.items()
        }
        self.ended = {
            name: end + repeats * (period if name in steady else end - earlier.ended[name])
            for name, end in self.ended.items()
        }
        self.compute = self.compute + repeats * period
        self.idle = extrapolated(self.idle, earlier.idle)

    def forget(self, needed: Container[str]) -> None:
        """Forget when those collectives ended that are not among the needed ones."""
        self.ended = {name: end for name, end in self.ended.items() if name in needed}

    def rows(self, rows: np.ndarray) -> _State:
        """Return the state of some candidates, in new arrays."""
        return _State(
            self.compute[rows],
            self.idle[rows],
            {lane: free[rows] for lane, free in self.lane.items()},
            {name: end[rows] for name, end in self.ended.items()},
        )

    def take(self, taken: np.ndarray, other: _State) -> None:
        """Take over the state of some candidates; every array is a new one."""
        self.compute = np.where(taken, other.compute, self.compute)
        self.idle = np.where(taken, other.idle, self.idle)
        self.lane = {
            lane: np.where(taken, other.lane[lane], free) for lane, free in self.lane.items()
        }
        self.ended = {
            name: np.where(taken, other.ended.get(name, 0.0), end)
            for name, end in self.ended.items()
        }

    def write(self, rows: np.ndarray, other: _State) -> None:
        """Replace the state of some candidates, in place."""
        self.compute[rows] = other.compute
        self.idle[rows] = other.idle
        for lane, free in self.lane.items():
            free[rows] = other.lane[lane]
        for name, end in self.ended.items():
            end[rows] = other.ended[name]


class _Playable(NamedTuple):
    """A phase with the duration of each of its instructions, shape (C,)."""

    phase: PhaseProgram
    durations: Sequence[Array]
    interference: Interference
    sharing: LaneSharing

    def rows(self, rows: np.ndarray) -> _Playable:
        """Return the phase with the durations of some candidates."""
        durations = [seconds[rows] for seconds in self.durations]
        interference = self.interference.rows(rows)
        return _Playable(self.phase, durations, interference, self.sharing.rows(rows))

    def play(self, state: _State) -> None:
        """Play the phase once and change the state."""
        compute = state.compute
        idle = state.idle
        lane = state.lane
        ended = state.ended
        interference = self.interference
        sharing = self.sharing
        for instruction, seconds in zip(self.phase.instructions, self.durations, strict=True):
            ends = [ended[name] for name in instruction.waits_for if name in ended]
            if isinstance(instruction, Kernels):
                if ends:
                    start = _latest([compute, *ends])
                    idle = idle + (start - compute)
                    compute = start
                if interference.slows_kernels and instruction.concurrent:
                    beside = self._slowing(instruction, state)
                    if beside:
                        seconds = interference.kernel_seconds(seconds, _latest(beside) - compute)
                if interference.slows_collectives and instruction.concurrent:
                    self._delay(instruction, compute, seconds, state)
                compute = compute + seconds
            else:
                start = _latest([lane[instruction.lane], compute, *ends])
                ended[instruction.name] = sharing.occupy(lane, instruction.lane, start + seconds)
        state.compute = compute
        state.idle = idle

    def _slowing(self, kernels: Kernels, state: _State) -> list[Array]:
        """Return the ends of the collectives that may slow kernels."""
        if kernels.slowing is None:
            return [state.lane[lane] for lane in kernels.concurrent]
        return [state.ended[name] for name in kernels.slowing if name in state.ended]

    def _delay(self, kernels: Kernels, start: Array, seconds: Array, state: _State) -> None:
        """Delay the ends of the collectives that run while the kernels do."""

        def delayed(end: Array) -> Array:
            return end + self.interference.delay_seconds(seconds, end - start)

        # The ends of all lanes are read before any is changed, so that lanes which are the same
        # links for a candidate are delayed once.
        ends = {lane: state.lane[lane] for lane in kernels.concurrent}
        for lane, end in ends.items():
            self.sharing.occupy(state.lane, lane, delayed(end))
        for name in kernels.pending:
            if name in state.ended:
                state.ended[name] = delayed(state.ended[name])

    def snapshot(self, state: _State) -> dict[_Key, Array]:
        """Return the part of the state on which the next repeat depends.

        The keys are lanes and names of collectives; the compute stream has the key 0. Whatever
        comes next is issued after the computation so far, so that a lane or a collective that
        ended before it counts as ending with it. How far a lane that may drift ends after one of
        its collectives, with both as the key, settles later than the lane: kernels delay a
        collective less if it ends while they run.
        """
        names = (*self.phase.carried, *self._slowing_before())
        carried = {name: state.ended[name] for name in names if name in state.ended}
        ends: list[tuple[_Key, Array]] = [*state.lane.items(), *carried.items()]
        compute = state.compute
        seen = {0: compute, **{key: np.maximum(end, compute) for key, end in ends}}
        if self.interference.slows_collectives:
            for each in self.phase.drifting:
                if each.name in state.ended:
                    ahead = seen[each.lane] - np.maximum(state.ended[each.name], compute)
                    seen[each.lane, each.name] = compute + ahead
        return seen

    def _slowing_before(self) -> list[str]:
        """Return the names of what may slow the phase's kernels and end before its lane is free.

        Collectives that slow no kernels may follow these on their lane.
        """
        lanes = self.sharing.joined(self.phase.quiet_lanes)
        return [name for name, lane in self.phase.slowing_before if lane in lanes]

    def is_periodic(self, before: dict[_Key, Array], after: dict[_Key, Array]) -> np.ndarray:
        """Return which candidates ended a repeat in the state in which it began, shifted in time.

        A lane that nothing in the phase waits for may shift by more than the period.
        """
        period = after[0] - before[0]
        tolerance = REPEAT_TOLERANCE * after[0]
        # A collective that was awaited for the first time says nothing about the next repeat.
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
    """Return the latest of several times, shape (C,)."""
    return reduce(np.maximum, times)


class _Ended:
    """The states of candidates that have fewer repeats of a phase than others, or none."""

    def __init__(self, repeats: int | Ints, state: _State) -> None:
        self.most = int(np.max(repeats))
        self._repeats = repeats
        self._states: list[tuple[np.ndarray, _State]] = []
        self.note(0, state)

    def note(self, played: int, state: _State) -> None:
        """Note the state of the candidates that have so many repeats."""
        if isinstance(self._repeats, int) or played == self.most:
            return
        have_ended = self._repeats == played
        if have_ended.any():
            self._states.append((have_ended, state.copy()))

    def restore(self, state: _State) -> None:
        """Undo what has been played beyond the last repeat of a candidate."""
        for have_ended, ended in self._states:
            state.take(have_ended, ended)


def _play_repeated(
    playable: _Playable, repeats: int | Ints, state: _State, needed: Container[str]
) -> None:
    """Play a phase `repeats` times; once its state repeats, add the period for the rest.

    `needed` are the collectives whose ends this phase or a later one depends on.

    The player is a deterministic function of its state up to a common shift. From the first
    repeat that ends in the state in which it began (shifted), every further repeat adds the same
    time. A lane that nothing in the phase waits for may run further ahead at a constant rate of
    its own, which shows one repeat later. Candidates that take longer to settle are played to the
    end. The last digits of a time depend on the repeat that the period is taken from, and so on the
    other candidates.
    """
    if isinstance(repeats, int) and repeats == 1:
        playable.play(state)
        return
    ended = _Ended(repeats, state)
    n_enough = 3 if playable.phase.drifting else 1
    before = playable.snapshot(state)
    earlier = state.copy()
    n_settled = np.zeros(state.compute.shape, dtype=np.int64)  # periodic repeats in a row
    for played in range(1, ended.most + 1):
        playable.play(state)
        ended.note(played, state)
        if played == ended.most:
            break
        after = playable.snapshot(state)
        n_settled = np.where(playable.is_periodic(before, after), n_settled + 1, 0)
        remaining = np.maximum(repeats - played, 0)
        unsettled_rows = np.flatnonzero((n_settled < n_enough) & (remaining > 0))
        if not unsettled_rows.size or played == COMMON_REPEATS:
            state.forget(needed)
            unsettled = state.rows(unsettled_rows)
            state.extrapolate(earlier, remaining, playable.phase.steady)
            if unsettled_rows.size:
                of_unsettled = np.broadcast_to(remaining, n_settled.shape)[unsettled_rows]
                _play_each(playable.rows(unsettled_rows), of_unsettled, unsettled)
                state.write(unsettled_rows, unsettled)
            break
        before = after
        earlier = state.copy()
    ended.restore(state)


def _play_each(playable: _Playable, repeats: Ints, state: _State) -> None:
    """Play every repeat of a phase."""
    ended = _Ended(repeats, state)
    for played in range(1, ended.most + 1):
        playable.play(state)
        ended.note(played, state)
    ended.restore(state)
