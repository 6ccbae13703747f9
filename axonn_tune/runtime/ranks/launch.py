"""Start ranks on this machine with torch's elastic launcher, or use those of torchrun or srun."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import process, resource_tracker
from types import FrameType
from typing import Any, TypeAlias, TypeVar

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from axonn_tune.errors import AxonnTuneError, FileError, InputError
from axonn_tune.runtime.ranks import server
from axonn_tune.runtime.ranks.parent import die_with_launcher, launching
from axonn_tune.runtime.ranks.place import (
    Place,
    place_in_job,
    require_meeting_place,
    slurm_rendezvous,
)
from axonn_tune.runtime.ranks.session import LostRankError

MONITOR_SECONDS = 0.1  # time between two looks of the launcher whether a rank has died
_RETRY_SECONDS = 0.02  # until an interrupt that came while a rank was being started comes again

# Without SIGINT: Python's own handler of an interrupt lets the launcher end its ranks with SIGTERM.
# An early torch has no such setting.
_SIGNALS: dict[str, Any] = (
    {"signals_to_handle": "SIGTERM,SIGHUP,SIGQUIT"}
    if "signals_to_handle" in LaunchConfig.__dataclass_fields__
    else {}
)

# Torch would print tens of lines where NCCL's own time-out ends a rank; the launcher prints one.
_QUIET_TORCH = {"TORCH_CPP_LOG_LEVEL": "FATAL", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}

Request = TypeVar("Request")
Result = TypeVar("Result")
# What each rank calls; function, request and result are pickled.
RankFunction: TypeAlias = Callable[[Request, Place], Result]


def launch(
    function: RankFunction[Request, Result], request: Request, n_ranks: int, device: str
) -> Result | None:
    """Call ``function(request, place)`` on each of `n_ranks` ranks.

    The ranks are those that torchrun or srun has started; if neither has, they are started here.

    Parameters
    ----------
    function : callable
        Joins the other ranks (see `session.joined`) and does what is requested.
    device : str
        ``"auto"``, ``"cpu"`` or ``"cuda"``.

    Returns
    -------
    What `function` returns on rank 0; None on the other ranks of torchrun or srun.

    Raises
    ------
    AxonnTuneError
        The input is bad, or a rank failed; the message is that of the rank.
    """
    place = place_in_job(os.environ)
    if place is None:
        return _start_here(function, request, n_ranks, device)
    if place.n_ranks != n_ranks:
        raise InputError(f"the task needs {n_ranks} ranks; this job has {place.n_ranks}")
    if "RANK" not in os.environ:
        os.environ.update(slurm_rendezvous(os.environ))
    require_meeting_place(os.environ)
    try:
        result = function(request, place)
    except LostRankError:
        sys.exit(2)  # the rank that failed says why
    return result if place.rank == 0 else None


@contextmanager
def only_rank_0_speaks() -> Iterator[None]:
    """Let rank 0 alone report bad input that every rank of a job finds within this context."""
    try:
        yield
    except InputError:
        if not is_speaker():
            sys.exit(2)
        raise


def in_job() -> bool:
    """Tell whether torchrun or srun has started this process as one rank of a job."""
    return place_in_job(os.environ) is not None


def is_speaker() -> bool:
    """Tell whether this is the process of a job that talks to the user."""
    place = place_in_job(os.environ)
    return place is None or place.rank == 0


def ranks_at_hand(device: str) -> int:
    """Return the number of ranks in the job of this process; without a job, that of the GPUs.

    Raises
    ------
    InputError
        This process belongs to no job, and torch sees no GPU.
    """
    place = place_in_job(os.environ)
    n_ranks = place.n_ranks if place else _n_gpus(device)
    if not n_ranks:
        raise InputError("how many ranks? torch sees no GPU here; give --gpus")
    return n_ranks


def ranks_or_cores(wanted: int | None, device: str) -> int:
    """Return the number of ranks in the job; without a job, `wanted`, or that of GPUs or cores."""
    place = place_in_job(os.environ)
    if place is not None:
        return place.n_ranks
    return wanted or _n_gpus(device) or len(os.sched_getaffinity(0))


def default_dtype(device: str) -> str:
    """Return ``"bf16"`` where there are GPUs, and ``"fp32"`` on a CPU, which is slow at bf16."""
    return "bf16" if _n_gpus(device) else "fp32"


def _n_gpus(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.device_count()


def _start_here(
    function: RankFunction[Request, Result], request: Request, n_ranks: int, device: str
) -> Result:
    n_gpus = _n_gpus(device)
    if n_gpus and n_ranks > n_gpus:
        raise InputError(
            f"{n_ranks} ranks need as many GPUs; this machine has {n_gpus}; start the same "
            "command with torchrun or srun on several, or give --device cpu"
        )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, value in _QUIET_TORCH.items():
        os.environ.setdefault(name, value)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=n_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        start_method=server.START_METHOD,
        **_SIGNALS,
    )
    of_others = set(multiprocessing.active_children())
    try:
        with _silent_logs(), launching(), _interrupts_kept_from_ranks(), _ranks_started_whole():
            server.start(function)
            results: dict[int, Result] = elastic_launch(config, _rank)(
                function, request, server.Environment()
            )
    except ChildFailedError as error:
        raise _error_of(error) from error
    except SignalException as error:
        raise KeyboardInterrupt from error
    finally:
        # An interrupt while the ranks are being started leaves them unknown to torch.
        for child in set(multiprocessing.active_children()) - of_others:
            child.kill()
    return results[0]


@contextmanager
def _interrupts_kept_from_ranks() -> Iterator[None]:
    """Leave it to this process to end its ranks on Ctrl-C, which a terminal sends to all of them.

    A process inherits the signals that the thread which starts it has blocked. Another thread must
    let them through, so that they reach Python, which handles them in the main thread.
    """
    resource_tracker.ensure_running()  # When it starts, it lets interrupts through again.
    done = threading.Event()
    threading.Thread(target=done.wait, daemon=True).start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()


@contextmanager
def _ranks_started_whole() -> Iterator[None]:
    """Let an interrupt wait while a rank is being started.

    A rank that is handed half of what it should call prints a traceback, and nobody knows of it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield  # Interrupts are ignored, or another program handles them.
        return
    starts = process.BaseProcess.start.__code__

    def interrupt(number: int, frame: FrameType | None) -> None:
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is starts:
                threading.Timer(_RETRY_SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()
                return
            at = at.f_back
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _silent_logs() -> Iterator[None]:
    """Switch logs off, since the launcher would repeat what is reported in one line."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _rank(
    function: RankFunction[Request, Result], request: Request, _: server.Environment
) -> Result:
    die_with_launcher()  # once more, since torch has chosen a signal that a rank ignores
    if "PYTHONFAULTHANDLER" not in os.environ:
        faulthandler.disable()  # torch lets it print all stacks; the launcher names the signal
    place = place_in_job(os.environ)
    assert place is not None
    try:
        return function(request, place)
    except FileError as error:
        raise FileError(str(error)) from None
    except AxonnTuneError as error:
        raise AxonnTuneError(str(error)) from None


def _error_of(error: ChildFailedError) -> AxonnTuneError:
    """Return the error of the first rank that failed, which torch hands over as text."""
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        return AxonnTuneError(f"rank {rank} was ended by {failure.signal_name()}")
    if not os.path.isfile(failure.error_file):
        return AxonnTuneError(
            f"rank {rank} ended with exit code {failure.exitcode}, and said nothing"
        )
    message = failure.message
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    if text.startswith("FileError: "):
        return FileError(text.removeprefix("FileError: "))
    return AxonnTuneError(text.removeprefix("AxonnTuneError: "))
