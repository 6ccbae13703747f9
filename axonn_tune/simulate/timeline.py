"""Play one candidate operation by operation: for people to read, and to check the player."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from axonn_tune.simulate.interference import Interference
from axonn_tune.simulate.program import AxisLanes
from axonn_tune.spec.plan import Collective, Operation, Phase


@dataclass(frozen=True)
class Event:
    """One operation on the timeline; lane 0 is the compute stream.

    exposed_seconds: how long the compute stream stood still for this collective.
    """

    phase: str
    operation: Operation
    lane: int
    start_seconds: float
    end_seconds: float
    exposed_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_seconds - self.start_seconds


def timeline(
    phases: Sequence[Phase],
    seconds_of: Callable[[Operation], float],
    axis_lanes: AxisLanes,
    interference: Interference,
    least_seconds: float = 0.0,
) -> list[Event]:
    """Every operation with its start and end, all repeats, from idle streams to idle streams.

    The time for which the compute stream stands still is charged to the collective that held
    it up, as far as that ran meanwhile, then to the one that this one had followed, and so
    on; so is what still runs when computation ends. If the links that the lanes share need
    `least_seconds`, longer than that, the last collective ends so late.
    """
    recording = _Recording(seconds_of, axis_lanes, interference)
    for phase in phases:
        for _ in range(phase.repeats):
            for operation in phase.operations:
                recording.issue(phase.name, operation)
    recording.drain(least_seconds)
    return recording.events


class _Recording:
    def __init__(
        self,
        seconds_of: Callable[[Operation], float],
        axis_lanes: AxisLanes,
        interference: Interference,
    ) -> None:
        self._seconds_of, self._axis_lanes = seconds_of, axis_lanes
        self._interference = interference
        self.events: list[Event] = []
        self._queues: dict[int, list[int]] = {}  # events of each lane in order
        self._latest: dict[str, int] = {}  # collective -> its latest event
        self._followed: dict[int, int | None] = {}  # event -> collective whose end started it
        self._compute_free = 0.0

    def issue(self, phase: str, operation: Operation) -> None:
        """Start an operation as soon as its stream and what it waits for allow."""
        ready, holding = self._compute_free, None
        for name in operation.waits_for:
            index = self._latest.get(name)
            if index is not None and self.events[index].end_seconds > ready:
                ready, holding = self.events[index].end_seconds, index
        if not isinstance(operation, Collective):
            if holding is not None:
                self._charge(holding)
            seconds = self._beside(self._seconds_of(operation), ready)
            self._delay(ready, seconds)
            self._compute_free = ready + seconds
            self.events.append(Event(phase, operation, 0, ready, self._compute_free))
        elif lane := self._axis_lanes[operation.axis]:
            queue = self._queues.setdefault(lane, [])
            start, index = max(ready, self._lane_free(lane)), len(self.events)
            self._followed[index] = holding if start == ready else queue[-1]
            self._latest[operation.name] = index
            queue.append(index)
            end = start + self._seconds_of(operation)
            self.events.append(Event(phase, operation, lane, start, end))

    def drain(self, least_seconds: float) -> None:
        """Charge what still runs after the last kernel."""
        last_events = [queue[-1] for queue in self._queues.values()]
        ends = [self.events[index].end_seconds for index in last_events]
        if ends and least_seconds > max(self._compute_free, *ends):
            last = max(last_events, key=lambda i: self.events[i].end_seconds)
            self.events[last] = replace(self.events[last], end_seconds=least_seconds)
        for queue in sorted(self._queues.values(), key=lambda q: self.events[q[-1]].end_seconds):
            if self.events[queue[-1]].end_seconds > self._compute_free:
                self._charge(queue[-1])
                self._compute_free = self.events[queue[-1]].end_seconds

    def _lane_free(self, lane: int) -> float:
        queue = self._queues.get(lane)
        return self.events[queue[-1]].end_seconds if queue else 0.0

    def _beside(self, seconds: float, start: float) -> float:
        """A kernel's duration: what it does beside collectives, slower, then the rest."""
        left = max((self._lane_free(lane) for lane in self._queues), default=0.0) - start
        busy = max(left, 0.0) * (1.0 + self._interference.of_collectives)
        slower = 1.0 + self._interference.of_kernels
        done_beside = busy / slower
        if done_beside >= seconds:
            return seconds * slower
        return busy + (seconds - done_beside)

    def _delay(self, start: float, seconds: float) -> None:
        """Move what is on the lanes while a kernel runs: they do less meanwhile."""
        slower = 1.0 + self._interference.of_collectives

        def later(time: float) -> float:
            if time <= start:
                return time
            if (time - start) * slower <= seconds:
                return start + (time - start) * slower
            return time + seconds - seconds / slower

        for queue in self._queues.values():
            for index in reversed(queue):
                event = self.events[index]
                if event.end_seconds <= start:
                    break
                self.events[index] = replace(
                    event,
                    start_seconds=later(event.start_seconds),
                    end_seconds=later(event.end_seconds),
                )

    def _charge(self, holding: int) -> None:
        """Charge the standstill until `holding` ends to it and to those that it followed."""
        idle_from = self._compute_free
        index: int | None = holding
        while index is not None and self.events[index].end_seconds > idle_from:
            event = self.events[index]
            share = event.end_seconds - max(event.start_seconds, idle_from)
            self.events[index] = replace(event, exposed_seconds=event.exposed_seconds + share)
            index = self._followed[index]
