"""Fine-tuning on the command line: options, what they change, and refusals."""

import json

import pytest
from command_line import assert_refused, run_cli

from axonn_tune.strategies.named import STRATEGIES

JOB = ["--gpus", "8", "--model", "llama2-7b", "--machine", "dgx-h100", "--global-batch", "32"]
MEGATRON = [*JOB, "--strategy", "megatron"]
TORCHTITAN = [*JOB, "--strategy", "zero3", "--engine", "torchtitan"]
ONE = ["--grid", "tensor=2,data=4", "--micro-batch", "1", "--recompute", "none"]


def document_of(capsys, command, *words):
    code, out, err = run_cli(capsys, command, *words, "--format", "json")
    assert code == 0, err
    return json.loads(out)


def test_adapters_take_less_time_and_memory(capsys):
    """The micro-batches are so large that the GPU bounds them, and not the host."""
    usual = document_of(capsys, "explain", *MEGATRON, *ONE, "--micro-batch", "4")
    words = ["--micro-batch", "4", "--lora-rank", "16", "--lora-targets", "attention, up"]
    tuned = document_of(capsys, "explain", *MEGATRON, *ONE, *words)
    assert usual["assumptions"]["adapters"] is None
    targets = {"rank": 16, "targets": ["attention", "up"], "dropout": False}
    assert tuned["assumptions"]["adapters"] == targets
    for number in ("step_seconds", "memory_bytes"):
        assert tuned["prediction"][number] < usual["prediction"][number]
    names = {operation["name"] for operation in tuned["operations"]}
    assert "backward.up.adapter_in.gemm_weight" in names
    assert not {"backward.up.gemm_weight", "forward.down.adapter_in.gemm"} & names


def test_frozen_layers_take_less_time_and_memory(capsys):
    usual = document_of(capsys, "explain", *MEGATRON, *ONE)
    frozen = document_of(capsys, "explain", *MEGATRON, *ONE, "--frozen", "embedding, layers:0-23")
    assert usual["assumptions"]["frozen"] is None
    assert frozen["assumptions"]["frozen"] == "embedding,layers:0-23"
    for number in ("step_seconds", "memory_bytes"):
        assert frozen["prediction"][number] < 0.6 * usual["prediction"][number]


def test_packed_samples_take_less_time(capsys):
    whole = document_of(capsys, "explain", *MEGATRON, *ONE)
    packed = document_of(capsys, "explain", *MEGATRON, *ONE, "--samples-per-sequence", "8")
    assert packed["assumptions"]["samples_per_sequence"] == 8.0
    assert packed["prediction"]["step_seconds"] < whole["prediction"]["step_seconds"]


@pytest.mark.slow
def test_tables_say_what_is_trained(capsys):
    words = ["--lora-rank", "4", "--lora-dropout", "--samples-per-sequence", "2.5"]
    code, out, _ = run_cli(capsys, "suggest", *MEGATRON, *words)
    assert code == 0
    text = "frozen weights with adapters of rank 4 beside attention and mlp, with dropout, "
    assert text + "2.5 samples in each sequence" in out


@pytest.mark.parametrize("strategy", ["zero3", "zeropp"])
def test_deepspeed_predicts_adapters(capsys, strategy):
    engine = ["--strategy", strategy, "--engine", "deepspeed"]
    found = document_of(capsys, "suggest", *JOB, *engine, "--lora-rank", "16", "--micro-batch", "1")
    assert found["results"]


@pytest.mark.slow
def test_every_strategy_predicts_adapters(capsys):
    words = ["--lora-rank", "16", "--every-strategy", "--micro-batch", "1", "--recompute", "none"]
    found = document_of(capsys, "compare", *JOB, *words)["strategies"]
    assert {each["strategy"] for each in found} == set(STRATEGIES)


def test_a_comparison_of_adapters_holds_what_can_train_them(capsys):
    """No release of AxoNN has adapters: it must not win unmarked."""
    words = ["compare", *JOB, "--lora-rank", "16", "--micro-batch", "1", "--recompute", "none"]
    found = document_of(capsys, *words)
    assert {"axonn", "axonn-pipeline"} <= set(found["left_out"])
    assert "zero3" in {each["strategy"] for each in found["strategies"]}
    _, out, _ = run_cli(capsys, *words, "--strategies", "axonn,zero3")
    assert "axonn *" in out and "* No release of AxoNN has adapters" in out
    _, out, _ = run_cli(capsys, "compare", *JOB, "--strategies", "axonn,zero3")
    assert "axonn *" not in out


