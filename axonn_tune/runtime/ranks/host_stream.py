"""A stream of communication on the CPU: what is issued on it runs in order, beside the host."""

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
    """Does tasks one after another in a thread of its own, as NCCL does on a stream of a GPU.

    The thread starts with the first task and ends when nobody holds the stream any more.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Task, torch.futures.Future[Any]] | None] | None = None

    def issue(self, task: Task) -> HostWork:
        """Do a task once all before it have been done."""
        if self._queue is None:
            self._queue = SimpleQueue()
            threading.Thread(target=_serve, args=(self._queue,), daemon=True).start()
            weakref.finalize(self, self._queue.put, None)
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._queue.put((task, future))
        return HostWork(future)


class HostWork:
    """A task that was issued."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        """Block until it is done; raises what it raised."""
        self._future.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Completes with the time (``time.perf_counter``) at which it was done."""
        return self._future


@torch.no_grad()
def _serve(queue: SimpleQueue[tuple[Task, torch.futures.Future[Any]] | None]) -> None:
    while (item := queue.get()) is not None:
        task, future = item
        del item
        try:
            task()
        except Exception as error:  # whoever waits for the task hears of it
            future.set_exception(error)
        else:
            future.set_result(time.perf_counter())
        del task, future
