"""Hugging Face configs of newer models have the parameters of what transformers builds from them.

The numbers are those of the trained elements of `AutoModelForCausalLM.from_config` on the meta
device, in transformers 5.24.0; a sink, an indexer and the scalars of an activation are not counted.
"""

from __future__ import annotations

from typing import Any

import pytest
from hf_configs import sizes

from axonn_tune.errors import InputError
from axonn_tune.io.hf.config import model_from_hf
from axonn_tune.io.presets import load_model

TIED = {"tie_word_embeddings": True}
FEW_LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}
FEW_LATENTS |= {"v_head_dim": 256}


def experts(count: int, top_k: int, size: int, **others: Any) -> dict[str, Any]:
    """Return the keys of DeepSeek's mixtures of experts."""
    keys = {"n_routed_experts": count, "num_experts_per_tok": top_k}
    return keys | {"moe_intermediate_size": size} | others


APERTUS_8B = sizes("apertus", 4096, 32, 32, 8, 21504, 131072)
APERTUS_70B = sizes("apertus", 8192, 80, 64, 8, 43008, 131072)
COMMAND_R7B = sizes("cohere2", 4096, 32, 32, 8, 14336, 256000)
DOTS1 = sizes("dots1", 4096, 62, 32, 32, 10944, 152064, first_k_dense_replace=1) | experts(
    128, 6, 1408, n_shared_experts=2, sliding_window=None
)
ERNIE = sizes("ernie4_5_moe", 2560, 28, 20, 4, 12288, 103424, moe_intermediate_size=1536)
EXAONE4 = sizes("exaone4", 5120, 64, 40, 8, 27392, 102400, head_dim=128)
GLM4_9B = sizes("glm4", 4096, 40, 32, 2, 13696, 151552)
GLM45 = sizes("glm4_moe", 5120, 92, 96, 8, 12288, 151552, head_dim=128, use_qk_norm=True) | experts(
    160, 8, 1536, first_k_dense_replace=3, attention_bias=True, num_nextn_predict_layers=1
)
GLM47_FLASH = sizes("glm4_moe_lite", 2048, 47, 20, 20, 10240, 154880, **FEW_LATENTS) | experts(
    64, 4, 1536
)
GLM5 = sizes("glm_moe_dsa", 6144, 78, 64, 64, 12288, 154880, **FEW_LATENTS) | experts(256, 8, 2048)
GRANITE_3B = sizes("granitemoe", 1536, 32, 24, 8, 512, 49155, num_local_experts=40, **TIED)
HUNYUAN_A13B = sizes("hunyuan_v1_moe", 4096, 32, 32, 8, 3072, 128167, head_dim=128, **TIED)
HUNYUAN_A13B |= {"num_experts": 64, "moe_topk": [8] * 32}
K_EXAONE = sizes("exaone_moe", 6144, 48, 64, 8, 18432, 153600, head_dim=128, sliding_window=128)
K_EXAONE |= {"num_experts": 128, "num_shared_experts": 1, "moe_intermediate_size": 2048}
GPT_OSS_20B = sizes("gpt_oss", 2880, 24, 64, 8, 2880, 201088, head_dim=64, num_local_experts=32)
GPT_OSS_SINKS = 24 * 64
LLAMA3_8B = sizes("llama", 4096, 32, 32, 8, 14336, 128256)
MINIMAX_M2 = sizes("minimax_m2", 3072, 62, 48, 8, 1536, 200064, head_dim=128)
NEOX_20B = sizes("gpt_neox", 6144, 44, 64, 64, 24576, 50432)
OLMO3_32B = sizes("olmo3", 5120, 64, 40, 8, 27648, 100278)
SEED_OSS = sizes("seed_oss", 5120, 64, 80, 8, 27648, 155136)
SMOLLM3 = sizes("smollm3", 2048, 36, 16, 4, 11008, 128256)
QWEN3_MOE = sizes("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128) | {
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}


