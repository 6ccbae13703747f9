"""Which keys of a Hugging Face config.json hold the sizes of each architecture.

Defaults are those of configuration_*.py in transformers 4.57.1, or in 5.24.0 for architectures that
are newer, and what cannot be seen in a config (biases of Qwen 2, norms of Gemma and OLMo 2) is that
of modeling_*.py. Kimi K2 has the keys of DeepSeek-V3 and states all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from axonn_tune.io.hf import rules
from axonn_tune.io.hf.rules import Config, Fields
from axonn_tune.spec.model import SQUARED_RELU, XIELU


@dataclass(frozen=True)
class Architecture:
    """How the configs of one architecture map to the fields of `Model`.

    The names of fields of `Experts` and `LatentAttention` have a prefix, as in ``experts.top_k``.

    Parameters
    ----------
    counts, optional_counts : mapping of str to str
        The key of the config for each field that holds a whole number from 1 on; a list of equal
        numbers, one for each layer, stands for the number.
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
_SQUARED_RELU = {"gated_mlp": False, "activation": SQUARED_RELU}
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
_FIRST_DENSE = {"n_shared_experts": 1, "first_k_dense_replace": 1} | _UNGROUPED | _FURTHER_TOKENS
# What some models have beside the layers of others.
_SCALED = "the factors of embeddings and of what a layer adds"
_SPARSE = "sparse attention and its indexer (it sees all earlier tokens)"
# Cohere's norms have gains and no shifts: the weights of RMS norms.
_NO_SHIFT = "the means that norms subtract"

