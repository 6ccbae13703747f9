"""Whole-process time and memory of commands that make one wait, beside the time they may take.

Run: python tests/benchmarks/command_time.py [--runs 5] [--before CHECKOUT] [WORD ...]

Prints medians. With `--before`, the commands also run with the package of another checkout, in
turn, so that a machine whose speed drifts does not favour one of them. Words choose the commands
whose name holds one of them. A program that only imports the libraries of `suggest` says how fast
the machine is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parents[2]
IMPORTS = [sys.executable, "-c", "import numpy, yaml, click"]
LARGE = "--model llama3-405b --gpus 16384"
# Name, bar in seconds on two cores, and words of each command.
COMMANDS = (
    ("suggest, 80B on 1,024", 0.25, "suggest --model 80b --gpus 1024"),
    (
        "suggest, 640B on 131,072, all orders",
        0.5,
        "suggest --model 640b --gpus 131072 --machine frontier --order all",
    ),
    ("suggest megatron, 405B on 16,384", 0.7, f"suggest --strategy megatron {LARGE}"),
    ("compare, 405B on 16,384", 2.0, f"compare {LARGE}"),
    (
        "suggest, mixture of experts on 2,048",
        2.0,
        "suggest --strategy megatron --model deepseek-v3 --gpus 2048 --machine dgx-h100 "
        "--precision fp8",
    ),
    ("report, 250 grids", 1.5, "report --model 80b --gpus 1024 --output page.html"),
    (
        "report, 5,000 candidates",
        2.5,
        "report --model 80b --gpus 1024 --order all --every-configuration --output page.html",
    ),
    ("scale, 128 to 16,384", 1.0, "scale --model 80b --gpus 128..16384"),
    ("whatif with sensitivities", 2.0, "whatif --model 80b --gpus 1024"),
    (
        "plan with a deadline",
        2.0,
        "plan --model 80b --tokens 2T --deadline 30d",
    ),
    ("reproduce, all tables", 10.0, "reproduce"),
    ("--help", 0.15, "--help"),
    ("suggest --help", 0.15, "suggest --help"),
)
MEMORY_BAR_MB = 300


def run(command: Sequence[str], checkout: Path = HERE) -> tuple[float, float]:
    """Return the seconds and the megabytes that a program takes."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": ""},
            cwd=folder,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return seconds, usage.ru_maxrss * 1024 / 1e6


def medians(command: Sequence[str], checkouts: Sequence[Path], n_runs: int) -> list[list[float]]:
    """Return the median seconds and megabytes of a command for each checkout, run in turn."""
    rounds = [[run(command, checkout) for checkout in checkouts] for _ in range(n_runs)]
    return [
        [statistics.median(column) for column in zip(*of_checkout, strict=True)]
        for of_checkout in zip(*rounds, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--before", type=Path)
    parser.add_argument("words", nargs="*")
    wanted = parser.parse_args()
    checkouts = [HERE, *([wanted.before.resolve()] if wanted.before else [])]
    [[base, _]] = medians(IMPORTS, [HERE], wanted.runs)
    print(f"imports alone: {base:.3f} s; memory may be {MEMORY_BAR_MB} MB")
    print(f"{'command':<38}{'bar s':>7}{'now s':>8}{'MB':>6}{'imports':>9}{'before s':>10}")
    for name, bar, words in COMMANDS:
        if wanted.words and not any(word in name for word in wanted.words):
            continue
        command = [sys.executable, "-m", "axonn_tune.cli.main", *words.split()]
        (seconds, megabytes), *others = medians(command, checkouts, wanted.runs)
        before = "".join(f"{other:>10.2f}" for other, _ in others)
        ratio = f"{seconds / base:.1f} x"
        now = f"{bar:>7.2f}{seconds:>8.2f}{megabytes:>6.0f}{ratio:>9}"
        print(f"{name:<38}{now}{before}", flush=True)


if __name__ == "__main__":
    main()
