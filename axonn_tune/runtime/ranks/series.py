"""Several runs one after another on the same ranks; one that fails does not end the others."""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from axonn_tune.errors import AxonnTuneError
from axonn_tune.runtime.ranks.session import MeetingError, Place, joined, pick_device
from axonn_tune.runtime.run import Run, train
from axonn_tune.spec.measurement import Measurement


class Keeper(Protocol):
    """Where rank 0 leaves each result as soon as it is known."""

    def ended(self) -> Container[str]:
        """Keys of runs that need not be done (again)."""

    def begin(self, key: str) -> None:
        """A run starts."""

    def keep(self, key: str, measurement: Measurement) -> None:
        """It ended well."""

    def keep_failure(self, key: str, reason: str) -> None:
        """It failed."""


@dataclass(frozen=True)
class Series:
    """Runs by key, and who keeps their results."""

    runs: Sequence[tuple[str, Run]]
    keeper: Keeper
    device: str
    timeout_seconds: float
    quiet: bool = False


def execute_series(series: Series, place: Place) -> bool:
    """Do all runs on this rank, together with all others; True, so that rank 0 is told apart.

    Raises
    ------
    AxonnTuneError
        The ranks cannot meet (again), or a result cannot be kept.
    """
    device = pick_device(series.device, place)
    timeout = timedelta(seconds=series.timeout_seconds)
    store = _meeting_point(place, timeout)
    left = _left_to_do(series, place, store)
    for number, (key, run) in enumerate(series.runs, 1):
        if key not in left:
            continue
        try:
            with joined(place, device, run.timeout_seconds, dist.PrefixStore(key, store)):
                if place.rank == 0:
                    _announce(series, number, key)
                measurement = train(run, place, device)
            if measurement is not None:
                series.keeper.keep(key, measurement)
        except MeetingError:
            raise
        except AxonnTuneError as error:
            if place.rank == 0:
                series.keeper.keep_failure(key, str(error))
        finally:
            _free_memory(device)
    _part(store, place, timeout)
    return True


def _left_to_do(series: Series, place: Place, store: dist.Store) -> set[str]:
    """What rank 0 has no result of."""
    try:
        if place.rank == 0:
            ended = series.keeper.ended()
            left = "\n".join(key for key, _ in series.runs if key not in ended)
            store.set("left to do", left)
        return set(store.get("left to do").decode().split("\n"))
    except RuntimeError as error:
        raise MeetingError(f"rank {place.rank} has lost the others: {error}") from error


def _announce(series: Series, number: int, key: str) -> None:
    series.keeper.begin(key)
    if not series.quiet:
        print(f"{number} of {len(series.runs)}: {key}", file=sys.stderr, flush=True)


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _meeting_point(place: Place, timeout: timedelta) -> dist.Store:
    """Where the environment says that the ranks meet."""
    try:
        url = f"env://?rank={place.rank}&world_size={place.n_ranks}"
        return next(rendezvous(url, timeout=timeout))[0]
    except (RuntimeError, ValueError) as error:
        raise MeetingError(f"rank {place.rank} cannot join the others: {error}") from error


def _part(store: dist.Store, place: Place, timeout: timedelta) -> None:
    """Rank 0, which may hold the store, leaves last."""
    try:
        store.set(f"parted/{place.rank}", "")
        if place.rank == 0:
            store.wait([f"parted/{rank}" for rank in range(place.n_ranks)], timeout)
    except RuntimeError as error:
        raise MeetingError(f"not all ranks have come to the end: {error}") from error
