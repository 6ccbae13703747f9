"""What a script trains otherwise than the model says is told on the screen and in the script."""

from dataclasses import replace

import pytest
from command_line import run_cli

from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_model
from axonn_tune.job_scripts.differences import model_differences
from axonn_tune.spec.model import Model

GPT = Model("gpt", n_layers=2, hidden_size=64, n_heads=4, vocab_size=128, seq_len=32)
LLAMA = load_model("llama3-8b")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("apertus-8b", "trains apertus-8b with GELU, since it has no xIELU"),
        ("apertus-8b", "Predictions leave out the two scalars of each activation."),
        ("gpt-oss-20b", "Predictions leave out the sinks of attention."),
    ],
)
def test_what_is_left_out_is_told_on_the_screen_and_in_the_script(tmp_path, capsys, model, told):
    given = ("--gpus", 64, "--model", model, "--machine", "dgx-h100", "--strategy", "megatron")
    given += ("--recompute", "full", "--micro-batch", 1)
    code, _, err = run_cli(capsys, "launch", *given, "--output", tmp_path)
    assert (code, told in err) == (0, True)
    comments = (tmp_path / "launch.sbatch").read_text().partition("\n#SBATCH")[0]
    assert told in comments


@pytest.mark.parametrize(
    ("model", "framework", "told"),
    [
        (GPT, "megatron", []),
        (LLAMA, "megatron", []),
        (replace(LLAMA, qkv_bias=True), "megatron", []),
        (replace(GPT, activation="squared-relu"), "megatron", []),
        (replace(LLAMA, proj_bias=True), "megatron", ["attention's last product a bias"]),
        (replace(GPT, qkv_bias=False), "megatron-fsdp", ["queries, keys and values biases"]),
        (replace(LLAMA, qk_norm="all"), "megatron", ["the model all heads at once"]),
        (replace(GPT, activation="squared-relu"), "fsdp2", ["GELU in the place of the squared"]),
        (replace(GPT, activation="xielu"), "axonn", ["GELU in the place of xIELU"]),
        (replace(GPT, qkv_bias=False, proj_bias=False), "deepspeed", []),
        (load_model("deepseek-v3"), "megatron", []),
    ],
)
def test_only_what_a_framework_builds_otherwise_is_told(model, framework, told):
    sentences = model_differences(model, framework, train=None)
    assert len(sentences) == len(told)
    assert all(part in sentence for part, sentence in zip(told, sentences, strict=True))


def test_nobody_knows_what_a_program_of_the_user_builds():
    model = replace(GPT, activation="xielu", not_modelled="ALiBi")
    assert model_differences(model, "fsdp2", "mine.py") == ["Predictions leave out ALiBi."]
    assert len(model_differences(model, "megatron", "Megatron-LM/pretrain_gpt.py")) == 2


def test_an_activation_is_one_of_two_and_has_no_gate():
    with pytest.raises(InputError, match="activation is 'relu'; allowed: squared-relu, xielu"):
        replace(GPT, activation="relu")
    with pytest.raises(InputError, match="activation is xielu; allowed: only without gated_mlp"):
        replace(GPT, activation="xielu", gated_mlp=True)
