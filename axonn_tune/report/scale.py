"""What ``scale`` shows: the best layouts at several GPU counts as text, plain data and a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from axonn_tune.report.figure import new_figure, plain_log_scale
from axonn_tune.report.memory import memory_lines, memory_text
from axonn_tune.report.phrases import (
    assumption_line,
    interval_text,
    percent,
    tokens_per_second_text,
)
from axonn_tune.report.records import SCHEMA_VERSION, assumptions, flat_record
from axonn_tune.report.table import Column, fitted_table_of
from axonn_tune.report.trust import trust_lines
from axonn_tune.search.rank import Best
from axonn_tune.step.prediction import Prediction
from axonn_tune.studies.scaling import efficiencies

# A number of GPUs with its efficiency, which is None where there is no candidate.
_Row: TypeAlias = tuple[Best, float | None]
# Columns that a table may leave out for want of room, the least important first.
_DROPPABLE = ("TFLOP/s", "exposed", "tokens/s", "GiB")


def scaling_text(points: Sequence[Best]) -> str:
    """Return a table with a row for each count, and why some counts have no candidate."""
    searches = [point.search for point in points]
    rows = list(zip(points, efficiencies(points), strict=True))
    reasons = [
        f"{point.search.scenario.job.n_gpus} GPUs: {point.reason}"
        for point in points
        if point.reason
    ]
    return "\n".join(
        [
            f"{_best_layouts(points)}; efficiency: model FLOP/s of each GPU against the first "
            "count",
            "",
            fitted_table_of(rows, _columns(rows), _DROPPABLE),
            "",
            *reasons,
            *memory_lines([point.prediction for point in points if point.prediction is not None]),
            *trust_lines(*searches),
            assumption_line(*searches),
        ]
    )


def _best_layouts(points: Sequence[Best]) -> str:
    scenario = points[0].search.scenario
    models = dict.fromkeys(point.search.scenario.model.name for point in points)
    of_model = f" of {scenario.model.name}" if len(models) == 1 else ""
    return f"Best {scenario.strategy.name} layouts{of_model} on {scenario.machine.gpu.name}"


def _columns(rows: Sequence[_Row]) -> list[Column[_Row]]:
    """Return the columns of a table; model and batch are left out where all rows share them."""
    scenarios = [point.search.scenario for point, _ in rows]
    columns: list[Column[_Row]] = [("GPUs", lambda row: row[0].search.scenario.job.n_gpus)]
    if len({scenario.model.name for scenario in scenarios}) > 1:
        columns.append(("model", lambda row: row[0].search.scenario.model.name))
    if len({scenario.job.global_batch for scenario in scenarios}) > 1:
        columns.append(("batch", lambda row: row[0].search.scenario.job.global_batch))
    return [
        *columns,
        ("layout", _of(lambda best: best.configuration.brief_layout, "none")),
        ("mbs", _of(lambda best: best.configuration.micro_batch)),
        ("recompute", _of(lambda best: best.configuration.recompute)),
        ("step s", _of(lambda best: f"{best.step_seconds:.3f}")),
        ("90 % interval", _of(interval_text)),
        ("TFLOP/s", _of(lambda best: f"{best.tflops_per_gpu:.1f}")),
        ("MFU %", _of(lambda best: percent(best.mfu))),
        ("efficiency", lambda row: "-" if row[1] is None else f"{percent(row[1])} %"),
        ("exposed", _of(lambda best: f"{percent(best.exposed_communication_fraction)} %")),
        ("tokens/s", _of(tokens_per_second_text)),
        ("GiB", _of(memory_text)),
    ]


def _of(cell: Callable[[Prediction], Any], otherwise: str = "-") -> Callable[[_Row], Any]:
    """Return a function that fills a cell from a row's prediction, or else with `otherwise`."""
    return lambda row: otherwise if row[0].prediction is None else cell(row[0].prediction)


def scaling_records(points: Sequence[Best]) -> list[dict[str, Any]]:
    """Return one flat record for each count that has a candidate."""
    return [
        {
            "gpus": point.search.scenario.job.n_gpus,
            "model": point.search.scenario.model.name,
            "efficiency": efficiency,
            **flat_record(point.prediction),
        }
        for point, efficiency in zip(points, efficiencies(points), strict=True)
        if point.prediction is not None
    ]


def scaling_document(points: Sequence[Best]) -> dict[str, Any]:
    """Return what ``scale --format json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "assumptions": assumptions(points[0].search),
        "results": scaling_records(points),
        "without": [
            {"gpus": point.search.scenario.job.n_gpus, "reason": point.reason}
            for point in points
            if point.prediction is None
        ],
    }


def scaling_figure(points: Sequence[Best]) -> Any:
    """Draw step time with its interval, and efficiency, over the GPU count."""
    figure, (left, right) = new_figure(1, 2)
    known = [
        (point.prediction, efficiency)
        for point, efficiency in zip(points, efficiencies(points), strict=True)
        if point.prediction is not None and efficiency is not None
    ]
    scenarios = [best.scenario for best, _ in known]
    counts = [scenario.job.n_gpus for scenario in scenarios]
    steps = np.array([best.step_seconds for best, _ in known])
    ends = np.array([best.step_seconds_interval or (best.step_seconds,) * 2 for best, _ in known])
    left.errorbar(counts, steps, yerr=np.abs(ends.T - steps), fmt="o-", capsize=3)
    ideal = steps * np.array([efficiency for _, efficiency in known])
    left.plot(counts, ideal, color="black", linewidth=0.8, linestyle="--", label="ideal")
    left.legend(fontsize="small")
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="step, s (90 % interval)")
    right.plot(counts, [100.0 * efficiency for _, efficiency in known], "o-", label="efficiency")
    right.plot(counts, [100.0 * best.mfu for best, _ in known], "s-", label="MFU")
    right.set(xscale="log", xlabel="GPUs", ylabel="%", ylim=(0, None))
    right.legend(fontsize="small")
    plain_log_scale(left.yaxis)
    is_weak = len({scenario.model.name for scenario in scenarios}) > 1
    labels = [
        f"{scenario.job.n_gpus}\n{scenario.model.name}" if is_weak else f"{scenario.job.n_gpus}"
        for scenario in scenarios
    ]
    for axes in (left, right):
        axes.set_xticks(counts, labels, fontsize="small")
        axes.xaxis.minorticks_off()
        axes.grid(alpha=0.3)
    figure.suptitle(_best_layouts(points))
    return figure
