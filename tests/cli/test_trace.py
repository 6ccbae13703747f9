"""``axonn-tune trace``: the predicted step, with the measured one if there is one."""

import json

import pytest
from command_line import assert_refused, run_cli
from execution_traces import read_directory
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
    assert code == 2 and f"its layout is {grid}, and that of the trace 1x1x1x2" in err
    for option, value in (("--micro-batch", 2), ("--recompute", "full")):
        code, _, err = run_cli(capsys, "trace", *job, "--grid", grid, option, value, *arguments)
        assert code == 2 and f"its {option[2:].replace('-', '_')} is" in err


EXECUTION = ["--format", "chakra", "--grid", "1x4x8x2", "--micro-batch", "1"]
EXECUTION += ["--layers", "2", "--microsteps", "1"]


def test_execution_traces_of_all_ranks_and_their_groups_are_written(capsys, tmp_path):
    folder = tmp_path / "traces"
    code, out, err = run_cli(capsys, "trace", *JOB, *EXECUTION, "--output", folder)
    assert (code, out) == (0, "")
    names = {path.name for path in folder.iterdir()}
    assert names == {"groups.json", *(f"step.{rank}.et" for rank in range(64))}
    assert "64 of 64 ranks" in err and "1 of 8 micro-steps" in err
    assert f"--workload-configuration={folder}/step" in err
    assert f"--comm-group-configuration={folder}/groups.json" in err
    traces, groups = read_directory(folder)
    assert len(groups) == 64 // 4 + 64 // 8 + 64 // 2
    assert "0" not in groups  # ASTRA-sim takes it for all ranks
    assert len({len(nodes) for nodes in traces.values()}) == 1


def test_the_bytes_of_the_files_are_said(capsys, tmp_path):
    _, _, err = run_cli(capsys, "trace", *JOB, *EXECUTION, "--output", tmp_path)
    nbytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert f"{nbytes / 1e6:.3g} MB" in err


def test_some_ranks_are_chosen_by_numbers_and_ranges(capsys, tmp_path):
    arguments = [*JOB, *EXECUTION, "--output", tmp_path, "--ranks", "5, 0-2,2"]
    code, _, err = run_cli(capsys, "trace", *arguments)
    assert code == 0 and "4 of 64 ranks" in err
    traces, _ = read_directory(tmp_path)
    assert set(traces) == {0, 1, 2, 5}


@pytest.mark.parametrize("ranks", ["64", "3-1", "0-64", "x", "", "1,,2", "-1", "9999999999"])
def test_ranks_that_do_not_exist_are_refused(capsys, tmp_path, ranks):
    arguments = [*JOB, *EXECUTION, "--output", tmp_path / "none", f"--ranks={ranks}"]
    assert_refused(capsys, "trace", *arguments, culprit="allowed: numbers and ranges from 0 to 63")
    assert not (tmp_path / "none").exists()


def test_more_bytes_than_the_limit_are_refused_unless_all_ranks_are_asked_for(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("axonn_tune.cli.trace.MOST_BYTES", 1e6)
    arguments = [*JOB, *EXECUTION, "--output", tmp_path / "all"]
    assert_refused(capsys, "trace", *arguments, culprit="allowed: at most 1 MB")
    assert not (tmp_path / "all").exists()
    assert run_cli(capsys, "trace", *arguments, "--ranks", "all")[0] == 0


def test_options_of_the_other_format_are_refused(capsys, tmp_path):
    chosen = [*JOB, "--grid", "1x4x8x2", "--output", tmp_path / "none"]
    chakra = ["--format", "chakra", "--measured", "run.json"]
    assert_refused(capsys, "trace", *chosen, *chakra, culprit="--measured")
    assert_refused(capsys, "trace", *chosen, "--ranks", "0", culprit="--ranks")


def test_traces_of_another_job_are_not_left_among_those_of_this_one(capsys, tmp_path):
    job = ["trace", "--model", "5b", "--format", "chakra", "--microsteps", "1", "--layers", "1"]
    eight = [*job, "--gpus", "8", "--grid", "1x2x2x2", "--output", tmp_path]
    for ranks in ("0-3", "4-7"):
        assert run_cli(capsys, *eight, "--ranks", ranks)[0] == 0
    assert len(list(tmp_path.glob("step.*.et"))) == 8
    four = [*job, "--gpus", "4", "--grid", "1x2x2x1", "--output", tmp_path]
    assert_refused(capsys, *four, culprit="holds step.4.et of another job")


@pytest.mark.slow
def test_ten_thousand_ranks_are_written(capsys, tmp_path):
    job = ["--gpus", "10240", "--model", "80b", "--global-batch", "10240", "--strategy", "megatron"]
    grid = ["--grid", "tensor=8,data=320,pipeline=4", "--layers", "2", "--microsteps", "8"]
    arguments = [*job, *grid, "--format", "chakra", "--output", tmp_path]
    code, _, err = run_cli(capsys, "trace", *arguments)
    assert code == 0 and "10240 of 10240 ranks" in err
    assert len(list(tmp_path.glob("step.*.et"))) == 10240


@pytest.mark.parametrize(
    "offload",
    [["zero3", "--offload", "optimizer"], ["megatron", "--offload-modules", "core_attn"]],
    ids=["optimizer", "modules"],
)
def test_execution_traces_have_no_offload(tmp_path, capsys, offload):
    job = ["--gpus", "8", "--model", "5b", "--machine", "dgx-h100", "--strategy", *offload]
    chakra = ["--format", "chakra", "--layers", "2", "--output", tmp_path / "et"]
    assert_refused(capsys, "trace", *job, *chakra, culprit="has no copies between GPU and host")
