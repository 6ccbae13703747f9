"""Scaling over GPU counts as text and records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axonn_tune.report.records import SCHEMA_VERSION, assumptions, flat_record
from axonn_tune.report.text import assumption_line, interval_text, table
from axonn_tune.search.rank import Best
from axonn_tune.studies.scaling import efficiencies
from axonn_tune.units import format_count, gib

HEADERS = (
    *("GPUs", "model", "layout", "mbs", "recompute", "step s", "90 % interval", "TFLOP/s/GPU"),
    *("MFU %", "efficiency %", "exposed %", "tokens/s", "GiB"),
)


def scaling_text(points: Sequence[Best], machine_was_given: bool) -> str:
    """A line for each count, and why some have none."""
    rows = [
        _row(point, efficiency)
        for point, efficiency in zip(points, efficiencies(points), strict=True)
    ]
    search = points[0].search
    batches = {point.search.scenario.job.global_batch for point in points}
    grows = f", growing to {max(batches)} sequences" if len(batches) > 1 else ""
    reasons = [
        f"{point.search.scenario.job.n_gpus} GPUs: {point.reason}"
        for point in points
        if point.reason
    ]
    return "\n".join(
        [
            f"Best {search.scenario.strategy.name} layouts on {search.scenario.machine.gpu.name}; efficiency: model "
            "FLOP/s of each GPU against the first count",
            "",
            table(rows, HEADERS),
            "",
            *reasons,
            assumption_line(search.scenario, machine_was_given).removesuffix(".") + grows + ".",
        ]
    )


def _row(point: Best, efficiency: float | None) -> list[Any]:
    head: list[Any] = [point.search.scenario.job.n_gpus, point.search.scenario.model.name]
    best = point.prediction
    if best is None or efficiency is None:
        return [*head, "none", *["-"] * (len(HEADERS) - 3)]
    return [
        *head,
        best.configuration.ordered_layout,
        best.configuration.micro_batch,
        best.configuration.recompute,
        f"{best.step_seconds:.3f}",
        interval_text(best),
        f"{best.tflops_per_gpu:.1f}",
        f"{100 * best.mfu:.1f}",
        f"{100 * efficiency:.1f}",
        f"{100 * best.exposed_communication_fraction:.1f}",
        format_count(best.tokens_per_second_per_gpu * point.search.scenario.job.n_gpus),
        f"{gib(best.memory_bytes):.1f}",
    ]


def scaling_records(points: Sequence[Best]) -> list[dict[str, Any]]:
    """One flat record per count that has a candidate."""
    return [
        {
            "gpus": point.search.scenario.job.n_gpus,
            "model": point.search.scenario.model.name,
            "global_batch": point.search.scenario.job.global_batch,
            "efficiency": efficiency,
            **flat_record(point.prediction),
        }
        for point, efficiency in zip(points, efficiencies(points), strict=True)
        if point.prediction is not None
    ]


def scaling_document(points: Sequence[Best]) -> dict[str, Any]:
    """What ``scale --format json`` prints."""
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
