"""Do several runs one after another on the same ranks; a failing run does not end the others."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from axonn_tune.errors import AxonnTuneError, FileError, InputError
from axonn_tune.runtime.ranks.launch import in_job, launch
from axonn_tune.runtime.ranks.place import Place
from axonn_tune.runtime.ranks.session import (
    MeetingError,
    RankError,
    joined,
    meeting_point,
    pick_device,
    reason,
)
from axonn_tune.runtime.request import RunRequest
from axonn_tune.runtime.run import TrainerFactory, train
from axonn_tune.spec.measurement import Measurement


class Keeper(Protocol):
    """Keeps each result as soon as rank 0 knows it."""

    def ended(self) -> Container[str]:
        """Return the keys of the runs that have ended, well or with a failure."""

    def begin(self, key: str) -> None:
        """Note that a run starts."""

    def keep(self, key: str, measurement: Measurement) -> None:
        """Keep what a run that ended well has measured."""

    def keep_failure(self, key: str, reason: str) -> None:
        """Keep the reason why a run failed."""

    def under_way(self) -> Sequence[str]:
        """Return the keys of the runs that began and have not ended."""


@dataclass(frozen=True)
class RunSeries:
    """Runs several configurations one after another.

    Attributes
    ----------
    runs
        A key and a request for each run.
    keeper
        Keeps the results.
    timeout_seconds
        How long ranks wait for each other between two runs.
    quiet
        Whether to print no progress.
    factory
        Builds what trains the model of a request.
    """

    runs: Sequence[tuple[str, RunRequest]]
    keeper: Keeper
    device: str
    timeout_seconds: float
    quiet: bool
    factory: TrainerFactory

    @property
    def n_left(self) -> int:
        """The number of runs that have not ended."""
        ended = self.keeper.ended()
        return sum(key not in ended for key, _ in self.runs)


def launch_series(series: RunSeries, n_ranks: int) -> None:
    """Do all runs that are left, on ranks that are started here or in the job that there is.

    A rank that is started here and dies takes its run with it, and one that hangs is replaced;
    in the job of another launcher it takes the job, which can be resumed.

    Raises
    ------
    AxonnTuneError
        The input is bad, or no run can begin.
    """
    if in_job():
        launch(execute_series, series, n_ranks, series.device)
        return
    while n_left := series.n_left:
        try:
            launch(execute_series, series, n_ranks, series.device)
        except (InputError, FileError):
            raise
        except AxonnTuneError as error:
            begun = series.keeper.under_way()
            if begun:
                series.keeper.keep_failure(begun[-1], str(error))
            elif n_left == series.n_left:
                raise


def execute_series(series: RunSeries, place: Place) -> None:
    """Do all runs on this rank, in step with all other ranks.

    Raises
    ------
    AxonnTuneError
        The ranks cannot meet, or a result cannot be kept.
    """
    device = pick_device(series.device, place)
    timeout = timedelta(seconds=series.timeout_seconds)
    store = meeting_point(place, series.timeout_seconds)
    left = _left_to_do(series, place, store)
    for number, (key, request) in enumerate(series.runs, 1):
        if key not in left:
            continue
        try:
            meeting = dist.PrefixStore(key, store)
            on_loss = _keeper_of_failure(series, key, place)
            with joined(place, device, request.timeout_seconds, meeting, on_loss) as alive:
                if place.rank == 0:
                    _announce(series, number, key)
                measurement = train(request, place, device, series.factory, alive)
            if measurement is not None:
                series.keeper.keep(key, measurement)
        except MeetingError:
            raise
        except AxonnTuneError as error:
            if FileError in (type(error), type(error.__cause__)):
                raise FileError(str(error)) from error  # what cannot be kept is not worth measuring
            if place.rank == 0:
                series.keeper.keep_failure(key, str(error))
            if isinstance(error, RankError) and not error.can_meet_again:
                raise
        finally:
            _free_memory(device)
    _part(store, place, timeout)


def _left_to_do(series: RunSeries, place: Place, store: dist.Store) -> set[str]:
    """Return the keys of the runs that have not ended, as rank 0 knows them."""
    try:
        if place.rank == 0:
            ended = series.keeper.ended()
            left = "\n".join(key for key, _ in series.runs if key not in ended)
            store.set("left to do", left)
        return set(store.get("left to do").decode().split("\n"))
    except RuntimeError as error:
        raise MeetingError(f"rank {place.rank} has lost the others: {reason(error)}") from error


def _keeper_of_failure(series: RunSeries, key: str, place: Place) -> Callable[[str], None]:
    """Return a function by which rank 0 keeps the reason when another rank's failure ends it."""

    def keep(reason: str) -> None:
        if place.rank == 0:
            series.keeper.keep_failure(key, reason)

    return keep


def _announce(series: RunSeries, number: int, key: str) -> None:
    series.keeper.begin(key)
    if not series.quiet:
        print(f"{number} of {len(series.runs)}: {key}", file=sys.stderr, flush=True)


def _free_memory(device: torch.device) -> None:
    """Give the memory of a run back; a GPU that a kernel has broken will say so in the next run."""
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):
            torch.cuda.empty_cache()


def _part(store: dist.Store, place: Place, timeout: timedelta) -> None:
    """Let rank 0, which may hold the store, leave last."""
    try:
        store.set(f"parted/{place.rank}", "")
        if place.rank == 0:
            store.wait([f"parted/{rank}" for rank in range(place.n_ranks)], timeout)
    except RuntimeError as error:
        raise MeetingError(f"not all ranks have come to the end: {reason(error)}") from error
