"""Which keys of a Hugging Face config.json hold the sizes of each architecture.

Defaults are those of configuration_*.py in transformers 4.57.1, and what cannot be seen in a config
(biases of Qwen 2, norms of Gemma and OLMo 2) is that of modeling_*.py. Kimi K2 has the keys of
DeepSeek-V3 and states all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from axonn_tune.io.hf_layers import expert_fields, listed_layers, window_fields

Config: TypeAlias = Mapping[str, Any]
Fields: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How the configs of one architecture map to the fields of `Model`.

    The names of fields of `Experts` and `LatentAttention` have a prefix, as in ``experts.top_k``.

    Parameters
    ----------
    counts, optional_counts : mapping of str to str
        The key of the config for each field that holds a whole number from 1 on.
    flags : mapping of str to bool
        The keys of the config that hold flags, with their defaults in transformers.
    fixed : mapping
        Fields that are the same for all models of the architecture.
    defaults : mapping of str to int
        What transformers takes for keys of `counts` that a config lacks.
    numbers : mapping of str to int
        The keys, with their defaults, that hold whole numbers from 0 on for `derived`; null counts
        as 0.
    periods : mapping of str to int
        The keys, with their defaults, that hold distances between layers for `derived`.
    derived : tuple of callables
        Each returns fields that follow from the checked config; under the name ``not_modelled`` it
        may return a tuple of what predictions leave out.
    not_modelled : tuple of str
        What all models of the architecture have and predictions leave out.
    """

    counts: Mapping[str, str]
    optional_counts: Mapping[str, str]
    flags: Mapping[str, bool]
    fixed: Config = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    periods: Mapping[str, int] = field(default_factory=dict)
    derived: tuple[Callable[[Config], Fields], ...] = ()
    not_modelled: tuple[str, ...] = ()


# Rules of one architecture ----------------------------------------------------------------


def _falcon(config: Config) -> Fields:
    """Return what follows from the switches of a Falcon config."""
    is_parallel = config["parallel_attn"]
    is_new = config["new_decoder_architecture"]
    n_norms = config.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    fields: Fields = {
        "parallel_block": is_parallel,
        "norms_per_block": n_norms if is_parallel else 2,
        "position": "none" if config["alibi"] else "rotary",
    }
    if not is_new:  # The numbers of heads of keys and values count in the new architecture only.
        fields["n_kv_heads"] = 1 if config["multi_query"] else config["num_attention_heads"]
    return fields


def _window_everywhere(config: Config) -> Fields:
    """Return the window of all layers."""
    return window_fields(config, lambda layer: False)


def _window_in_every_other_layer(config: Config) -> Fields:
    """Return the window of the first, the third, the fifth layer and so on."""
    return window_fields(config, lambda layer: layer % 2 == 1)


def _gemma3_window(config: Config) -> Fields:
    """Return the window of all layers but each sixth, or another one that the config states."""
    period = config["sliding_window_pattern"]
    return window_fields(config, lambda layer: (layer + 1) % period == 0)


def _qwen_window(config: Config) -> Fields:
    """Return the window of the layers from `max_window_layers` on, if it is switched on."""
    if not config["use_sliding_window"]:
        return {}
    return window_fields(config, lambda layer: layer < config["max_window_layers"])


def _qwen_moe_window(config: Config) -> Fields:
    """Return the window of all layers, if it is switched on."""
    return _window_everywhere(config) if config["use_sliding_window"] else {}


def _qwen_moe_experts(config: Config) -> Fields:
    """Return the layers with experts: every `decoder_sparse_step`-th, unless it is excepted."""
    excepted = listed_layers(config, "mlp_only_layers") or ()
    step = config["decoder_sparse_step"]
    return expert_fields(config, lambda layer: (layer + 1) % step == 0 and layer not in excepted)


def _qwen2_shared_experts(config: Config) -> Fields:
    """Return the experts that every token passes through, whose output a gate scales."""
    shared = config["shared_expert_intermediate_size"]
    return {"experts.shared_hidden_size": shared, "experts.shared_gate": shared > 0}


