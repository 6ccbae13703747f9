"""``axonn-tune validate``: rows, limits, failures that are rows, resuming, reports read again."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import assert_refused, run_cli
from processes import PATIENCE_SECONDS, environment, torchrun_environments

pytest.importorskip("torch")

from axonn_tune.cli.interrupts import resumable
from axonn_tune.errors import AxonnTuneError
from axonn_tune.io.journal import Journal

MODULE = [sys.executable, "-m", "axonn_tune.cli.main"]
# Two ranks, made-up machine: what is checked here is not how good the prediction is.
ARGUMENTS = ["--model", "tiny", "--machine", "dgx-a100", "--gpus", "2", "--seq-len", "16"]
QUICK = [*ARGUMENTS, "--steps", "3", "--device", "cpu"]
PROGRAM = Path(__file__).with_name("failing_validation.py")
# A report of an emulated cluster, for what needs no run.
SHIPPED = Path(__file__).parents[2] / "docs" / "emulated" / "frontier-mini-overlap.json"


def validate(*arguments, program=MODULE, **variables):
    return subprocess.run(
        [*program, "validate", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=environment(**variables),
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A validation of all four grids of two ranks, with everything that it can write."""
    folder = tmp_path_factory.mktemp("report")
    files = [f"--{kind}={folder / f'report.{kind}'}" for kind in ("csv", "junit", "trace")]
    limits = ["--max-regret", "1e6", "--max-error", "1e6"]
    done = validate(*QUICK, "--output", str(folder / "report.json"), *files, *limits)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.slow
def test_every_grid_is_a_row(report):
    folder, text = report
    grids = {"2x1x1x1", "1x2x1x1", "1x1x2x1", "1x1x1x2"}
    assert all(grid in text for grid in grids) and "MAPE" in text and "regret" in text
    document = json.loads((folder / "report.json").read_text())
    assert len(document["outcomes"]) == 4
    for outcome in document["outcomes"]:
        assert len(outcome["step_seconds"]) == 1  # the first two are not timed
        names = {operation["name"] for operation in outcome["operations"]}
        assert {"forward.qkv.gemm", "host"} <= names
    with (folder / "report.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 and all(float(row["measured_seconds"]) > 0 for row in rows)
    assert ElementTree.parse(folder / "report.junit").find("testsuite").get("failures") == "0"
    assert not (folder / "report.json.partial").exists()


@pytest.mark.slow
def test_the_trace_has_predicted_and_measured_steps(report):
    events = json.loads((report[0] / "report.trace").read_text())["traceEvents"]
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert len(titles) == 8
    assert sum("predicted" in title for title in titles) == 4
    assert len({event["pid"] for event in events}) == 8


@pytest.mark.slow
def test_a_report_is_read_again(report, capsys):
    code, again, _ = run_cli(capsys, "validate", "--from", report[0] / "report.json")
    assert code == 0 and report[1].startswith(again.rstrip())


def test_a_report_is_compared_with_a_baseline(capsys):
    code, out, _ = run_cli(capsys, "validate", "--from", SHIPPED, "--baseline", SHIPPED)
    n_outcomes = len(json.loads(SHIPPED.read_text())["outcomes"])
    assert code == 0 and f"{n_outcomes} configurations are in the baseline" in out


@pytest.mark.parametrize(
    ("limits", "code", "said"),
    [
        (["--max-error", "1e6"], 0, ["passed  MAPE"]),
        (["--max-error", "0"], 1, ["FAILED  MAPE"]),
        (["--max-regret", "1e6"], 0, ["passed  regret"]),
        (["--max-error", "0", "--max-regret", "1e6"], 1, ["FAILED  MAPE", "passed  regret"]),
    ],
)
def test_limits_decide_the_exit_code_of_a_report(capsys, limits, code, said):
    ended, out, _ = run_cli(capsys, "validate", "--from", SHIPPED, *limits)
    assert ended == code and all(text in out for text in said)


def test_a_journal_that_cannot_be_gone_on_with_is_not_said_to_be_kept(tmp_path):
    journal = Journal(str(tmp_path / "report.json.partial"), "validation")
    Path(journal.path).write_text("[1]\n")
    with pytest.raises(AxonnTuneError) as refused, resumable(journal):
        journal.read({})
    assert str(refused.value).endswith("delete it and leave --resume out to begin anew")


@pytest.mark.slow
def test_limits_decide_the_exit_code_of_a_run(report):
    """The run of the fixture kept to its limits; a prediction without any error is none."""
    assert "passed  regret" in report[1] and "FAILED" not in report[1]
    failed = validate(*QUICK, "--grid", "1x1x1x2", "--max-error", "0", "--quiet")
    assert failed.returncode == 1 and "FAILED  MAPE" in failed.stdout and not failed.stderr


@pytest.fixture
def failing_program():
    return [sys.executable, str(PROGRAM)]


@pytest.mark.sweep
def test_a_job_that_loses_a_rank_is_resumed(failing_program, tmp_path):
    output = tmp_path / "report.json"
    arguments = [*QUICK, "--output", str(output), "--timeout", "20"]
    killing = failing("1x1x2x1", "kill")
    first, second = in_a_job(failing_program, *arguments, **killing)
    assert (first[0], second[0]) == (2, -9) and "go on with --resume" in first[2]
    assert len(first[2].strip().splitlines()[-1].split(": ")) > 2 and "Traceback" not in first[2]
    first, second = in_a_job(failing_program, *arguments, "--resume", **killing)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    ((grid, failure),) = failures_of(output)
    assert grid == {"x": 1, "y": 1, "z": 2, "data": 1} and failure.startswith("rank 0 failed")


def failing(grid, how, rank=1):
    return {"FAILING_GRID": grid, "FAIL": how, "FAILING_RANK": str(rank)}


def failures_of(path):
    outcomes = json.loads(path.read_text())["outcomes"]
    return [(o["configuration"]["grid"], o["failure"]) for o in outcomes if "failure" in o]


@pytest.mark.parametrize(
    ("how", "said", "seconds"),
    [
        pytest.param(
            *("raise", "rank 1 failed: MemoryError: no more pages", "60"), marks=pytest.mark.sweep
        ),
        pytest.param("kill", "rank 1 was ended by SIGKILL", "60", marks=pytest.mark.slow),
        pytest.param("hang", "rank 0 failed:", "5", marks=pytest.mark.sweep),
    ],
)
def test_a_grid_that_fails_is_a_row_and_the_others_run(
    how, said, seconds, failing_program, tmp_path
):
    output = tmp_path / "report.json"
    arguments = [*QUICK, "--output", str(output), "--timeout", seconds]
    done = validate(*arguments, program=failing_program, **failing("1x2x1x1", how))
    assert done.returncode == 0, done.stderr
    ((grid, failure),) = failures_of(output)
    assert grid == {"x": 1, "y": 2, "z": 1, "data": 1} and failure.startswith(said)
    assert "1x2x1x1 xyzd" in done.stdout and "failed" in done.stdout


def in_a_job(program, *arguments, **variables):
    """Two ranks as torchrun would start them; exit codes, output and errors by rank."""
    ranks = [
        subprocess.Popen(
            [*program, "validate", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=its_own,
        )
        for its_own in torchrun_environments(2, **variables)
    ]
    said = [rank.communicate(timeout=PATIENCE_SECONDS) for rank in ranks]
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, said, strict=True)]


