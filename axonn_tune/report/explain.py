"""What ``explain`` shows: one step, operation by operation, as text, plain data and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from axonn_tune.report.figure import new_figure
from axonn_tune.report.memory import host_memory_text, verdict
from axonn_tune.report.phrases import (
    assumption_line,
    in_host_memory,
    mfu_remarks,
    model_on_gpus,
    percent,
)
from axonn_tune.report.records import SCHEMA_VERSION, assumptions, record
from axonn_tune.report.table import fitted_table, table
from axonn_tune.report.trust import trust_lines
from axonn_tune.search.search import Search
from axonn_tune.spec.layout import EXPERT, EXPERT_REPLICAS
from axonn_tune.spec.plan import COMPUTE
from axonn_tune.step.explain import Explanation, OperationCost
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.timeline import step_timeline
from axonn_tune.units import counted, format_quantity, format_seconds, gib, rounded

OPTIMIZER = "optimizer.step"
# Number of digits that people read.
DIGITS = 5
# Share of a step from which the host, or the difference between stages, is told of.
NOTABLE_FRACTION = 0.05
# Number of equal layers in a row that a timeline draws.
DRAWN_LAYERS = 3
# Number of micro-batches of a pipeline that a timeline draws.
DRAWN_MICROBATCHES = 8
_EXPERT_GROUPS = (
    f"({EXPERT}: the ranks that share the experts of a layer; {EXPERT_REPLICAS}: those that hold "
    "the same experts)"
)


def explanation_text(search: Search, explanation: Explanation, n_operations: int | None) -> str:
    """Return a configuration's time by operation, its memory, and what would help.

    Parameters
    ----------
    n_operations : int or None
        Number of operations to show, the longest first; None shows all.
    """
    p = explanation.prediction
    return "\n".join(
        [
            *_head_lines(p),
            *_remark_lines(explanation),
            "",
            _operations_text(explanation.operations, n_operations, p.step_seconds),
            "",
            _axes_text(explanation),
            "",
            _memory_text(p),
            "",
            _sensitivity_text(explanation, p.step_seconds),
            "",
            *trust_lines(search),
            assumption_line(search),
        ]
    )


def _head_lines(p: Prediction) -> list[str]:
    configuration = p.configuration
    layout = f"layout {p.layout}"
    if p.scenario.strategy.axes.is_grid:
        layout = f"grid {p.layout} ({', '.join(p.layout.sizes)}), order {configuration.order}"
    if configuration.n_virtual > 1:
        layout += f", {configuration.n_virtual} virtual stages"
    bubble = f" + {p.bubble_seconds:.3f} s pipeline bubble" if p.bubble_seconds else ""
    return [
        f"{model_on_gpus(p.scenario)}, {layout}, "
        f"micro-batch {configuration.micro_batch}, recompute {configuration.recompute}",
        *_shortage_lines(p),
        f"step {p.step_seconds:.3f} s = {p.compute_seconds:.3f} s compute + "
        f"{p.exposed_communication_seconds:.3f} s exposed communication{bubble}; "
        f"{counted(p.n_microsteps, 'micro-step')}; {p.tflops_per_gpu:.1f} TFLOP/s per GPU, "
        f"MFU {percent(p.mfu)} %, HFU {percent(p.hfu)} %",
        *([verdict(p)] if p.nearly_fits else []),
    ]


def _remark_lines(explanation: Explanation) -> list[str]:
    """Return lines on the host, on other stages and on the MFU, where these matter."""
    p = explanation.prediction
    lines = []
    if explanation.host_seconds > NOTABLE_FRACTION * p.step_seconds:
        lines.append(
            f"{explanation.host_seconds:.3f} s of the compute are waits for the host, which issues "
            "operations more slowly than the GPU carries them out"
        )
    own, busiest = explanation.stage_seconds, explanation.busiest_stage_seconds
    if busiest > (1.0 + NOTABLE_FRACTION) * own:
        lines.append(
            "the compute and the exposed communication are those of the last stage, which takes "
            f"{format_seconds(own, 3)} for a micro-batch; the busiest stage takes "
            f"{format_seconds(busiest, 3)} and sets the pace"
        )
    return [*lines, *_sleep_lines(p), *_causal_lines(p), *_peak_lines(p), *mfu_remarks([p])]


def _sleep_lines(p: Prediction) -> list[str]:
    """Return a line on the sleep of stages over their messages, which counts in the bubble."""
    handover_seconds = p.scenario.strategy.engine.megatron.handover_seconds
    if p.layout.n_stages == 1 or not any(handover_seconds):
        return []
    return [
        "the bubble includes the sleep of hosts over messages: two neighbouring stages stand still "
        f"for {sum(handover_seconds):.3g} s with each micro-batch"
    ]


def _peak_lines(p: Prediction) -> list[str]:
    """Return a line on the peak of which MFU and HFU are fractions, if products have a higher."""
    job = p.scenario.job
    if job.recipe is None or p.mfu > 1.0:
        return []
    return [f"MFU and HFU are fractions of the peak of {job.dtype}, not of {job.precision}"]


def _causal_lines(p: Prediction) -> list[str]:
    """Return a line on what attention's mask would take off the FLOP/s, where it is much."""
    masked_fraction = 1.0 - p.causal_tflops_per_gpu / p.tflops_per_gpu
    if masked_fraction <= NOTABLE_FRACTION:
        return []
    mfu = p.mfu * (1.0 - masked_fraction)
    return [
        "attention counts without its causal mask, by convention; with the mask, these are "
        f"{p.causal_tflops_per_gpu:.1f} TFLOP/s per GPU, MFU {percent(mfu)} %"
    ]


