"""What ``compare`` shows: the best configuration of each strategy as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axonn_tune.report.phrases import (
    assumption_line,
    interval_text,
    model_on_gpus,
    percent,
    tokens_per_second_text,
)
from axonn_tune.report.records import SCHEMA_VERSION, assumptions, flat_record, record
from axonn_tune.report.table import Column, fitted_table_of
from axonn_tune.search.rank import Best
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import gib

# Columns that a table may leave out for want of room, the least important first.
_DROPPABLE = ("tokens/s", "TFLOP/s", "bubble", "exposed", "MFU %", "mbs")
# Remarks on what a strategy costs that a table of times does not show.
NOTES = {
    "zeropp": "zeropp quantises messages (INT8 weights, INT4 gradients): the loss may change, and "
    "DeepSpeed's kernels do not support every GPU (MI200: check).",
    "zero-topo": "zero-topo quantises messages (INT8 weights, INT4 gradients): the loss may "
    "change; no released implementation is known.",
}


def comparison_text(contenders: Sequence[Best]) -> str:
    """Return a table with one row per strategy, the fastest first, and what was assumed."""
    scenario = contenders[0].search.scenario
    predictions = _predictions(contenders)
    lines = [
        f"{model_on_gpus(scenario, with_parameters=True)}: the best of "
        f"{len(contenders)} strategies",
        "",
    ]
    if predictions:
        lines += [fitted_table_of(predictions, _columns(predictions), _DROPPABLE), ""]
    for contender in contenders:
        if contender.prediction is None:
            lines.append(f"{contender.search.scenario.strategy.name}: {contender.reason}")
    for prediction in predictions:
        if prediction.scenario.strategy.name in NOTES:
            lines.append(NOTES[prediction.scenario.strategy.name])
    lines.append(assumption_line(*(contender.search for contender in contenders)))
    return "\n".join(lines)


def _predictions(contenders: Sequence[Best]) -> list[Prediction]:
    return [c.prediction for c in contenders if c.prediction is not None]


def _columns(predictions: Sequence[Prediction]) -> list[Column[Prediction]]:
    fastest = predictions[0]
    batches: list[Column[Prediction]] = [("batch", lambda p: p.scenario.job.global_batch)]
    differ = len({p.scenario.job.global_batch for p in predictions}) > 1
    return [
        ("strategy", lambda p: p.scenario.strategy.name),
        *(batches if differ else []),
        ("layout", lambda p: p.layout.brief),
        ("mbs", lambda p: p.configuration.micro_batch),
        ("recompute", lambda p: p.configuration.recompute),
        ("step s", lambda p: f"{p.step_seconds:.3f}"),
        ("90 % interval", interval_text),
        ("times", lambda p: f"{p.seconds_per_token / fastest.seconds_per_token:.3f}"),
        ("TFLOP/s", lambda p: f"{p.tflops_per_gpu:.1f}"),
        ("MFU %", lambda p: percent(p.mfu)),
        ("tokens/s", tokens_per_second_text),
        ("exposed", lambda p: f"{percent(p.exposed_communication_fraction)} %"),
        ("bubble", lambda p: f"{percent(p.bubble_seconds / p.step_seconds)} %"),
        (
            f"GiB of {gib(fastest.memory_capacity_bytes):.0f}",
            lambda p: f"{gib(p.memory_bytes):.1f}",
        ),
    ]


def comparison_document(contenders: Sequence[Best]) -> dict[str, Any]:
    """Return what ``compare --format json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "strategies": [
            {
                "strategy": c.search.scenario.strategy.name,
                "assumptions": assumptions(c.search),
                "best": None if c.prediction is None else record(c.prediction),
                "reason": c.reason or None,
            }
            for c in contenders
        ],
    }


def comparison_records(contenders: Sequence[Best]) -> list[dict[str, Any]]:
    """Return one flat record for each strategy that has a candidate."""
    return [flat_record(prediction) for prediction in _predictions(contenders)]
