"""Bind the life of a rank to that of the process that starts it; nothing slow is imported here."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process

from axonn_tune.io.operating_system import is_running, process_start
from axonn_tune.spec.checks import whole_number

# The number of the process that starts ranks, and when it started, for these ranks.
LAUNCHER_VARIABLE = "AXONN_TUNE_LAUNCHER"


@contextmanager
def launching() -> Iterator[None]:
    """Tell the processes that are started within this context that they are ranks of this one."""
    os.environ[LAUNCHER_VARIABLE] = f"{os.getpid()}/{process_start(os.getpid())}"
    try:
        yield
    finally:
        del os.environ[LAUNCHER_VARIABLE]


def has_launcher() -> bool:
    """Tell whether this process is a rank that `launching` has started."""
    return _launcher() is not None


def die_with_launcher() -> None:
    """Have Linux kill this rank when its launcher dies, and end it if the launcher is dead."""
    found = _launcher()
    if found is None or platform.system() != "Linux":
        return
    launcher, start = found
    if _is_started_by(launcher):
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    is_alive = is_running(launcher) and process_start(launcher) == start
    if launcher != os.getppid() and not is_alive:
        os._exit(1)


def _launcher() -> tuple[int, str] | None:
    """Return the launcher's number and start; None without one, or where others set the variable.

    A process that is no rank must not end silently over what somebody has put there.
    """
    number, _, start = os.environ.get(LAUNCHER_VARIABLE, "").partition("/")
    launcher = whole_number(number)
    if launcher is None or (platform.system() == "Linux" and not start.isdigit()):
        return None
    return launcher, start


def _is_started_by(launcher: int) -> bool:
    """Tell whether a process, or the server that forks ranks for it, has started this one.

    The server ends with the process that it serves.
    """
    served = parent_process()
    return launcher == os.getppid() or (served is not None and launcher == served.pid)
