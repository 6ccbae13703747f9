"""Candidates per second of the full cost model on one core, and its peak memory.

Run: python tests/benchmarks/search_speed.py [--candidates 1000000]

Searches models x grids x rank orders x micro-batches x recomputations on Frontier (three
link levels) until the wanted number of candidates is reached: as `suggest` searches for its ten
best rows, for all rows, and with every candidate timed, whether it fits or not. All candidates
count, those that do not fit and those that a bound rules out included. Prints each rate beside the
one that it may not fall below, and the largest resident memory of the process.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import resource
import statistics
import time

from axonn_tune import processes
from axonn_tune.api.searching import build_search
from axonn_tune.errors import NoCandidateError
from axonn_tune.search.rank import HOST_MEMORY_REASON, MEMORY_REASON, rank_best

MODELS = ("5b", "10b", "20b", "40b", "60b", "80b", "160b", "320b", "640b")
GPU_COUNTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
# Name, the number of rows that are wanted, whether every candidate is timed, and the least
# candidates per second.
SEARCHES = (
    ("suggest", 10, False, 3_000_000),
    ("all rows", None, False, 3_000_000),
    ("exhaustive", None, True, 600_000),
)


def rates(
    machine: str, n_rows: int | None, is_exhaustive: bool, wanted: int
) -> tuple[int, float, list[float]]:
    """Return the number of candidates, the seconds that they took, and each search's rate."""
    found, total, seconds = [], 0, 0.0
    for gpus in GPU_COUNTS * 10:
        for model in MODELS:
            begin = time.perf_counter()
            search = build_search(model, gpus, machine, order="all", include_oom=is_exhaustive)
            try:
                ranking = rank_best(search, n_rows)
            except NoCandidateError:
                continue
            taken = time.perf_counter() - begin
            count = ranking.n_evaluated
            if not is_exhaustive:
                reasons = (MEMORY_REASON, HOST_MEMORY_REASON)
                count += sum(ranking.rejected.get(reason, 0) for reason in reasons)
            found.append(count / taken)
            total += count
            seconds += taken
        if total >= wanted:
            break
    return total, seconds, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", type=int, default=1_000_000)
    parser.add_argument("--machine", default="frontier")
    wanted = parser.parse_args()
    processes._n_cores = lambda: 1

    print(
        f"{'search':>12}{'candidates':>12}{'seconds':>9}{'per second':>12}{'median':>9}{'bar':>11}"
    )
    for name, n_rows, is_exhaustive, bar in SEARCHES:
        total, seconds, found = rates(wanted.machine, n_rows, is_exhaustive, wanted.candidates)
        print(
            f"{name:>12}{total:12,}{seconds:12.2f}{total / seconds:12,.0f}"
            f"{statistics.median(found):12,.0f}{bar:12,}"
        )
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory {peak_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