@pytest.mark.parametrize(
    ("config", "built"),
    [
        (APERTUS_8B, 8_053_338_112),
        (APERTUS_70B, 70_599_864_320),
        (sizes("arcee", 2560, 36, 20, 4, 18432, 128004, head_dim=128), 4_619_184_640),
        (sizes("cohere", 8192, 40, 64, 64, 22528, 256000), 34_980_831_232),
        (sizes("cohere", 12288, 64, 96, 8, 33792, 256000, use_qk_norm=True), 103_810_674_688),
        (COMMAND_R7B, 8_028_033_024),
        (sizes("deepseek_v32", 7168, 61, 128, 128, 18432, 129280), 671_026_404_352),
        (DOTS1, 142_774_373_888),
        (sizes("ernie4_5", 1024, 18, 16, 2, 3072, 103424), 360_748_032),
        (ERNIE, 21_825_436_160),
        (sizes("exaone", 4096, 32, 32, 8, 14336, 102400), 7_818_448_896),
        (EXAONE4, 32_003_216_384),
        (K_EXAONE, 236_571_150_336),
        (sizes("flex_olmo", 4096, 32, 32, 32, 11008, 100352), 33_270_665_216),
        (sizes("gemma", 3072, 28, 16, 16, 24576, 256000), 8_537_680_896),
        (GLM4_9B, 9_400_279_040),
        (GLM45, 352_797_814_784),
        (GLM47_FLASH, 29_943_390_976),
        (GLM5, 743_180_190_720),
        (sizes("granite", 4096, 40, 32, 8, 12800, 49155, **TIED), 8_170_848_256),
        (GRANITE_3B | {"num_experts_per_tok": 8}, 3_298_793_472),
        (sizes("hunyuan_v1_dense", 4096, 32, 32, 8, 14336, 128167, **TIED), 7_504_568_320),
        (HUNYUAN_A13B, 80_393_183_232),
        (sizes("hy_v3", 4096, 80, 64, 8, 13312, 120832), 295_033_528_320),
        (MINIMAX_M2, 228_689_748_992),
        (sizes("ministral3", 5120, 40, 32, 8, 16384, 131072), 13_506_073_600),
        (sizes("nemotron", 18432, 96, 96, 8, 73728, 256000), 341_029_195_776),
        (OLMO3_32B, 32_233_522_176),
        (SEED_OSS, 36_151_104_512),
        (SMOLLM3, 3_075_098_624),
        (sizes("starcoder2", 6144, 40, 48, 4, 24576, 49152), 15_655_899_136),
    ],
)
def test_parameters_are_those_that_transformers_builds(config: dict[str, Any], built: int) -> None:
    assert model_from_hf(config, "x").parameters == built


@pytest.mark.parametrize(
    ("config", "built"),
    [
        (ERNIE | {"moe_num_experts": 32, "moe_k": 4, "moe_num_shared_experts": 1}, 11_312_560_640),
        (ERNIE | {"moe_layer_interval": 2}, 12_928_760_320),
        (ERNIE | {"use_bias": True, "moe_layer_end_index": -1}, 21_825_870_336),
        (K_EXAONE | {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 45}, 227_509_880_832),
        (sizes("nemotron", 3072, 32, 24, 8, 9216, 256000, head_dim=128), 4_190_509_056),
        (NEOX_20B, 20_554_567_680),
        (NEOX_20B | {"attention_bias": False}, 20_553_486_336),
        (GPT_OSS_20B, 20_914_757_184 - GPT_OSS_SINKS),
        (GPT_OSS_20B | {"attention_bias": False}, 20_914_565_184 - GPT_OSS_SINKS),
        (SEED_OSS | {"mlp_bias": True}, 36_154_971_136),
        (SEED_OSS | {"attention_out_bias": True}, 36_151_432_192),
        (SEED_OSS | {"attention_bias": False}, 36_150_318_080),
        (OLMO3_32B | {"attention_bias": True}, 32_234_308_608),
        (LLAMA3_8B | {"attention_bias": True}, 8_030_588_928),
        (LLAMA3_8B | {"mlp_bias": True}, 8_031_309_824),
    ],
)
def test_keys_that_change_the_layers_are_read(config: dict[str, Any], built: int) -> None:
    assert model_from_hf(config, "x").parameters == built


def test_the_maker_of_exaone_names_the_layers_otherwise() -> None:
    config = sizes("exaone", 4096, 32, 32, 8, 14336, 102400)
    config["num_layers"] = config.pop("num_hidden_layers")
    assert model_from_hf(config, "x").parameters == 7_818_448_896


def test_transformers_5_names_the_experts_of_qwen3_otherwise() -> None:
    older = model_from_hf(QWEN3_MOE | {"num_experts": 64}, "x")
    newer = model_from_hf(QWEN3_MOE | {"num_local_experts": 64}, "x")
    assert newer == older
    assert newer.parameters == 16_030_316_544
    assert newer.n_experts == 64