def _deepseek_experts(config: Config) -> Fields:
    """Return the layers with experts, and the experts that every token passes through."""
    first, period = config["first_k_dense_replace"], config["moe_layer_freq"]
    shared = config["n_shared_experts"] * config["moe_intermediate_size"]
    return expert_fields(config, lambda layer: layer >= first and layer % period == 0) | {
        "experts.shared_hidden_size": shared
    }


def _deepseek_queries(config: Config) -> Fields:
    """Return the size of the latent vector of queries, which small models lack."""
    return {"latent_attention.q_rank": config["q_lora_rank"]}


def _multi_token_prediction(config: Config) -> Fields:
    """Return what the layers that predict further tokens are called among what is left out."""
    n_layers = config["num_nextn_predict_layers"]
    layers = "1 more layer" if n_layers == 1 else f"{n_layers} more layers"
    return {"not_modelled": (f"multi-token prediction ({layers})",) if n_layers else ()}


def _glm_norms(config: Config) -> Fields:
    return {"qk_norm": "head" if config["use_qk_norm"] else "none"}


def _llama4_experts(config: Config) -> Fields:
    """Return the layers with experts; an expert for all tokens is as large as each of the others.

    The layers are every `interleave_moe_layer_step`-th, unless the config lists them.
    """
    listed = listed_layers(config, "moe_layers")
    step = config["interleave_moe_layer_step"]
    return expert_fields(
        config, lambda layer: (layer + 1) % step == 0 if listed is None else layer in listed
    ) | {"experts.shared_hidden_size": config["intermediate_size"]}


def _llama4_attention(config: Config) -> Fields:
    """Return what of attention predictions leave out."""
    chunk = config["attention_chunk_size"]
    chunks = f"attention in chunks of {chunk} tokens (it sees all earlier tokens)"
    norms = "norms of queries and keys, which have no weights"
    return {
        "not_modelled": (
            *((chunks,) if chunk else ()),
            *((norms,) if config["use_qk_norm"] else ()),
        )
    }


def _phimoe_biases(config: Config) -> Fields:
    """Return the biases of attention; experts have none, and there is no other MLP."""
    return {
        "bias": config["attention_bias"],
        "not_modelled": ("the bias of the head",) if config["lm_head_bias"] else (),
    }


# Keys that several architectures share ------------------------------------------------------

_COUNTS = {
    "n_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
    "ffn_hidden_size": "intermediate_size",
}
_KV_HEADS = {"n_kv_heads": "num_key_value_heads"}
_HEAD_DIM = {"head_dim": "head_dim"}
_GATED = {"gated_mlp": True, "norm": "rms", "position": "rotary"}
_UNBIASED = _GATED | {"bias": False}
_UNTIED = {"tie_word_embeddings": False}
_BIAS = {"attention_bias": False}

# Mixtures of experts. In those that have no other MLP, its size is that of an expert.
_LOCAL_EXPERTS = {
    "experts.n_experts": "num_local_experts",
    "experts.top_k": "num_experts_per_tok",
    "experts.hidden_size": "intermediate_size",
}
_SMALL_EXPERTS = {
    "experts.n_experts": "num_experts",
    "experts.top_k": "num_experts_per_tok",
    "experts.hidden_size": "moe_intermediate_size",
}
_DEEPSEEK_COUNTS = _COUNTS | _SMALL_EXPERTS | {"experts.n_experts": "n_routed_experts"}
_LATENT_COUNTS = {
    "latent_attention.kv_rank": "kv_lora_rank",
    "latent_attention.content_dim": "qk_nope_head_dim",
    "latent_attention.position_dim": "qk_rope_head_dim",
    "latent_attention.value_dim": "v_head_dim",
}
_LATENT_DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_RULES = (_deepseek_experts, _deepseek_queries, _multi_token_prediction)
_FURTHER_TOKENS = {"num_nextn_predict_layers": 0}

