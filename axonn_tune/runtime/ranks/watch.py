"""End a rank whose host waits for a GPU in vain.

NCCL raises nothing where another rank has died or hangs: the host waits in a call of CUDA, which
Python cannot interrupt, until torch aborts the process after a long time and with many lines. A
thread watches instead, and ends the process with the one line and the exit code of other failures.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from axonn_tune.errors import AxonnTuneError
from axonn_tune.runtime.ranks.parent import has_launcher

FAILURE_KEY = "axonn_tune/failure"
EXIT_CODE = 2
POLL_SECONDS = 0.5
# Ranks that all fail for the same reason, such as too little memory, do so within this time.
GRACE_SECONDS = 10.0


def first_failure(store: dist.Store, message: str) -> str:
    """Return the message of the first rank that failed; `message` is that of this rank."""
    try:
        return store.compare_set(FAILURE_KEY, "", message).decode()
    except (RuntimeError, ValueError):  # the store ended with the rank that held it
        return message


class Watch:
    """Watches over one rank in a thread.

    Parameters
    ----------
    store : Store
        Store through which all ranks of the group have met.
    timeout_seconds : float
        How long the rank may take between two signs of life.
    on_loss : callable
        Called with the reason before this rank is ended for the failure of another one.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        n_ranks: int,
        timeout_seconds: float,
        on_loss: Callable[[str], None] = lambda reason: None,
    ) -> None:
        # A connection of its own does not wait for what the main thread asks of the store.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._rank = rank
        self._n_ranks = n_ranks
        self._timeout_seconds = timeout_seconds
        self._on_loss = on_loss
        self._stopped = threading.Event()
        self._last_sign = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def alive(self) -> None:
        """Note a sign of life: a step, or another piece of work of all ranks, has ended."""
        self._last_sign = time.monotonic()

    def stop(self) -> None:
        """Watch no more."""
        self._stopped.set()
        self._thread.join()

    def all_failed(self) -> bool:
        """Tell the other ranks that this one has failed, and return whether all of them have.

        If not, some wait for this one, and end themselves.
        """
        keys = [f"{FAILURE_KEY}/{rank}" for rank in range(self._n_ranks)]
        try:
            self._store.set(keys[self._rank], "")
            self._store.wait(keys, timedelta(seconds=GRACE_SECONDS))
        except (RuntimeError, ValueError):
            return False
        return True

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            try:
                failure, is_own = self._failure()
            except (RuntimeError, ValueError):
                # The rank that held the store has ended, and it or its launcher says why.
                self._end("the rank at which all ranks met has ended", is_own=False)
                return
            if failure and (is_own or not self._stopped.wait(GRACE_SECONDS)):
                self._end(failure, is_own)

    def _failure(self) -> tuple[str, bool]:
        """Return the first failure, or an empty text, and whether it is that of this rank."""
        if self._store.check([FAILURE_KEY]):
            return self._store.get(FAILURE_KEY).decode(), False
        if not self._is_late():
            return "", False
        own = (
            f"rank {self._rank} failed: nothing has ended for {self._timeout_seconds:g} s; "
            "another rank hangs or has died, or the time-out is shorter than a step"
        )
        first = self._store.compare_set(FAILURE_KEY, "", own).decode()
        return first, first == own

    def _is_late(self) -> bool:
        return time.monotonic() - self._last_sign > self._timeout_seconds

    def _end(self, failure: str, is_own: bool) -> None:
        """End the process; the launcher or the rank whose failure it is tells the user."""
        with suppress(AxonnTuneError):
            self._on_loss(failure)
        if has_launcher():
            get_error_handler().record_exception(AxonnTuneError(failure))
        elif is_own:
            print(f"axonn-tune: {failure}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)
