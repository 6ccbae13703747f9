"""What all ranks know of the measurements so far; rank 0 keeps it in a journal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from axonn_tune.calibrate.measure.progress import Progress

T = TypeVar("T")


class Journal(Protocol):
    """Where results are kept, so that an interrupted calibration can go on."""

    def read(self, owner: dict[str, Any]) -> dict[str, Any]:
        """What is known already."""

    def begin(self, owner: dict[str, Any]) -> None:
        """Start with nothing."""

    def add(self, key: str, result: Any) -> None:
        """Keep a result."""


class Ledger:
    """Results by key, the same on all ranks, so that all decide alike what to measure next.

    Parameters
    ----------
    owner : dict
        What was measured on, and how; a journal of another owner is refused.
    resume : bool
        Go on with what the journal holds.
    """

    def __init__(
        self, journal: Journal, owner: dict[str, Any], resume: bool, progress: Progress
    ) -> None:
        self._journal, self._rank, self._progress = journal, dist.get_rank(), progress
        known: list[dict[str, Any]] = [{}]
        if self._rank == 0 and resume:
            known = [journal.read(owner)]
        elif self._rank == 0:
            journal.begin(owner)
        dist.broadcast_object_list(known)
        self._known = known[0]

    def result(self, key: str, find: Callable[[], Any]) -> Any:
        """The result of a key; found now, by all ranks together, if it is not known.

        Parameters
        ----------
        find : callable
            Returns the same plain data (numbers, text, lists, dicts) on every rank.
        """
        if key not in self._known:
            start = time.monotonic()
            found = find()
            self._known[key] = [found, time.monotonic() - start]
            if self._rank == 0:
                self._journal.add(key, self._known[key])
        self._progress.advance(key)
        return self._known[key][0]

    @property
    def seconds(self) -> float:
        """Time of all measurements, those before an interrupt too."""
        return float(sum(seconds for _, seconds in self._known.values()))


def gathered(own: T) -> list[T]:
    """What each rank has, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def least(value: float, device: torch.device) -> float:
    """The smallest value of any rank."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return float(tensor.item())
