"""Start the ranks of a run on this machine with torch's elastic launcher, or join given ones."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from axonn_tune.errors import AxonnTuneError, InputError
from axonn_tune.runtime.run import Run, execute
from axonn_tune.runtime.session import (
    LostRankError,
    die_with_parent,
    place_in_job,
    slurm_rendezvous,
)
from axonn_tune.spec.measurement import Measurement

MONITOR_SECONDS = 0.1  # how often the launcher looks whether a rank has died


def launch(run: Run) -> Measurement | None:
    """Execute a run: on ranks that torchrun or srun has started, or on ranks started here.

    Returns
    -------
    Measurement or None
        None on ranks other than 0.

    Raises
    ------
    AxonnTuneError
        Bad input, or a rank that failed, with its message.
    """
    place = place_in_job(os.environ)
    if place is None:
        return _start_here(run)
    if place.n_ranks != run.grid.n_ranks:
        raise InputError(
            f"grid {run.grid} needs {run.grid.n_ranks} ranks; this job has {place.n_ranks}"
        )
    if "RANK" not in os.environ:
        os.environ.update(slurm_rendezvous(os.environ))
    try:
        return execute(run, place)
    except LostRankError:
        sys.exit(2)  # the rank that failed says why


@contextmanager
def only_rank_0_speaks() -> Iterator[None]:
    """Within it, bad input that every rank of a job finds is reported by rank 0 alone."""
    try:
        yield
    except InputError:
        place = place_in_job(os.environ)
        if place is not None and place.rank != 0:
            sys.exit(2)
        raise


def ranks_at_hand(device: str) -> int:
    """Ranks of the job that this process belongs to, else GPUs of this machine.

    Raises
    ------
    InputError
        Neither.
    """
    place = place_in_job(os.environ)
    n_ranks = place.n_ranks if place else _n_gpus(device)
    if not n_ranks:
        raise InputError("how many ranks? torch sees no GPU here; give --gpus")
    return n_ranks


def default_dtype(device: str) -> str:
    """``"bf16"`` where there are GPUs; a CPU is slow at it."""
    return "bf16" if _n_gpus(device) else "fp32"


def _n_gpus(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.device_count()


def _start_here(run: Run) -> Measurement:
    n_ranks = run.grid.n_ranks
    n_gpus = _n_gpus(run.device)
    if n_gpus and n_ranks > n_gpus:
        raise InputError(
            f"grid {run.grid} needs {n_ranks} GPUs; this machine has {n_gpus}; start the same "
            "command with torchrun or srun on several, or give --device cpu"
        )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
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
        start_method="spawn",
    )
    try:
        with _silent_logs():
            results = elastic_launch(config, _rank)(run)
    except ChildFailedError as error:
        raise AxonnTuneError(_message_of(error)) from error
    except SignalException as error:
        raise KeyboardInterrupt from error
    measurement: Measurement = results[0]
    return measurement


@contextmanager
def _silent_logs() -> Iterator[None]:
    """What a rank says is reported in one line; the launcher's logs would repeat it."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _rank(run: Run) -> Measurement | None:
    die_with_parent()
    place = place_in_job(os.environ)
    assert place is not None
    try:
        return execute(run, place)
    except AxonnTuneError as error:
        raise AxonnTuneError(str(error)) from None


def _message_of(error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {failure.signal_name()}"
    message = failure.message
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    return text.removeprefix("AxonnTuneError: ")
