"""Bind the life of a rank to that of the process that starts it; nothing slow is imported here."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager

# The number of the process that starts ranks, for these ranks.
LAUNCHER_VARIABLE = "AXONN_TUNE_LAUNCHER"


@contextmanager
def launching() -> Iterator[None]:
    """Tell the processes that are started within this context that they are ranks of this one."""
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        del os.environ[LAUNCHER_VARIABLE]


def die_with_launcher() -> None:
    """Have Linux kill this rank when its launcher dies, and end it if the launcher is dead."""
    launcher = os.environ[LAUNCHER_VARIABLE]
    if launcher == str(os.getppid()):
        _die_with_parent()
    if launcher != str(os.getppid()) and not _is_alive(launcher):
        os._exit(1)


def _die_with_parent() -> None:
    if platform.system() == "Linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):  # The process of somebody else, or no launcher at all.
        return True
    return True
