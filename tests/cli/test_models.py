"""What `models` shows of experts and windows, and which commands refuse such models."""

import json

import pytest
from command_line import assert_refused, run_cli

from axonn_tune.io.package_data import template
from axonn_tune.strategies.named import STRATEGIES


def shown(capsys, name):
    """Return what `models show` says, by the name of each line."""
    _, out, _ = run_cli(capsys, "models", "show", name)
    return dict(line.split(maxsplit=1) for line in out.splitlines())


def line_of(text, name):
    """Return the words of the row that begins with a name."""
    return next(line.split() for line in text.splitlines() if line.startswith(f"{name} "))


def test_the_list_has_active_parameters_and_experts(capsys):
    _, out, _ = run_cli(capsys, "models", "list")
    v3 = " ".join(line_of(out, "deepseek-v3"))
    assert v3 == "deepseek-v3 671B 37.55B 61 7168 128 latent - 8 of 256 x 2048 129280 4096"
    assert line_of(out, "gemma3-27b")[2] == "-"  # All its parameters are active.
    assert "1024" in line_of(out, "gemma3-27b")


def test_a_mixture_is_shown_with_its_experts(capsys):
    _, out, _ = run_cli(capsys, "models", "show", "deepseek-v3")
    assert "n_experts 256, top_k 8, hidden_size 2048, shared_hidden_size 2048" in out
    in_one_line = " ".join(out.split())
    assert (
        "kv_rank 512, q_rank 1536, content_dim 128, position_dim 64, value_dim 128" in in_one_line
    )
    assert "active parameters            37552282624 (37.55B)" in out
    assert "layers with experts          58 of 61" in out
    assert "window" not in out


def test_a_dense_model_is_shown_with_its_windows_alone(capsys):
    says = shown(capsys, "gemma3-27b")
    assert (says["window"], says["full_attention_every"]) == ("1024", "6")
    _, out, _ = run_cli(capsys, "models", "show", "gemma3-27b")
    assert "layers with a window   52 of 62" in out
    assert "experts" not in out and "active" not in out and "latent" not in out


@pytest.mark.parametrize(
    "command",
    [
        ["suggest", "--gpus", 64, "--strategy", "axonn"],
        ["suggest", "--gpus", 64, "--strategy", "zeropp"],
        ["explain", "--gpus", 64, "--strategy", "axonn", "--grid", "1x8x8x1"],
        ["scale", "--gpus", "64..128", "--strategy", "axonn"],
        ["compare", "--gpus", 64, "--strategies", "axonn"],
    ],
)
def test_strategies_that_do_not_place_experts_refuse_them(capsys, command):
    culprit = "predicts only models without; allowed: megatron, zero3"
    assert_refused(capsys, *command, "--model", "olmoe-1b-7b", culprit=culprit)


def test_the_parts_that_are_not_placed_are_named(capsys):
    culprit = "model deepseek-v3 has experts and latent attention: --strategy axonn predicts only"
    words = ["--gpus", 64, "--model", "deepseek-v3", "--strategy", "axonn"]
    assert_refused(capsys, "suggest", *words, culprit=culprit)


def test_an_empty_name_is_no_strategy(capsys):
    words = ["--gpus", 8, "--model", "tiny", "--strategy", ""]
    assert_refused(capsys, "suggest", *words, culprit="strategy is ''; allowed: axonn")


@pytest.mark.parametrize(
    ("model", "options", "strategy"),
    [
        ("tiny", [], "axonn"),
        ("olmoe-1b-7b", [], "megatron"),
        ("llama3-8b", ["--engine", "nanotron"], "megatron"),
        ("llama3-8b", ["--engine", "fsdp2"], "zero3"),
    ],
)
def test_the_model_and_the_engine_choose_the_strategy(capsys, model, options, strategy):
    words = ["--gpus", 8, "--model", model, "--machine", "dgx-h100", "--global-batch", 8]
    _, out, _ = run_cli(
        capsys, "suggest", *words, "--recompute", "full", *options, "--format", "json"
    )
    assert json.loads(out)["assumptions"]["strategy"] == strategy


def test_a_comparison_of_all_strategies_has_those_that_place_experts(capsys):
    job = ["--gpus", 64, "--model", "olmoe-1b-7b", "--global-batch", 64, "--recompute", "full"]
    _, out, _ = run_cli(capsys, "compare", *job, "--every-strategy", "--format", "json")
    document = json.loads(out)
    assert {each["strategy"] for each in document["strategies"]} == {"megatron", "zero3"}
    assert set(document["left_out"]) == set(STRATEGIES) - {"megatron", "zero3"}


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("olmoe-1b-7b", "experts and norms of queries and keys"),
        ("gemma3-27b", "a sliding window of 1024 tokens and norms of queries and keys"),
        ("qwen3-8b", "norms of queries and keys"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["run", "--grid", "1x1x1x1"],
        ["rehearse", "--gpus", 2, "--grid", "1x1x1x2"],
        ["validate", "--gpus", 2, "--machine", "perlmutter"],
    ],
)
def test_the_runtime_refuses_what_it_does_not_build(capsys, command, model, part):
    culprit = f"run: model '{model}' has {part}, which the runtime does not build"
    assert_refused(capsys, *command, "--model", model, culprit=culprit)


@pytest.mark.parametrize(
    ("model", "strategy", "parts"),
    [
        ("qwen3-8b", "zero3", "norms of queries and keys"),
        ("mistral.yaml", "zero3", "a sliding window of 256 tokens"),
    ],
)
def test_no_script_is_written_for_what_it_would_not_train(
    capsys, tmp_path, monkeypatch, model, strategy, parts
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mistral.yaml").write_text(template("model") + "window: 256\n")
    job = ["--gpus", 64, "--machine", "dgx-h100", "--global-batch", 64, "--recompute", "full"]
    culprit = f"has {parts}; allowed where a script of fsdp2 is written: a model without"
    command = ["launch", "--model", model, "--strategy", strategy, *job]
    assert_refused(capsys, *command, culprit=culprit)
