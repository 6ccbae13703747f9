"""Presets against what the makers publish: parameters, and NVIDIA's FLOPs of a token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from axonn_tune.io.presets import load_model
from axonn_tune.spec.model import Model

# Elements of the published checkpoints (safetensors on Hugging Face), less those that no optimizer
# trains or that the presets say to leave out.
IMAGES_OF_LLAMA4 = 871_932_416
CHECKPOINTS = {
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2": 235_741_434_880,
    # The biases with which routers balance experts follow a rule, not gradients.
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "kimi-k2": 1_026_408_232_448 - 60 * 384,
    "gpt-oss-20b": 20_914_757_184 - 24 * 64,  # a sink for each head
    "gpt-oss-120b": 116_829_156_672 - 36 * 64,
    "llama4-scout": 108_641_793_536 - IMAGES_OF_LLAMA4,
    "llama4-maverick": 401_583_781_376 - IMAGES_OF_LLAMA4,
    "olmoe-1b-7b": 6_919_161_856,
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * 5376 - 1152,  # images, their projection
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_parameters_are_those_of_the_checkpoint(name: str) -> None:
    assert load_model(name).parameters == CHECKPOINTS[name]


def without_input(model: Model) -> float:
    """Return the active parameters without the embedding of the input."""
    return model.active_parameters - model.vocab_size * model.hidden_size


@pytest.mark.parametrize(
    ("name", "active", "half_a_digit"),
    [
        ("mixtral-8x7b", 12.9e9, 0.05e9),
        ("mixtral-8x22b", 39e9, 0.5e9),
        ("qwen3-235b-a22b", 22e9, 0.5e9),
        ("qwen3-30b-a3b", 3.3e9, 0.06e9),  # 3.353, cut and not rounded
        ("deepseek-v2", 21e9, 0.5e9),
        ("llama4-scout", 17e9, 0.5e9),
        ("llama4-maverick", 17e9, 0.5e9),
        ("olmoe-1b-7b", 1.3e9, 0.05e9),
        ("kimi-k2", 32.6e9, 0.3e9),  # 32.86: the report's own figures differ from its sizes
    ],
)
def test_active_parameters_are_the_published_ones(
    name: str, active: float, half_a_digit: float
) -> None:
    model = load_model(name)
    assert model.published_active_parameters == active
    assert abs(model.active_parameters - active) <= half_a_digit


@pytest.mark.parametrize(
    ("name", "active", "half_a_digit"),
    [
        ("deepseek-v3", 37e9, 0.5e9),
        ("gpt-oss-20b", 3.61e9, 0.005e9),
        ("gpt-oss-120b", 5.13e9, 0.005e9),
    ],
)
def test_some_makers_do_not_count_the_embedding_of_the_input(
    name: str, active: float, half_a_digit: float
) -> None:
    model = load_model(name)
    assert model.published_active_parameters == active
    assert abs(without_input(model) - active) <= half_a_digit


@pytest.mark.parametrize(
    ("name", "total", "half_a_digit"),
    [
        ("qwen3-30b-a3b", 29.9e9, 0.05e9),
        ("qwen3-235b-a22b", 234e9, 0.5e9),
        ("gemma3-27b", 25.6e9, 0.0005e9),
    ],
)
def test_parameters_without_embeddings_are_the_published_ones(
    name: str, total: float, half_a_digit: float
) -> None:
    """The model cards of Qwen 3 and table 1 of the Gemma 3 report (arXiv 2503.19786) say them."""
    model = load_model(name)
    n_embeddings = 1 if model.tied_embeddings else 2
    without = model.parameters - n_embeddings * model.vocab_size * model.hidden_size
    assert abs(without - total) <= half_a_digit


# FLOPs of a token in NVIDIA's words ---------------------------------------------------------


def nvidia_flops(model: Model, seq_len: int, mtp_modules: int = 0) -> float:
    """Return the FLOPs of a token as Megatron-Bridge counts them.

    `training/utils/flop_utils.py` of NVIDIA-NeMo/Megatron-Bridge at commit 0494433 counts half of
    the score matrix and no router.
    """
    flops = model.model_flops(1.0, seq_len, mtp_modules=mtp_modules)
    attention = flops - model.model_flops(1.0, 0, mtp_modules=mtp_modules)
    n_routers = sum(block.has_experts for block in model.blocks) + mtp_modules
    return flops - attention / 2.0 - 6.0 * n_routers * model.router_parameters


@pytest.mark.parametrize(
    ("name", "seq_len", "gigaflops"),
    [
        ("llama3-8b", 8192, 51.48),
        ("llama3-70b", 8192, 449.2),
        ("llama3-405b", 8192, 2524.2),
        ("qwen3-30b-a3b", 4096, 23.01),
        ("qwen3-235b-a22b", 4096, 147.98),
        ("kimi-k2", 4096, 204.4),
        ("gpt-oss-120b", 4096, 32.6),
    ],
)
def test_flops_of_a_token_are_nvidias(name: str, seq_len: int, gigaflops: float) -> None:
    """The figures are TFLOP/s over tokens/s of Megatron-Bridge's performance summaries."""
    assert nvidia_flops(load_model(name), seq_len) == pytest.approx(gigaflops * 1e9, rel=2e-3)


def test_nvidias_deepseek_v3_predicts_a_second_token() -> None:
    """Its rows without multi-token prediction have 249.7 GFLOP for each token."""
    model = load_model("deepseek-v3")
    assert nvidia_flops(model, 4096, mtp_modules=1) == pytest.approx(259.97e9, rel=1e-3)
    assert nvidia_flops(model, 4096) == pytest.approx(249.7e9, rel=2e-3)


def test_nvidias_older_count_of_gpt_oss_has_neither_gates_nor_windows() -> None:
    """The summaries before release 26.06 have 27.2 GFLOP a token, later ones 32.6."""
    fields = {"gated_mlp": False, "clamped_gate": False, "window": 0}
    model = replace(load_model("gpt-oss-120b"), **fields)
    assert nvidia_flops(model, 4096) == pytest.approx(27.2e9, rel=5e-3)
