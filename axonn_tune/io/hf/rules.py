"""What follows from the keys of a Hugging Face config, architecture by architecture.

Each rule takes a checked config and returns fields of `Model`; `architectures` says whose it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from axonn_tune.errors import InputError
from axonn_tune.io.hf.layers import expert_fields, listed_kinds, listed_layers, window_fields

Config: TypeAlias = Mapping[str, Any]
Fields: TypeAlias = dict[str, Any]

NOT_ROTATED = "the layers without positions (they are rotated as the others are)"


def falcon(config: Config) -> Fields:
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


def window_everywhere(config: Config) -> Fields:
    """Return the window of all layers."""
    return window_fields(config, lambda layer: False)


def window_in_every_other_layer(config: Config) -> Fields:
    """Return the window of the first, the third, the fifth layer and so on."""
    return window_fields(config, lambda layer: layer % 2 == 1)


def window_with_period(config: Config) -> Fields:
    """Return the window of all layers but those at the distance that the config states."""
    period = config["sliding_window_pattern"]
    return window_fields(config, lambda layer: (layer + 1) % period == 0)


def window_but_in_every_fourth_layer(config: Config) -> Fields:
    """Return the window of all layers but each fourth."""
    return window_fields(config, lambda layer: (layer + 1) % 4 == 0)


def window_in_last_layers(config: Config) -> Fields:
    """Return the window of the layers from `max_window_layers` on."""
    return window_fields(config, lambda layer: layer < config["max_window_layers"])


def qwen_window(config: Config) -> Fields:
    """Return the window of the layers from `max_window_layers` on, if it is switched on."""
    return window_in_last_layers(config) if config["use_sliding_window"] else {}


def qwen_moe_window(config: Config) -> Fields:
    """Return the window of all layers, if it is switched on."""
    return window_everywhere(config) if config["use_sliding_window"] else {}


def qwen_moe_experts(config: Config) -> Fields:
    """Return the layers with experts: every `decoder_sparse_step`-th, unless it is excepted."""
    excepted = listed_layers(config, "mlp_only_layers") or frozenset()
    step = config["decoder_sparse_step"]
    return expert_fields(config, lambda layer: (layer + 1) % step == 0 and layer not in excepted)


def qwen2_shared_experts(config: Config) -> Fields:
    """Return the experts that every token passes through, whose output a gate scales."""
    shared = config["shared_expert_intermediate_size"]
    return {"experts.shared_hidden_size": shared, "experts.shared_gate": shared > 0}


def deepseek_experts(config: Config) -> Fields:
    """Return the layers with experts, their groups, and the experts of every token.

    The layers are those from `first_k_dense_replace` on, unless the config lists them.
    """
    first, period = config["first_k_dense_replace"], config["moe_layer_freq"]
    listed = listed_kinds(config, "mlp_layer_types")
    is_grouped = config.get("topk_method") != "greedy"

    def has_experts(layer: int) -> bool:
        if listed is not None:
            return listed[layer] == "sparse"
        return bool(layer >= first and layer % period == 0)

    return {
        **expert_fields(config, has_experts),
        **shared_experts(config),
        "experts.n_groups": max(config["n_group"], 1) if is_grouped else 1,
        "experts.top_groups": max(config["topk_group"], 1) if is_grouped else 1,
    }


def ernie_experts(config: Config) -> Fields:
    """Return the layers with experts, every `moe_layer_interval`-th between two layers."""
    n_layers, step = config["num_hidden_layers"], config["moe_layer_interval"]
    last = config.get("moe_layer_end_index", -1)
    if not isinstance(last, int) or not -1 <= last < n_layers:
        raise InputError(
            f"moe_layer_end_index is {str(last)[:40]!r}; allowed: a layer, or -1 for the last one"
        )
    between = range(config["moe_layer_start_index"], (n_layers if last == -1 else last + 1))
    return expert_fields(config, lambda layer: layer in between and (layer + 1) % step == 0)


def shared_experts(config: Config) -> Fields:
    """Return the experts that every token passes through, each as large as the others."""
    size = config["n_shared_experts"] * config["moe_intermediate_size"]
    return {"experts.shared_hidden_size": size}


def shared_expert_of_the_same_size(config: Config) -> Fields:
    """Return the one expert for all tokens, which is as large as each of the others."""
    return {"experts.shared_hidden_size": config["intermediate_size"]}


def granite_shared_experts(config: Config) -> Fields:
    """Return the experts that every token passes through."""
    return {"experts.shared_hidden_size": config["shared_intermediate_size"]}


def deepseek_queries(config: Config) -> Fields:
    """Return the size of the latent vector of queries, which small models lack."""
    return {"latent_attention.q_rank": config["q_lora_rank"]}


def multi_token_prediction(config: Config) -> Fields:
    """Return the number of modules that predict further tokens."""
    return {"mtp_modules": config["num_nextn_predict_layers"]}


def exaone_positions(config: Config) -> Fields:
    """Return a note that layers without a window have no positions, if other layers have one."""
    return {"not_modelled": (NOT_ROTATED,) if config["sliding_window"] else ()}


def minimax_modules(config: Config) -> Fields:
    """Return a note that modules of multi-token prediction are left out: they are unpublished."""
    has_modules = bool(config.get("use_mtp"))
    return {"not_modelled": ("the modules of multi-token prediction",) if has_modules else ()}


def head_norms(config: Config) -> Fields:
    """Return which norms queries and keys have, if they are switched on."""
    return {"qk_norm": "head" if config["use_qk_norm"] else ""}


def cohere_norms(config: Config) -> Fields:
    """Return the norms of queries and keys, whose gains differ from head to head as OLMo's do."""
    return {"qk_norm": "all" if config["use_qk_norm"] else ""}


def llama4_experts(config: Config) -> Fields:
    """Return the layers with experts, every `interleave_moe_layer_step`-th unless it lists them."""
    listed = listed_layers(config, "moe_layers")
    step = config["interleave_moe_layer_step"]
    return expert_fields(
        config, lambda layer: (layer + 1) % step == 0 if listed is None else layer in listed
    )


def llama4_attention(config: Config) -> Fields:
    """Return notes on the parts of attention that predictions leave out."""
    left_out = []
    if config["attention_chunk_size"]:
        chunks = f"attention in chunks of {config['attention_chunk_size']} tokens"
        left_out.append(f"{chunks} (it sees all earlier tokens)")
    if config["use_qk_norm"]:
        left_out.append("norms of queries and keys, which have no weights")
    return {"not_modelled": tuple(left_out)}


def phimoe_biases(config: Config) -> Fields:
    """Return the biases of attention; experts have none, and there is no other MLP."""
    return {
        "bias": config["attention_bias"],
        "not_modelled": ("the bias of the head",) if config["lm_head_bias"] else (),
    }