def _shortage_lines(p: Prediction) -> list[str]:
    """Return a line for each memory, of the GPU or of the host, in which it does not fit."""
    lines = []
    if not p.fits_in_gpu:
        missing = gib(p.memory_bytes - p.memory_capacity_bytes)
        lines.append(
            f"out of memory: {missing:.2f} GiB short of {gib(p.memory_capacity_bytes):.1f} GiB per "
            "GPU; the times are those of a GPU with enough memory"
        )
    if not p.fits_in_host:
        lines.append(f"{host_memory_text(p)}; the times are those of a host with enough memory")
    return lines


def longest_first(operations: Sequence[OperationCost]) -> list[OperationCost]:
    """Return operations by their time, and equally long ones in the order of the plan.

    Sums of equal times may differ in their last digits, so that the first `DIGITS` count.
    """
    return sorted(operations, key=lambda op: -rounded(op.total_seconds, DIGITS))


def _operations_text(
    operations: Sequence[OperationCost], limit: int | None, step_seconds: float
) -> str:
    ordered = longest_first(operations)
    shown = ordered if limit is None else ordered[:limit]
    rows = [
        [
            op.name,
            op.kind,
            op.axis or "-",
            operation_size(op),
            op.n_calls,
            format_seconds(op.seconds_per_call, 3),
            f"{op.total_seconds:.4f}",
            f"{op.exposed_seconds:.4f}" if op.axis else "-",
            f"{op.hidden_seconds:.4f}" if op.axis else "-",
            operation_rate(op),
            op.bound_by,
        ]
        for op in shown
    ]
    headers = ["operation", "kind", "axis", "size", "calls", "each", "total s", "exposed s"]
    headers += ["hidden s", "rate", "bound by"]
    text = fitted_table(rows, headers, ("hidden s", "rate", "kind", "calls"))
    hidden = ordered[len(shown) :]
    if hidden:
        seconds = sum(op.total_seconds for op in hidden)
        text += (
            f"\n(and {len(hidden)} more operations, {seconds:.4f} s, "
            f"{percent(seconds / step_seconds, 2)} % of the step; --all shows them)"
        )
    return text


def operation_size(operation: OperationCost) -> str:
    """Return the shape of a kernel, or the size of a collective's buffer."""
    return operation.shape or format_quantity(operation.nbytes, "size_bytes")


def operation_rate(operation: OperationCost) -> str:
    """Return FLOP/s of a product, or bytes/s of an operation that moves bytes."""
    if operation.kind.startswith(("GEMM", "attention")):
        return format_quantity(operation.rate_per_s, "rate_flops_per_s")
    return format_quantity(operation.rate_per_s, "rate_bytes_per_s")


def _axes_text(explanation: Explanation) -> str:
    exposed = explanation.exposed_seconds_by_axis
    parts = (f"{axis} {seconds:.4f} s" for axis, seconds in exposed.items())
    line = "Exposed communication by axis: " + ", ".join(parts)
    return f"{line}\n{_EXPERT_GROUPS}" if EXPERT in exposed else line


def _memory_text(p: Prediction) -> str:
    rows = [[term, f"{gib(size):.2f}"] for term, size in p.memory_terms_bytes.items()]
    rows.append(["total", f"{gib(p.memory_bytes):.2f}"])
    capacity = f"{gib(p.memory_capacity_bytes):.1f} GiB"
    low, high = map(gib, p.memory_bytes_interval)
    return table(rows, ["memory term", "GiB"]) + (
        f"\nOf {capacity} per GPU: {verdict(p)}\nThe total lies between {low:.2f} and {high:.2f} "
        "GiB with 90 % probability, since fragmentation and reserved memory are known only roughly."
        f"{_offload_line(p)}"
    )


def _offload_line(p: Prediction) -> str:
    """Say in a line of its own what is offloaded, if anything is."""
    moved = in_host_memory(p.scenario)
    return f"\nOffloaded: {', '.join(moved)}; {host_memory_text(p)}" if moved else ""


