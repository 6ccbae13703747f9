"""Start and end of every operation of the step, under the names of the step plan.

On a GPU the times are CUDA events, on a CPU `time.perf_counter`; neither makes the host
or the device wait. Operations are kept in the order in which the host issued them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from axonn_tune.spec.measurement import Operation
from axonn_tune.spec.plan import COMPUTE


class Work(Protocol):
    """A collective under way, as torch's `Work`."""

    def wait(self) -> Any:
        """Let what follows wait for it."""

    def get_future(self) -> Any:
        """Completes when it has ended, with the time (CPU)."""


class HostClock:
    """Times on a CPU: kernels end when their call returns, collectives when their thread says."""

    now = staticmethod(time.perf_counter)

    def at_completion(self, work: Work, stream: str, tell: Callable[[float], None]) -> None:
        """Call `tell` with the time at which a collective ends, which its future holds."""

        def told(future: Any) -> None:
            with suppress(Exception):  # whoever waits for the collective hears that it failed
                tell(future.value())

        work.get_future().add_done_callback(told)

    def resolve(self, point: float, origin: float) -> float:
        """Seconds since the origin."""
        return point - origin


class CudaClock:
    """Times on a GPU: events, read once the step has ended."""

    def __init__(self) -> None:
        self._watchers: dict[str, torch.cuda.Stream] = {}

    def now(self) -> torch.cuda.Event:
        """An event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def at_completion(
        self, work: Work, stream: str, tell: Callable[[torch.cuda.Event], None]
    ) -> None:
        """Call `tell` with an event behind a collective, on a stream that only watches."""
        if stream not in self._watchers:
            self._watchers[stream] = torch.cuda.Stream()
        with torch.cuda.stream(self._watchers[stream]):
            work.wait()
            tell(self.now())

    def resolve(self, point: torch.cuda.Event, origin: torch.cuda.Event) -> float:
        """Seconds since the origin."""
        return 1e-3 * origin.elapsed_time(point)


@dataclass(slots=True)
class _Entry:
    """One operation; a kernel's is the context from the first launch to the end of the last."""

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

    def ends(self, point: Any) -> None:
        self.end = point


_NOT_RECORDED = nullcontext()


class Recorder:
    """Collects the operations of a step; switched off it costs one comparison each."""

    def __init__(self, device: torch.device, active: bool = True) -> None:
        self.active = active
        self._clock = CudaClock() if device.type == "cuda" else HostClock()
        self._entries: list[_Entry] = []
        self._origin: Any = None

    def start_step(self) -> None:
        """Forget what was recorded; times count from here."""
        self._entries = []
        self._origin = self._clock.now()

    def kernel(
        self, name: str, kind: str, nbytes: float = 0.0, flops: float = 0.0
    ) -> AbstractContextManager[None]:
        """A context in which the kernels of one operation are launched."""
        if not self.active:
            return _NOT_RECORDED
        entry = _Entry(name, COMPUTE, kind, nbytes, flops, self._clock.now)
        self._entries.append(entry)
        return entry

    def memory_bound(self, name: str, nbytes: float) -> AbstractContextManager[None]:
        """A context for a kernel that reads and writes `nbytes` in all."""
        return self.kernel(name, "memory_bound", nbytes=nbytes)

    def collective(
        self, name: str, kind: str, nbytes: float, axis: str, issue: Callable[[], Work]
    ) -> Work:
        """Issue a collective and note its start and, when it comes, its end."""
        if not self.active:
            return issue()
        entry = _Entry(name, axis, kind, nbytes, 0.0, self._clock.now)
        self._entries.append(entry)
        entry.start = entry.now()
        work = issue()
        self._clock.at_completion(work, axis, entry.ends)
        return work

    def take_step(self) -> list[Operation]:
        """What was recorded since `start_step`, in the order of issue.

        The device must be idle. A collective that queued behind another of its axis starts
        when that one ends.
        """
        axis_free: dict[str, float] = {}
        operations = []
        for entry in self._entries:
            while entry.end is None:  # its thread tells a moment after the wait for it returns
                time.sleep(1e-5)
            start, end = (self._clock.resolve(p, self._origin) for p in (entry.start, entry.end))
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
