"""Read the logs of LitGPT's pretraining, which times micro-steps.

A step is the sum of its micro-steps. Its number is raised by the optimizer, before the line of the
last micro-step is printed. LitGPT prints its arguments before (utils.capture_hparams). Since 2024
it logs the last micro-step of a step at most (pretrain.py at 26857050, log_iter_interval), whose
time depends on how far the host was ahead; steps of several micro-steps then have no time.
"""

from __future__ import annotations

import re

from axonn_tune.errors import FileError
from axonn_tune.io.runs.logged_run import NUMBER, LoggedRun, first_count, layout_text, logged_run

_MICRO_STEP = re.compile(
    r"iter +(\d+) step +(\d+) ?[|:][^\n]{0,200}?iter time: +" + NUMBER + r" ?ms"
)


def is_litgpt(text: str) -> bool:
    """Return whether a log has a micro-step of LitGPT."""
    return _MICRO_STEP.search(text) is not None or "TrainArgs(save_interval=" in text


def parse_litgpt(text: str) -> LoggedRun:
    """Return the run; steps of which a micro-step is not in the log are left out.

    Raises
    ------
    FileError
        Micro-steps are missing of every step.
    """
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
    steps = _step_seconds(text)
    numbers = sorted({int(match[1]) for match in _MICRO_STEP.finditer(text)})
    if not steps and len(numbers) > 1 and numbers[-1] - numbers[0] >= len(numbers):
        raise FileError(
            f"it times {len(numbers)} of {numbers[-1] - numbers[0] + 1} micro-steps, from which no "
            "step follows; allowed: steps of one micro-step, and --train.log_interval 1"
        )
    return logged_run(text, facts, steps)


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
