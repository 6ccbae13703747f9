"""What ``scale`` shows: the best layouts at several GPU counts as text, plain data and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from axonn_tune.report.figure import new_figure
from axonn_tune.report.memory import memory_lines, memory_text
from axonn_tune.report.phrases import assumption_line, interval_text, percent
from axonn_tune.report.records import SCHEMA_VERSION, assumptions, flat_record
from axonn_tune.report.table import table
from axonn_tune.report.trust import trust_lines
from axonn_tune.search.rank import Best
from axonn_tune.studies.scaling import efficiencies
from axonn_tune.units import format_count

HEADERS = (
    "GPUs",
    "model",
    "batch",
    "layout",
    "mbs",
    "recompute",
    "step s",
    "90 % interval",
    "TFLOP/s/GPU",
    "MFU %",
    "efficiency %",
    "exposed %",
    "tokens/s",
    "GiB",
)


def scaling_text(points: Sequence[Best]) -> str:
    """Return a table with a row for each count, and why some counts have no candidate."""
    searches = [point.search for point in points]
    rows = [
        _row(point, efficiency)
        for point, efficiency in zip(points, efficiencies(points), strict=True)
    ]
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
            table(rows, HEADERS),
            "",
            *reasons,
            *memory_lines([point.prediction for point in points if point.prediction is not None]),
            *trust_lines(*searches),
            assumption_line(*searches),
        ]
    )


def _best_layouts(points: Sequence[Best]) -> str:
    scenario = points[0].search.scenario
    return f"Best {scenario.strategy.name} layouts on {scenario.machine.gpu.name}"


def _row(point: Best, efficiency: float | None) -> list[Any]:
    scenario = point.search.scenario
    best = point.prediction
    n_gpus = scenario.job.n_gpus
    head = [n_gpus, scenario.model.name, scenario.job.global_batch]
    if best is None or efficiency is None:
        return [*head, "none", *["-"] * (len(HEADERS) - len(head) - 1)]
    return [
        *head,
        best.configuration.ordered_layout,
        best.configuration.micro_batch,
        best.configuration.recompute,
        f"{best.step_seconds:.3f}",
        interval_text(best),
        f"{best.tflops_per_gpu:.1f}",
        percent(best.mfu),
        percent(efficiency),
        percent(best.exposed_communication_fraction),
        format_count(best.tokens_per_second_per_gpu * n_gpus),
        memory_text(best),
    ]


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
    labels = [f"{scenario.job.n_gpus}\n{scenario.model.name}" for scenario in scenarios]
    for axes in (left, right):
        axes.set_xticks(counts, labels, fontsize="small")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.suptitle(_best_layouts(points))
    return figure
