"""A stream of communication on the CPU, whose tasks run in order while the host goes on."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

Task: TypeAlias = Callable[[], object]


class HostStream:
    """Runs tasks one after another in a thread, as NCCL does on a stream of a GPU.

    The thread starts with the first task and ends when nobody holds the stream any more.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Task, torch.futures.Future[Any]] | None] | None = None

    def issue(self, task: Task) -> HostWork:
        """Run a task once all tasks before it have run."""
        if self._queue is None:
            self._queue = SimpleQueue()
            threading.Thread(target=_serve, args=(self._queue,), daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._queue.put((task, future))
        return HostWork(future)


class HostWork:
    """A task that was issued on a stream."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        """Block until the task is done; raise what it raised."""
        self._future.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the time (``time.perf_counter``) at which the task was done."""
        return self._future


@torch.no_grad()
def _serve(queue: SimpleQueue[tuple[Task, torch.futures.Future[Any]] | None]) -> None:
    while (item := queue.get()) is not None:
        task, future = item
        del item
        try:
            task()
        except Exception as error:  # raised again in whoever waits for the task
            future.set_exception(error)
        else:
            future.set_result(time.perf_counter())
        del task, future
