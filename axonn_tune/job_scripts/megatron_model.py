"""The flags by which ``pretrain_gpt.py`` of Megatron-LM builds a model.

Names and meanings as in NVIDIA/Megatron-LM at d98e8a64 (August 2026):
megatron/training/arguments.py, and the configurations of
megatron/core/transformer/transformer_config.py from which it builds its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from axonn_tune.spec.blocks import Experts, LatentAttention
from axonn_tune.spec.model import SQUARED_RELU, Model

# The gate and the positions of gpt-oss, the only model with such in Megatron-LM. Its numbers are of
# its config.json (and of NVIDIA-NeMo/Megatron-Bridge at 067f987d, gpt_oss_bridge.py).
_CLAMPED_GATE = "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0"
_SCALED_ROTARY = (
    "--position-embedding-type yarn --rotary-scaling-factor 32 "
    "--yarn-original-max-position-embeddings 4096"
)


def model_flags(model: Model, seq_len: int) -> list[str]:
    """Return the flags with their values, one or a few of a kind per line."""
    lines = [
        f"--num-layers {model.n_layers}",
        f"--hidden-size {model.hidden_size}",
        f"--ffn-hidden-size {model.ffn_hidden_size}",
        f"--num-attention-heads {model.n_heads}",
        f"--kv-channels {model.head_dim}",
        f"--seq-length {seq_len}",
        f"--max-position-embeddings {max(seq_len, model.seq_len)}",
        f"--tokenizer-type NullTokenizer --vocab-size {model.vocab_size}",
    ]
    if model.n_kv_heads < model.n_heads and model.latent_attention is None:
        lines.append(f"--group-query-attention --num-query-groups {model.n_kv_heads}")
    if model.clamped_gate:
        lines.append(_CLAMPED_GATE)
    elif model.gated_mlp:
        lines.append("--swiglu")
    elif model.activation == SQUARED_RELU:
        lines.append("--squared-relu")
    if model.norm == "rms":
        lines.append("--normalization RMSNorm")
    if not model.bias:
        lines.append("--disable-bias-linear")
    if model.qkv_bias and not model.bias:
        lines.append("--add-qkv-bias")
    if model.scaled_rotary:
        lines.append(_SCALED_ROTARY)
    elif model.position == "rotary":
        lines.append("--position-embedding-type rope")
    elif model.position == "none":
        lines.append("--position-embedding-type none")
    if not model.tied_embeddings:
        lines.append("--untie-embeddings-and-output-weights")
    if model.latent_attention is not None:
        lines += _latent_attention_flags(model.latent_attention)
    elif model.qk_norm:
        lines.append("--qk-layernorm")
    if 0 < model.window < seq_len:
        lines += _window_flags(model)
    if model.experts is not None:
        lines += _expert_flags(model, model.experts)
    return lines


def _latent_attention_flags(latent: LatentAttention) -> list[str]:
    """Return the flags of latent attention, whose latent vectors are normalised."""
    query_rank = [f"--q-lora-rank {latent.q_rank}"] if latent.q_rank else []
    return [
        "--multi-latent-attention",
        *query_rank,
        f"--kv-lora-rank {latent.kv_rank}",
        f"--qk-head-dim {latent.content_dim}",
        f"--qk-pos-emb-head-dim {latent.position_dim}",
        f"--v-head-dim {latent.value_dim}",
        "--qk-layernorm",
    ]


def _window_flags(model: Model) -> list[str]:
    """Return the flags of sliding windows: how many tokens back a token sees, and in which layers.

    Megatron-LM counts the tokens before a token without it.
    """
    lines = [f"--window-size ({model.window - 1},0)"]
    if model.full_attention_every:
        lines.append(f"--window-attn-skip-freq {model.full_attention_every}")
    return lines


def _expert_flags(model: Model, experts: Experts) -> list[str]:
    """Return the flags of the experts and of the layers that have them."""
    lines = [
        f"--num-experts {experts.n_experts}",
        f"--moe-router-topk {experts.top_k}",
        f"--moe-ffn-hidden-size {experts.hidden_size}",
    ]
    if experts.top_k == 1:
        # TransformerConfig asserts it: the softmax of one expert's score alone has no gradient.
        lines.append("--moe-router-pre-softmax")
    if experts.n_groups > 1:
        lines.append(f"--moe-router-num-groups {experts.n_groups}")
        lines.append(f"--moe-router-group-topk {experts.top_groups}")
    if experts.shared_hidden_size:
        lines.append(f"--moe-shared-expert-intermediate-size {experts.shared_hidden_size}")
    if experts.shared_gate:
        lines.append("--moe-shared-expert-gate")
    if experts.first_layer:
        lines.append(f"--moe-layer-freq {_pattern(block.has_experts for block in model.blocks)}")
    elif experts.every > 1:
        lines.append(f"--moe-layer-freq {experts.every}")
    return lines


def _pattern(have_experts: Iterable[bool]) -> str:
    """Return which layers have experts as Megatron-LM reads it, such as ``[0]*3+[1]*58``."""
    runs = ((flag, len(list(run))) for flag, run in groupby(have_experts))
    return "+".join(f"[{int(flag)}]*{count}" for flag, count in runs)
