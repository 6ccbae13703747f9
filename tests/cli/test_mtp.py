"""Multi-token prediction on the command line: the option, the remark, refusals, the flag."""

import json

import pytest
from command_line import assert_refused, run_cli

JOB = ["--gpus", "8", "--model", "llama2-7b", "--machine", "dgx-h100", "--global-batch", "32"]
MEGATRON = [*JOB, "--strategy", "megatron"]
ONE = ["--grid", "tensor=4,data=2", "--micro-batch", "1", "--recompute", "none"]
DEEPSEEK = ["--gpus", "1024", "--model", "deepseek-v3", "--machine", "dgx-h100", "--fix", "ep=64"]
DEEPSEEK += ["--fix", "pp=16", "--fix", "tp=1", "--strategy", "megatron", "--top-n", "1"]


def prediction_of(capsys, *words):
    code, out, err = run_cli(capsys, "explain", *MEGATRON, *ONE, *words, "--format", "json")
    assert code == 0, err
    return json.loads(out)


def test_each_module_takes_time_and_memory(capsys):
    documents = [prediction_of(capsys, "--mtp-modules", n) for n in (0, 1, 2)]
    assert [each["assumptions"]["mtp_modules"] for each in documents] == [0, 1, 2]
    for number in ("step_seconds", "memory_bytes"):
        none, one, two = (each["prediction"][number] for each in documents)
        assert none < one < two


@pytest.mark.slow
def test_tables_say_that_a_models_modules_are_not_trained(capsys):
    remark = "Multi-token prediction is not trained; --mtp-modules 1 is the model's."
    assert remark in run_cli(capsys, "suggest", *DEEPSEEK)[1]
    trained = run_cli(capsys, "suggest", *DEEPSEEK, "--mtp-modules", "1")[1]
    assert "1 modules of multi-token prediction" not in trained
    assert ", 1 module of multi-token prediction" in trained and remark not in trained


@pytest.mark.slow
def test_other_strategies_are_refused_and_left_out(capsys):
    culprit = "--strategy axonn does not predict multi-token prediction"
    assert_refused(capsys, "suggest", *JOB, "--mtp-modules", "1", culprit=culprit)
    code, out, _ = run_cli(capsys, "compare", *JOB, "--mtp-modules", "1")
    assert code == 0 and "since multi-token prediction is predicted for megatron only" in out


def test_launch_writes_megatrons_flag(capsys, tmp_path):
    output = tmp_path / "run"
    code, _, err = run_cli(capsys, "launch", *MEGATRON, "--mtp-modules", "1", "--output", output)
    assert code == 0, err
    assert "--mtp-num-layers 1" in (output / "launch.sbatch").read_text()
