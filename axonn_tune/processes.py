"""Work on independent items in as many processes as there are cores."""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_PR_SET_PDEATHSIG = 1  # prctl(2)
# What a worker calls, with what, and the numbers of the objects that its parent has as well, by
# their identity; a process that is no worker has none.
_work: tuple[Callable[[Any], Any], Sequence[Any], dict[int, int]] | None = None


def mapped(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    least_shared: int = 2,
    each: Callable[[Sequence[Item]], Iterable[Item]] = iter,
    known: Sequence[object] = (),
) -> Iterator[Result]:
    """Yield what a function returns for each item, in order, as `map` does.

    Where it is safe, several processes share the work, if there are at least `least_shared` items.
    They inherit the function and the items, so that only results and errors are pickled, and of
    objects in `known`, to which results refer, only their numbers. `each` walks through the items
    as their results come, and may show the progress.
    """
    n_workers = min(_n_cores(), len(items))
    is_shared = len(items) >= least_shared and n_workers >= 2 and _is_safe_to_fork()
    results = _shared(function, items, known, n_workers) if is_shared else map(function, items)
    for _, result in zip(each(items), results, strict=True):
        yield result


def _shared(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    known: Sequence[object],
    n_workers: int,
) -> Iterator[Result]:
    """Yield the results of several processes."""
    # It takes 30 ms to import these, which most commands do not need.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    executor = ProcessPoolExecutor(
        n_workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_become_worker,
        initargs=(function, items, known),
    )
    with executor:
        try:
            for pickled in executor.map(_call, range(len(items))):
                yield _Unpickler(pickled, known).load()
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


class _Pickler(pickle.Pickler):
    """Writes the number of a known object in its place."""

    def __init__(self, file: io.BytesIO, numbers: dict[int, int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._numbers = numbers

    def persistent_id(self, found: object) -> int | None:
        """Return the number of a known object; None for others, which are written in full."""
        return self._numbers.get(id(found))


class _Unpickler(pickle.Unpickler):
    """Puts the known object where its number was written."""

    def __init__(self, pickled: bytes, known: Sequence[object]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._known = known

    def persistent_load(self, number: int) -> object:
        """Return the object of a number."""
        return self._known[number]


def _become_worker(
    function: Callable[[Any], Any], items: Sequence[Any], known: Sequence[object]
) -> None:
    """Leave an interrupt to the process that started this one, and end when that one ends."""
    global _work
    _work = function, items, {id(shared): number for number, shared in enumerate(known)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _call(index: int) -> bytes:
    """Call the function with one item, and pickle what it returns."""
    assert _work is not None
    function, items, numbers = _work
    file = io.BytesIO()
    _Pickler(file, numbers).dump(function(items[index]))
    return file.getvalue()
