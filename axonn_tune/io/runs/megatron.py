"""Read the logs of Megatron-LM and of what is built on it: Megatron-Bridge and Megatron-DeepSpeed.

Megatron-LM prints all its arguments (training/arguments.py, _print_args), a line for each logged
iteration with the mean time since the last one (training/training.py, training_log), and once the
memory of ranks in units of 2**20 bytes (report_memory); Megatron-Bridge in units of 10**9 bytes
(training/utils/train_utils.py at 067f987d).
"""

from __future__ import annotations

import re
from typing import Any

from axonn_tune.io.runs.arguments import count, dotted_arguments, is_true, yaml_arguments
from axonn_tune.io.runs.logged_run import (
    NUMBER,
    LoggedRun,
    dtype_named,
    first_count,
    largest,
    layout_text,
    logged_run,
)

_ITERATION = re.compile(
    r"iteration\s+(\d+)/\s*\d+ \|[^\n]{0,999}?elapsed time per iteration \(ms\): "
    + NUMBER
    + r"(?:[^\n]{0,999}?global batch size:\s+(\d+))?"
)
_MAX_RESERVED = r"max reserved: " + NUMBER
_MAX_RESERVED_IN_BRIDGE = r"mem-max-reserved-gigabytes: " + NUMBER
_PADDED = r"padded vocab \(size: (\d+)\)"
_MODULE = re.compile(r"\b[a-z]\w+")
_NORMS = {"LayerNorm": "layer", "RMSNorm": "rms"}
_POSITIONS = {"rope": "rotary", "learned_absolute": "learned", "none": "none"}
# The groups beside those of data parallelism.
_GROUPS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_RECIPES = {"tensorwise": "fp8-current", "delayed": "fp8-delayed", "blockwise": "fp8-block"}
# Arguments that programs with configurations in YAML print, too.
ARGUMENTS = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "global_batch_size",
    "micro_batch_size",
    "seq_length",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "sequence_parallel",
    "use_distributed_optimizer",
    "transformer_impl",
)


def is_megatron(text: str) -> bool:
    """Return whether a log has a line of an iteration of Megatron-LM."""
    return _ITERATION.search(text) is not None or "tensor_model_parallel_size ....." in text


def parse_megatron(text: str) -> LoggedRun:
    """Return the run; if its batch grows, only the steps with the last batch count."""
    arguments = yaml_arguments(text, ARGUMENTS) | dotted_arguments(text)
    is_stated = "tensor_model_parallel_size" in arguments
    pipeline = count(arguments, "pipeline_model_parallel_size") or 1
    virtual = count(arguments, "virtual_pipeline_model_parallel_size")
    timed: dict[int, tuple[float, int]] = {}
    for iteration, milliseconds, batch in _ITERATION.findall(text):
        timed.setdefault(int(iteration), (1e-3 * float(milliseconds), int(batch or 0)))
    batch = timed[max(timed)][1] if timed else 0
    steps = {number: seconds for number, (seconds, size) in timed.items() if size == batch}
    facts = {
        "engine": _engine(arguments) if is_stated else "megatron-core",
        "gpus": count(arguments, "world_size"),
        "layout": layout_of(arguments, count(arguments, "world_size")),
        "global_batch": batch or count(arguments, "global_batch_size"),
        "precision": _precision(arguments),
        "recompute": "none" if is_stated else None,
        "virtual_stages": virtual or (1 if pipeline > 1 else None),
        **_switches(arguments),
        **common_facts(arguments),
        **_of_sharded_weights(arguments),
    }
    return logged_run(
        text,
        facts,
        steps,
        memory_bytes=max(
            largest(_MAX_RESERVED, text) * 2**20, largest(_MAX_RESERVED_IN_BRIDGE, text) * 1e9
        ),
        sizes=_sizes(arguments, first_count(_PADDED, text)),
    )


def layout_of(arguments: dict[str, str], n_gpus: int | None) -> str | None:
    """Return the layout of the strategy megatron that the sizes of its groups state."""
    tensor = count(arguments, "tensor_model_parallel_size")
    pipeline = count(arguments, "pipeline_model_parallel_size")
    context = count(arguments, "context_parallel_size") or 1
    if n_gpus is None or tensor is None or pipeline is None:
        return None
    return layout_text(
        {
            "tensor": tensor,
            "context": context,
            "data": n_gpus // (tensor * context * pipeline),
            "pipeline": pipeline,
            "expert": count(arguments, "expert_model_parallel_size") or 1,
        }
    )


def common_facts(arguments: dict[str, str]) -> dict[str, object]:
    """Return the facts whose arguments NeMo has, too, as far as they are stated."""
    recompute = _recompute(arguments)
    return {
        "micro_batch": count(arguments, "micro_batch_size"),
        "seq_len": count(arguments, "seq_length"),
        "dtype": dtype_named(arguments.get("params_dtype", "")),
        **({"recompute": recompute} if recompute else {}),
    }


