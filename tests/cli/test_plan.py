"""``axonn-tune plan``: time, energy and money of a whole run."""

import csv
import io
import json

import pytest
from command_line import assert_refused, run_cli


def test_a_plan_in_every_format(capsys):
    arguments = ["plan", "--model", "5b", "--tokens", "100B", "--gpus", "64"]
    arguments += ["--global-batch", "512", "--recompute", "full"]
    _, text, _ = run_cli(capsys, *arguments, "--node-hour-price", "10EUR", "--node-power", "2kW")
    document = json.loads(run_cli(capsys, *arguments, "--format", "json")[1])
    (run,) = document["runs"]
    assert f"{10 * run['node_hours']:,.0f} EUR" in text
    assert f"{run['node_hours'] * 2e-3:.0f} MWh" in text
    assert run["tokens"] == 100e9 and run["cost"] is None
    (row,) = csv.DictReader(io.StringIO(run_cli(capsys, *arguments, "--format", "csv")[1]))
    assert float(row["wall_seconds"]) == pytest.approx(run["wall_seconds"])
    assert int(row["g_z"]) == run["prediction"]["grid"]["z"]
    for column in ("step_seconds", "memory_bytes", "mfu"):  # The table has them, too.
        assert float(row[column]) == pytest.approx(run["prediction"][column])


def test_a_plan_finds_the_gpus_for_a_deadline_and_hints_at_tokens(capsys):
    _, text, _ = run_cli(capsys, "plan", "--model", "5b", "--deadline", "10d")
    assert "20 for each parameter" in text
    days = float(next(line for line in text.splitlines() if line.startswith("time")).split()[1])
    assert days <= 10
    _, text, _ = run_cli(capsys, "plan", "--model", "5b", "--gpus", "16384")
    assert "perlmutter has no more than 1536 nodes" in text


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ([], "--deadline"),
        (["--gpus", "64", "--deadline", "30d"], "--gpus"),
        (["--gpus", "64", "--tokens", "many"], "--tokens"),
        (["--gpus", "64", "--tokens", "0"], "--tokens"),
        (["--gpus", "64", "--tokens", "1e400"], "--tokens"),
        (["--gpus", "64", "--gpu-mtbf", "1s"], "so that it never ends"),
        (["--deadline", "soon"], "--deadline"),
        (["--deadline", "1ms"], "--deadline"),
        (["--gpus", "64", "--gpu-mtbf", "-1d"], "--gpu-mtbf"),
        (["--gpus", "64", "--node-hour-price", "20"], "--node-hour-price"),
        (["--gpus", "64", "--node-power", "2 km"], "--node-power"),
    ],
)
def test_bad_plans_are_one_line(capsys, arguments, culprit):
    assert_refused(capsys, "plan", "--model", "5b", *arguments, culprit=culprit)
