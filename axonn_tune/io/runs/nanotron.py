"""Read the logs of nanotron.

nanotron prints its configuration and that of the model as Python objects on several lines, and for
each step numbers of three digits with K, M or G behind them (powers of 1000). The batch of a step's
line is in sequences or, in newer versions, in tokens; that of the line before the first step is in
sequences (src/nanotron/trainer.py at 2411b022).
"""

from __future__ import annotations

import re
from typing import Any

from axonn_tune.io.runs.logged_run import (
    NUMBER,
    LoggedRun,
    dtype_named,
    first_count,
    layout_text,
    logged_run,
)

_AMOUNT = NUMBER + r"([KMGBT]?)"
_POWERS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_STEP = re.compile(
    r"iteration: (\d+) / \d+ [^\n]{0,200}?(?:elapsed_)?time_per_iteration_ms: "
    + _AMOUNT
    + r"(?:\s|$)"
)
_BATCH_AT_START = r"global_batch_size: (\d+) \| (?:sequence_length|train_steps): "
_RESERVED = re.compile(r"(?:cuda_)?max_memory_reserved: " + _AMOUNT)
_PREFIX = re.compile(r"^(?:\[default\d+\]:)?[\d/: ]{0,40}\[INFO\|[^\]\n]{0,99}\]: ?", re.MULTILINE)
# The sizes of axes by the names in ParallelismArgs.
_AXES = {"tensor": "tp", "context": "context_parallel_size", "data": "dp", "pipeline": "pp"}
_MODEL_FIELDS = {
    "n_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "seq_len": "max_position_embeddings",
}


def is_nanotron(text: str) -> bool:
    """Return whether a log was written by nanotron."""
    return "consumed_tokens: " in text or "ParallelismArgs(" in text


def parse_nanotron(text: str) -> LoggedRun:
    """Return the run."""
    steps: dict[int, float] = {}
    for step, number, power in _STEP.findall(text):
        steps.setdefault(int(step), 1e-3 * float(number) * _POWERS[power])
    reserved = [float(number) * _POWERS[power] for number, power in _RESERVED.findall(text)]
    printed = _PREFIX.sub("", text)
    parallelism = _arguments_of("ParallelismArgs", printed)
    tokens = _arguments_of("TokensArgs", printed)
    sizes = {axis: int(parallelism.get(name, "0")) for axis, name in _AXES.items()}
    is_stated = all(sizes[axis] for axis in ("tensor", "data", "pipeline"))
    layout = {axis: size for axis, size in sizes.items() if size}
    micro_batch = first_count(r"\bmbs: (\d+)", text) or _whole(tokens, "micro_batch_size")
    accumulated = _whole(tokens, "batch_accumulation_per_replica")
    batch = first_count(_BATCH_AT_START, text)
    if batch is None and micro_batch and accumulated and is_stated:
        batch = micro_batch * accumulated * sizes["data"]
    n_gpus = sizes["tensor"] * sizes["data"] * sizes["pipeline"] * max(sizes["context"], 1)
    facts = {
        "engine": "nanotron",
        "gpus": n_gpus if is_stated else None,
        "layout": layout_text(layout) if is_stated else None,
        "global_batch": batch,
        "micro_batch": micro_batch,
        "seq_len": first_count(r"sequence_length[:=] ?(\d+)", printed),
        "dtype": dtype_named(next(iter(re.findall(r"dtype=(torch\.\w+)", printed)), "")),
        "recompute": "full" if parallelism.get("recompute_layer") == "True" else "none",
    }
    return logged_run(
        text,
        facts,
        steps,
        memory_bytes=max(reserved, default=0.0),
        sizes=_sizes(
            _arguments_of("LlamaConfig", printed) or _arguments_of("Qwen2Config", printed)
        ),
    )


def _arguments_of(name: str, printed: str) -> dict[str, str]:
    """Return the plain arguments of the first object of a class that the log shows."""
    match = re.search(rf"{name}\(([^()]*)", printed)
    return dict(re.findall(r"\b(\w+)=([\w.+-]+)", match[1])) if match else {}


def _whole(arguments: dict[str, str], name: str) -> int | None:
    text = arguments.get(name, "")
    return int(text) if text.isdecimal() else None


def _sizes(arguments: dict[str, str]) -> dict[str, Any]:
    """Return the fields of nanotron's Llama or dense Qwen 2; none of a mixture of experts."""
    sizes: dict[str, Any] = {
        field: _whole(arguments, name) for field, name in _MODEL_FIELDS.items()
    }
    if None in sizes.values() or arguments.get("moe_config", "None") != "None":
        return {}
    return sizes | {
        "gated_mlp": True,
        "norm": "rms",
        "position": "rotary",
        "bias": False,
        "qkv_bias": arguments.get("attention_bias") == "True",
        "tied_embeddings": arguments.get("tie_word_embeddings") == "True",
    }
