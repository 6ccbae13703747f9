"""What the benchmarks of the runtime share: they start ranks, and time variants in turn."""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from axonn_tune.runtime.ranks.session import run_as_batch

warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", category=UserWarning)


def on_ranks(n_ranks: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call ``work(*arguments)`` on ranks of one thread each, scheduled as the runtime's are."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _rank, (n_ranks, f"file://{folder}/ranks", work, arguments), nprocs=n_ranks
        )


def _rank(
    rank: int, n_ranks: int, rendezvous: str, work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    run_as_batch()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=n_ranks)
    work(*arguments)
    dist.barrier()
    dist.destroy_process_group()


@dataclass
class Timed:
    """Seconds per call, one entry for each round.

    Attributes
    ----------
    elapsed
        Elapsed time on the slowest rank.
    cpu
        CPU time of this rank's whole process, on which other programs have far less influence.
    """

    elapsed: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def in_turn(
    variants: dict[str, Callable[[], object]], n_rounds: int, n_calls: int = 1, n_warm_up: int = 3
) -> dict[str, Timed]:
    """Time variants in turn.

    Every round times all variants. Their order is reversed from round to round, so that a machine
    whose speed drifts does not favour one of them.
    """
    for variant in variants.values():
        for _ in range(n_warm_up):
            variant()
    timed = {name: Timed() for name in variants}
    for i in range(n_rounds):
        for name in variants if i % 2 == 0 else reversed(variants):
            dist.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            for _ in range(n_calls):
                variants[name]()
            timed[name].elapsed.append((time.perf_counter() - begin) / n_calls)
            timed[name].cpu.append((time.process_time() - begin_cpu) / n_calls)
    for times in timed.values():
        slowest = torch.tensor(times.elapsed, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.elapsed = slowest.tolist()
    return timed


def compared(own: Timed, base: Timed) -> str:
    """Return a line under `header`: medians of the rounds, and quartiles of their ratios."""
    low, ratio, high = _quartiles(own.elapsed, base.elapsed)
    _, cpu_ratio, _ = _quartiles(own.cpu, base.cpu)
    times = "".join(f"{1e3 * statistics.median(timed.elapsed):12.2f}" for timed in (base, own))
    return f"{times}{ratio:8.3f}   {low:.3f} to {high:.3f}{cpu_ratio:11.3f}"


def header(base: str, own: str) -> str:
    """Return the headings of the columns of `compared`."""
    names = "".join(f"{name + ' ms':>12}" for name in (base, own))
    return f"{names}{'ratio':>8}   {'quartiles':>14}{'CPU ratio':>11}"


def _quartiles(own: list[float], base: list[float]) -> list[float]:
    ratios = [a / b for a, b in zip(own, base, strict=True)]
    return statistics.quantiles(ratios, n=4, method="inclusive")


def say(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)
