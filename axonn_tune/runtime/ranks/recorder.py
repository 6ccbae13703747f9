"""Record the start and the end of every operation of a step, under the names of the step plan.

On a GPU the times are CUDA events, on a CPU they are `time.perf_counter`; neither makes the host
or the device wait. Operations are kept in the order in which the host issued them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from axonn_tune.runtime.ranks.device_stream import give_host_a_lead, recorded_event
from axonn_tune.spec.measurement import Operation
from axonn_tune.spec.plan import COMPUTE


class PendingCollective(Protocol):
    """A collective under way: a `HostWork`, a `DeviceWork`, or torch's own `Work`."""

    def wait(self) -> Any:
        """Let what follows wait for the collective."""


class HostClock:
    """Tells times on a CPU.

    A kernel ends when its call returns, and a collective when its thread has done it.
    """

    now = staticmethod(time.perf_counter)

    def note(self, pending: Any, entry: _Entry) -> None:
        """Note the end of a collective when it comes; the collective's future holds the time.

        In a rehearsal it ends as soon as it begins.
        """
        if dist.get_backend() == dist.Backend.FAKE:
            entry.end = self.now()
            return

        def when_done(future: Any) -> None:
            with suppress(Exception):  # a failure is raised in whoever waits for the collective
                entry.end = future.value()

        pending.get_future().add_done_callback(when_done)

    def resolve(self, point: float, origin: float) -> float:
        """Return the seconds between the origin and a point in time."""
        return point - origin


class CudaClock:
    """Tells times on a GPU by events, which are read once the step has ended."""

    now = staticmethod(recorded_event)

    def note(self, pending: Any, entry: _Entry) -> None:
        """Take over the events between which a collective runs."""
        entry.start = pending.begin
        entry.end = pending.end

    def resolve(self, point: torch.cuda.Event, origin: torch.cuda.Event) -> float:
        """Return the seconds between the origin and a point in time."""
        return 1e-3 * origin.elapsed_time(point)


@dataclass(slots=True)
class _Entry:
    """One operation; for kernels it is the context in which they are launched."""

    name: str
    stream: str
    kind: str
    nbytes: float
    flops: float
    now: Callable[[], Any]
    start: Any = None
    end: Any = None

    def __enter__(self) -> None:
        self.start = self.now()

    def __exit__(self, *_: object) -> None:
        self.end = self.now()


_NOT_RECORDED = nullcontext()


class Recorder:
    """Collects the operations of a step; when it is not active, each costs one comparison.

    Attributes
    ----------
    active : bool
        Whether operations are recorded.
    lead_seconds : float
        How long a GPU stays idle at the start of a step, so that the host is ahead of it: a kernel
        that takes less time than its launch would otherwise be timed with the launch. [s]
    clock
        Tells points in time, such as the present one (``now``), and resolves them to seconds.
    """

    def __init__(self, device: torch.device, active: bool = True) -> None:
        self.active = active
        self.lead_seconds = 0.0
        self.clock = CudaClock() if device.type == "cuda" else HostClock()
        self._entries: list[_Entry] = []
        self._origin: Any = None

    def start_step(self) -> None:
        """Forget what was recorded, and let times count from now."""
        self._entries = []
        if not self.active:
            return
        if self.lead_seconds:
            give_host_a_lead(self.lead_seconds)
        self._origin = self.clock.now()

    def kernel(
        self, name: str, kind: str, nbytes: float = 0.0, flops: float = 0.0
    ) -> AbstractContextManager[None]:
        """Return a context in which the kernels of one operation are to be launched."""
        if not self.active:
            return _NOT_RECORDED
        entry = _Entry(name, COMPUTE, kind, nbytes, flops, self.clock.now)
        self._entries.append(entry)
        return entry

    def memory_bound(self, name: str, nbytes: float) -> AbstractContextManager[None]:
        """Return a context for a kernel that reads and writes `nbytes` in all."""
        return self.kernel(name, "memory_bound", nbytes=nbytes)

    def collective(
        self,
        name: str,
        kind: str,
        nbytes: float,
        axis: str,
        issue: Callable[[], PendingCollective],
    ) -> PendingCollective:
        """Issue a collective, and note its start and, when it comes, its end."""
        if not self.active:
            return issue()
        entry = _Entry(name, axis, kind, nbytes, 0.0, self.clock.now)
        self._entries.append(entry)
        entry.start = entry.now()
        pending = issue()
        self.clock.note(pending, entry)
        return pending

    def seconds_of(self, point: Any) -> float:
        """Return the seconds from the start of the step to a point in time of the clock."""
        return self.clock.resolve(point, self._origin)

    def take_step(self) -> list[Operation]:
        """Return what was recorded since `start_step`, in the order of issue.

        The device must be idle. A collective that queued behind another one of its axis starts
        when that one ends.
        """
        axis_free: dict[str, float] = {}
        operations = []
        for entry in self._entries:
            while entry.end is None:  # the thread notes it a moment after the wait has returned
                time.sleep(1e-5)
            start = self.seconds_of(entry.start)
            # A GPU tells seconds in fp32, so that a span is measured from its own start.
            end = start + self.clock.resolve(entry.end, entry.start)
            if entry.stream != COMPUTE:
                start = max(start, axis_free.get(entry.stream, start))
                axis_free[entry.stream] = end
            operations.append(
                Operation(
                    entry.name, entry.stream, entry.kind, entry.nbytes, entry.flops, start, end
                )
            )
        self._entries = []
        return operations