def _switches(arguments: dict[str, str]) -> dict[str, object]:
    """Return the switches of the strategy that are stated and matter.

    Megatron-LM trains with dropout, without sequence parallelism and without the distributed
    optimizer unless it is told otherwise. DeepSpeed's configuration replaces the last of these.
    """
    tensor = count(arguments, "tensor_model_parallel_size") or 1
    drops = (arguments.get(name, "0") for name in ("hidden_dropout", "attention_dropout"))
    has_experts = count(arguments, "num_experts") is not None
    splits_experts = has_experts and (count(arguments, "expert_tensor_parallel_size") or 1) > 1
    return {
        "sequence_parallel": _yes_or_no(arguments, "sequence_parallel") if tensor > 1 else None,
        "distributed_optimizer": (
            None
            if is_true(arguments, "deepspeed")
            else _yes_or_no(arguments, "use_distributed_optimizer")
        ),
        "split_experts": "yes" if splits_experts else None,
        "dropout": "yes" if any(float(drop) > 0 for drop in drops) else None,
    }


def _of_sharded_weights(arguments: dict[str, str]) -> dict[str, object]:
    """Return what differs under Megatron-FSDP or torch's FSDP2; nothing without these.

    FSDP2 shards everything over data and context parallelism
    (megatron/core/distributed/torch_fully_sharded_data_parallel.py at d98e8a64). The user says the
    layout where other groups or copies of weights are left.
    """
    is_torch = is_true(arguments, "use_torch_fsdp2")
    if not is_torch and not is_true(arguments, "use_megatron_fsdp"):
        return {}
    groups = [count(arguments, name) or 1 for name in _GROUPS]
    strategy = arguments.get("data_parallel_sharding_strategy")
    is_whole = is_torch or strategy == "optim_grads_params"
    n_gpus = count(arguments, "world_size")
    is_known = is_whole and n_gpus is not None and max(groups) == 1
    return {
        "engine": "fsdp2" if is_torch else "megatron-fsdp",
        "layout": layout_text({"shard": n_gpus or 1}) if is_known else None,
        "sequence_parallel": None,
        "distributed_optimizer": None,
        "virtual_stages": None,
    }


def _yes_or_no(arguments: dict[str, str], name: str) -> str | None:
    """Return a switch as a table writes it, or None where it is not stated."""
    if name not in arguments:
        return None
    return "yes" if is_true(arguments, name) else "no"


def _engine(arguments: dict[str, str]) -> str:
    """Return the version of Megatron whose arguments these are.

    `sequence_parallel` came with the paper of 2022, `transformer_impl` with Transformer Engine.
    """
    if arguments.get("transformer_impl") == "transformer_engine":
        return "megatron-core"
    return "megatron-2022" if "sequence_parallel" in arguments else "megatron-2021"


def _precision(arguments: dict[str, str]) -> str | None:
    """Return the precision of the products; --fp8-recipe came after delayed scaling."""
    if "fp8" not in arguments or arguments["fp8"] == "False":
        return None
    recipe = arguments.get("fp8_recipe", "delayed")
    return _RECIPES.get(recipe, recipe)


def _recompute(arguments: dict[str, str]) -> str | None:
    """Return the recomputation that is switched on, or None."""
    if is_true(arguments, "checkpoint_activations"):  # the name of before 2022
        return "full"
    granularity = arguments.get("recompute_granularity")
    layers = count(arguments, "recompute_num_layers")
    if granularity == "full" and arguments.get("recompute_method") == "block" and layers:
        return f"full:{layers}"
    modules = _MODULE.findall(arguments.get("recompute_modules", "None"))
    if granularity == "selective" and modules:
        return f"selective:{','.join(modules)}"
    return granularity


def _sizes(arguments: dict[str, str], vocabulary: int | None) -> dict[str, Any]:
    """Return the fields of a dense model; empty where arguments are missing."""
    sizes: dict[str, Any] = {
        "n_layers": count(arguments, "num_layers"),
        "hidden_size": count(arguments, "hidden_size"),
        "n_heads": count(arguments, "num_attention_heads"),
        "ffn_hidden_size": count(arguments, "ffn_hidden_size"),
        "seq_len": count(arguments, "max_position_embeddings") or count(arguments, "seq_length"),
        "vocab_size": vocabulary or count(arguments, "padded_vocab_size"),
    }
    if None in sizes.values() or count(arguments, "num_experts"):
        return {}
    if is_true(arguments, "group_query_attention"):
        sizes["n_kv_heads"] = count(arguments, "num_query_groups") or sizes["n_heads"]
    bias = arguments.get("add_bias_linear", "True") == "True"
    return sizes | {
        "gated_mlp": is_true(arguments, "swiglu"),
        "norm": _NORMS.get(arguments.get("normalization", "LayerNorm"), "layer"),
        "position": _POSITIONS.get(arguments.get("position_embedding_type", ""), "learned"),
        "bias": bias,
        "qkv_bias": bias or is_true(arguments, "add_qkv_bias"),
        "tied_embeddings": not is_true(arguments, "untie_embeddings_and_output_weights"),
    }
