"""Join the other ranks of a job, and leave them."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from axonn_tune.errors import AxonnTuneError, InputError
from axonn_tune.spec.checks import require_choice

# Gloo's threads run Python callbacks, and let go of them a moment after a wait has returned;
# a thread that does so while the interpreter ends aborts the process.
_CALLBACK_SECONDS = 0.2
DEVICES = ("auto", "cpu", "cuda")
FAILURE_KEY = "axonn_tune/failure"
# Private ports, as many as Slurm job numbers are spread over (IANA: dynamic ports from 49152).
_FIRST_PORT, _N_PORTS = 49152, 16000

# Variables that hold the rank, the ranks, and both of them on this node.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SRUN = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_TASKS_PER_NODE",
)


@dataclass(frozen=True)
class Place:
    """One rank among those of a job."""

    rank: int
    n_ranks: int
    local_rank: int
    n_local_ranks: int


def place_in_job(environment: Mapping[str, str]) -> Place | None:
    """The place of this process as torchrun or srun tells it; None if neither started it.

    Raises
    ------
    InputError
        A variable that is missing or is not a number.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        names = _TORCHRUN
    elif "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment:
        names = _SRUN
    else:
        return None
    rank, n_ranks = (_number(environment, name) for name in names[:2])
    local_rank, n_local = (_number(environment, name, default=0) for name in names[2:])
    return Place(rank, n_ranks, local_rank, max(n_local, 1))


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    text = text.partition("(")[0]  # Slurm writes 4(x2) for four tasks on each of two nodes
    if not text.isdigit():
        raise InputError(
            f"environment variable {name} is '{text}'; allowed: a whole number, as torchrun "
            "and srun set it"
        )
    return int(text)


def slurm_rendezvous(environment: Mapping[str, str]) -> dict[str, str]:
    """Rendezvous variables for torch from those of Slurm; given ones stay.

    Raises
    ------
    InputError
        The first node's name is unknown here.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    job = environment.get("SLURM_JOB_ID", "0")
    step = environment.get("SLURM_STEP_ID", "0")
    port = _FIRST_PORT + (int(job) * 31 + int(step)) % _N_PORTS if job.isdigit() else _FIRST_PORT
    address = environment.get("MASTER_ADDR") or first_host(nodes)
    try:
        socket.getaddrinfo(address, None)
    except OSError:
        raise InputError(
            f"node '{address}', the first of Slurm's, has no address here; set MASTER_ADDR to one"
        ) from None
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }


def first_host(nodes: str) -> str:
    """``nid001`` of ``nid[001-004,010],login1``.

    Raises
    ------
    InputError
        An empty list.
    """
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    if match is None:
        raise InputError(
            f"Slurm's list of nodes is '{nodes}'; allowed: a list such as nid[001-004], or "
            "set MASTER_ADDR"
        )
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + suffix


def pick_device(wanted: str, place: Place) -> torch.device:
    """``"cpu"``, ``"cuda"`` (NVIDIA and AMD alike) or ``"auto"``: a GPU where there is one.

    Raises
    ------
    InputError
        A GPU is asked for and there is none.
    """
    require_choice("run", "device", wanted, DEVICES)
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' is not here: torch sees no GPU; allowed: cpu, auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def joined(
    place: Place, device: torch.device, timeout_seconds: float, store: dist.Store | None = None
) -> Iterator[None]:
    """The default process group; a rank that fails tells the others, so that one message is said.

    Parameters
    ----------
    store : Store, optional
        Where the ranks meet, if not where the environment says; it outlives the group, so that
        after a failure they can meet again.

    Raises
    ------
    AxonnTuneError
        What went wrong, with the rank on which it did.
    """
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.n_local_ranks))
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.n_ranks,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise MeetingError(f"rank {place.rank} cannot join the others: {error}") from error
    try:
        yield
    except Exception as error:
        what = str(error) if isinstance(error, AxonnTuneError) else _described(error)
        own = f"rank {place.rank} failed: {what}"
        first = _first_failure(own)
        if store is not None:
            _abandon()
        raise (AxonnTuneError(own) if own == first else LostRankError(first)) from error
    else:
        dist.destroy_process_group()
    finally:
        time.sleep(_CALLBACK_SECONDS)


def _abandon() -> None:
    """Leave a group whose collectives may hang, so that its ranks can meet in another one."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if dist.get_backend() == "nccl" and abort is not None:
        abort()
    else:
        dist.destroy_process_group()


class MeetingError(AxonnTuneError):
    """Not all ranks came: one has died, or hangs."""


class LostRankError(AxonnTuneError):
    """Another rank failed before this one did; the message is that rank's."""


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _first_failure(own: str) -> str:
    """What the first rank to fail says."""
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.compare_set(FAILURE_KEY, "", own).decode()
    except (RuntimeError, ValueError):  # the store went with the rank that kept it
        return own


def die_with_parent() -> None:
    """Have Linux kill this process when its parent dies, however that happens."""
    if platform.system() == "Linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def peak_memory_bytes(device: torch.device) -> float:
    """Most memory in use so far: of torch on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    scale = 1 if platform.system() == "Darwin" else 1024  # getrusage(2)
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * scale


def idle_bytes(device: torch.device) -> float:
    """Memory that training cannot use: of a GPU what is taken but by tensors, of a CPU's rank all.

    A CPU's rank is asked for the most that it ever held, so early in its life.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free - torch.cuda.memory_allocated(device))
    return peak_memory_bytes(device)
