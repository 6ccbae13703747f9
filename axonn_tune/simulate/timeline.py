"""Play one candidate operation by operation, for people to read and to check the player."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from axonn_tune.simulate.interference import Interference
from axonn_tune.simulate.player import REPEAT_TOLERANCE
from axonn_tune.simulate.program import AxisLanes, is_between_two, lane_of
from axonn_tune.spec.measurement import HOST
from axonn_tune.spec.plan import HostWork, Operation, Phase, Transfer

COMPUTE_LANE = 0


@dataclass(slots=True)
class Event:
    """One operation on the timeline.

    phase
        Name of the phase.
    operation
        Operation of the plan.
    lane
        Lane of a collective or of a copy; 0 is the compute stream.
    start_seconds, end_seconds
        Times since the start of the timeline.
    exposed_seconds
        Time for which the compute stream stood still for this collective.
    """

    phase: str
    operation: Operation
    lane: int
    start_seconds: float
    end_seconds: float
    exposed_seconds: float = 0.0

    def scaled(self, factor: float) -> Event:
        """Return the event on a timeline whose times are all `factor` times as long."""
        times = self.start_seconds, self.end_seconds, self.exposed_seconds
        return Event(self.phase, self.operation, self.lane, *(factor * each for each in times))

    @property
    def seconds(self) -> float:
        """The duration of the operation."""
        return self.end_seconds - self.start_seconds


def timeline(
    phases: Sequence[Phase],
    seconds_of: Callable[[Operation], float],
    axis_lanes: AxisLanes,
    interference: Interference,
    least_seconds: float = 0.0,
    issued_seconds: Sequence[float] = (),
) -> list[Event]:
    """Return every operation of all repeats, from idle streams until all are idle again.

    A standstill of the compute stream is charged to the collective that held it up, for as long
    as that ran in it, then to the collective that this one had followed, and so on. The time in
    which collectives still run after the last kernel is charged in the same way. If the links
    that lanes share need longer, the last collective ends after `least_seconds`.

    If the host is not ahead, `issued_seconds` are the times at which it has issued all phases
    before each one. Where the compute stream waits for that, it has work of the host.
    """
    recording = _Recording(interference)
    for i, phase in enumerate(phases):
        if issued_seconds:
            recording.await_host(phase.name, issued_seconds[i])
        issues = _issues(phase, seconds_of, axis_lanes)
        for _ in range(phase.common_repeats):
            recording.play(phase.name, issues)
    recording.drain(least_seconds)
    return recording.events


@dataclass
class Sum:
    """The events of one operation, added up."""

    operation: Operation
    count: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0

    def add(self, other: Sum, times: int) -> None:
        """Add other events of the operation, several times."""
        self.count += times * other.count
        self.seconds += times * other.seconds
        self.exposed_seconds += times * other.exposed_seconds


def summed(
    phases: Sequence[Phase],
    seconds_of: Callable[[Operation], float],
    axis_lanes: AxisLanes,
    interference: Interference,
    least_seconds: float = 0.0,
    issued_seconds: Sequence[float] = (),
) -> tuple[dict[str, Sum], float]:
    """Return the events of `timeline` added up by the name of their operation, and the last end.

    Once a repeat of a phase leaves the streams as it found them, only later, the next repeat counts
    for all that remain.
    """
    recording = _Recording(interference)
    skipped: list[tuple[Sum, int]] = []
    for i, phase in enumerate(phases):
        if issued_seconds:
            recording.await_host(phase.name, issued_seconds[i])
        issues = _issues(phase, seconds_of, axis_lanes)
        remaining = _play_until_alike(recording, phase, issues)
        if remaining:
            n_skipped, start = remaining - 1, recording.compute_free
            first = min([each.event for each in recording.running()] or [len(recording.events)])
            before = _sums(recording.events[first:])
            last_repeat = len(recording.events)
            recording.play(phase.name, issues)
            after = _sums(recording.events[first:])
            skipped += [(of_one, n_skipped) for of_one in after.values()]
            skipped += [(of_one, -n_skipped) for of_one in before.values()]
            recording.skip(n_skipped * (recording.compute_free - start), last_repeat)
    recording.drain(least_seconds)
    sums = _sums(recording.events)
    for of_one, times in skipped:
        sums[of_one.operation.name].add(of_one, times)
    return sums, recording.compute_free


def _play_until_alike(recording: _Recording, phase: Phase, issues: _Issues) -> int:
    """Play a phase until a repeat leaves the streams as it found them; return how many remain."""
    before = recording.running()
    for played in range(1, phase.common_repeats + 1):
        recording.play(phase.name, issues)
        after = recording.running()
        if recording.is_alike(before, after):
            return phase.common_repeats - played
        before = after
    return 0


def _sums(events: Sequence[Event]) -> dict[str, Sum]:
    """Return events added up by the name of their operation."""
    sums: dict[str, Sum] = {}
    for event in events:
        name = event.operation.name
        if name not in sums:
            sums[name] = Sum(event.operation)
        total = sums[name]
        total.count += 1
        total.seconds += event.seconds
        total.exposed_seconds += event.exposed_seconds
    return sums


# The operations that a phase issues, each with its lane and its time.
_Issues: TypeAlias = list[tuple[Operation, int, float]]


def _issues(
    phase: Phase, seconds_of: Callable[[Operation], float], axis_lanes: AxisLanes
) -> _Issues:
    """Return what one repeat of a phase issues, in order."""
    lanes = [_lane_of(operation, axis_lanes) for operation in phase.operations]
    return [
        (operation, lane, seconds_of(operation))
        for operation, lane in zip(phase.operations, lanes, strict=True)
        if lane is not None
    ]


def _lane_of(operation: Operation, axis_lanes: AxisLanes) -> int | None:
    """Return the lane of a collective or of a copy.

    It is None for one over a single rank, which takes no time and holds nothing up.
    """
    if not isinstance(operation, Transfer):
        return COMPUTE_LANE
    return lane_of(operation, axis_lanes) or None


class _Running(NamedTuple):
    """A collective that the compute stream has not seen end.

    event
        Number of its event.
    followed
        By how many events earlier the one was issued whose end started it.
    ahead
        Times from now until it starts, if it has not, and until it ends.
    """

    event: int
    operation: Operation
    followed: int | None
    ahead: tuple[float, float]


class _Recording:
    """The events of one candidate, recorded operation by operation."""

    def __init__(self, interference: Interference) -> None:
        self._kernel_slowdown = float(interference.kernel_slowdown)
        self._collective_slowdown = float(interference.collective_slowdown)
        self.events: list[Event] = []
        self._queues: dict[int, list[int]] = {}  # events of each lane, in order
        self._latest: dict[str, int] = {}  # latest event of each collective, by name
        self._followed: dict[int, int | None] = {}  # event whose end started each event
        self.compute_free = 0.0
        self._busy_until = 0.0  # end of the last collective that slows kernels

    def play(self, phase: str, issues: _Issues) -> None:
        """Issue the operations of one repeat of a phase."""
        for operation, lane, seconds in issues:
            self.issue(phase, operation, lane, seconds)

    def running(self) -> list[_Running]:
        """Return what still runs, on which alone it depends how the next repeat goes."""
        now = self.compute_free
        running = []
        for queue in self._queues.values():
            for index in reversed(queue):
                event = self.events[index]
                if event.end_seconds <= now:
                    break
                followed = self._followed[index]
                ahead = max(event.start_seconds - now, 0.0), event.end_seconds - now
                offset = None if followed is None else index - followed
                running.append(_Running(index, event.operation, offset, ahead))
        return running

    def is_alike(self, before: list[_Running], after: list[_Running]) -> bool:
        """Return whether the same runs after a repeat as before it, up to rounding."""
        tolerance = REPEAT_TOLERANCE * self.compute_free
        return len(before) == len(after) and all(
            a.operation is b.operation
            and a.followed == b.followed
            and all(abs(x - y) <= tolerance for x, y in zip(a.ahead, b.ahead, strict=True))
            for a, b in zip(before, after, strict=True)
        )

    def issue(self, phase: str, operation: Operation, lane: int, seconds: float) -> None:
        """Start an operation as soon as its stream and what it waits for allow."""
        ready = self.compute_free
        holding = None
        for name in operation.waits_for:
            latest = self._latest.get(name)
            if latest is not None and self.events[latest].end_seconds > ready:
                ready = self.events[latest].end_seconds
                holding = latest
        if lane == COMPUTE_LANE:
            if holding is not None:
                self._charge(holding)
            if self._busy_until > ready:
                seconds = self._slowed(seconds, ready)
            if self._collective_slowdown:
                self._delay(ready, seconds)
            self.compute_free = ready + seconds
            self.events.append(Event(phase, operation, lane, ready, self.compute_free))
        else:
            queue = self._queues.setdefault(lane, [])
            start = max(ready, self._lane_free(lane))
            index = len(self.events)
            self._followed[index] = holding if start == ready else queue[-1]
            self._latest[operation.name] = index
            queue.append(index)
            if not is_between_two(operation):
                self._busy_until = max(self._busy_until, start + seconds)
            self.events.append(Event(phase, operation, lane, start, start + seconds))

    def await_host(self, phase: str, until: float) -> None:
        """Let the compute stream stand still until the host has issued all before a phase."""
        if until > self.compute_free:
            work = HostWork(HOST, until - self.compute_free)
            self.events.append(Event(phase, work, COMPUTE_LANE, self.compute_free, until))
            self.compute_free = until

    def skip(self, seconds: float, last_repeat: int) -> None:
        """Let repeats pass that are not recorded; after them, the same runs as before.

        The last recorded repeat, whose events begin at `last_repeat`, stands for the last of all.
        """
        latest = {queue[-1] for queue in self._queues.values() if queue[-1] >= last_repeat}
        for index in latest | {each.event for each in self.running()}:
            event = self.events[index]
            event.start_seconds += seconds
            event.end_seconds += seconds
        self.compute_free += seconds
        self._busy_until += seconds

    def drain(self, least_seconds: float) -> None:
        """Charge the collectives that still run after the last kernel."""
        last_events = [queue[-1] for queue in self._queues.values()]
        ends = [self.events[index].end_seconds for index in last_events]
        if ends and least_seconds > max(self.compute_free, *ends):
            last = max(last_events, key=lambda i: self.events[i].end_seconds)
            self.events[last].end_seconds = least_seconds
        for queue in sorted(self._queues.values(), key=lambda q: self.events[q[-1]].end_seconds):
            if self.events[queue[-1]].end_seconds > self.compute_free:
                self._charge(queue[-1])
                self.compute_free = self.events[queue[-1]].end_seconds

    def _lane_free(self, lane: int) -> float:
        """Return the time at which the last collective of a lane ends."""
        queue = self._queues.get(lane)
        return self.events[queue[-1]].end_seconds if queue else 0.0

    def _slowed(self, seconds: float, start: float) -> float:
        """Return a kernel's duration: it is slower while collectives run, then as fast as alone."""
        busy = (self._busy_until - start) * (1.0 + self._collective_slowdown)
        slowdown = 1.0 + self._kernel_slowdown
        done_while_busy = busy / slowdown
        if done_while_busy >= seconds:
            return seconds * slowdown
        return busy + (seconds - done_while_busy)

    def _delay(self, start: float, seconds: float) -> None:
        """Delay the collectives that run while a kernel does, since they do less in that time."""
        slowdown = 1.0 + self._collective_slowdown

        def delayed(time: float) -> float:
            if time <= start:
                return time
            if (time - start) * slowdown <= seconds:
                return start + (time - start) * slowdown
            return time + seconds - seconds / slowdown

        for queue in self._queues.values():
            for index in reversed(queue):
                event = self.events[index]
                if event.end_seconds <= start:
                    break
                event.start_seconds = delayed(event.start_seconds)
                event.end_seconds = delayed(event.end_seconds)
        self._busy_until = delayed(self._busy_until)

    def _charge(self, holding: int) -> None:
        """Charge a standstill to the event `holding`, which ends it, and to those it followed."""
        idle_from = self.compute_free
        index: int | None = holding
        while index is not None and self.events[index].end_seconds > idle_from:
            event = self.events[index]
            event.exposed_seconds += event.end_seconds - max(event.start_seconds, idle_from)
            index = self._followed[index]
