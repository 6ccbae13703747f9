"""``next`` proposes layouts that were not tried, as commands of ``launch``."""

import json
import shlex

import pytest
from command_line import assert_refused, run_cli

HEADER = (
    "model,gpus,layout,global_batch,micro_batch,virtual_stages,engine,recompute,step_seconds,status"
)
JOB = ("--gpus", "8", "--model", "llama3-8b", "--machine", "dgx-h100", "--global-batch", "64")
MEGATRON = (*JOB, "--strategy", "megatron", "--quiet")


def proposed(capsys, *arguments):
    code, out, _ = run_cli(capsys, "next", *MEGATRON, *arguments, "--format", "json")
    assert code == 0
    document = json.loads(out)
    assert document["schema_version"] == 1
    return document


# The layout that is predicted best, one that is not, and one that does not fit.
ROWS = (
    'llama3-8b,8,"tensor=2,data=4",64,1,1,megatron-core,none,8.0,',
    'llama3-8b,8,"tensor=4,data=2",64,1,1,megatron-core,none,8.1,',
    'llama3-8b,8,"data=8",64,1,1,megatron-core,none,1.0,oom',
)


@pytest.fixture
def runs(tmp_path):
    table = tmp_path / "runs.csv"
    table.write_text("\n".join([HEADER, *ROWS, ""]))
    return table


@pytest.mark.slow
def test_what_was_tried_is_not_proposed_again(capsys, runs):
    tried = "tensor=2,context=1,data=4,pipeline=1"
    (before,) = proposed(capsys, "--budget", "1")["proposals"]
    assert before["layout"] == tried
    after = proposed(capsys, "--runs", runs, "--budget", "3")
    assert after["n_runs"] == 3
    assert after["best_measured_seconds"] == 8.0
    assert tried not in {each["layout"] for each in after["proposals"]}


@pytest.mark.slow
def test_the_commands_write_job_scripts(capsys, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (proposal,) = proposed(capsys, "--runs", runs, "--budget", "1")["proposals"]
    program, *words = shlex.split(proposal["command"])
    assert program == "axonn-tune"
    code, out, _ = run_cli(capsys, *words)
    assert code == 0 and "trial-4" in out


@pytest.mark.slow
def test_the_table_says_what_it_knows(capsys, runs):
    code, out, _ = run_cli(capsys, "next", *MEGATRON, "--runs", runs)
    assert code == 0
    assert "Learned from 2 runs; 3 are of this job; the fastest step" in out
    assert out.count("axonn-tune launch") == 4


def test_runs_of_another_engine_are_refused(capsys, runs):
    culprit = "row 1 is of engine Megatron-Core"
    sharded = (*JOB, "--strategy", "zero3", "--quiet", "--runs", runs)
    assert_refused(capsys, "next", *sharded, culprit=culprit)