_GEMMA3 = Architecture(
    counts=_COUNTS,
    optional_counts=_KV_HEADS | _HEAD_DIM,
    flags={"tie_word_embeddings": True} | _BIAS,
    fixed=_UNBIASED | {"norms_per_block": 4, "qk_norm": "head"},
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    numbers={"sliding_window": 4096},
    periods={"sliding_window_pattern": 6},
    derived=(_gemma3_window,),
)
_DEEPSEEK_V3 = Architecture(
    counts=_DEEPSEEK_COUNTS | _LATENT_COUNTS,
    optional_counts=_KV_HEADS,
    flags=_UNTIED | _BIAS,
    fixed=_UNBIASED,
    defaults=_LATENT_DEFAULTS
    | {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 4096,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    },
    numbers={"n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536}
    | _FURTHER_TOKENS,
    periods={"moe_layer_freq": 1},
    derived=_DEEPSEEK_RULES,
)
_LLAMA4 = Architecture(
    counts=_COUNTS | _LOCAL_EXPERTS | {"ffn_hidden_size": "intermediate_size_mlp"},
    optional_counts=_KV_HEADS | _HEAD_DIM,
    flags=_UNTIED | {"use_qk_norm": True},
    fixed=_UNBIASED,
    defaults={
        "num_hidden_layers": 48,
        "hidden_size": 5120,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 202048,
        "max_position_embeddings": 131072,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
    },
    numbers={"attention_chunk_size": 8192},
    periods={"interleave_moe_layer_step": 1},
    derived=(_llama4_experts, _llama4_attention),
)

ARCHITECTURES = {
    "gpt2": Architecture(
        counts={
            "n_layers": "n_layer",
            "hidden_size": "n_embd",
            "n_heads": "n_head",
            "vocab_size": "vocab_size",
            "seq_len": "n_positions",
        },
        optional_counts={"ffn_hidden_size": "n_inner"},
        flags={"tie_word_embeddings": True},
        fixed={"position": "learned"},
    ),
    "gpt_neox": Architecture(
        counts=_COUNTS,
        optional_counts={},
        flags=_UNTIED | {"use_parallel_residual": True, "attention_bias": True},
        fixed={"position": "rotary"},
    ),
    "llama": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED | _BIAS | {"mlp_bias": False},
        fixed=_GATED,
    ),
    "mistral": Architecture(
        counts=_COUNTS | _KV_HEADS,
        optional_counts=_HEAD_DIM,
        flags=_UNTIED,
        fixed=_UNBIASED,
        numbers={"sliding_window": 4096},
        derived=(_window_everywhere,),
    ),
    "qwen2": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS,
        flags=_UNTIED | {"use_sliding_window": False},
        fixed=_UNBIASED | {"qkv_bias": True},
        numbers={"sliding_window": 4096, "max_window_layers": 28},
        derived=(_qwen_window,),
    ),
    "qwen3": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED | _BIAS | {"use_sliding_window": False},
        fixed=_UNBIASED | {"qk_norm": "head"},
        defaults={"head_dim": 128},
        numbers={"sliding_window": 4096, "max_window_layers": 28},
        derived=(_qwen_window,),
    ),
    "gemma2": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags={"tie_word_embeddings": True} | _BIAS,
        fixed=_UNBIASED | {"norms_per_block": 4},
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        numbers={"sliding_window": 4096},
        derived=(_window_in_every_other_layer,),
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi3": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS,
        flags=_UNTIED,
        fixed=_UNBIASED,
        numbers={"sliding_window": 0},
        derived=(_window_everywhere,),
    ),
    "falcon": Architecture(
        counts={name: key for name, key in _COUNTS.items() if name != "ffn_hidden_size"},
        optional_counts={"n_kv_heads": "num_kv_heads", "ffn_hidden_size": "ffn_hidden_size"},
        flags={
            "tie_word_embeddings": True,
            "bias": False,
            "parallel_attn": True,
            "new_decoder_architecture": False,
            "multi_query": True,
            "alibi": False,
        },
        defaults={"max_position_embeddings": 2048},
        derived=(_falcon,),
    ),
    "olmo2": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS,
        flags=_UNTIED | _BIAS,
        fixed=_UNBIASED | {"qk_norm": "all"},
    ),
    "mixtral": Architecture(
        counts=_COUNTS | _LOCAL_EXPERTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED,
        fixed=_UNBIASED,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8},
        numbers={"sliding_window": 0},
        derived=(_window_everywhere,),
    ),
    "phimoe": Architecture(
        counts=_COUNTS | _LOCAL_EXPERTS,
        optional_counts=_KV_HEADS,
        flags=_UNTIED | _BIAS | {"lm_head_bias": False},
        fixed=_GATED | {"norm": "layer"},
        defaults={"num_local_experts": 16, "num_experts_per_tok": 2, "num_key_value_heads": 8},
        numbers={"sliding_window": 0},
        derived=(_window_everywhere, _phimoe_biases),
    ),
    "olmoe": Architecture(
        counts=_COUNTS | _LOCAL_EXPERTS | {"experts.n_experts": "num_experts"},
        optional_counts=_KV_HEADS,
        flags=_UNTIED | _BIAS,
        fixed=_UNBIASED | {"qk_norm": "all"},
        defaults={"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "qwen2_moe": Architecture(
        counts=_COUNTS | _SMALL_EXPERTS,
        optional_counts=_KV_HEADS,
        flags=_UNTIED | {"use_sliding_window": False, "qkv_bias": True},
        fixed=_UNBIASED,
        defaults={"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
        numbers={"sliding_window": 4096, "shared_expert_intermediate_size": 5632},
        periods={"decoder_sparse_step": 1},
        derived=(_qwen_moe_window, _qwen_moe_experts, _qwen2_shared_experts),
    ),
    "qwen3_moe": Architecture(
        counts=_COUNTS | _SMALL_EXPERTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED | _BIAS | {"use_sliding_window": False},
        fixed=_UNBIASED | {"qk_norm": "head"},
        defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"num_key_value_heads": 4},
        numbers={"sliding_window": 4096},
        periods={"decoder_sparse_step": 1},
        derived=(_qwen_moe_window, _qwen_moe_experts),
    ),
    "glm4_moe": Architecture(
        counts=_DEEPSEEK_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED | _BIAS | {"use_qk_norm": False},
        fixed=_UNBIASED,
        defaults={"n_routed_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 8}
        | {"moe_intermediate_size": 1408},
        numbers={"n_shared_experts": 1, "first_k_dense_replace": 1} | _FURTHER_TOKENS,
        periods={"moe_layer_freq": 1},
        derived=(_deepseek_experts, _glm_norms, _multi_token_prediction),
    ),
    "deepseek_v2": Architecture(
        counts=_DEEPSEEK_COUNTS | _LATENT_COUNTS,
        optional_counts=_KV_HEADS,
        flags=_UNTIED | _BIAS,
        fixed=_UNBIASED,
        defaults=_LATENT_DEFAULTS | {"n_routed_experts": 64, "moe_intermediate_size": 1407},
        numbers={"n_shared_experts": 2, "first_k_dense_replace": 0, "q_lora_rank": 1536}
        | _FURTHER_TOKENS,
        periods={"moe_layer_freq": 1},
        derived=_DEEPSEEK_RULES,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "gpt_oss": Architecture(
        counts=_COUNTS | _LOCAL_EXPERTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED,
        fixed=_GATED | {"bias": True, "experts.bias": True},
        defaults={
            "num_hidden_layers": 36,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        numbers={"sliding_window": 128},
        derived=(_window_in_every_other_layer,),
        not_modelled=("the sinks of attention",),
    ),
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
}
# The field of Model for flags of configs; other flags serve `derived`.
FLAG_FIELDS = {
    "tie_word_embeddings": "tied_embeddings",
    "use_parallel_residual": "parallel_block",
    "attention_bias": "qkv_bias",
    "qkv_bias": "qkv_bias",
    "mlp_bias": "bias",
    "bias": "bias",
}
# Keys of older configs, with the keys that replaced them.
OLD_KEYS = {
    "falcon": {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
    }
}
