"""Whole-process time of `suggest` against importing its libraries, and of the largest search.

Run: python tests/benchmarks/suggest_time.py [--runs 9]

Prints medians, and ratios of runs made in turn, so that a machine whose speed drifts
does not favour one of them.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

BASE = [sys.executable, "-c", "import numpy, yaml, click"]
SUGGEST = [sys.executable, "-m", "axonn_tune.cli.main", "suggest", "--model", "80b", "--gpus"]


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    n_runs = parser.parse_args().runs
    for name, command in (
        ("suggest, 1024 GPUs", [*SUGGEST, "1024"]),
        ("suggest, 131072 GPUs, all orders", [*SUGGEST, "131072", "--order", "all"]),
    ):
        seconds(BASE), seconds(command)
        pairs = [(seconds(command), seconds(BASE)) for _ in range(n_runs)]
        own, base = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(f"{name}: {own:.3f} s, {ratio:.2f} times the imports alone ({base:.3f} s)")


if __name__ == "__main__":
    main()
