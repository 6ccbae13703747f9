"""The process from which the ranks of this machine are forked.

It imports once what each rank needs, so that ranks start in a fraction of a second. The standard
library calls it a fork server. This module imports nothing that is slow.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver
from typing import Any

# Other systems than Linux do not promise that a process works after a fork.
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
# Optimizers of torch import this module when the first of them is made, which takes a second.
_IMPORTED_LATE = "torch._dynamo"
_POLL_SECONDS = 0.02


def start(function: Callable[..., Any]) -> None:
    """Start the server, if it does not run, and wait until it has imported a function's module.

    The server ends with this process. It ignores Ctrl-C, which a terminal sends to all processes
    of a command, and so do its ranks; this process ends at once.
    """
    if START_METHOD != "forkserver":
        return
    while isinstance(function, partial):
        function = function.func
    multiprocessing.set_forkserver_preload([function.__module__, _IMPORTED_LATE])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    first_fork = threading.Thread(target=_fork, daemon=True)
    first_fork.start()
    while first_fork.is_alive():
        first_fork.join(_POLL_SECONDS)


def _fork() -> None:
    """Have the server fork a process, which it does once its imports have ended."""
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid, daemon=True)
    process.start()
    process.join()


class Environment:
    """The environment of the process that pickles it, which becomes that of the one that loads it.

    A rank inherits that of the server, which may have been started before a variable changed.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _adopted, (dict(os.environ),)


def _adopted(variables: dict[str, str]) -> Environment:
    """Take over the variables of another process."""
    os.environ.clear()
    os.environ.update(variables)
    return Environment()
