"""Mixtures of experts on the command line: the option, the axis, the tables, refusals."""

import json

import pytest
from command_line import assert_refused, run_cli

import axonn_tune

JOB = ["--gpus", "8", "--model", "olmoe-1b-7b", "--machine", "dgx-h100", "--global-batch", "32"]
MEGATRON = [*JOB, "--strategy", "megatron", "--recompute", "none"]


def document_of(capsys, command, *words):
    code, out, err = run_cli(capsys, command, *MEGATRON, *words, "--format", "json")
    assert code == 0, err
    return json.loads(out)


def test_busier_experts_take_longer_and_more_memory(capsys):
    layout = ["--grid", "dp=8,ep=8", "--micro-batch", "1"]
    even = document_of(capsys, "explain", *layout)
    uneven = document_of(capsys, "explain", *layout, "--expert-imbalance", "2")
    assert even["assumptions"]["expert_imbalance"] == 1.0
    assert uneven["assumptions"]["expert_imbalance"] == 2.0
    for number in ("step_seconds", "memory_bytes"):
        assert uneven["prediction"][number] > even["prediction"][number]
    sizes = [
        {each["name"]: each["nbytes"] for each in document["operations"]}
        for document in (even, uneven)
    ]
    assert sizes[1]["forward.dispatch"] == 2 * sizes[0]["forward.dispatch"]


def test_the_axis_of_experts_is_fixed_by_either_name(capsys):
    for name in ("ep", "expert"):
        results = document_of(capsys, "suggest", "--fix", f"{name}=4", "--top-n", "99")["results"]
        assert results and {row["grid"]["expert"] for row in results} == {4}


def test_python_takes_the_same_options():
    frame = axonn_tune.suggest(
        "olmoe-1b-7b",
        8,
        "dgx-h100",
        strategy="megatron",
        global_batch=32,
        fix={"ep": 8},
        expert_imbalance=1.5,
    )
    assert set(frame["g_expert"]) == {8} and frame.attrs["expert_imbalance"] == 1.5


def test_an_explanation_names_the_groups_and_counts_the_products(capsys):
    _, out, _ = run_cli(capsys, "explain", *MEGATRON, "--grid", "dp=8,ep=4", "--all")
    assert "(expert: the ranks that share the experts of a layer; expert_replicas: those" in out
    for name in ("router.gemm", "choice", "permute", "dispatch", "sort", "experts_up.gemm"):
        assert f"\nforward.{name} " in out
    assert " 16 of " in out  # 64 experts over 4 ranks
    dense = ["--gpus", "8", "--model", "tiny", "--strategy", "megatron", "--global-batch", "8"]
    _, out, _ = run_cli(capsys, "explain", *dense, "--grid", "data=8")
    assert "expert" not in out


def test_the_assumptions_say_how_busy_experts_are(capsys):
    _, even, _ = run_cli(capsys, "suggest", *MEGATRON, "--top-n", "1")
    assert "experts equally busy." in even
    _, uneven, _ = run_cli(capsys, "suggest", *MEGATRON, "--expert-imbalance", "1.25")
    assert "the busiest experts take 1.25 times the mean." in uneven


@pytest.mark.parametrize(
    ("layout", "reasons"),
    [
        ("dp=8,ep=3", "number of experts (64) not divisible by expert; tensor*context*data not"),
        ("dp=8,ep=16", "tensor*context*data not divisible by expert"),
        ("tp=2,pp=4,ep=8", "tensor*context*data not divisible by expert"),
    ],
)
def test_a_layout_that_cannot_spread_the_experts_is_refused_with_the_reason(
    capsys, layout, reasons
):
    code, out, _ = run_cli(capsys, "suggest", *MEGATRON, "--why-not", layout)
    assert code == 0 and reasons in out
    assert_refused(capsys, "explain", *MEGATRON, "--grid", layout, culprit=reasons)


def test_experts_that_are_split_leave_the_tensor_group_alone(capsys):
    split = [*MEGATRON, "--split-experts", "--why-not", "tp=2,dp=4,ep=8"]
    assert "context*data not divisible by expert" in run_cli(capsys, "suggest", *split)[1]


@pytest.mark.parametrize("value", ["0.5", "nan", "-1", "1001", "inf", "two"])
def test_an_imbalance_that_cannot_be_is_refused(capsys, value):
    words = ["suggest", *MEGATRON, f"--expert-imbalance={value}"]
    assert_refused(capsys, *words, culprit="imbalance")


def test_models_without_experts_have_no_such_axis(capsys):
    dense = ["--gpus", "8", "--model", "tiny", "--strategy", "megatron", "--fix", "ep=2"]
    assert_refused(capsys, "suggest", *dense, culprit="axis is 'expert'; allowed: tensor, context")


@pytest.mark.parametrize(
    "words", [["--strategies", "megatron,zeropp"], ["--engine", "bundled,megatron-core"]]
)
def test_a_comparison_says_which_strategies_cannot_predict_the_model(capsys, words):
    code, out, err = run_cli(capsys, "compare", *JOB, "--recompute", "none", *words)
    assert code == 0, err
    assert "\nmegatron " in out and "\nzeropp " not in out
    assert "Left out: " in out
    assert "since models with experts are predicted for megatron, zero3 only." in out


def test_a_comparison_of_nothing_that_predicts_the_model_is_refused(capsys):
    culprit = "model olmoe-1b-7b has experts: --strategy zeropp predicts only models without"
    assert_refused(capsys, "compare", *JOB, "--strategies", "zeropp,axonn", culprit=culprit)
    culprit = "strategy is 'foo'"
    assert_refused(capsys, "compare", *JOB, "--strategies", "megatron,foo", culprit=culprit)


def test_a_run_that_recomputes_a_part_is_scored(capsys, tmp_path):
    runs = tmp_path / "runs.csv"
    runs.write_text(
        "model,gpus,layout,global_batch,step_seconds,strategy,recompute\n"
        'olmoe-1b-7b,8,"dp=8,ep=8",32,1.0,megatron,full:4\n'
    )
    code, out, err = run_cli(capsys, "score", str(runs), "--machine", "dgx-h100", "--by", "expert")
    assert code == 0, err
    assert "expert" in out


def test_execution_traces_exchange_within_the_group_of_experts(capsys, tmp_path):
    words = ["--grid", "tp=2,dp=4,ep=4", "--layers", "1", "--format", "chakra"]
    run_cli(capsys, "trace", *MEGATRON, *words, "--output", str(tmp_path / "et"))
    groups = json.loads((tmp_path / "et" / "groups.json").read_text())
    assert [0, 1, 2, 3] in groups.values() and [4, 5, 6, 7] in groups.values()
    assert [0, 4] in groups.values(), "the ranks that hold the same experts"
