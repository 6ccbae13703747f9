"""Read the logs of DeepSpeed, whose engine prints its configuration and samples per second.

The rate of the current step counts the global batch (runtime/engine.py, tput_timer). The memory in
the same line is what was allocated; the peak that the allocator held is in see_memory_usage.
"""

from __future__ import annotations

import re

from axonn_tune.io.runs.arguments import count, dotted_arguments, is_true
from axonn_tune.io.runs.logged_run import NUMBER, LoggedRun, largest, logged_run
from axonn_tune.units import GIB_BYTES

_STEP = re.compile(
    r"(?:global_step=|(?<!\d)\d+/)(\d+), RunningAvgSamplesPerSec=[\d.]+, CurrSamplesPerSec="
    + NUMBER
)
# The strategy of each stage of ZeRO, and its axis; the engine's usual strategy needs no name.
_STAGES = {"1": ("zero1", "data"), "2": ("zero2", "data"), "3": (None, "shard")}
_MAX_RESERVED = r"Max_CA " + NUMBER + r" GB"


def is_deepspeed(text: str) -> bool:
    """Return whether a log has the throughput or the configuration of DeepSpeed's engine."""
    return _STEP.search(text) is not None or "train_micro_batch_size_per_gpu  " in text


def parse_deepspeed(text: str) -> LoggedRun:
    """Return the run, with a strategy and a layout if it names a stage of ZeRO."""
    arguments = dotted_arguments(text)
    batch = count(arguments, "train_batch_size")
    n_gpus = count(arguments, "world_size")
    stage = arguments.get("zero_optimization_stage", "")
    strategy, axis = _STAGES.get(stage, (None, None))
    steps: dict[int, float] = {}
    for step, rate in _STEP.findall(text):
        if batch and float(rate):
            steps.setdefault(int(step), batch / float(rate))
    facts = {
        "strategy": strategy,
        "engine": "deepspeed" if axis else None,
        "gpus": n_gpus,
        "layout": f"{axis}={n_gpus}" if axis and n_gpus else None,
        "global_batch": batch,
        "micro_batch": count(arguments, "train_micro_batch_size_per_gpu"),
        "dtype": _dtype(arguments),
    }
    return logged_run(text, facts, steps, memory_bytes=largest(_MAX_RESERVED, text) * GIB_BYTES)


def _dtype(arguments: dict[str, str]) -> str | None:
    """Return the number type; the names of the argument have changed."""
    has_bf16 = arguments.get("bfloat16_config", "").startswith("enabled=True")
    if has_bf16 or is_true(arguments, "bfloat16_enabled"):
        return "bf16"
    return "fp16" if is_true(arguments, "fp16_enabled") else None
