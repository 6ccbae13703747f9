"""Hugging Face configs: realistic ones give the published number of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hf_configs import sizes

from axonn_tune.errors import AxonnTuneError, InputError
from axonn_tune.io.hf.config import load_hf_config, model_from_hf
from axonn_tune.io.presets import load_model

GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "bos_token_id": 50256,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-05,
    "vocab_size": 50257,
}
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"],
    "attention_probs_dropout_prob": 0,
    "hidden_act": "gelu_fast",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 50432,
}
LLAMA2_7B = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
LLAMA2_70B = LLAMA2_7B | {
    "_name_or_path": "meta-llama/Llama-2-70b-hf",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
}
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
LLAMA32_1B = LLAMA3_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MISTRAL_NEMO = MISTRAL_7B | {
    "head_dim": 128,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "sliding_window": None,
    "vocab_size": 131072,
}


QWEN25_7B = sizes("qwen2", 3584, 28, 28, 4, 18944, 152064, use_sliding_window=False) | {
    "max_position_embeddings": 131072,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
}
QWEN25_05B = sizes("qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True)
QWEN3_8B = sizes("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128)
QWEN3_06B = sizes("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True)
GEMMA2_2B = sizes("gemma2", 2304, 26, 8, 4, 9216, 256000, head_dim=256) | {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
}
GEMMA2_27B = sizes("gemma2", 4608, 46, 32, 16, 36864, 256000, head_dim=128)
GEMMA3_1B = sizes("gemma3_text", 1152, 26, 4, 1, 6912, 262144, head_dim=256, sliding_window=512)
GEMMA3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
PHI3_MINI = sizes("phi3", 3072, 32, 32, 32, 8192, 32064, sliding_window=2047)
PHI4 = sizes("phi3", 5120, 40, 40, 10, 17920, 100352, sliding_window=None)
OLMO2_7B = sizes("olmo2", 4096, 32, 32, 32, 11008, 100352)
OLMO2_32B = sizes("olmo2", 5120, 64, 40, 8, 27648, 100352)
FALCON_7B = {
    "alibi": False,
    "bias": False,
    "hidden_size": 4544,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
}
FALCON_40B = {
    "hidden_size": 8192,
    "model_type": "falcon",
    "multi_query": True,
    "n_head": 128,
    "n_head_kv": 8,
    "n_layer": 60,
    "new_decoder_architecture": True,
    "vocab_size": 65024,
}


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (GPT2, 124_439_808),
        (NEOX, 20_554_567_680),
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA2_70B, 68_976_648_192),
        (LLAMA3_8B, 8_030_261_248),
        (LLAMA32_1B, 1_235_814_400),
        (MISTRAL_7B, 7_241_732_096),
        (MISTRAL_NEMO, 12_247_782_400),
        (QWEN25_7B, 7_615_616_512),
        (QWEN25_05B, 494_032_768),
        (GEMMA2_2B, 2_614_341_888),
        (GEMMA2_27B, 27_227_128_320),
        (PHI3_MINI, 3_821_079_552),
        (PHI4, 14_659_507_200),
        (FALCON_7B, 6_921_720_704),
        (FALCON_40B, 41_303_293_952),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_06B, 596_049_920),
        (GEMMA3_1B, 999_885_952),
        (OLMO2_7B, 7_298_617_344),
        (OLMO2_32B, 32_234_279_936),
    ],
)
def test_parameters_match_the_published_count(config: dict[str, Any], published: int) -> None:
    assert model_from_hf(config, "config.json").parameters == published


def test_of_a_model_for_images_and_text_the_text_is_read_with_the_defaults() -> None:
    model = model_from_hf(GEMMA3_4B, "x")
    assert (model.n_heads, model.n_kv_heads, model.head_dim) == (8, 4, 256)
    # 3209M in table 1 of the Gemma 3 report (arXiv 2503.19786), without embedding.
    without_embedding = model.parameters - model.vocab_size * model.hidden_size
    assert round(without_embedding / 1e6) == 3209
    assert "images" in model.not_modelled


def test_falcons_of_different_kinds() -> None:
    shared = model_from_hf(FALCON_7B, "x")
    assert (shared.n_kv_heads, shared.norms_per_block, shared.parallel_block) == (1, 1, True)
    new = model_from_hf(FALCON_40B, "x")
    assert (new.n_kv_heads, new.norms_per_block, new.position) == (8, 2, "rotary")
    old = model_from_hf(
        FALCON_7B | {"parallel_attn": False, "alibi": True, "multi_query": False, "bias": True}, "x"
    )
    assert (old.n_kv_heads, old.norms_per_block, old.position) == (71, 2, "none")
    assert old.bias
    assert "ALiBi" in old.not_modelled
    with pytest.raises(InputError, match="multi_query is 'yes'; allowed: true or false"):
        model_from_hf(FALCON_7B | {"multi_query": "yes"}, "x")


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (NEOX, "gpt-neox-20b"),
        (LLAMA2_7B, "llama2-7b"),
        (LLAMA2_70B, "llama2-70b"),
        (LLAMA3_8B, "llama3-8b"),
    ],
)
def test_a_config_agrees_with_the_preset(config: dict[str, Any], preset: str) -> None:
    ours, theirs = load_model(preset), model_from_hf(config, "config.json")
    for name in (
        "block_linears",
        "head",
        "norm",
        "position",
        "parallel_block",
        "tied_embeddings",
        "seq_len",
        "n_kv_heads",
        "head_dim",
        "gated_mlp",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_defaults_of_each_architecture() -> None:
    gpt2 = model_from_hf(GPT2, "x")
    assert (gpt2.tied_embeddings, gpt2.position, gpt2.norm) == (True, "learned", "layer")
    assert (gpt2.ffn_hidden_size, gpt2.gated_mlp, gpt2.bias) == (3072, False, True)
    bare = {key: value for key, value in NEOX.items() if key != "tie_word_embeddings"}
    neox = model_from_hf(bare, "x")
    assert (neox.parallel_block, neox.tied_embeddings, neox.qkv_bias) == (True, False, True)
    llama = model_from_hf({k: v for k, v in LLAMA2_7B.items() if "key_value" not in k}, "x")
    assert (llama.n_kv_heads, llama.qkv_bias, llama.bias) == (32, False, False)


def test_flags_are_followed() -> None:
    assert model_from_hf(GPT2 | {"n_inner": 1000}, "x").ffn_hidden_size == 1000
    assert model_from_hf(GPT2 | {"n_inner": None}, "x").ffn_hidden_size == 3072
    assert not model_from_hf(GPT2 | {"tie_word_embeddings": False}, "x").tied_embeddings
    neox = model_from_hf(NEOX | {"use_parallel_residual": False, "attention_bias": False}, "x")
    assert (neox.parallel_block, neox.qkv_bias, neox.proj_bias) == (False, False, False)
    assert neox.bias
    llama = model_from_hf(LLAMA2_7B | {"attention_bias": True}, "x")
    assert (llama.qkv_bias, llama.proj_bias, llama.bias) == (True, True, False)
    assert model_from_hf(LLAMA2_7B | {"mlp_bias": True}, "x").bias
    assert model_from_hf(MISTRAL_NEMO, "x").head_dim == 128
    assert model_from_hf(MISTRAL_7B | {"head_dim": None}, "x").head_dim == 128


def test_what_predictions_leave_out_is_noted() -> None:
    assert model_from_hf(MISTRAL_NEMO, "x").not_modelled == ""
    assert model_from_hf(QWEN25_7B, "x").not_modelled == ""
    assert model_from_hf(GEMMA2_2B, "x").not_modelled == "soft caps of logits"
    some = QWEN25_7B | {"use_sliding_window": True, "max_window_layers": 21}
    text = "the sliding window of 131072 tokens in 7 of 28 layers"
    assert model_from_hf(some, "x").not_modelled == text


LISTED = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("config", "window", "full_attention_every"),
    [
        (MISTRAL_7B, 4096, 0),
        ({key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}, 4096, 0),
        (MISTRAL_NEMO, 0, 0),
        (PHI3_MINI, 2047, 0),
        (PHI4, 0, 0),
        (QWEN25_7B, 0, 0),
        (QWEN25_7B | {"use_sliding_window": True, "max_window_layers": 28}, 0, 0),
        (QWEN25_7B | {"use_sliding_window": True, "max_window_layers": 0}, 131072, 0),
        (GEMMA2_2B, 4096, 2),
        (GEMMA3_1B, 512, 6),
        (GEMMA3_1B | {"sliding_window": None}, 0, 0),
        (GEMMA3_1B | {"sliding_window_pattern": 2}, 512, 2),
        (GEMMA3_1B | {"layer_types": 13 * LISTED[::-1]}, 512, 2),
        (GEMMA3_1B | {"layer_types": 26 * LISTED[:1]}, 0, 0),
        (GEMMA3_1B | {"layer_types": 26 * LISTED[1:]}, 512, 0),
    ],
)
def test_windows_are_in_the_layers_that_have_them(
    config: dict[str, Any], window: int, full_attention_every: int
) -> None:
    model = model_from_hf(config, "x")
    assert (model.window, model.full_attention_every) == (window, full_attention_every)
    assert "window" not in model.not_modelled


@pytest.mark.parametrize("kinds", ["sliding_attention", ["full_attention"], 3])
def test_a_list_of_layers_that_is_none_is_refused(kinds: object) -> None:
    with pytest.raises(InputError, match="layer_types holds no list of 26 kinds; allowed: one for"):
        model_from_hf(GEMMA3_1B | {"layer_types": kinds}, "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": -1}, "sliding_window is -1; allowed: a whole number, 0 to 1073741824"),
        ({"hidden_size": 10**30}, f"hidden_size is {10**30}; allowed: .* 1 to 1073741824"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0; allowed: .* 1 to "),
        ({"num_hidden_layers": 2**30}, "num_hidden_layers is 1073741824; allowed: at most 10000"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_from_hf(GEMMA3_1B | change, "x")


def test_a_sequence_length_that_is_only_the_longest_has_the_name_of_its_key() -> None:
    assert model_from_hf(QWEN25_7B, "x").seq_len_key == "max_position_embeddings"
    assert model_from_hf(GPT2, "x").seq_len_key == ""


@pytest.mark.parametrize(
    ("config", "origin", "name"),
    [
        (LLAMA2_7B, "a/config.json", "Llama-2-7b-hf"),
        (GPT2, "my/gpt2/config.json", "gpt2"),
        (GPT2, "other.json", "other"),
        (GPT2, "config.json", "gpt2"),
        (GPT2, "some-origin", "some-origin"),
    ],
)
def test_a_model_is_named_after_its_origin(config: dict[str, Any], origin: str, name: str) -> None:
    assert model_from_hf(config, origin).name == name


def test_an_unknown_architecture_names_the_supported_ones() -> None:
    with pytest.raises(InputError, match=r"x: model_type 'bert' .* gpt2, gpt_neox, llama, mistral"):
        model_from_hf({"model_type": "bert"}, "x")
    with pytest.raises(InputError, match=r"kimi_k2, .*models template.* dense or with experts"):
        model_from_hf(QWEN3_8B | {"model_type": "some_moe", "num_experts": 64}, "x")
    with pytest.raises(InputError, match="no model_type; supported: gpt2"):
        model_from_hf({}, "x")
    with pytest.raises(InputError, match="model_type"):
        model_from_hf({"model_type": ["gpt2"]}, "x")


def test_missing_and_wrong_keys_are_named_all_at_once() -> None:
    config = {k: v for k, v in LLAMA3_8B.items() if k not in ("hidden_size", "vocab_size")}
    config |= {"num_hidden_layers": "32", "num_key_value_heads": 2.0, "tie_word_embeddings": 1}
    with pytest.raises(InputError) as caught:
        model_from_hf(config, "a.json")
    message = str(caught.value)
    assert message.startswith("a.json (llama): missing hidden_size, vocab_size; ")
    assert "num_hidden_layers is '32'; allowed: a whole number" in message
    assert "num_key_value_heads is 2.0" in message
    assert "tie_word_embeddings is 1; allowed: true or false" in message


@pytest.mark.parametrize("value", [0, -1, True, 10**400])
def test_counts_that_make_no_sense_are_refused(value: object) -> None:
    with pytest.raises(InputError, match="n_layer"):
        model_from_hf(GPT2 | {"n_layer": value}, "x")


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match=r"n_embd is 770; allowed: a multiple of n_head \(12\)"):
        model_from_hf(GPT2 | {"n_embd": 770}, "x")
    with pytest.raises(InputError, match="n_kv_heads is 5"):
        model_from_hf(LLAMA3_8B | {"num_key_value_heads": 5}, "x")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"a": 1,\n "b": }', "line 2: malformed JSON"),
        ("[]", "a JSON object"),
        ("{}", "no model_type"),
        ("[" * 100_000, "malformed JSON"),
        ('{"a": ' + "9" * 5000 + "}", "malformed JSON"),
    ],
)
def test_malformed_configs_are_named(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(AxonnTuneError, match=part) as caught:
        load_hf_config(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", ["a\x1b[31m", "a/b\x07", "x" * 1000])
def test_a_name_that_cannot_be_printed_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"^f\.json \(llama\): its name is .* printed on one line"):
        model_from_hf({**LLAMA2_7B, "_name_or_path": name}, "f.json")


def test_what_the_model_refuses_names_the_file() -> None:
    with pytest.raises(InputError, match=r"^f\.json: model .*: n_kv_heads is 5"):
        model_from_hf({**LLAMA2_7B, "num_key_value_heads": 5}, "f.json")
