"""The place of this process in a job, as torchrun or srun states it, and where its ranks meet."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import whole_number

# Slurm's job numbers are spread over these ports (IANA: dynamic ports begin with 49152).
_FIRST_PORT = 49152
_N_PORTS = 16000
_LARGEST_PORT = 2**16 - 1
# Variables that hold a rank, the number of ranks, and the same two numbers for this node.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SRUN = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
)


@dataclass(frozen=True)
class Place:
    """The numbers of one rank among those of a job and among those of its node."""

    rank: int
    n_ranks: int
    local_rank: int
    n_local_ranks: int


def place_in_job(environment: Mapping[str, str]) -> Place | None:
    """Return the place that torchrun or srun gives this process; None if neither started it.

    Raises
    ------
    InputError
        A variable is missing, is not a number, or contradicts another one.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        variables = _TORCHRUN
    elif "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        variables = _SRUN
    else:
        return None
    rank, n_ranks, local_rank, n_local_ranks = variables
    place = Place(
        _number(environment, rank),
        _number(environment, n_ranks),
        _number(environment, local_rank, default=0),
        max(_number(environment, n_local_ranks, default=0), 1),
    )
    if place.rank >= place.n_ranks:
        raise InputError(
            f"environment variable {rank} is {place.rank} and {n_ranks} is {place.n_ranks}; "
            f"allowed: a {rank} below {n_ranks}"
        )
    return place


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    text = text.partition("(")[0]  # Slurm writes 4(x2) for four tasks on each of two nodes
    number = whole_number(text)
    if number is None:
        raise InputError(
            f"environment variable {name} is '{text[:40]}'; allowed: a whole number, as torchrun "
            "and srun set it"
        )
    return number


def slurm_rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """Derive torch's rendezvous variables from those of Slurm; those that are set stay.

    Raises
    ------
    InputError
        Slurm names no node.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job = whole_number(environment.get("SLURM_JOB_ID", "")) or 0
    step = whole_number(environment.get("SLURM_STEP_ID", "")) or 0
    port = _FIRST_PORT + (job * 31 + step) % _N_PORTS
    address = environment.get("MASTER_ADDR") or first_host(nodes)
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }


def require_meeting_place(environment: Mapping[str, str]) -> None:
    """Raise InputError unless torch's variables name a port, and an address that is known here.

    Torch itself looks for a name that nobody knows far beyond every time-out.
    """
    port = environment.get("MASTER_PORT", "")
    if not 0 < (whole_number(port) or 0) <= _LARGEST_PORT:
        raise InputError(
            f"environment variable MASTER_PORT is '{port[:40]}'; allowed: 1 to {_LARGEST_PORT}, "
            "as torchrun sets it"
        )
    address = environment.get("MASTER_ADDR", "")
    try:
        if not address:  # The system would take it for this machine.
            raise OSError
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError):
        raise InputError(
            f"environment variable MASTER_ADDR is '{address[:80]}', which is unknown here; "
            "allowed: the name or the address of the node of rank 0, as torchrun sets it; under "
            "Slurm, unless it is set, the job's first node"
        ) from None


def first_host(nodes: str) -> str:
    """Return the first host of a list, such as ``nid001`` of ``nid[001-004,010],login1``.

    Raises
    ------
    InputError
        The list is empty.
    """
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        raise InputError(
            f"Slurm's list of nodes is '{nodes}'; allowed: a list such as nid[001-004], or "
            "set MASTER_ADDR"
        )
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + suffix