@pytest.mark.parametrize(
    ("config", "window", "full_attention_every", "left_out"),
    [
        (OLMO3_32B, 4096, 4, ""),
        (OLMO3_32B | {"layer_types": ["sliding_attention"] * 64}, 4096, 0, ""),
        (EXAONE4, 4096, 4, "positions"),
        (EXAONE4 | {"sliding_window": None}, 0, 0, ""),
        (EXAONE4 | {"sliding_window_pattern": "LLLG"}, 4096, 4, "positions"),
        (COMMAND_R7B, 4096, 4, "means that norms subtract, the layers without positions"),
        (COMMAND_R7B | {"sliding_window_pattern": 2}, 4096, 2, "positions"),
        (SMOLLM3, 0, 0, "positions"),
        (SMOLLM3 | {"sliding_window": 2048}, 0, 0, "positions"),
        (DOTS1, 0, 0, ""),
        (DOTS1 | {"sliding_window": 4096, "max_window_layers": 0}, 4096, 0, ""),
        (sizes("ministral", 4096, 36, 32, 8, 12288, 131072), 4096, 0, ""),
        (sizes("ministral3", 5120, 40, 32, 8, 16384, 131072), 0, 0, ""),
        (MINIMAX_M2, 0, 0, ""),
        (MINIMAX_M2 | {"use_mtp": True}, 0, 0, "multi-token prediction"),
        (GLM5, 0, 0, "sparse attention and its indexer"),
        (GRANITE_3B | {"num_experts_per_tok": 8}, 0, 0, "factors of embeddings"),
        (APERTUS_8B, 0, 0, "scalars of each activation"),
        (sizes("gpt_neox", 64, 2, 4, 4, 96, 256), 0, 0, ""),
        (GLM45, 0, 0, ""),
        (GLM47_FLASH | {"attention_bias": True}, 0, 0, ""),
        (sizes("llama", 64, 2, 4, 4, 96, 256, attention_bias=True, mlp_bias=True), 0, 0, ""),
    ],
)
def test_windows_and_what_is_left_out(
    config: dict[str, Any], window: int, full_attention_every: int, left_out: str
) -> None:
    model = model_from_hf(config, "x")
    assert (model.window, model.full_attention_every) == (window, full_attention_every)
    assert left_out in model.not_modelled
    assert bool(left_out) == bool(model.not_modelled)


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (APERTUS_8B, "apertus-8b"),
        (APERTUS_70B, "apertus-70b"),
        (GLM45, "glm-4.5"),
        (MINIMAX_M2 | {"use_mtp": True}, "minimax-m2"),
    ],
)
def test_a_config_agrees_with_the_preset(config: dict[str, Any], preset: str) -> None:
    read, ours = model_from_hf(config, "x"), load_model(preset)
    same = ("blocks", "block_linears", "shared_linears", "experts", "qk_norm", "norms_per_block")
    same += ("parameters", "active_parameters", "norm", "position", "mtp_modules", "not_modelled")
    for name in same:
        assert getattr(read, name) == getattr(ours, name), name


def test_makers_of_two_presets_count_active_parameters_without_embeddings() -> None:
    """GLM-4.5 has 32e9 and MiniMax-M2 10e9; of all parameters GLM-4.5 counts its module, too."""
    for preset, active in (("glm-4.5", 32e9), ("minimax-m2", 10e9)):
        model = load_model(preset)
        embeddings = 2.0 * model.vocab_size * model.hidden_size
        assert model.active_parameters - embeddings == pytest.approx(active, rel=2.5e-2)
    glm = load_model("glm-4.5")
    embeddings = 2.0 * glm.vocab_size * glm.hidden_size
    assert abs(glm.parameters + glm.mtp_parameters - embeddings - 355e9) <= 0.5e9


def test_heads_of_latent_attention_need_not_divide_the_hidden_size() -> None:
    model = model_from_hf(GLM47_FLASH, "x")
    assert (model.hidden_size, model.n_heads, model.query_width) == (2048, 20, 20 * 256)
    with pytest.raises(InputError, match="hidden_size is 4096; allowed: a multiple of num_att"):
        model_from_hf(GLM4_9B | {"model_type": "olmo3", "num_attention_heads": 24}, "x")


