"""Read the logs of DeepSpeed, whose engine prints its configuration and samples per second.

The rate of the current step counts the global batch (runtime/engine.py, tput_timer). The memory in
the same line is what was allocated; the peak that the allocator held is in see_memory_usage.
"""

from __future__ import annotations

import re

from axonn_tune.io.runs.arguments import count, dotted_arguments, is_true
from axonn_tune.io.runs.logged_run import (
    NUMBER,
    LoggedRun,
    largest,
    positive,
    ran_out_of_memory,
    stated,
)

_STEP = re.compile(
    r"(?:global_step=|\d+/)(\d+), RunningAvgSamplesPerSec=[\d.]+, CurrSamplesPerSec=" + NUMBER
)
_MAX_RESERVED = r"Max_CA " + NUMBER + r" GB"


def is_deepspeed(text: str) -> bool:
    """Return whether a log has the throughput or the configuration of DeepSpeed's engine."""
    return _STEP.search(text) is not None or "train_micro_batch_size_per_gpu  " in text


def parse_deepspeed(text: str) -> LoggedRun:
    """Return the run, with a layout if its ZeRO stage is 3."""
    arguments = dotted_arguments(text)
    batch = count(arguments, "train_batch_size")
    n_gpus = count(arguments, "world_size")
    is_zero3 = arguments.get("zero_optimization_stage") == "3"
    steps: dict[int, float] = {}
    for step, rate in _STEP.findall(text):
        if batch and float(rate):
            steps.setdefault(int(step), batch / float(rate))
    facts = {
        "engine": "deepspeed" if is_zero3 else None,
        "gpus": n_gpus,
        "layout": f"shard={n_gpus}" if is_zero3 and n_gpus else None,
        "global_batch": batch,
        "micro_batch": count(arguments, "train_micro_batch_size_per_gpu"),
        "dtype": _dtype(arguments),
    }
    return LoggedRun(
        stated(facts),
        positive(steps),
        memory_bytes=largest(_MAX_RESERVED, text) * 2**30,
        out_of_memory=ran_out_of_memory(text),
    )


def _dtype(arguments: dict[str, str]) -> str | None:
    """Return the number type; the names of the argument have changed."""
    has_bf16 = arguments.get("bfloat16_config", "").startswith("enabled=True")
    if has_bf16 or is_true(arguments, "bfloat16_enabled"):
        return "bf16"
    return "fp16" if is_true(arguments, "fp16_enabled") else None
