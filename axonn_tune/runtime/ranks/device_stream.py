"""A stream of communication on a GPU, whose collectives run in order while the GPU computes.

Torch's collectives that are not asynchronous run on the current stream (torch 2.8 and newer; an
earlier one lets this stream wait for its own). So the stream holds, in this order, the wait for
what computes the message, the begin, the collective and the end. No further stream watches: on a
GPU with few hardware queues, such as with CUDA_DEVICE_MAX_CONNECTIONS=1, a stream that waits for
the end of a collective holds up the kernels that were issued after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Task: TypeAlias = Callable[[], object]
HIGH_PRIORITY = -1
# Roughly: the clock of a GPU runs at 1 to 2 GHz.
CYCLES_PER_SECOND = 2e9


class DeviceStream:
    """Issues tasks, such as collectives, one after another beside the current stream."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream(priority=HIGH_PRIORITY)

    def issue(self, task: Task) -> DeviceWork:
        """Issue a task that begins when what the current stream holds, and each task, has ended."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            begin = recorded_event()
            task()
            return DeviceWork(task, begin, recorded_event())


class DeviceWork:
    """A task under way, which holds its tensors until somebody has waited for it.

    Torch's allocator would give the memory of a tensor that nobody holds to the next one of the
    stream that made it, whatever other streams still do with it.

    Attributes
    ----------
    begin, end : torch.cuda.Event
        The points between which the task runs.
    """

    def __init__(self, task: Task, begin: Any, end: Any) -> None:
        self._task: Task | None = task
        self.begin = begin
        self.end = end

    def wait(self) -> None:
        """Let what is issued on the current stream from now on wait for the end."""
        torch.cuda.current_stream().wait_event(self.end)
        self._task = None


def recorded_event() -> Any:
    """Record an event with a time on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def give_host_a_lead(seconds: float) -> None:
    """Keep the GPU idle for about this time, in which the host can issue kernels."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