_LLAMA = Architecture(
    counts=_COUNTS,
    optional_counts=_KV_HEADS | _HEAD_DIM,
    flags=_UNTIED | _ATTENTION_BIAS | {"mlp_bias": False},
    fixed=_GATED,
)
_MISTRAL = Architecture(
    counts=_COUNTS | _KV_HEADS,
    optional_counts=_HEAD_DIM,
    flags=_UNTIED,
    fixed=_UNBIASED,
    numbers={"sliding_window": 4096},
    derived=(rules.window_everywhere,),
)
_GEMMA2 = Architecture(
    counts=_COUNTS,
    optional_counts=_KV_HEADS | _HEAD_DIM,
    flags={"tie_word_embeddings": True} | _ATTENTION_BIAS,
    fixed=_UNBIASED | {"norms_per_block": 4},
    defaults={"num_key_value_heads": 4, "head_dim": 256},
    numbers={"sliding_window": 4096},
    derived=(rules.window_in_every_other_layer,),
)
_OLMO2 = Architecture(
    counts=_COUNTS,
    optional_counts=_KV_HEADS,
    flags=_UNTIED | _ATTENTION_BIAS,
    fixed=_UNBIASED | {"qk_norm": "all"},
)
_OLMOE = Architecture(
    counts=_COUNTS | _LOCAL_EXPERTS | {"experts.n_experts": "num_experts"},
    optional_counts=_KV_HEADS,
    flags=_UNTIED | _ATTENTION_BIAS,
    fixed=_UNBIASED | {"qk_norm": "all"},
    defaults={"num_experts": 64, "num_experts_per_tok": 8},
)
_GLM4 = Architecture(
    counts=_COUNTS,
    optional_counts=_KV_HEADS | _HEAD_DIM,
    flags=_UNTIED | {"attention_bias": True},
    fixed=_UNBIASED | {"proj_bias": False},
    defaults={"num_key_value_heads": 2, "head_dim": 128},
)
_GLM4_MOE = Architecture(
    counts=_DEEPSEEK_COUNTS,
    optional_counts=_KV_HEADS | _HEAD_DIM,
    flags=_UNTIED | _ATTENTION_BIAS | {"use_qk_norm": False},
    fixed=_UNBIASED | {"proj_bias": False},
    defaults={"n_routed_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 8}
    | {"moe_intermediate_size": 1408},
    numbers=_FIRST_DENSE,
    periods={"moe_layer_freq": 1},
    derived=(rules.deepseek_experts, rules.head_norms, rules.multi_token_prediction),
)
_GRANITE_MOE = Architecture(
    counts=_COUNTS | _LOCAL_EXPERTS,
    optional_counts=_KV_HEADS,
    flags=_UNTIED | _ATTENTION_BIAS,
    fixed=_UNBIASED,
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    not_modelled=(_SCALED,),
)
_COHERE = Architecture(
    counts=_COUNTS,
    optional_counts=_KV_HEADS,
    flags={"tie_word_embeddings": True} | _ATTENTION_BIAS,
    fixed=_UNBIASED | {"parallel_block": True, "norms_per_block": 1},
    not_modelled=(_NO_SHIFT,),
)
_HUNYUAN = replace(_LLAMA, flags=_UNTIED | _ATTENTION_BIAS, fixed=_UNBIASED | {"qk_norm": "head"})

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
    derived=(rules.window_with_period,),
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
    derived=(
        rules.llama4_experts,
        rules.shared_expert_of_the_same_size,
        rules.llama4_attention,
    ),
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
    "llama": _LLAMA,
    "mistral": _MISTRAL,
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
    "gemma2": _GEMMA2,
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
    "olmo2": _OLMO2,
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
    "olmoe": _OLMOE,
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
    "glm4_moe": _GLM4_MOE,
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
        flags=_UNTIED | {"attention_bias": True},
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
    "apertus": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED | _ATTENTION_BIAS,
        fixed=_UNBIASED | {"gated_mlp": False, "activation": XIELU, "qk_norm": "head"},
        not_modelled=("the two scalars of each activation",),
    ),
    "arcee": replace(_LLAMA, fixed=_GATED | _SQUARED_RELU),
    "cohere": replace(
        _COHERE, flags={**_COHERE.flags, "use_qk_norm": False}, derived=(rules.cohere_norms,)
    ),
    "cohere2": replace(
        _COHERE,
        numbers={"sliding_window": 4096},
        periods={"sliding_window_pattern": 4},
        derived=(rules.window_with_period,),
        not_modelled=(_NO_SHIFT, rules.NOT_ROTATED),
    ),
    "ernie4_5": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags={"tie_word_embeddings": True, "use_bias": False},
        fixed=_GATED,
        defaults={"num_key_value_heads": 2, "head_dim": 128},
    ),
    "exaone4": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED,
        fixed=_UNBIASED | {"qk_norm": "head"},
        defaults={"num_key_value_heads": 32},
        numbers={"sliding_window": 4096},
        derived=(rules.window_but_in_every_fourth_layer, rules.exaone_positions),
    ),
    "exaone": _LLAMA,
    "gemma": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_GEMMA2.flags,
        fixed=_UNBIASED,
        defaults={"num_key_value_heads": 16, "head_dim": 256},
    ),
    "glm": _GLM4,
    "glm4": replace(_GLM4, fixed={**_GLM4.fixed, "norms_per_block": 4}),
    "granite": replace(_LLAMA, not_modelled=(_SCALED,)),
    "hunyuan_v1_dense": _HUNYUAN,
    "ministral": _MISTRAL,
    "ministral3": replace(
        _MISTRAL,
        defaults={"head_dim": 128, "num_key_value_heads": 8},
        numbers={"sliding_window": 0},
    ),
    "nemotron": replace(_LLAMA, fixed={"norm": "layer", "position": "rotary"} | _SQUARED_RELU),
    "olmo3": replace(
        _OLMO2,
        numbers={"sliding_window": 4096},
        derived=(rules.window_but_in_every_fourth_layer,),
    ),
    "seed_oss": replace(
        _LLAMA,
        flags=_UNTIED | {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
        defaults={"num_key_value_heads": 8, "head_dim": 128},
    ),
    "smollm3": replace(
        _LLAMA,
        flags={**_LLAMA.flags, "tie_word_embeddings": True, "use_sliding_window": False},
        defaults={"num_key_value_heads": 4},
        numbers={"sliding_window": 0},
        derived=(rules.qwen_moe_window,),
        not_modelled=(rules.NOT_ROTATED,),
    ),
    "starcoder2": Architecture(
        counts=_COUNTS,
        optional_counts=_KV_HEADS,
        flags={"tie_word_embeddings": True, "use_bias": True},
        fixed={"position": "rotary"},
        defaults={"num_key_value_heads": 2},
        numbers={"sliding_window": 0},
        derived=(rules.window_everywhere,),
    ),
    "deepseek_v32": replace(
        _DEEPSEEK_V3,
        defaults={**_DEEPSEEK_V3.defaults, "max_position_embeddings": 163840},
        not_modelled=(_SPARSE,),
    ),
    "dots1": replace(
        _GLM4_MOE,
        flags=_UNTIED | _ATTENTION_BIAS,
        fixed=_UNBIASED | {"qk_norm": "head"},
        defaults={},
        numbers=_FIRST_DENSE
        | {"n_shared_experts": 0, "first_k_dense_replace": 0}
        | {"sliding_window": 4096, "max_window_layers": 62},
        derived=(rules.deepseek_experts, rules.window_in_last_layers),
    ),
    "ernie4_5_moe": Architecture(
        counts=_DEEPSEEK_COUNTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags={"tie_word_embeddings": True, "use_bias": False},
        fixed=_GATED,
        defaults={"num_key_value_heads": 4, "n_routed_experts": 64, "num_experts_per_tok": 6}
        | {"moe_intermediate_size": 1536},
        numbers={"n_shared_experts": 2, "moe_layer_start_index": 1},
        periods={"moe_layer_interval": 1},
        derived=(rules.ernie_experts, rules.shared_experts),
    ),
    "exaone_moe": replace(
        _GLM4_MOE,
        flags=_UNTIED,
        fixed=_UNBIASED | {"qk_norm": "head"},
        defaults={"num_key_value_heads": 32, "n_routed_experts": 64, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 1024},
        numbers=_FIRST_DENSE | {"sliding_window": 4096},
        derived=(
            rules.deepseek_experts,
            rules.window_but_in_every_fourth_layer,
            rules.exaone_positions,
            rules.multi_token_prediction,
        ),
    ),
    "flex_olmo": replace(_OLMOE, defaults={"num_experts": 7, "num_experts_per_tok": 5}),
    "glm4_moe_lite": replace(
        _DEEPSEEK_V3, defaults={}, numbers=_FIRST_DENSE | {"q_lora_rank": 768}
    ),
    "glm_moe_dsa": replace(
        _DEEPSEEK_V3,
        defaults={},
        numbers=_FIRST_DENSE | {"first_k_dense_replace": 3, "q_lora_rank": 2048},
        not_modelled=(_SPARSE,),
    ),
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": replace(
        _GRANITE_MOE,
        numbers={"shared_intermediate_size": 0},
        derived=(rules.granite_shared_experts,),
    ),
    "hunyuan_v1_moe": replace(
        _HUNYUAN,
        counts=_COUNTS
        | _LOCAL_EXPERTS
        | {"experts.n_experts": "num_experts", "experts.top_k": "moe_topk"},
        derived=(rules.shared_expert_of_the_same_size,),
    ),
    "hy_v3": replace(
        _GLM4_MOE,
        flags=_UNTIED | _ATTENTION_BIAS,
        fixed=_UNBIASED | {"qk_norm": "head"},
        defaults={"num_key_value_heads": 8, "n_routed_experts": 192, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 1536, "head_dim": 128},
        derived=(rules.deepseek_experts, rules.multi_token_prediction),
    ),
    "minimax_m2": Architecture(
        counts=_COUNTS | _LOCAL_EXPERTS,
        optional_counts=_KV_HEADS | _HEAD_DIM,
        flags=_UNTIED,
        fixed=_UNBIASED | {"qk_norm": "all"},
        defaults={"num_local_experts": 256, "num_experts_per_tok": 8}
        | {"num_key_value_heads": 8, "head_dim": 128},
        derived=(rules.minimax_modules,),
    ),
}
# The parts for text of models for images and text.
ARCHITECTURES |= {
    "qwen2_5_vl": ARCHITECTURES["qwen2"],
    "qwen2_5_vl_text": ARCHITECTURES["qwen2"],
    "qwen3_vl_text": ARCHITECTURES["qwen3"],
    "qwen3_vl_moe_text": replace(ARCHITECTURES["qwen3_moe"], defaults={}),
}
# The fields of Model for flags of configs; other flags serve `derived`.
FLAG_FIELDS = {
    "tie_word_embeddings": ("tied_embeddings",),
    "use_parallel_residual": ("parallel_block",),
    "attention_bias": ("qkv_bias", "proj_bias"),
    "attention_out_bias": ("proj_bias",),
    "qkv_bias": ("qkv_bias",),
    "mlp_bias": ("bias",),
    "bias": ("bias",),
    "use_bias": ("bias",),
}
# Keys that other versions of transformers or other architectures write, with those of the table.
_FEW_AND_SHARED = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
OTHER_KEYS = {
    "falcon": {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
    },
    "exaone": {"num_layers": "num_hidden_layers"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "qwen3_vl_moe_text": {"num_local_experts": "num_experts"},
    "ernie4_5_moe": {
        "moe_num_experts": "n_routed_experts",
        "moe_k": "num_experts_per_tok",
        "moe_num_shared_experts": "n_shared_experts",
    },
    "exaone_moe": _FEW_AND_SHARED,
    "hy_v3": _FEW_AND_SHARED,
}
