"""Which layers of a Hugging Face config lack softmax attention; `Model` has no such layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LINEAR = "layers of linear attention"
_MAMBA = "state-space layers (Mamba)"
_CONVOLUTION = "layers of short convolutions"
_RECURRENT = "recurrent layers"
# Keys that only models with such layers have, in transformers 5.24.0 and in the makers' own code
# (MiniMax-01, Kimi Linear, Ling 2.5, Nemotron-H).
_KEYS = {
    "mamba_d_conv": _MAMBA,
    "mamba_num_heads": _MAMBA,
    "ssm_state_size": _MAMBA,
    "state_size": _MAMBA,
    "conv_L_cache": _CONVOLUTION,
    "lru_width": _RECURRENT,
    "linear_attn_config": _LINEAR,
    "num_kv_heads_for_linear_attn": _LINEAR,
    "linear_conv_kernel_dim": _LINEAR,
    "layernorm_linear_attention_alpha": _LINEAR,
    "linear_attn_alpha_factor": _LINEAR,
}


def layers_beyond_attention(config: Mapping[str, Any]) -> str:
    """Return which layers without softmax attention a config has, empty where it has none."""
    return next((layers for key, layers in _KEYS.items() if key in config), "")
