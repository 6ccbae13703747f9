"""Hugging Face configs of mixtures of experts agree with the presets, which the makers confirm."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from axonn_tune.errors import InputError
from axonn_tune.io.hf.config import model_from_hf
from axonn_tune.io.presets import load_model
from axonn_tune.spec.blocks import Experts

MIXTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN3 = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2 = QWEN3 | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 2560,
    "num_attention_heads": 28,
    "num_experts": 64,
    "num_hidden_layers": 28,
    "shared_expert_intermediate_size": 20480,
}
DEEPSEEK_V2 = {
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "n_group": 8,
    "moe_intermediate_size": 1536,
    "moe_layer_freq": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V3 = DEEPSEEK_V2 | {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "topk_group": 1,
    "vocab_size": 163840,
}
GPT_OSS = {
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": 18 * ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
SCOUT_TEXT = {
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760,
    "model_type": "llama4_text",
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "use_qk_norm": True,
    "vocab_size": 202048,
}
MAVERICK_TEXT = SCOUT_TEXT | {
    "interleave_moe_layer_step": 2,
    "num_local_experts": 128,
    "use_qk_norm": False,
}
OLMOE = {
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "tie_word_embeddings": False,
    "vocab_size": 50304,
}
PHI35 = MIXTRAL | {
    "attention_bias": True,
    "intermediate_size": 6400,
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "model_type": "phimoe",
    "num_local_experts": 16,
    "sliding_window": 131072,
    "vocab_size": 32064,
}
GLM45_AIR = {
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


def of_images(text_config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a model for images and text."""
    return {"model_type": "llama4", "text_config": text_config, "vision_config": {}}


# What a preset says beside the config, or says of another length of sequences.
BESIDE = {"name", "source", "seq_len", "seq_len_key"}
BESIDE |= {"published_parameters", "published_active_parameters", "not_modelled"}


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (MIXTRAL, "mixtral-8x7b"),
        (QWEN3, "qwen3-30b-a3b"),
        (DEEPSEEK_V2, "deepseek-v2"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (KIMI_K2, "kimi-k2"),
        (GPT_OSS, "gpt-oss-120b"),
        ({key: GPT_OSS[key] for key in GPT_OSS if key != "layer_types"}, "gpt-oss-120b"),
        (SCOUT_TEXT, "llama4-scout"),
        (of_images(SCOUT_TEXT), "llama4-scout"),
        (of_images(MAVERICK_TEXT), "llama4-maverick"),
        (of_images(MAVERICK_TEXT | {"moe_layers": list(range(1, 48, 2))}), "llama4-maverick"),
        (OLMOE, "olmoe-1b-7b"),
    ],
)
def test_a_config_agrees_with_the_preset(config: dict[str, Any], preset: str) -> None:
    read, ours = model_from_hf(config, "config.json"), load_model(preset)
    for item in fields(ours):
        if item.name not in BESIDE:
            assert getattr(read, item.name) == getattr(ours, item.name), item.name
    assert set(read.not_modelled.split(", ")) <= set(ours.not_modelled.split(", "))


@pytest.mark.parametrize("config", [{"model_type": "deepseek_v3"}, {"model_type": "gpt_oss"}])
def test_a_config_may_leave_everything_to_transformers(config: dict[str, Any]) -> None:
    preset = "deepseek-v3" if config["model_type"] == "deepseek_v3" else "gpt-oss-120b"
    assert model_from_hf(config, "x").parameters == load_model(preset).parameters


@pytest.mark.parametrize(
    ("config", "checkpoint", "active"),
    [
        (QWEN2, 57_408_658_944, 14e9),  # Qwen2-57B-A14B
        (PHI35, 41_873_153_344 - 32064, 6.6e9),  # Phi-3.5-MoE, less the bias of the head
    ],
)
def test_parameters_of_others_are_those_of_the_checkpoint(
    config: dict[str, Any], checkpoint: int, active: float
) -> None:
    model = model_from_hf(config, "x")
    assert model.parameters == checkpoint
    assert model.active_parameters == pytest.approx(active, rel=2e-2)


def test_glm_counts_the_parameters_that_are_active_without_embeddings() -> None:
    """GLM-4.5-Air has 106B parameters, of which 12B are active, says its model card."""
    model = model_from_hf(GLM45_AIR, "x")
    embeddings = 2.0 * model.vocab_size * model.hidden_size
    assert model.parameters == pytest.approx(106e9, rel=1e-2)
    assert model.active_parameters - embeddings == pytest.approx(12e9, rel=2e-2)


def test_small_models_of_deepseek_have_no_latent_queries() -> None:
    model = model_from_hf(DEEPSEEK_V2 | {"q_lora_rank": None}, "x")
    assert model.latent_attention is not None
    assert model.latent_attention.q_rank == 0


def test_only_some_experts_are_shared_and_gated() -> None:
    qwen2 = model_from_hf(QWEN2, "x")
    assert qwen2.experts == Experts(64, 8, 2560, shared_hidden_size=20480, shared_gate=True)
    none = model_from_hf(QWEN2 | {"shared_expert_intermediate_size": 0}, "x").experts
    assert none == Experts(64, 8, 2560)
    assert qwen2.qkv_bias and not qwen2.bias


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, range(48)),
        ({"decoder_sparse_step": 2}, range(1, 48, 2)),
        ({"mlp_only_layers": [0, 1, 2]}, range(3, 48)),
        ({"mlp_only_layers": None, "decoder_sparse_step": 5}, range(4, 48, 5)),
        ({"decoder_sparse_step": 48}, [47]),
    ],
)
def test_experts_are_in_the_layers_that_have_them(change: dict[str, Any], layers: Any) -> None:
    blocks = model_from_hf(QWEN3 | change, "x").blocks
    assert [layer for layer, block in enumerate(blocks) if block.has_experts] == list(layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_only_layers": [5]}, "0, 1, 2, 3, 4, 6, 7, 8; allowed: layers with equal distances"),
        ({"mlp_only_layers": list(range(48))}, "no layer has experts; allowed: a layer with"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers is 'all'; allowed: a list of layers"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers is .*; allowed: a list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0; allowed: a whole number"),
        ({"num_experts": 0}, "num_experts is 0; allowed: a whole number, 1 to 1073741824"),
        ({"num_experts_per_tok": 129}, "experts: top_k is 129; allowed: at most n_experts"),
        ({"num_experts": "128", "moe_intermediate_size": None}, "num_experts is '128'; allowed"),
    ],
)
def test_experts_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=rf"^x.*: .*{message}"):
        model_from_hf(QWEN3 | change, "x")


def test_modules_of_multi_token_prediction_change_no_count_of_parameters() -> None:
    v3, air = model_from_hf(DEEPSEEK_V3, "x"), model_from_hf(GLM45_AIR, "x")
    assert v3.mtp_modules == air.mtp_modules == 1
    none = model_from_hf(DEEPSEEK_V3 | {"num_nextn_predict_layers": 0}, "x")
    assert none.mtp_modules == 0 and none.parameters == v3.parameters


def test_what_predictions_leave_out_is_noted() -> None:
    assert model_from_hf(KIMI_K2, "x").not_modelled == ""
    assert model_from_hf(GPT_OSS, "x").not_modelled == "the sinks of attention"
    assert model_from_hf(PHI35, "x").not_modelled == "the bias of the head"
    scout = model_from_hf(of_images(SCOUT_TEXT), "x").not_modelled
    assert all(part in scout for part in ("chunks of 8192 tokens", "norms of queries", "images"))
