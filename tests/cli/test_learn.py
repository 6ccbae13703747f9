"""``learn`` writes a profile from a table, says what it tells, and refuses what it cannot use."""

import json

import pytest
from command_line import assert_refused, run_cli

HEADER = "model,gpus,layout,global_batch,micro_batch,engine,recompute,step_seconds"
ROWS = (
    'llama3-8b,8,"tensor=8",64,1,megatron-core,none,11.5',
    'llama3-8b,8,"tensor=4,data=2",64,1,megatron-core,none,9.1',
    'llama3-8b,8,"tensor=2,data=4",64,1,megatron-core,full,10.6',
)
# The same layouts again, on another day.
AGAIN = [ROWS[0].replace("11.5", "11.6"), ROWS[1].replace("9.1", "9.2")]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, *ROWS, ""]))
    return path


def printed(capsys, *arguments):
    code, out, _ = run_cli(capsys, *arguments)
    assert code == 0
    return out


def learn(capsys, table, *arguments):
    return printed(capsys, "learn", table, "--machine", "dgx-h100", "--quiet", *arguments)


def test_one_run_is_singular(capsys, table):
    table.write_text("\n".join([HEADER, ROWS[0], ""]))
    report = learn(capsys, table)
    assert "Learned from 1 run of Megatron-Core" in report
    assert "This run says nothing of:" in report


def test_a_profile_is_written_and_compared_with_the_one_before(capsys, tmp_path, table):
    mine = tmp_path / "mine.yaml"
    table.write_text("\n".join([HEADER, *ROWS, *AGAIN, ""]))
    report = learn(capsys, table, "--output", mine)
    assert "Learned from 5 runs of Megatron-Core" in report
    assert "These runs say nothing of:" in report and "infiniband bandwidth" in report
    assert f"Written to {mine}" in report
    difference = printed(capsys, "machines", "diff", "dgx-h100", mine)
    assert "Learned from 5 runs of Megatron-Core" in difference
    step = ["explain", "--model", "llama3-8b", "--gpus", "8", "--grid", "tensor=8"]
    step += ["--strategy", "megatron", "--global-batch", "64", "--micro-batch", "1"]
    step += ["--recompute", "none", "--format", "json"]
    seconds = [
        json.loads(printed(capsys, *step, "--machine", machine))["prediction"]["step_seconds"]
        for machine in ("dgx-h100", mine)
    ]
    assert seconds[0] < seconds[1] < 11.5


def test_json_holds_every_factor_and_every_run(capsys, table):
    document = json.loads(learn(capsys, table, "--format", "json"))
    assert document["schema_version"] == 1
    assert [run["measured_seconds"] for run in document["runs"]] == [11.5, 9.1, 10.6]
    told = {factor["key"]: factor["is_told"] for factor in document["factors"]}
    assert told["attention"] and not told["infiniband.bandwidth"]


def kernel(name, microseconds):
    return {"ph": "X", "cat": "kernel", "name": name, "dur": microseconds, "args": {}}


def test_a_trace_tells_of_kernels_and_the_report_says_which(capsys, tmp_path):
    """Backward attention took 0.9 s, and nothing else is in the trace."""
    events = [kernel("flash_bwd_kernel", 9000.0)] * 100
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))
    path = tmp_path / "traced.csv"
    path.write_text(f"{HEADER},trace\n{ROWS[0]},rank0.json\n{ROWS[1]},\n")
    document = json.loads(learn(capsys, path, "--format", "json"))
    (part,) = document["traced"]
    assert part["name"] == "row 1: llama3-8b, tensor=8, 8 GPUs: attention, backward"
    assert part["measured_seconds"] == pytest.approx(0.9)
    assert "part of a traced step" in learn(capsys, path)


def test_a_trace_that_is_not_there_is_named(capsys, tmp_path):
    path = tmp_path / "traced.csv"
    path.write_text(f"{HEADER},trace\n{ROWS[0]},nowhere.json\n")
    culprit = str(tmp_path / "nowhere.json")
    assert_refused(capsys, "learn", path, "--machine", "dgx-h100", "--quiet", culprit=culprit)


def test_runs_on_two_machines_are_refused(capsys, tmp_path):
    path = tmp_path / "two.csv"
    path.write_text(f"{HEADER},machine\n{ROWS[0]},\n{ROWS[1]},aws-p5\n")
    culprit = "row 2 ran on aws-p5, row 1 on dgx-h100"
    assert_refused(capsys, "learn", path, "--machine", "dgx-h100", "--quiet", culprit=culprit)


@pytest.mark.slow
def test_a_night_is_compared_with_the_one_before(capsys, tmp_path, table):
    tonight = tmp_path / "tonight.csv"
    tonight.write_text(table.read_text().replace("11.5", "13.8"))
    arguments = ("score", "--machine", "dgx-h100", "--quiet", "--baseline", table)
    code, out, _ = run_cli(capsys, *arguments, table)
    assert (code, out.count("\n")) == (0, 1)
    assert out.startswith("3 runs as in the baseline (on average +0.0 %; predicted ")
    code, out, _ = run_cli(capsys, *arguments, tonight)
    assert (code, out.count("\n")) == (1, 1)
    assert out.startswith("1 of 3 runs slower by up to 20.0 % than the baseline")
