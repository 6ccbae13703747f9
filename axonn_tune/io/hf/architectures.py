"""Which keys of a Hugging Face config.json hold the sizes of each architecture.

Defaults are those of configuration_*.py in transformers 4.57.1, and what cannot be seen in a config
(biases of Qwen 2, norms of Gemma and OLMo 2) is that of modeling_*.py. Kimi K2 has the keys of
DeepSeek-V3 and states all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from axonn_tune.io.hf import rules
from axonn_tune.io.hf.rules import Config, Fields


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
_ATTENTION_BIAS = {"attention_bias": False}

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
_DEEPSEEK_RULES = (rules.deepseek_experts, rules.deepseek_queries, rules.multi_token_prediction)
_FURTHER_TOKENS = {"num_nextn_predict_layers": 0}
_UNGROUPED = {"n_group": 1, "topk_group": 1}

_GEMMA3 = Architecture(
    counts=_COUNTS,
    optional_counts=_KV_HEADS | _HEAD_DIM,
    flags={"tie_word_embeddings": True} | _ATTENTION_BIAS,
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
    derived=(rules.gemma3_window,),
)
_DEEPSEEK_V3 = Architecture(
    counts=_DEEPSEEK_COUNTS | _LATENT_COUNTS,
    optional_counts=_KV_HEADS,
    flags=_UNTIED | _ATTENTION_BIAS,
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
    | {"n_group": 8, "topk_group": 4}
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
    derived=(rules.llama4_experts, rules.llama4_attention),
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
        flags=_UNTIED | _ATTENTION_BIAS | {"mlp_bias": False},
        fixed=_GATED,
    ),
    "mistral": Architecture(
        counts=_COUNTS | _KV_HEADS,
        optional_counts=_HEAD_DIM,
        flags=_UNTIED,
        fixed=_UNBIASED,
        numbers={"sliding_window": 4096},
        derived=(rules.window_everywhere,),
    ),
    "qwen2": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS,
        flags=_UNTIED | {"use_sliding_window": False},
        fixed=_UNBIASED | {"qkv_bias": True},
        numbers={"sliding_window": 4096, "max_window_layers": 28},
        derived=(rules.qwen_window,),
    ),
    "qwen3": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED | _ATTENTION_BIAS | {"use_sliding_window": False},
        fixed=_UNBIASED | {"qk_norm": "head"},
        defaults={"head_dim": 128},
        numbers={"sliding_window": 4096, "max_window_layers": 28},
        derived=(rules.qwen_window,),
    ),
    "gemma2": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags={"tie_word_embeddings": True} | _ATTENTION_BIAS,
        fixed=_UNBIASED | {"norms_per_block": 4},
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        numbers={"sliding_window": 4096},
        derived=(rules.window_in_every_other_layer,),
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "phi3": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS,
        flags=_UNTIED,
        fixed=_UNBIASED,
        numbers={"sliding_window": 0},
        derived=(rules.window_everywhere,),
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
        derived=(rules.falcon,),
    ),
    "olmo2": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS,
        flags=_UNTIED | _ATTENTION_BIAS,
        fixed=_UNBIASED | {"qk_norm": "all"},
    ),
    "mixtral": Architecture(
        counts=_COUNTS | _LOCAL_EXPERTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED,
        fixed=_UNBIASED,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8},
        numbers={"sliding_window": 0},
        derived=(rules.window_everywhere,),
    ),
    "phimoe": Architecture(
        counts=_COUNTS | _LOCAL_EXPERTS,
        optional_counts=_KV_HEADS,
        flags=_UNTIED | _ATTENTION_BIAS | {"lm_head_bias": False},
        fixed=_GATED | {"norm": "layer"},
        defaults={"num_local_experts": 16, "num_experts_per_tok": 2, "num_key_value_heads": 8},
        numbers={"sliding_window": 0},
        derived=(rules.window_everywhere, rules.phimoe_biases),
    ),
    "olmoe": Architecture(
        counts=_COUNTS | _LOCAL_EXPERTS | {"experts.n_experts": "num_experts"},
        optional_counts=_KV_HEADS,
        flags=_UNTIED | _ATTENTION_BIAS,
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
        derived=(rules.qwen_moe_window, rules.qwen_moe_experts, rules.qwen2_shared_experts),
    ),
    "qwen3_moe": Architecture(
        counts=_COUNTS | _SMALL_EXPERTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED | _ATTENTION_BIAS | {"use_sliding_window": False},
        fixed=_UNBIASED | {"qk_norm": "head"},
        defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"num_key_value_heads": 4},
        numbers={"sliding_window": 4096},
        periods={"decoder_sparse_step": 1},
        derived=(rules.qwen_moe_window, rules.qwen_moe_experts),
    ),
    "glm4_moe": Architecture(
        counts=_DEEPSEEK_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED | _ATTENTION_BIAS | {"use_qk_norm": False},
        fixed=_UNBIASED,
        defaults={"n_routed_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 8}
        | {"moe_intermediate_size": 1408},
        numbers={"n_shared_experts": 1, "first_k_dense_replace": 1} | _UNGROUPED | _FURTHER_TOKENS,
        periods={"moe_layer_freq": 1},
        derived=(rules.deepseek_experts, rules.glm_norms, rules.multi_token_prediction),
    ),
    "deepseek_v2": Architecture(
        counts=_DEEPSEEK_COUNTS | _LATENT_COUNTS,
        optional_counts=_KV_HEADS,
        flags=_UNTIED | _ATTENTION_BIAS,
        fixed=_UNBIASED,
        defaults=_LATENT_DEFAULTS | {"n_routed_experts": 64, "moe_intermediate_size": 1407},
        numbers={"n_shared_experts": 2, "first_k_dense_replace": 0, "q_lora_rank": 1536}
        | _UNGROUPED
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
        fixed=_GATED
        | {"bias": True, "experts.bias": True, "clamped_gate": True, "scaled_rotary": True},
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
        derived=(rules.window_in_every_other_layer,),
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