@pytest.mark.sweep
def test_ranks_of_a_job_meet_again_after_a_failure(failing_program, tmp_path):
    output = tmp_path / "report.json"
    arguments = [*QUICK, "--output", str(output)]
    first, second = in_a_job(failing_program, *arguments, **failing("2x1x1x1", "raise"))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "MAPE" in first[1] and second[1:] == ("", "")
    assert [failure for _, failure in failures_of(output)] == [
        "rank 1 failed: MemoryError: no more pages"
    ]


@pytest.mark.sweep
def test_a_grid_that_ends_the_job_twice_is_given_up(failing_program, tmp_path):
    output = tmp_path / "report.json"
    arguments = [*QUICK, "--output", str(output), "--timeout", "20"]
    killing = failing("1x1x2x1", "kill", rank=0)
    for resume in ([], ["--resume"]):
        first, second = in_a_job(failing_program, *arguments, *resume, **killing)
        assert (first[0], second[0]) == (-9, 2) and not output.exists()
    first, second = in_a_job(failing_program, *arguments, "--resume", **killing)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert [failure for _, failure in failures_of(output)] == ["the job ended 2 times while it ran"]


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        (["--model", "tiny"], "give --machine"),
        (["--machine", "dgx-a100"], "give --model"),
        ([*QUICK, "--grids", "some"], "allowed: all, top:N or spread:N"),
        ([*QUICK, "--grid", "4x1x1x1"], "4x1x1x1 is not among"),
        ([*QUICK, "--resume", "--output", "no/such.json"], "nothing to resume"),
        (["--from", "no/such.json"], "no/such.json"),
        (["--from", "x.json", "--trace", "t.json"], "--trace needs a run"),
        (["--from", "x.json", "--output", "y.json"], "--output is of a run"),
        (["--from", "x.json", "--grids", "all"], "--grids is of a run"),
        ([*QUICK, "--resume"], "--resume needs --output"),
        ([*QUICK, "--junit", "no/such/x.xml"], "no/such/x.xml cannot be written: there is no"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, culprit):
    assert_refused(capsys, "validate", *arguments, culprit=culprit)


@pytest.mark.slow
def test_an_interrupted_validation_goes_on(capsys, tmp_path):
    output = tmp_path / "report.json"
    partial = Path(f"{output}.partial")
    command = [*MODULE, "validate", *QUICK, "--output", str(output)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as begun:
        for line in begun.stderr:
            if line.startswith("3 of 4"):
                break
        begun.terminate()
        begun.wait(timeout=PATIENCE_SECONDS)
    kept = [json.loads(line) for line in partial.read_text().splitlines()[1:]]
    ended = [record["key"] for record in kept if "measurement" in record["result"]]
    assert len(ended) >= 2
    said = partial.read_text()
    assert_refused(capsys, "validate", *QUICK, "--output", output, culprit="--resume")
    other = [*QUICK, "--steps", "4", "--resume", "--output", output]
    assert_refused(capsys, "validate", *other, culprit="steps 3; here it is 4")
    assert partial.read_text() == said
    done = validate(*QUICK, "--output", str(output), "--resume")
    assert done.returncode == 0, done.stderr
    assert "1 of 4" not in done.stderr and "4 of 4" in done.stderr
    assert len(json.loads(output.read_text())["outcomes"]) == 4 and not partial.exists()
