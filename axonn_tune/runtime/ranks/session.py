"""Join the other ranks of a job, and leave them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from axonn_tune.errors import AxonnTuneError, InputError
from axonn_tune.runtime.ranks.place import Place
from axonn_tune.runtime.ranks.watch import Watch, first_failure
from axonn_tune.spec.checks import require_choice

# Gloo's threads run Python callbacks, and release them a moment after a wait has returned. A
# thread that releases one while the interpreter ends aborts the process.
_CALLBACK_SECONDS = 0.2
DEVICES = ("auto", "cpu", "cuda")
# Programs start apart: on a cluster, imports from a shared file system take minutes.
_STARTING_SECONDS = 300.0
# NCCL aborts a process after its own time-out, which must come after that of our watch.
NCCL_LATER_SECONDS = 60.0


def pick_device(wanted: str, place: Place) -> torch.device:
    """Return the device of this rank.

    Parameters
    ----------
    wanted : str
        ``"cpu"``, ``"cuda"`` (NVIDIA and AMD alike), or ``"auto"`` for a GPU where there is one.

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
    place: Place,
    device: torch.device,
    timeout_seconds: float,
    store: dist.Store | None = None,
    on_loss: Callable[[str], None] = lambda reason: None,
) -> Iterator[Callable[[], None]]:
    """Join the default process group for the length of this context.

    A rank that fails tells the others, so that all of them report the same first failure. What the
    context gives is to be called whenever a step has ended: on a GPU, a rank that does not call it
    for the length of the time-out is ended.

    Parameters
    ----------
    store : Store, optional
        Store through which the ranks meet, instead of a `meeting_point`. It outlives the group, so
        that the ranks can meet again after a failure.
    on_loss : callable
        Called with the reason if this rank is ended because another one failed.

    Raises
    ------
    RankError
        A rank failed; the message says which one, and why.
    """
    if device.type == "cpu":
        run_as_batch()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.n_local_ranks))
    can_meet_elsewhere = store is not None
    store = store or meeting_point(place, timeout_seconds)
    watch = None
    if must_be_watched(device):
        watch = Watch(store, place.rank, place.n_ranks, timeout_seconds, on_loss)
    try:
        _join(place, device, timeout_seconds, store)
    except MeetingError:
        if watch is not None:
            watch.stop()
        raise
    alive = _nothing if watch is None else watch.alive
    alive()
    try:
        yield alive
    except Exception as error:
        if watch is not None:
            watch.stop()
        why = str(error)
        if not isinstance(error, AxonnTuneError):
            why = f"{type(error).__name__}: {reason(error)}"
        message = f"rank {place.rank} failed: {why}"
        first_message = first_failure(store, message)
        can_meet_again = watch is None or watch.all_failed()
        if can_meet_elsewhere or watch is not None:
            _abandon()
        if message != first_message:
            raise LostRankError(first_message, can_meet_again) from error
        raise RankError(message, can_meet_again) from error
    else:
        dist.destroy_process_group()
        if watch is not None:
            watch.stop()
    finally:
        time.sleep(_CALLBACK_SECONDS)


def run_as_batch() -> None:
    """Let this thread, and those that it starts, keep its core when it wakes another one (Linux).

    On cores that ranks share, a message would otherwise give the core to the thread of gloo that
    receives it, while the sender holds the lock of its connection. The sender's own thread of gloo
    then tries that lock without a pause, which took half of the CPU time of collectives. Where a
    container forbids the change, ranks run as before.
    """
    if sys.platform == "linux":
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _nothing() -> None:
    pass


def meeting_point(place: Place, timeout_seconds: float) -> dist.Store:
    """Return the store over which the ranks meet, as the environment gives it, once all are there.

    What the programs need to start does not count against the time-out, which holds from then on.

    Raises
    ------
    MeetingError
        Not all ranks have come.
    """
    try:
        url = f"env://?rank={place.rank}&world_size={place.n_ranks}"
        starting = timedelta(seconds=max(timeout_seconds, _STARTING_SECONDS))
        store = next(rendezvous(url, timeout=starting))[0]
        _await_others(store, place, "started")
        store.set_timeout(timedelta(seconds=timeout_seconds))
        return store
    except (RuntimeError, ValueError) as error:
        raise MeetingError(f"rank {place.rank} cannot join the others: {reason(error)}") from error


def _join(place: Place, device: torch.device, timeout_seconds: float, store: dist.Store) -> None:
    on_gpu = device.type == "cuda"
    if on_gpu:
        # Each axis has a communicator. From NCCL 2.26 on, kernels of all of them then run in the
        # order of issue, which is the same on all ranks, so that none waits for another for ever.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.n_ranks,
            timeout=timedelta(seconds=timeout_seconds + (NCCL_LATER_SECONDS if on_gpu else 0.0)),
            device_id=device if on_gpu else None,
        )
        _await_others(store, place, "joined")
    except (RuntimeError, ValueError) as error:
        raise MeetingError(f"rank {place.rank} cannot join the others: {reason(error)}") from error


def _await_others(store: dist.Store, place: Place, event: str) -> None:
    """Wait until all ranks have announced an event.

    Ranks that meet several times over one store do so in rounds. A rank that still joins learns of
    another one's failure only as the loss of that rank.
    """
    before = store.add(event, 1) - 1
    everybody = f"{event}/{before // place.n_ranks}"
    if (before + 1) % place.n_ranks == 0:
        store.set(everybody, "")
    store.wait([everybody])


def must_be_watched(device: torch.device) -> bool:
    """Tell whether a wait for another rank may last for ever; gloo's waits raise an error.

    On a GPU, NCCL waits so for a rank that is lost while communicators are formed, too.
    """
    return device.type == "cuda"


def _abandon() -> None:
    """Leave a group whose collectives may hang, so that its ranks can meet in another one."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if dist.get_backend() == "nccl" and abort is not None:
        abort()
    else:
        dist.destroy_process_group()


def reason(error: Exception) -> str:
    """Return the message of an error of torch without the frames of its code below it."""
    return str(error).partition("\nException raised from ")[0]


class MeetingError(AxonnTuneError):
    """Not all ranks came to a meeting, since one has died or hangs."""


class RankError(AxonnTuneError):
    """A rank failed; `can_meet_again` tells whether the ranks can join once more."""

    def __init__(self, message: str, can_meet_again: bool) -> None:
        super().__init__(message)
        self.can_meet_again = can_meet_again


class LostRankError(RankError):
    """Another rank failed before this one did; the message is that rank's."""
