"""Play one candidate operation by operation, for people to read and to check the player."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from axonn_tune.simulate.interference import Interference
from axonn_tune.simulate.program import AxisLanes, lane_of
from axonn_tune.spec.plan import Operation, Phase, Transfer

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
) -> list[Event]:
    """Return every operation of all repeats, from idle streams until all are idle again.

    A standstill of the compute stream is charged to the collective that held it up, for as long
    as that ran in it, then to the collective that this one had followed, and so on. The time in
    which collectives still run after the last kernel is charged in the same way. If the links
    that lanes share need longer, the last collective ends after `least_seconds`.
    """
    recording = _Recording(interference)
    for phase in phases:
        lanes = [_lane_of(operation, axis_lanes) for operation in phase.operations]
        issues = [
            (operation, lane, seconds_of(operation))
            for operation, lane in zip(phase.operations, lanes, strict=True)
            if lane is not None
        ]
        for _ in range(phase.repeats):
            for operation, lane, seconds in issues:
                recording.issue(phase.name, operation, lane, seconds)
    recording.drain(least_seconds)
    return recording.events


def _lane_of(operation: Operation, axis_lanes: AxisLanes) -> int | None:
    """Return the lane of a collective or of a copy.

    It is None for one over a single rank, which takes no time and holds nothing up.
    """
    if not isinstance(operation, Transfer):
        return COMPUTE_LANE
    return lane_of(operation, axis_lanes) or None


class _Recording:
    """The events of one candidate, recorded operation by operation."""

    def __init__(self, interference: Interference) -> None:
        self._interference = interference
        self.events: list[Event] = []
        self._queues: dict[int, list[int]] = {}  # events of each lane, in order
        self._latest: dict[str, int] = {}  # latest event of each collective, by name
        self._followed: dict[int, int | None] = {}  # event whose end started each event
        self._compute_free = 0.0
        self._busy_until = 0.0  # end of the last collective

    def issue(self, phase: str, operation: Operation, lane: int, seconds: float) -> None:
        """Start an operation as soon as its stream and what it waits for allow."""
        ready = self._compute_free
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
                self._delay(ready, seconds)
            self._compute_free = ready + seconds
            self.events.append(Event(phase, operation, lane, ready, self._compute_free))
        else:
            queue = self._queues.setdefault(lane, [])
            start = max(ready, self._lane_free(lane))
            index = len(self.events)
            self._followed[index] = holding if start == ready else queue[-1]
            self._latest[operation.name] = index
            queue.append(index)
            self._busy_until = max(self._busy_until, start + seconds)
            self.events.append(Event(phase, operation, lane, start, start + seconds))

    def drain(self, least_seconds: float) -> None:
        """Charge the collectives that still run after the last kernel."""
        last_events = [queue[-1] for queue in self._queues.values()]
        ends = [self.events[index].end_seconds for index in last_events]
        if ends and least_seconds > max(self._compute_free, *ends):
            last = max(last_events, key=lambda i: self.events[i].end_seconds)
            self.events[last].end_seconds = least_seconds
        for queue in sorted(self._queues.values(), key=lambda q: self.events[q[-1]].end_seconds):
            if self.events[queue[-1]].end_seconds > self._compute_free:
                self._charge(queue[-1])
                self._compute_free = self.events[queue[-1]].end_seconds

    def _lane_free(self, lane: int) -> float:
        """Return the time at which the last collective of a lane ends."""
        queue = self._queues.get(lane)
        return self.events[queue[-1]].end_seconds if queue else 0.0

    def _slowed(self, seconds: float, start: float) -> float:
        """Return a kernel's duration: it is slower while collectives run, then as fast as alone."""
        busy = (self._busy_until - start) * (1.0 + self._interference.collective_slowdown)
        slowdown = 1.0 + self._interference.kernel_slowdown
        done_while_busy = busy / slowdown
        if done_while_busy >= seconds:
            return seconds * slowdown
        return busy + (seconds - done_while_busy)

    def _delay(self, start: float, seconds: float) -> None:
        """Delay the collectives that run while a kernel does, since they do less in that time."""
        slowdown = 1.0 + self._interference.collective_slowdown

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
        """Charge the standstill until the event `holding` ends to it and to those it followed."""
        idle_from = self._compute_free
        index: int | None = holding
        while index is not None and self.events[index].end_seconds > idle_from:
            event = self.events[index]
            event.exposed_seconds += event.end_seconds - max(event.start_seconds, idle_from)
            index = self._followed[index]
