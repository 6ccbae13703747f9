"""Compare what two checkouts predict: every number of many commands, to a relative 1e-12.

    python tests/same_predictions.py OLD NEW

runs each command of `commands` with the package of the checkout in folder OLD and with that of NEW,
and compares what they print, number by number. Among them are searches for every model of the
catalogue. Exit code 1 says that something differs, or that NEW ends in a traceback.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

TOLERANCE = 1e-12
STRATEGIES = ("axonn", "axonn-pipeline", "megatron", "zero3", "zeropp", "zero-topo")
WHOLE = ["--include-oom", "--every-configuration", "--top-n", "400", "--format", "json"]
# Model, GPUs and machine of each job, with further options.
JOBS = (
    "--model 80b --gpus 256",
    "--model 20b --gpus 64 --machine frontier --global-batch 128",
    "--model llama3-70b --gpus 128 --machine dgx-h100 --global-batch 256 --seq-len 4096",
    "--model tiny --gpus 8 --machine jean-zay --global-batch 32 --attention unfused --dropout",
    "--model 5b --gpus 48 --machine alps --global-batch 96 --no-overlap --no-kernel-tuning",
)
MODELS = Path(__file__).parents[1] / "models"
# What is searched for every model, and ranked as far as `suggest` shows it.
SEARCHES = (
    "--strategy axonn-pipeline --gpus 64",
    "--strategy megatron --gpus 512 --machine dgx-h100",
    "--strategy megatron --gpus 128 --machine aws-p5-2024 --engine nanotron",
    "--strategy megatron --gpus 256 --machine dgx-h100 --schedule zb-h1",
    "--strategy zero3 --gpus 96 --machine dgx-h100",
)
SWITCHES = (
    "",
    "--distributed-optimizer",
    "--keep-gathered-weights",
    "--no-distributed-optimizer --no-sequence-parallel --no-overlap-grad-reduce",
    "--no-qwz --no-qgz --no-oag",
)


def commands() -> list[list[str]]:
    """Return the words of every command whose output is compared."""
    found = [["reproduce", "--format", "csv"]]
    for job, strategy, switches in product(JOBS, STRATEGIES, SWITCHES):
        words = [*job.split(), "--strategy", strategy, *switches.split()]
        found.append(["suggest", *words, *WHOLE])
    for model, search in product(sorted(MODELS.glob("*.yaml")), SEARCHES):
        found.append(["suggest", "--model", model.stem, *search.split(), "--format", "csv"])
    for job in JOBS:
        found.append(["suggest", *job.split(), "--order", "all", *WHOLE])
        found.append(["suggest", *job.split(), "--cost-model", "paper", *WHOLE])
        found.append(["compare", *job.split(), "--format", "json"])
    explained = (
        ("axonn", JOBS[0], "1x1x256x1"),
        ("axonn", JOBS[0], "2x4x8x4"),
        ("axonn", JOBS[1], "1x8x8x1"),
        ("axonn-pipeline", JOBS[1], "1x2x2x4x4"),
        ("megatron", JOBS[1], "tensor=4,pipeline=4,data=4"),
        ("megatron", JOBS[2], "tensor=8,context=2,pipeline=4,data=2"),
        ("zero3", JOBS[2], "shard=8,replica=16"),
        ("zeropp", JOBS[1], "secondary=8,across=8"),
        ("zero-topo", JOBS[1], "weights=2,gradients=4,states=8"),
    )
    for strategy, job, layout in explained:
        words = [*job.split(), "--strategy", strategy, "--grid", layout]
        found.append(["explain", *words, "--format", "json"])
        found.append(["trace", *words, "--microsteps", "2", "--output", "written/trace.json"])
        found.append(["launch", *words, "--output", "written"])
    found += [
        [
            "scale",
            "--model",
            "20b",
            "--gpus",
            "64..512",
            "--machine",
            "frontier",
            "--format",
            "json",
        ],
        [
            "whatif",
            "--model",
            "5b",
            "--gpus",
            "32",
            "--set",
            "inter_node.bandwidth=2x",
            "--format",
            "json",
        ],
        ["whatif", "--model", "tiny", "--gpus", "8", "--format", "json"],
        ["plan", "--model", "5b", "--gpus", "64", "--tokens", "100B", "--format", "json"],
    ]
    return found


def printed(checkout: str, words: list[str]) -> str:
    """Return what a command prints and writes, or its error, with the package of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "written").mkdir()
        run = subprocess.run(
            [sys.executable, "-m", "axonn_tune.cli.main", *words],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": checkout},
            cwd=folder,
            check=False,
        )
        written = sorted((Path(folder) / "written").iterdir())
        return "\n".join([run.stdout or run.stderr, *(path.read_text() for path in written)])


def parsed(text: str, words: list[str]) -> object:
    """Return the output as nested lists, dicts and values."""
    if "csv" in words:
        return list(csv.reader(io.StringIO(text)))
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text.split()


def differences(old: object, new: object, place: str = "") -> list[str]:
    """Return a line for each value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        if list(old) != list(new):
            return [f"{place}: keys {list(old)} became {list(new)}"]
        return [line for key in old for line in differences(old[key], new[key], f"{place}.{key}")]
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return [f"{place}: {len(old)} entries became {len(new)}"]
        pairs = enumerate(zip(old, new, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{place}[{i}]")]
    return [] if is_same(old, new) else [f"{place}: {old} became {new}"]


def is_same(old: object, new: object) -> bool:
    """Return whether two values agree, numbers (also in text) to `TOLERANCE`."""
    if old == new:
        return True
    try:
        return math.isclose(float(str(old)), float(str(new)), rel_tol=TOLERANCE, abs_tol=1e-300)
    except ValueError:
        return False


def count(document: object) -> int:
    """Return how many values a document holds."""
    if isinstance(document, dict):
        return sum(map(count, document.values()))
    return sum(map(count, document)) if isinstance(document, list) else 1


def main() -> None:
    """Compare two checkouts and exit with 1 if they differ."""
    old, new = (os.path.abspath(folder) for folder in sys.argv[1:3])
    n_values, n_different = 0, 0
    todo = commands()
    with ThreadPoolExecutor(2) as pool:
        outputs = pool.map(lambda words: (words, printed(old, words), printed(new, words)), todo)
        for words, before, after in outputs:
            document = parsed(before, words)
            found = differences(document, parsed(after, words))
            if "Traceback" in after:
                found.append(after.splitlines()[-1])
            n_values += count(document)
            n_different += bool(found)
            for line in found[:5]:
                print(f"axonn-tune {' '.join(words)}\n  {line[:300]}", flush=True)
    print(f"{len(todo)} commands, {n_values} values: {n_different} commands differ")
    sys.exit(bool(n_different))


if __name__ == "__main__":
    main()
