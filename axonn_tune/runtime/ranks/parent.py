"""Bind the life of a rank to that of the process that starts it; nothing slow is imported here."""

from __future__ import annotations

import ctypes
import os
import platform
import signal

# The number of the process that starts ranks, for these ranks.
LAUNCHER_VARIABLE = "AXONN_TUNE_LAUNCHER"


def die_with_launcher() -> None:
    """Have Linux kill this process when its parent dies, if the parent has started it as a rank."""
    if os.environ.get(LAUNCHER_VARIABLE) == str(os.getppid()):
        die_with_parent()


def die_with_parent() -> None:
    """Have Linux kill this process when its parent dies, however that happens."""
    if platform.system() == "Linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
