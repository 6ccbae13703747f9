"""Read the logs of NeMo: lines or a progress bar with ``train_step_timing in s``.

NeMo logs the groups of ranks that Megatron-Core makes (utils/megatron_init or nemo_logging), and
NeMo 1 prints its configuration as YAML. With `log_memory_usage`, NeMo 2 adds bytes to the line of a
step (lightning/pytorch/strategies/megatron_strategy.py at 8cfedd72).
"""

from __future__ import annotations

import re

from axonn_tune.io.runs.arguments import count, yaml_arguments
from axonn_tune.io.runs.logged_run import NUMBER, LoggedRun, first_count, largest, logged_run
from axonn_tune.io.runs.megatron import ARGUMENTS, common_facts, layout_of

_STEP = re.compile(
    r"global_step[:=]\s*(\d+)[^\n\r]{0,999}?train_step_timing in s[:=]\s*" + NUMBER,
)
_MAX_RESERVED = r"max_memory_reserved[:=]\s*" + NUMBER
_BATCH = r"global_batch_size[:=] (\d+)"
# What NeMo 1 calls arguments of Megatron-LM.
_OLD_NAMES = {
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "encoder_seq_length": "seq_length",
}
# The sizes of groups by the word of the log and by the argument of Megatron-LM.
_GROUPS = {
    "tensor model": "tensor_model_parallel_size",
    "pipeline model": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
}


def is_nemo(text: str) -> bool:
    """Return whether a log has steps as NeMo times them."""
    return _STEP.search(text) is not None


def parse_nemo(text: str) -> LoggedRun:
    """Return the run."""
    arguments = yaml_arguments(text, (*ARGUMENTS, *_OLD_NAMES))
    for old, name in _OLD_NAMES.items():
        if old in arguments:
            arguments[name] = arguments[old]
    arguments["params_dtype"] = "bf16" if re.search(r"precision: .?bf16", text) else ""
    n_gpus = None
    for word, name in _GROUPS.items():
        groups = re.search(rf"All {word} parallel group ranks: \[(\[[^\n]*\])\]", text)
        if groups:
            arguments[name] = str(len(groups[1].partition("]")[0].split(",")))
            n_gpus = len(re.findall(r"\d+", groups[1]))
    steps: dict[int, float] = {}
    for step, seconds in _STEP.findall(text):
        steps.setdefault(int(step), float(seconds))
    facts = {
        "engine": "megatron-core",
        "gpus": n_gpus,
        "layout": layout_of(arguments, n_gpus),
        "global_batch": count(arguments, "global_batch_size") or first_count(_BATCH, text),
        **common_facts(arguments),
    }
    return logged_run(text, facts, steps, memory_bytes=largest(_MAX_RESERVED, text))