@pytest.mark.slow
def test_every_strategy_predicts_frozen_parts(capsys):
    words = ["--frozen", "embedding,layers:0-15,head", "--every-strategy", "--micro-batch", "1"]
    found = document_of(capsys, "compare", *JOB, *words, "--recompute", "none")["strategies"]
    assert {each["strategy"] for each in found} == set(STRATEGIES)


@pytest.mark.slow
def test_a_plan_writes_checkpoints_of_what_is_trained(capsys):
    words = ["--tokens", "1B", *MEGATRON]
    usual = document_of(capsys, "plan", *words)["runs"][0]
    tuned = document_of(capsys, "plan", *words, "--lora-rank", "16")["runs"][0]
    assert tuned["checkpoint_bytes"] < 0.01 * usual["checkpoint_bytes"]
    assert 0.6 < tuned["model_flops"] / usual["model_flops"] < 0.75


@pytest.mark.parametrize(
    ("words", "culprit"),
    [
        (
            [*TORCHTITAN, "--lora-rank", "6", "--fix", "tp=8"],
            "rank of adapters not divisible",
        ),
        ([*MEGATRON, "--frozen", "norm"], "'norm' is not a part; allowed: embedding"),
        ([*MEGATRON, "--frozen", "embedding,layers:0-31"], "fewer frozen layers"),
        ([*MEGATRON, "--frozen", "head", "--lora-rank", "8"], "allowed with adapters: no part"),
        ([*MEGATRON, "--frozen", "head", "--fix", "pp=2"], "frozen parts in a pipeline"),
        ([*JOB, "--model", "gemma3-27b", "--frozen", "head"], "are one weight"),
        ([*MEGATRON, "--lora-rank", "0"], "--lora-rank"),
        ([*MEGATRON, "--lora-rank", "8", "--lora-targets", "head"], "targets is 'head'"),
        ([*MEGATRON, "--lora-rank", "8", "--lora-targets", ""], "targets is ''"),
        ([*MEGATRON, "--samples-per-sequence", "0.5"], "--samples-per-sequence"),
        ([*MEGATRON, "--samples-per-sequence", "9999"], "samples_per_sequence is 9999"),
        ([*MEGATRON, "--lora-rank", "6", "--fix", "tp=8"], "rank of adapters not divisible"),
    ],
)
def test_what_cannot_be_is_refused(capsys, words, culprit):
    assert_refused(capsys, "suggest", *words, culprit=culprit)


@pytest.mark.parametrize(
    ("model", "culprit"),
    [
        ("mixtral-8x7b", "mixtral-8x7b has experts, which have no adapters"),
        ("deepseek-v3", "deepseek-v3 has latent attention"),
    ],
)
def test_models_whose_parts_have_no_adapters_are_refused(capsys, model, culprit):
    words = ["--gpus", "8", "--model", model, "--machine", "dgx-h100"]
    words += ["--strategy", "megatron", "--lora-rank", "8"]
    assert_refused(capsys, "suggest", *words, culprit=culprit)


def test_adapters_stand_beside_the_attention_of_a_mixture(capsys):
    words = ["--gpus", "8", "--model", "olmoe-1b-7b", "--machine", "dgx-h100"]
    words += ["--lora-rank", "8", "--lora-targets", "attention", "--strategy", "zero3"]
    layout = ["--grid", "shard=8,ep=8", "--micro-batch", "1", "--recompute", "none"]
    document = document_of(capsys, "explain", *words, *layout)
    found = {operation["name"] for operation in document["operations"]}
    assert "backward.qkv.adapter_in.gemm_weight" in found
    assert "backward.experts_up.gemm_weight" not in found


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [["--lora-rank", "8"], ["--frozen", "embedding"], ["--samples-per-sequence", "4"]],
)
def test_no_script_is_written_for_what_its_framework_cannot_do(capsys, tmp_path, words):
    output = ["--output", str(tmp_path / "run")]
    culprit = "where a script is written"
    assert_refused(capsys, "launch", *MEGATRON, *words, *output, culprit=culprit)


def test_launch_says_that_no_script_is_written_for_adapters_and_who_trains_them(capsys, tmp_path):
    words = [*MEGATRON, "--lora-rank", "8", "--micro-batch", "1", "--recompute", "none"]
    for said in (
        "no job script is written for adapters",
        "NeMo and Megatron-Bridge train adapters",
    ):
        assert_refused(capsys, "launch", *words, "--output", str(tmp_path / "run"), culprit=said)
