"""``axonn-tune run``: on ranks of its own, on given ones, and when one of them fails."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import (
    PATIENCE_SECONDS,
    all_end,
    children,
    ended,
    environment,
    ranks_of,
    torchrun_environments,
)

pytest.importorskip("torch")

from axonn_tune.cli.run import command
from axonn_tune.runtime.ranks import launch

COMMAND = [sys.executable, "-m", "axonn_tune.cli.main", "run"]
TINY = ["--model", "tiny", "--seq-len", "16"]
FAILING_RUN = str(Path(__file__).with_name("failing_run.py"))


def run(*arguments, **variables):
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=environment(**variables),
    )


def start(program, arguments, variables):
    return subprocess.Popen(
        [*program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
    )


def start_ranks(program, arguments, environments):
    return [start(program, arguments, variables) for variables in environments]


def test_ranks_of_its_own_report_time_loss_memory_operations_and_a_trace(tmp_path):
    trace = tmp_path / "trace.json"
    grid = ["--grid", "1x2x1x1", "--steps", "4", "--machine", "perlmutter", "--trace", str(trace)]
    done = run(*TINY, *grid, "--format", "json", "--dtype", "fp32")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["grid"] == {"x": 1, "y": 2, "z": 1, "data": 1}
    assert [len(report["steps"]), report["warm_up_steps"]] == [4, 2]
    timed = [step["seconds"] for step in report["steps"][2:]]
    assert report["mean_step_seconds"] == pytest.approx(sum(timed) / 2)
    assert report["median_step_seconds"] == pytest.approx(sum(timed) / 2)
    assert report["peak_memory_bytes"] > 1e7 and report["memory_is_of_process"]
    assert all(5.0 < step["loss"] < 7.5 for step in report["steps"])  # ln 512 = 6.2
    operations = {op["name"]: op for op in report["operations"]}
    host = operations.pop("host")  # between the others
    assert host["measured_seconds"] > 0 and host["predicted_seconds"] == 0.0
    gemm = operations["forward.qkv.gemm"]
    assert (gemm["n_calls"], gemm["flops"]) == (4, 4 * 2 * 16 * 128 * 384 / 2)
    assert all(
        op["measured_seconds"] > 0 and op["predicted_seconds"] > 0 for op in operations.values()
    )
    assert report["prediction"]["step_seconds"] > 0
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {event["name"] for event in events} == set(operations)
    assert "step 4 of 4: loss" in done.stderr


@pytest.mark.slow
def test_the_table_names_the_grid_the_step_and_the_longest_operations():
    done = run(*TINY, "--grid", "1x1x1x1", "--steps", "3", "--quiet")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for part in ("grid 1x1x1x1", "median", "TFLOP/s per GPU", "GiB", "forward.up.gemm"):
        assert part in done.stdout
    assert "give --machine" in done.stdout and "more operations" in done.stdout


def test_the_micro_batch_of_a_grid_is_the_best_where_a_machine_and_a_batch_are_known(monkeypatch):
    """One sequence alone leaves a GPU waiting for the host."""
    requests = []
    monkeypatch.setattr(launch, "launch", lambda _, request, *others: requests.append(request))
    known = ["--machine", "dgx-h100", "--global-batch", "16"]
    for words in ([], known, [*known, "--micro-batch", "2"]):
        command.main([*TINY, "--grid", "1x1x1x1", *words], standalone_mode=False)
    assert [r.configuration.micro_batch for r in requests] == [1, 16, 2]


@pytest.mark.slow
def test_suggest_runs_the_best_grid():
    done = run(
        *TINY, "--suggest", "--gpus", "2", "--machine", "dgx-a100", "--steps", "1", "--quiet"
    )
    assert done.returncode == 0, done.stderr
    same_job = ["--global-batch", "2", "--dtype", "fp32", "--format", "csv"]
    suggested = subprocess.run(
        [*COMMAND[:-1], "suggest", *TINY, "--gpus", "2", "--machine", "dgx-a100", *same_job],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    best = dict(zip(suggested[0].split(","), suggested[1].split(","), strict=True))
    assert "grid {g_x}x{g_y}x{g_z}x{g_data} ".format(**best) in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_given_ranks_join_and_rank_0_speaks_alone(launcher):
    environments = torchrun_environments(2)
    if launcher == "srun":
        environments = [
            environment(
                SLURM_STEP_ID=0,
                SLURM_PROCID=rank,
                SLURM_STEP_NUM_TASKS=2,
                SLURM_LOCALID=rank,
                SLURM_JOB_ID=1,
                SLURM_STEP_NODELIST="localhost",
                MASTER_PORT=environments[0]["MASTER_PORT"],
            )
            for rank in range(2)
        ]
    ranks = start_ranks(COMMAND, [*TINY, "--grid", "1x1x2x1", "--steps", "2"], environments)
    first, second = (ended(rank) for rank in ranks)
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert "grid 1x1x2x1" in first[1] and "step 2 of 2" in first[2]
    assert second[1:] == ("", "")


@pytest.mark.slow
def test_given_ranks_report_bad_input_once():
    ranks = start_ranks(COMMAND, [*TINY, "--grid", "1x1x4x1"], torchrun_environments(2))
    first, second = (ended(rank) for rank in ranks)
    assert [first[0], second[0]] == [2, 2]
    assert first[2] == "axonn-tune: the task needs 4 ranks; this job has 2\n"
    assert second[1:] == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill", pytest.param("hang", marks=pytest.mark.slow)])
def test_a_failing_rank_ends_the_job_with_one_message(how):
    ranks = start_ranks([sys.executable, FAILING_RUN], [how], torchrun_environments(2))
    code, _, first = ended(ranks[0])
    assert code == 2
    if how == "hang":
        ranks[1].kill()
    code, _, second = ended(ranks[1])
    assert code == {"raise": 2, "kill": -signal.SIGKILL, "hang": -signal.SIGKILL}[how]
    if how == "raise":
        assert (first, second) == (
            "",
            "rank 1 failed: ValueError: the disk is on fire\n",
        )
    else:
        assert first.startswith("rank 0 failed: ")


def wait_for_steps(process):
    for line in process.stderr:
        if line.startswith("step "):
            return


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "server", "launcher", "launcher, gently"])
def test_no_rank_survives_a_kill(victim):
    process = start(COMMAND, [*TINY, "--grid", "1x1x1x2", "--steps", "1000000"], environment())
    wait_for_steps(process)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 2
    if victim == "rank":
        os.kill(ranks[-1], signal.SIGKILL)
    elif victim == "server":
        os.kill(children(process.pid)[-1], signal.SIGKILL)
    else:
        process.send_signal(signal.SIGTERM if "gently" in victim else signal.SIGKILL)
    code, _, errors = ended(process)
    if victim == "rank":
        assert code == 2
        assert errors.splitlines()[-1] == "axonn-tune: rank 1 was ended by SIGKILL"
    elif victim == "server":
        assert code == 2
        assert re.fullmatch(
            "axonn-tune: rank . ended with exit code 255, and said nothing", errors.splitlines()[-1]
        )
    assert all_end(ranks)


@pytest.mark.sweep
def test_a_stopped_rank_ends_a_run_on_several_axes_in_time():
    steps = ["--steps", "1000000", "--timeout", "4"]
    process = start(COMMAND, [*TINY, "--grid", "2x2x1x1", *steps], environment())
    wait_for_steps(process)
    ranks = ranks_of(process.pid)
    os.kill(ranks[-1], signal.SIGSTOP)
    code, _, errors = ended(process)
    assert code == 2
    assert " failed: " in errors.splitlines()[-1]
    assert all_end(ranks)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--grid", "3x1x1x1"], "hidden size not divisible by G_x"),
        (["--grid", "1x1x1x2", "--dtype", "fp16"], "dtype is 'fp16'"),
        (["--grid", "1x1x1x2", "--goldfish", "1"], "goldfish is 1"),
        (["--grid", "1x1x1x1", "--seq-len", "65"], "seq_len is 65; allowed: at most 64"),
        (["--grid", "1x1x1x1", "--device", "tpu"], "device is 'tpu'"),
        (["--grid", "1x1x1x2", "--global-batch", "3"], "global batch not divisible"),
        (["--grid", "1x1x1x1", "--recompute", "auto"], "give --machine"),
        (["--suggest"], "give --machine"),
        (["--grid", "1x1x1x1", "--suggest"], "either --grid"),
        ([], "either --grid"),
        (["--grid", "1x1x1x1", "--gpus", "2"], "--gpus goes with --suggest"),
        (["--grid", "shard=2", "--strategy", "zeropp"], "allowed: axonn, zero3, hsdp, megatron-tp"),
        (["--grid", "2x1x1x1", "--shard-gradients"], "run has no --shard-gradients, which is pred"),
        (["--grid", "2x1x1x1", "--context-kind", "ring"], "run has no --context-kind, which is"),
        (["--grid", "2x1x1x1", "--no-such"], "No such option '--no-such'"),
        (["--grid", "1x1x2x1", "--engine", "nanotron"], "allowed: axonn, deepspeed, "),
        (
            ["--grid", "1x1x2x1", "--engine", "deepspeed"],
            "is not the size of an axis; for example shard=2",
        ),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(arguments, named, capsys):
    from axonn_tune.cli.main import main

    with pytest.raises(SystemExit) as stopped:
        main(["run", "--model", "tiny", *arguments])
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.out == "" and printed.err.count("\n") == 1
    assert named in printed.err


def test_without_torch_the_message_says_how_to_get_it():
    code = "import sys; sys.modules['torch'] = None; from axonn_tune.cli.main import main; "
    code += "main(['run', '--grid', '1x1x1x1', '--model', 'tiny'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "needs torch: pip install 'axonn-tune[runtime]'" in done.stderr
