"""What ranks share while they measure together: results, decisions and times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from axonn_tune.calibration.measure.progress_bar import ProgressBar
from axonn_tune.calibration.measure.timing import Sampling, Timing
from axonn_tune.calibration.measure.topology import RankLocation
from axonn_tune.calibration.request import Request, ResultStore, timed_results

T = TypeVar("T")


class Ledger:
    """Keeps results by key, the same on all ranks, so that all decide alike what to measure next.

    Parameters
    ----------
    store : ResultStore
        Store in which rank 0 keeps the results.
    owner : dict
        States what was measured on, and how; the store refuses results of another owner.
    resume : bool
        Whether to go on with the results that the store holds.
    progress : ProgressBar
        Advances with each result.
    alive : callable
        Called after each result.
    """

    def __init__(
        self,
        store: ResultStore,
        owner: dict[str, Any],
        resume: bool,
        progress: ProgressBar,
        alive: Callable[[], None] = lambda: None,
    ) -> None:
        self._alive = alive
        self._store = store
        self._rank = dist.get_rank()
        self._progress = progress
        known: list[dict[str, tuple[Any, float]]] = [{}]
        if self._rank == 0 and resume:
            known = [timed_results(store, owner)]
        elif self._rank == 0:
            store.begin(owner)
        dist.broadcast_object_list(known)
        self._known = known[0]

    def result(self, key: str, measure: Callable[[], Any]) -> Any:
        """Return the result of a key; if it is not known, all ranks measure it together.

        Parameters
        ----------
        measure : callable
            Returns the same plain data (numbers, text, lists, dicts) on every rank.
        """
        if key not in self._known:
            start = time.monotonic()
            result = measure()
            self._known[key] = (result, time.monotonic() - start)
            if self._rank == 0:
                self._store.add(key, self._known[key])
        self._progress.advance(key)
        self._alive()
        return self._known[key][0]

    @property
    def seconds(self) -> float:
        """The time of all measurements, including those before an interrupt, in seconds."""
        return float(sum(seconds for _, seconds in self._known.values()))


@dataclass(frozen=True)
class MeasuringRanks:
    """The ranks that measure together, as one of them sees them.

    Parameters
    ----------
    request : Request
        States what to measure.
    device : torch.device
        The device of this rank.
    sampling : Sampling
        That of the request, long enough for the ranks that share a core.
    share_cores : bool
        Whether several ranks compute on one core.
    locations : tuple of RankLocation
        Location of every rank.
    n_per_node : int
        Number of ranks of a node.
    memory_bytes : float
        Memory of the rank that has least. [bytes]
    """

    request: Request
    device: torch.device
    sampling: Sampling
    share_cores: bool
    locations: tuple[RankLocation, ...]
    n_per_node: int
    memory_bytes: float
    ledger: Ledger
    progress: ProgressBar

    @property
    def n_ranks(self) -> int:
        """The number of ranks."""
        return len(self.locations)

    def time_on_all(self, key: str, time_here: Callable[[], Timing]) -> list[Timing]:
        """Time the same work on all ranks at once; return the timings by rank."""

        def measure() -> list[tuple[float, float]]:
            dist.barrier()
            timing = time_here()
            return gathered((timing.seconds, timing.spread_fraction))

        return [Timing(*timing) for timing in self.ledger.result(key, measure)]


def gathered(value: T) -> list[T]:
    """Return the value that each rank has, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def least(value: float, device: torch.device) -> float:
    """Return the smallest value of any rank."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MIN)
    return float(tensor.item())
