"""``axonn-tune trace``: the predicted step, with the measured one if there is one."""

import json

import pytest
from command_line import run_cli
from recorded import MEASUREMENT

JOB = ["--gpus", "64", "--model", "5b", "--global-batch", "128", "--recompute", "full"]


def test_a_trace_holds_the_predicted_step(capsys, tmp_path):
    path = tmp_path / "trace.json"
    code, _, err = run_cli(capsys, "trace", *JOB, "--grid", "1x4x8x2", "--output", path)
    assert code == 0 and "ui.perfetto.dev" in err
    events = json.loads(path.read_text())["traceEvents"]
    ends = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") / 1e6
    _, out, _ = run_cli(capsys, "explain", *JOB, "--grid", "1x4x8x2", "--format", "json")
    assert ends == pytest.approx(json.loads(out)["prediction"]["step_seconds"])
    assert {e["ph"] for e in events} == {"X", "M", "s", "f"}


def test_a_trace_takes_a_recorded_step_of_the_same_grid_only(capsys, tmp_path):
    from axonn_tune.io.json_files import save_json

    record = tmp_path / "run.json"
    save_json(record, MEASUREMENT)
    path, job = tmp_path / "trace.json", ["--gpus", "2", "--model", "tiny", "--global-batch", "2"]
    grid = str(MEASUREMENT.layout)
    arguments = ["--measured", record, "--output", path]
    code, _, _ = run_cli(capsys, "trace", *job, "--grid", grid, *arguments)
    assert code == 0
    events = json.loads(path.read_text())["traceEvents"]
    titles = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert [title.split()[0] for title in titles] == ["predicted:", "measured"]
    n_measured = sum(e["ph"] == "X" and e["pid"] == 1 for e in events)
    assert n_measured == len(MEASUREMENT.last_step)
    code, _, err = run_cli(capsys, "trace", *job, "--grid", "1x1x1x2", *arguments)
    assert code == 2 and f"is of grid {grid}" in err
