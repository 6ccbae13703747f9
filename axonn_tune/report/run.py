"""What ``run`` shows: a measured step next to the predicted one as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from axonn_tune.report.phrases import signed_percent
from axonn_tune.report.records import SCHEMA_VERSION, record
from axonn_tune.report.table import table
from axonn_tune.spec.measurement import WARM_UP_STEPS, Measurement
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.validation import OperationTime
from axonn_tune.step.prediction import Prediction, hardware_flops
from axonn_tune.units import counted, format_count, format_quantity, format_seconds, gib


def rates(scenario: Scenario, measurement: Measurement) -> dict[str, float]:
    """Return TFLOP/s per GPU that the mean step reaches, without and with recomputation."""
    model = scenario.model
    job = scenario.job
    per_tflop = 1e-12 / measurement.mean_step_seconds / job.n_gpus
    hardware = hardware_flops(scenario, measurement.recompute)
    return {
        "tflops_per_gpu": model.model_flops(job.tokens, job.seq_len) * per_tflop,
        "hardware_tflops_per_gpu": hardware * per_tflop,
    }


def run_text(
    scenario: Scenario,
    measurement: Measurement,
    operations: Sequence[OperationTime],
    prediction: Prediction | None,
    n_operations: int | None,
) -> str:
    """Return the step, then its operations.

    Parameters
    ----------
    n_operations : int or None
        Number of operations to show, the longest first; None shows all.
    """
    model = scenario.model
    job = scenario.job
    speed = rates(scenario, measurement)
    lines = [
        f"{model.name} ({format_count(model.parameters)} parameters) on {job.n_gpus} x "
        f"{measurement.device_name} ({measurement.backend}), {_placement(measurement)}",
        f"global batch {counted(job.global_batch, 'sequence')} of {job.seq_len}, "
        f"micro-batch {measurement.micro_batch}, {job.dtype}, {job.attention} attention, "
        f"recompute {measurement.recompute}, overlap {job.overlap}",
        "",
        f"step     mean {format_seconds(measurement.mean_step_seconds)}, median "
        f"{format_seconds(measurement.median_step_seconds)} "
        f"(last {len(measurement.timed_steps)} of {counted(len(measurement.steps), 'step')})",
        f"speed    {speed['tflops_per_gpu']:.4g} TFLOP/s per GPU "
        f"({speed['hardware_tflops_per_gpu']:.4g} with recomputation)",
        f"loss     {measurement.steps[0].loss:.4f} to {measurement.steps[-1].loss:.4f}",
        f"memory   {_memory_text(measurement)}",
    ]
    if prediction is None:
        lines.append(
            "predicted nothing: no hardware profile is known for this machine; give --machine"
        )
    else:
        error = prediction.step_seconds / measurement.median_step_seconds - 1
        lines.append(
            f"predicted {format_seconds(prediction.step_seconds)} on {scenario.machine.name} "
            f"({signed_percent(error)} % of the median), "
            f"{_predicted_memory_text(prediction, measurement)}"
        )
    return "\n".join([*lines, "", _operations_text(operations, n_operations)])


def _memory_text(measurement: Measurement) -> str:
    """Return what a rank took at most: its process, or its tensors and what the allocator held."""
    peak = f"{gib(measurement.peak_memory_bytes):.2f} GiB at most on a rank"
    if measurement.held_memory_bytes is None:
        return f"{peak} (whole process)" if measurement.memory_is_of_process else peak
    return f"{peak} in tensors; the allocator held {gib(measurement.held_memory_bytes):.2f} GiB"


def _predicted_memory_text(prediction: Prediction, measurement: Measurement) -> str:
    """Return the predicted memory, in the parts that were measured."""
    whole = f"{gib(prediction.memory_bytes):.2f} GiB"
    if measurement.held_memory_bytes is None:
        return whole
    return (
        f"{gib(prediction.allocated_bytes):.2f} GiB in tensors, "
        f"{gib(prediction.allocator_bytes):.2f} GiB held, {whole} in all"
    )


def _placement(measurement: Measurement) -> str:
    """Return the layout, and the rank order where a layout may have several."""
    layout = measurement.layout
    if not layout.is_grid:
        return f"layout {layout}"
    return f"grid {layout} (x, y, z, data), order {measurement.order}"


def _operations_text(operations: Sequence[OperationTime], limit: int | None) -> str:
    shown = operations if limit is None else operations[:limit]
    rows = [
        [
            row.name,
            row.kind + (f" over {row.axis}" if row.axis else ""),
            row.n_calls,
            _amount(row),
            f"{1e3 * row.measured_seconds:.3f}",
            "-" if row.predicted_seconds is None else f"{1e3 * row.predicted_seconds:.3f}",
            "-" if row.predicted_over_measured is None else f"{row.predicted_over_measured:.2f}",
        ]
        for row in shown
    ]
    headers = ["operation", "kind", "calls", "amount", "measured ms", "predicted ms", "ratio"]
    text = table(rows, headers)
    hidden = operations[len(shown) :]
    if hidden:
        milliseconds = 1e3 * sum(row.measured_seconds for row in hidden)
        text += f"\n({len(hidden)} more operations, {milliseconds:.3f} ms; --all shows them)"
    return text


def _amount(row: OperationTime) -> str:
    if row.flops:
        return format_quantity(row.flops, "flops_per_s").removesuffix("/s")
    return format_quantity(row.nbytes, "nbytes_bytes")


def run_document(
    scenario: Scenario,
    measurement: Measurement,
    operations: Sequence[OperationTime],
    prediction: Prediction | None,
) -> dict[str, Any]:
    """Return what ``run --format json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": scenario.model.name,
        "strategy": scenario.strategy.name,
        "engine": scenario.strategy.engine.name,
        "job": asdict(scenario.job),
        "machine": None if prediction is None else scenario.machine.name,
        "device": measurement.device_name,
        "backend": measurement.backend,
        "software": dict(measurement.software),
        "grid": dict(measurement.layout.sizes),
        "order": measurement.order,
        "micro_batch": measurement.micro_batch,
        "recompute": measurement.recompute,
        "warm_up_steps": min(WARM_UP_STEPS, len(measurement.steps) - len(measurement.timed_steps)),
        "mean_step_seconds": measurement.mean_step_seconds,
        "median_step_seconds": measurement.median_step_seconds,
        **rates(scenario, measurement),
        "peak_memory_bytes": measurement.peak_memory_bytes,
        "memory_is_of_process": measurement.memory_is_of_process,
        "first_peak_memory_bytes": measurement.first_peak_memory_bytes,
        "held_memory_bytes": measurement.held_memory_bytes,
        "gemm_modes": dict(measurement.gemm_modes),
        "steps": [
            {"seconds": s.seconds, "loss": s.loss, "gradient_norm": s.gradient_norm}
            for s in measurement.steps
        ],
        "prediction": None if prediction is None else record(prediction),
        "operations": [
            {**asdict(row), "predicted_over_measured": row.predicted_over_measured}
            for row in operations
        ],
    }
