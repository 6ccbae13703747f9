"""Work on independent items in as many processes as there are cores."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1  # prctl(2)
# What a worker calls, and with what; a process that is no worker has none.
_work: tuple[Callable[[Any], Any], Sequence[Any]] | None = None


def mapped(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    least_shared: int = 2,
    each: Callable[[Sequence[Item]], Iterable[Item]] = iter,
) -> Iterator[Result]:
    """Yield what a function returns for each item, in order, as `map` does.

    Where it is safe, several processes share the work, if there are at least so many items. They
    inherit the function and the items, so that only results and errors are pickled. `each` walks
    through the items beside the results, and may show the progress.
    """
    n_workers = min(_n_cores(), len(items))
    is_shared = len(items) >= least_shared and n_workers >= 2 and _is_safe_to_fork()
    results = _shared(function, items, n_workers) if is_shared else map(function, items)
    for _, result in zip(each(items), results, strict=True):
        yield result


def _shared(
    function: Callable[[Item], Result], items: Sequence[Item], n_workers: int
) -> Iterator[Result]:
    """Yield the results of several processes."""
    # It takes 30 ms to import these, which most commands do not need.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    executor = ProcessPoolExecutor(
        n_workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_become_worker,
        initargs=(function, items),
    )
    with executor:
        try:
            yield from executor.map(_call, range(len(items)))
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.kill()
            raise


def _n_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _is_safe_to_fork() -> bool:
    """Return whether a fork of this process works as it does: other threads do not survive one."""
    return _work is None and threading.active_count() == 1 and "torch" not in sys.modules


def _become_worker(function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    """Leave an interrupt to the process that started this one, and end when that one ends."""
    global _work
    _work = function, items
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _call(index: int) -> Any:
    """Call the function with one item."""
    assert _work is not None
    function, items = _work
    return function(items[index])
