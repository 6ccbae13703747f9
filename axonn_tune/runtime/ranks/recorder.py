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

from axonn_tune.spec.measurement import Operation
from axonn_tune.spec.plan import COMPUTE


class PendingCollective(Protocol):
    """A collective under way; torch's `Work` is one."""

    def wait(self) -> Any:
        """Let what follows wait for the collective."""

    def get_future(self) -> Any:
        """Return a future of its end; on a CPU, its value is the time of the end."""


class HostClock:
    """Tells times on a CPU.

    A kernel ends when its call returns, and a collective when its thread has done it.
    """

    now = staticmethod(time.perf_counter)

    def at_completion(
        self, pending: PendingCollective, stream: str, on_end: Callable[[float], None]
    ) -> None:
        """Call `on_end` with the time at which a collective ends, which its future holds.

        In a rehearsal it ends as soon as it begins.
        """
        if dist.get_backend() == dist.Backend.FAKE:
            on_end(self.now())
            return

        def when_done(future: Any) -> None:
            with suppress(Exception):  # a failure is raised in whoever waits for the collective
                on_end(future.value())

        pending.get_future().add_done_callback(when_done)

    def resolve(self, point: float, origin: float) -> float:
        """Return the seconds between the origin and a point in time."""
        return point - origin


class CudaClock:
    """Tells times on a GPU by events, which are read once the step has ended."""

    def __init__(self) -> None:
        self._watchers: dict[str, torch.cuda.Stream] = {}

    def now(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def at_completion(
        self, pending: PendingCollective, stream: str, on_end: Callable[[torch.cuda.Event], None]
    ) -> None:
        """Call `on_end` with an event that follows a collective, on a stream that only watches."""
        if stream not in self._watchers:
            self._watchers[stream] = torch.cuda.Stream()
        with torch.cuda.stream(self._watchers[stream]):
            pending.wait()
            on_end(self.now())

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

    def mark_end(self, point: Any) -> None:
        self.end = point


_NOT_RECORDED = nullcontext()


class Recorder:
    """Collects the operations of a step; when it is not active, each costs one comparison."""

    def __init__(self, device: torch.device, active: bool = True) -> None:
        self.active = active
        self._clock = CudaClock() if device.type == "cuda" else HostClock()
        self._entries: list[_Entry] = []
        self._origin: Any = None

    def start_step(self) -> None:
        """Forget what was recorded, and let times count from now."""
        self._entries = []
        self._origin = self._clock.now()

    def kernel(
        self, name: str, kind: str, nbytes: float = 0.0, flops: float = 0.0
    ) -> AbstractContextManager[None]:
        """Return a context in which the kernels of one operation are to be launched."""
        if not self.active:
            return _NOT_RECORDED
        entry = _Entry(name, COMPUTE, kind, nbytes, flops, self._clock.now)
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
        entry = _Entry(name, axis, kind, nbytes, 0.0, self._clock.now)
        self._entries.append(entry)
        entry.start = entry.now()
        pending = issue()
        self._clock.at_completion(pending, axis, entry.mark_end)
        return pending

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
            start = self._clock.resolve(entry.start, self._origin)
            end = self._clock.resolve(entry.end, self._origin)
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