def _sensitivity_text(explanation: Explanation, step_seconds: float) -> str:
    rows = [
        [s.resource, f"{s.saved_seconds:.4f}", percent(s.saved_seconds / step_seconds, 2)]
        for s in explanation.sensitivities
    ]
    return table(rows, ["10 % more (latency, jitter, interference: less)", "saves s", "% of step"])


def explanation_document(search: Search, explanation: Explanation) -> dict[str, Any]:
    """Return what ``explain --format json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "assumptions": assumptions(search),
        "prediction": record(explanation.prediction),
        "operations": [
            {
                "name": op.name,
                "kind": op.kind,
                "shape": op.shape or None,
                "nbytes": op.nbytes,
                "axis": op.axis or None,
                "n_calls": op.n_calls,
                "seconds_per_call": op.seconds_per_call,
                "total_seconds": op.total_seconds,
                "exposed_seconds": op.exposed_seconds,
                "hidden_seconds": op.hidden_seconds,
                "rate_per_s": op.rate_per_s,
                "bound_by": op.bound_by,
            }
            for op in explanation.operations
        ],
        "host_seconds": explanation.host_seconds,
        "stage_seconds": explanation.stage_seconds or None,
        "busiest_stage_seconds": explanation.busiest_stage_seconds or None,
        "exposed_seconds_by_axis": explanation.exposed_seconds_by_axis,
        "sensitivities": [
            {"resource": s.resource, "saved_seconds": s.saved_seconds}
            for s in explanation.sensitivities
        ],
    }


def step_parts(explanation: Explanation) -> dict[str, float]:
    """Return the seconds of the parts that sum up to the step, without those that take nothing."""
    p = explanation.prediction
    optimizer = sum(op.total_seconds for op in explanation.operations if op.name == OPTIMIZER)
    exposed = explanation.exposed_seconds_by_axis
    parts = {
        "compute": p.compute_seconds - optimizer - explanation.host_seconds,
        "optimizer": optimizer,
        "host": explanation.host_seconds,
        **{f"exposed, {axis}": seconds for axis, seconds in exposed.items()},
        # In a pipeline the rank that is explained waits for others that synchronise.
        "exposed, other ranks": p.exposed_communication_seconds - sum(exposed.values()),
        "bubble": p.bubble_seconds,
    }
    least = 1e-9 * p.step_seconds
    return {name: seconds for name, seconds in parts.items() if seconds > least}


def explanation_figure(explanation: Explanation) -> Any:
    """Draw a micro-step's timeline, the parts of the step, and the terms of the memory."""
    p = explanation.prediction
    figure, axes = new_figure(2, 2)
    top_row = axes[0, 0].get_gridspec()[0, :]
    for empty in axes[0]:
        empty.remove()
    _draw_timeline(figure.add_subplot(top_row), p)
    _draw_terms(axes[1, 0], step_parts(explanation), "s", "Step")
    memory = {term: gib(size) for term, size in p.memory_terms_bytes.items() if size}
    _draw_terms(axes[1, 1], memory, "GiB", "Memory of one GPU")
    axes[1, 1].axvline(gib(p.memory_capacity_bytes), color="black", linestyle="--")
    figure.suptitle(
        f"{model_on_gpus(p.scenario)}: {p.layout}, micro-batch {p.configuration.micro_batch}, "
        f"recompute {p.configuration.recompute}, {p.step_seconds:.3f} s a step"
    )
    return figure


def _draw_timeline(axes: Any, prediction: Prediction) -> None:
    n_micro = DRAWN_MICROBATCHES if prediction.layout.n_stages > 1 else 1
    operations = step_timeline(prediction, DRAWN_LAYERS, n_micro).operations
    streams = sorted(
        {op.stream for op in operations}, key=lambda stream: (stream != COMPUTE, stream)
    )
    kinds = sorted({op.kind for op in operations})
    for color, kind in enumerate(kinds):
        for row, stream in enumerate(streams):
            bars = [
                (op.start_seconds, op.seconds)
                for op in operations
                if (op.kind, op.stream) == (kind, stream)
            ]
            label = kind if bars else None
            axes.broken_barh(bars, (row - 0.4, 0.8), color=f"C{color}", label=label)
    handles, labels = axes.get_legend_handles_labels()
    handle_by_kind = dict(zip(labels, handles, strict=True))
    axes.legend(
        handle_by_kind.values(),
        handle_by_kind.keys(),
        fontsize="small",
        ncols=len(handle_by_kind),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
    )
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    axes.set(
        xlabel="s",
        title=f"A micro-step with {DRAWN_LAYERS} of the equal layers in a row, and the step's end",
    )


def _draw_terms(axes: Any, terms: dict[str, float], unit: str, title: str) -> None:
    """Draw bars that continue one another."""
    sizes = np.array(list(terms.values()))
    axes.barh(range(len(terms)), sizes, left=np.cumsum(sizes) - sizes)
    axes.set_yticks(range(len(terms)), list(terms), fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel=unit, title=title)
    axes.grid(alpha=0.3, axis="x")
