"""Read the logs of Composer, with which llm-foundry trains.

A batch has a line for each metric: counters of batches, samples and tokens (from which the batch
and the length of a sequence follow), rates of a window of batches (callbacks/speed_monitor.py), and
memory in units of 1e9 bytes (callbacks/memory_monitor.py).
"""

from __future__ import annotations

import re
from typing import Any

from axonn_tune.io.runs.arguments import count, yaml_arguments
from axonn_tune.io.runs.logged_run import NUMBER, LoggedRun, first_count, largest, logged_run

_BATCH = re.compile(r"\[batch=(\d+)/\d+\]:")
_METRIC = re.compile(r"Train ([\w/]+): " + NUMBER)
_RESERVED = r"memory/(?:peak_)?reserved_mem: " + NUMBER
_SIZES = {
    "n_layers": "n_layers",
    "hidden_size": "d_model",
    "n_heads": "n_heads",
    "vocab_size": "vocab_size",
    "seq_len": "max_seq_len",
}


def is_composer(text: str) -> bool:
    """Return whether a log has the metrics of a batch of Composer."""
    return _BATCH.search(text) is not None and "Train " in text


def parse_composer(text: str) -> LoggedRun:
    """Return the run."""
    batches = [_metrics(part) for part in re.split(r"(?=\[(?:epoch=\d+\]\[)?batch=\d+/)", text)]
    batches = [metrics for metrics in batches if metrics.get("batch")]
    last = batches[-1] if batches else {}
    samples = _ratio(last, "time/sample", "time/batch")
    n_gpus = _n_gpus(text, last)
    steps: dict[int, float] = {}
    for metrics in batches:
        rate = metrics.get("throughput/samples_per_sec", 0.0)
        if samples and rate:
            steps.setdefault(int(metrics["batch"]), samples / rate)
    facts = {
        "engine": "llm-foundry",
        "gpus": n_gpus,
        "layout": f"shard={n_gpus}" if n_gpus else None,
        "global_batch": samples,
        "micro_batch": int(last.get("trainer/device_train_microbatch_size", 0)) or None,
        "seq_len": _ratio(last, "time/token", "time/sample"),
    }
    return logged_run(
        text, facts, steps, memory_bytes=largest(_RESERVED, text) * 1e9, sizes=_sizes(text)
    )


def _metrics(part: str) -> dict[str, float]:
    """Return the metrics of one batch by name, and its number as `batch`."""
    metrics = {name: float(number) for name, number in _METRIC.findall(part)}
    return metrics | {"batch": float(first_count(_BATCH.pattern, part) or 0)}


def _ratio(metrics: dict[str, float], many: str, few: str) -> int | None:
    """Return how many of one counter make one of another, if that is a whole number."""
    ratio = metrics.get(many, 0.0) / (metrics.get(few) or 1.0)
    return int(ratio) if ratio >= 1 and ratio == int(ratio) else None


def _n_gpus(text: str, last: dict[str, float]) -> int | None:
    """Return the number of GPUs, which the configuration says or two rates imply."""
    nodes = first_count(r"num_nodes: (\d+)", text)
    per_node = first_count(r"num_gpus_per_node: (\d+)", text)
    if nodes and per_node:
        return nodes * per_node
    one = last.get("throughput/device/tokens_per_sec", 0.0)
    return round(last.get("throughput/tokens_per_sec", 0.0) / one) if one else None


def _sizes(text: str) -> dict[str, Any]:
    """Return the fields of an MPT model with learned positions, as llm-foundry prints it."""
    printed = yaml_arguments(text, (*_SIZES.values(), "expansion_ratio", "no_bias", "alibi"))
    sizes: dict[str, Any] = {field: count(printed, name) for field, name in _SIZES.items()}
    if None in sizes.values():
        return {}
    return sizes | {
        "ffn_hidden_size": (count(printed, "expansion_ratio") or 4) * sizes["hidden_size"],
        "position": "none" if printed.get("alibi") == "true" else "learned",
        "bias": printed.get("no_bias") != "true",
        "tied_embeddings": True,
    }
