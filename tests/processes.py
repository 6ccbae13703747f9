"""Processes of a test: how they start, which there are, and whether they have ended."""

import contextlib
import os
import random
import socket
import subprocess
import time
from pathlib import Path

PATIENCE_SECONDS = 300
"""After so long, even on a slow machine, a test says that a process hangs."""


def environment(**variables):
    """Return this environment without a launcher's variables, and with one thread for each rank."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK"))}
    return inherited | {"OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in variables.items()}


def torchrun_environments(n_ranks, **variables):
    """Return what each rank of one node inherits from torchrun."""
    meeting = {"WORLD_SIZE": n_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [
        environment(RANK=rank, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=n_ranks, **meeting, **variables)
        for rank in range(n_ranks)
    ]


def free_port():
    """A free port below those that outgoing connections of other tests take in the meantime."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def ended(process):
    """The exit code of a process, and what it has printed and complained of."""
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, output, errors


def children(pid):
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(child) for child in listed.stdout.split()]


def ranks_of(pid):
    """The ranks that a command has started: one of its children forks them."""
    return [rank for child in children(pid) for rank in children(child)]


def all_end(pids, seconds=40):
    """Whether all of them end in time."""
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def is_running(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