def test_a_list_with_one_number_for_all_layers_is_that_number() -> None:
    model = model_from_hf(HUNYUAN_A13B, "x")
    assert model.experts is not None
    assert (model.experts.top_k, model.experts.shared_hidden_size) == (8, 3072)
    with pytest.raises(InputError, match=r"moe_topk is \[8, 4\]; allowed: a whole number"):
        model_from_hf(HUNYUAN_A13B | {"moe_topk": [8, 4]}, "x")


@pytest.mark.parametrize("last", [28, -2, "27"])
def test_a_last_layer_with_experts_that_is_none_is_refused(last: object) -> None:
    with pytest.raises(InputError, match=r"moe_layer_end_index is .*; allowed: a layer, or -1"):
        model_from_hf(ERNIE | {"moe_layer_end_index": last}, "x")


def test_layers_without_experts_at_the_end_are_refused() -> None:
    with pytest.raises(InputError, match="allowed: layers with equal distances"):
        model_from_hf(ERNIE | {"moe_layer_end_index": 20}, "x")
    with pytest.raises(InputError, match="mlp_layer_types holds no list of 48 kinds; allowed: one"):
        model_from_hf(K_EXAONE | {"mlp_layer_types": ["sparse"]}, "x")


# Models for images and text ------------------------------------------------------------------


def of_images(kind: str, text: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Return the config of a model for images and text."""
    return {"model_type": kind, "text_config": text, "vision_config": {}} | others


def test_the_part_for_text_says_the_architecture() -> None:
    ministral = sizes("ministral3", 5120, 40, 32, 8, 16384, 131072)
    model = model_from_hf(of_images("mistral3", ministral), "x")
    assert model.parameters == model_from_hf(ministral, "x").parameters
    assert model.not_modelled == "images"
    voxtral = {"model_type": "voxtral", "text_config": ministral, "audio_config": {}}
    assert model_from_hf(voxtral, "x").not_modelled == "sounds"
    text = QWEN3_MOE | {"model_type": "qwen3_vl_moe_text", "num_local_experts": 128}
    assert model_from_hf(of_images("qwen3_vl_moe", text), "x").parameters == 30_532_122_624


@pytest.mark.parametrize(
    ("of_whole", "of_text", "is_tied"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"tie_word_embeddings": True}, False, True),
        ({"tie_word_embeddings": False}, True, False),
    ],
)
def test_the_flag_of_the_whole_ties_the_embeddings(
    of_whole: dict[str, bool], of_text: bool, is_tied: bool
) -> None:
    text = GLM4_9B | {"tie_word_embeddings": of_text}
    model = model_from_hf(of_images("glm4v", text, **of_whole), "x")
    assert model.tied_embeddings is is_tied


# Models that cannot be described -------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "keys", "layers"),
    [
        ("qwen3_next", {"linear_conv_kernel_dim": 4}, "layers of linear attention"),
        ("kimi_linear", {"linear_attn_config": {}}, "layers of linear attention"),
        ("minimax", {"linear_attn_alpha_factor": 1}, "layers of linear attention"),
        ("minimax_m1", {"layernorm_linear_attention_alpha": 3.5}, "layers of linear attention"),
        ("ling", {"num_kv_heads_for_linear_attn": 32}, "layers of linear attention"),
        ("nemotron_h", {"mamba_num_heads": 128}, r"state-space layers \(Mamba\)"),
        ("granitemoehybrid", {"mamba_d_conv": 4}, r"state-space layers \(Mamba\)"),
        ("falcon_h1", {"mamba_d_conv": 4}, r"state-space layers \(Mamba\)"),
        ("mamba2", {"state_size": 128}, r"state-space layers \(Mamba\)"),
        ("lfm2", {"conv_L_cache": 3}, "layers of short convolutions"),
        ("recurrent_gemma", {"lru_width": 2560}, "recurrent layers"),
    ],
)
def test_hybrid_models_are_told_what_is_missing(
    kind: str, keys: dict[str, Any], layers: str
) -> None:
    message = f"^x: model_type '{kind}' is not supported: its architecture has {layers}, which"
    for config in (keys, {"text_config": keys}):
        with pytest.raises(InputError, match=message) as caught:
            model_from_hf({"model_type": kind} | config, "x")
        assert "models template" not in str(caught.value)
