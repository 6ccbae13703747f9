"""``axonn-tune runs``: from logs to a table that ``score`` reads, and its bad input."""

import csv
import json
import time
from pathlib import Path

import pytest
from command_line import assert_refused, run_cli

LOGS = Path(__file__).parents[1] / "data" / "training_logs"


def test_logs_of_two_programs_become_a_table_that_score_reads(capsys, tmp_path):
    table = tmp_path / "runs.csv"
    logs = (LOGS / "megatron.log", LOGS / "torchtitan.log")
    code, out, err = run_cli(capsys, "runs", *logs, "--output", table, "--machine", "dgx-a100")
    assert (code, out, err) == (0, "", "")
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["engine"] for row in rows] == ["megatron-core", "torchtitan-2024-eager"]
    assert rows[1]["model"] == str(tmp_path / "runs-6-layers-of-256.yaml")
    code, out, _ = run_cli(capsys, "score", table, "--format", "json", "--quiet")
    assert code == 0 and len(json.loads(out)["runs"]) == 2


def test_the_document_of_a_run_is_a_log(capsys, tmp_path):
    document = {
        "model": "tiny",
        "strategy": "axonn",
        "engine": "bundled",
        "job": {"n_gpus": 4, "global_batch": 8, "seq_len": 64, "dtype": "fp32"}
        | {"attention": "flash"},
        "machine": None,
        "grid": {"x": 2, "y": 1, "z": 2, "data": 1},
        "micro_batch": 2,
        "recompute": "none",
        "median_step_seconds": 0.5,
        "peak_memory_bytes": 2**30,
        "memory_is_of_process": True,
        "steps": [{"seconds": seconds} for seconds in (9.0, 8.0, 0.4, 0.5, 0.6)],
    }
    log = tmp_path / "run.json"
    log.write_text(json.dumps(document))
    code, out, _ = run_cli(capsys, "runs", log)
    (row,) = csv.DictReader(out.splitlines())
    assert code == 0 and row["layout"] == "x=2,z=2" and row["step_seconds"] == "0.5"
    assert row["engine"] == "bundled" and "memory_gib" not in row
    del document["grid"]
    log.write_text(json.dumps(document))
    assert_refused(
        capsys, "runs", log, culprit="run.json: not a document that `run` writes: KeyError('grid')"
    )


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ((LOGS / "torchtitan.log",), "no preset has the sizes of its model (6-layers-of-256)"),
        ((LOGS / "nemo.log",), "nemo.log does not say its model; give --model"),
        ((LOGS / "megatron.log", "--warm-up", "10"), "times 10 steps, of which the first 10"),
        ((LOGS / "megatron.log", "--column", "gpus"), "--column gpus: write NAME=COLUMN"),
        (
            ("sweep.csv", "--column", "step_seconds=time", "--column", "step_seconds = time_ms"),
            "--column step_seconds = time_ms: step_seconds has a column already; allowed: one",
        ),
        ((LOGS / "megatron.log", "--log-format", "csv"), "no column of step times"),
        (("/dev/null",), "/dev/null is a device"),
        (("missing.log",), "missing.log cannot be read"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, culprit):
    assert_refused(capsys, "runs", *arguments, culprit=culprit)


@pytest.mark.parametrize("name", ["run.log", "run.csv"])
@pytest.mark.parametrize("start", ["", "step_seconds\n"], ids=["alone", "behind a header"])
def test_zeros_without_line_ends_are_refused_at_once(capsys, tmp_path, name, start):
    """200 MB took 7 s of processor time as a log, and 1.2 GB of memory as a CSV file."""
    path = tmp_path / name
    with path.open("wb") as file:
        file.write(start.encode())
        file.truncate(200_000_000)
    before = time.process_time()
    line = 1 + start.count("\n")
    assert_refused(
        capsys, "runs", path, culprit=f"{name}, line {line} is too long; allowed: at most 16"
    )
    assert time.process_time() - before < 1.5


def test_a_log_larger_than_the_limit_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("axonn_tune.io.runs.read.LARGEST_LOG_BYTES", 100)
    log = tmp_path / "run.log"
    log.write_text("x" * 101)
    assert_refused(capsys, "runs", log, culprit="run.log is too large")
