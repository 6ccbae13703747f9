"""Read the logs of LitGPT's pretraining, which times every micro-step.

A step is the sum of its micro-steps. Its number is raised by the optimizer, before the line of the
last micro-step is printed. LitGPT prints its arguments before (utils.capture_hparams).
"""

from __future__ import annotations

import re

from axonn_tune.io.runs.logged_run import NUMBER, LoggedRun, first_count, layout_text, logged_run

_MICRO_STEP = re.compile(
    r"iter +(\d+) step +(\d+) ?[|:][^\n]{0,200}?iter time: +" + NUMBER + r" ?ms"
)


def is_litgpt(text: str) -> bool:
    """Return whether a log has a micro-step of LitGPT."""
    return _MICRO_STEP.search(text) is not None or "TrainArgs(save_interval=" in text


def parse_litgpt(text: str) -> LoggedRun:
    """Return the run; steps of which a micro-step is not in the log are left out."""
    devices = first_count(r"'devices': (\d+)", text)
    nodes = first_count(r"'num_nodes': (\d+)", text) or 1
    n_gpus = devices * nodes if devices else None
    batch = first_count(r"\bglobal_batch_size=(\d+)", text)
    micro_batch = first_count(r"\bmicro_batch_size=(\d+)", text)
    layout = {"shard": devices or 1, "replica": nodes}
    facts = {
        "engine": "fsdp2",
        "gpus": n_gpus,
        "layout": layout_text(layout) if n_gpus else None,
        "global_batch": batch,
        "micro_batch": micro_batch,
        "seq_len": first_count(r"max_seq_length=(\d+)", text),
        "dtype": "bf16" if "'precision': 'bf16" in text else None,
    }
    return logged_run(text, facts, _step_seconds(text))


def _step_seconds(text: str) -> dict[int, float]:
    """Return the seconds of each step of which all micro-steps are in the log, by its number."""
    micro_steps: dict[int, float] = {}
    last_of_step: dict[int, int] = {}
    for iteration, step, milliseconds in _MICRO_STEP.findall(text):
        micro_steps.setdefault(int(iteration), 1e-3 * float(milliseconds))
        last_of_step.setdefault(int(step), int(iteration))
    # The first number in the log may be that of a step whose end is not in it.
    last_of_step.pop(min(last_of_step, default=0), None)
    steps: dict[int, float] = {}
    for step, last in last_of_step.items():
        own = range(last_of_step.get(step - 1, last) + 1, last + 1)
        if own and all(iteration in micro_steps for iteration in own):
            steps[step] = sum(micro_steps[iteration] for iteration in own)
    return steps
