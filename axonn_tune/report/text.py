"""Results as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from axonn_tune.search.rank import Ranking
from axonn_tune.search.uncertainty import tied
from axonn_tune.spec.layout import AXES
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.explain import Explanation, OperationCost
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import format_count, format_quantity, format_seconds, gib

# Likelier than this to be the fastest, a row is the winner; otherwise those that share so much of
# the probability are as good as tied.
CLEAR, TIE_SHARE = 0.8, 0.9


def table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """Aligned columns: numbers to the right, names to the left.

    Written out because importing a table library costs a tenth of a whole `suggest`.
    """
    columns = zip(*rows, strict=True) if rows else [()] * len(headers)
    aligned = [
        _aligned(header, [str(cell) for cell in column])
        for header, column in zip(headers, columns, strict=True)
    ]
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def _aligned(header: str, cells: Sequence[str]) -> list[str]:
    width = max(map(len, (header, *cells)))
    numeric = all(cell[:1].isdigit() or cell[:1] in "-." for cell in cells)
    justify = str.rjust if numeric else str.ljust
    head, *body = (justify(cell, width) for cell in (header, *cells))
    return [head, "-" * width, *body]


def assumption_line(scenario: Scenario, machine_was_given: bool = True) -> str:
    """One line that says what was assumed."""
    job = scenario.job
    default = "" if machine_was_given else " (the default; choose with --machine)"
    tuning = "on" if job.kernel_tuning else "off"
    return (
        f"Assumed: machine {scenario.machine.name}{default}, global batch {job.global_batch} "
        f"sequences ({format_count(job.tokens)} tokens), sequence length {job.seq_len}, "
        f"{job.dtype}, {job.attention} attention{', dropout' if job.dropout else ''}, "
        f"overlap {job.overlap}, kernel tuning {tuning}."
    )


def ranking_text(ranking: Ranking, top_n: int, machine_was_given: bool) -> str:
    """The best configurations, the assumptions and the next command to type."""
    predictions = ranking.top(top_n)
    search = ranking.search
    capacity = search.scenario.memory_capacity_bytes
    what = "grids" if search.scenario.strategy.axes.is_grid else "layouts"
    what = what if len(search.constraints.orders) == 1 else f"{what} and orders"
    what = "configurations" if search.every_configuration else what
    show_order = (
        len({p.configuration.order for p in predictions} | set(search.constraints.orders)) > 1
    )
    paper = search.cost_model == "paper"
    axes = search.scenario.strategy.axes.names
    virtual = any(p.configuration.n_virtual > 1 for p in predictions)
    bubble = any(p.bubble_seconds > 0 for p in predictions)
    headers = [
        "#",
        *(
            f"G_{axis}" if search.scenario.strategy.axes.is_grid and axis in AXES else axis
            for axis in axes
        ),
    ] + ["order"] * show_order
    headers += ["virtual"] * virtual + ["mbs", "recompute"] + ["paper s"] * paper
    headers += [
        "step s",
        "90 % interval",
        "P(best) %",
        "TFLOP/s/GPU",
        "MFU %",
        "HFU %",
        "exposed %",
    ]
    headers += ["bubble %"] * bubble + [f"GiB of {gib(capacity):.0f}"]
    rows = []
    for p in predictions:
        memory = f"{gib(p.memory_bytes):.1f}" + ("" if p.fits else f" OOM: {p.largest_memory_term}")
        rows.append(
            [p.place, *(p.layout.sizes.get(axis, 1) for axis in axes)]
            + [p.configuration.order] * show_order
            + [p.configuration.n_virtual] * virtual
            + [p.configuration.micro_batch, p.configuration.recompute]
            + [f"{p.paper_communication_seconds or 0.0:.3f}"] * paper
            + [f"{p.step_seconds:.3f}", interval_text(p), _percent(p.p_best)]
            + [f"{p.tflops_per_gpu:.1f}"]
            + [f"{100 * p.mfu:.1f}", f"{100 * p.hfu:.1f}"]
            + [f"{100 * p.exposed_communication_fraction:.1f}"]
            + [f"{100 * p.bubble_seconds / p.step_seconds:.1f}"] * bubble
            + [memory]
        )
    return "\n".join(
        [
            f"{search.scenario.model.name} ({format_count(search.scenario.model.parameters)} parameters) on "
            f"{search.scenario.job.n_gpus} {search.scenario.machine.gpu.name}: best {len(rows)} of {len(ranking)} "
            f"{what} ({ranking.n_evaluated} configurations evaluated)",
            "",
            table(rows, headers),
            "",
            *tie_lines(ranking),
            assumption_line(search.scenario, machine_was_given),
        ]
    )


def interval_text(prediction: Prediction) -> str:
    """Ends of the 90 % interval, if it is known."""
    interval = prediction.step_seconds_interval
    return "-" if interval is None else f"{interval[0]:.3f}-{interval[1]:.3f}"


def _percent(probability: float | None) -> str:
    return "-" if probability is None else f"{100 * probability:.0f}"


def tie_lines(ranking: Ranking) -> list[str]:
    """Says so if the profile's spreads do not tell which row is the fastest."""
    p_best = ranking.uncertainty.p_best
    if not p_best.size or p_best.max() >= CLEAR:
        return []
    count = tied(p_best, TIE_SHARE)
    return [
        f"No clear winner: {count} rows share {100 * TIE_SHARE:.0f} % of the chance to be the "
        "fastest; the spreads of the profile do not tell them apart."
    ]


def rejected_text(rejected: Mapping[str, int]) -> str:
    """How many grids, or configurations of grids, fell to what."""
    if not rejected:
        return "Rejected: none."
    lines = (f"  {count:>8}  {reason}" for reason, count in rejected.items())
    return "\n".join(["Rejected (grids; out of memory: configurations):", *lines])


def explanation_text(explanation: Explanation, n_operations: int | None) -> str:
    """A configuration's time by operation, its memory, and what would help."""
    p, scenario = explanation.prediction, explanation.prediction.scenario
    layout = f"layout {p.layout}"
    if scenario.strategy.axes.is_grid:
        layout = f"grid {p.layout} (x, y, z, data), order {p.configuration.order}"
    if p.configuration.n_virtual > 1:
        layout += f", {p.configuration.n_virtual} virtual stages"
    bubble = f" + {p.bubble_seconds:.3f} s pipeline bubble" if p.bubble_seconds else ""
    parts = [
        f"{scenario.model.name} on {scenario.job.n_gpus} {scenario.machine.gpu.name}, {layout}, "
        f"micro-batch {p.configuration.micro_batch}, recompute {p.configuration.recompute}",
        f"step {p.step_seconds:.3f} s = {p.compute_seconds:.3f} s compute + "
        f"{p.exposed_communication_seconds:.3f} s exposed communication{bubble}; "
        f"{p.n_microsteps} micro-steps; {p.tflops_per_gpu:.1f} TFLOP/s per GPU, "
        f"MFU {100 * p.mfu:.1f} %, HFU {100 * p.hfu:.1f} %",
        "",
        _operations_text(explanation.operations, n_operations, p.step_seconds),
        "",
        _axes_text(explanation),
        "",
        _memory_text(p),
        "",
        _sensitivity_text(explanation, p.step_seconds),
        "",
        assumption_line(scenario),
    ]
    return "\n".join(parts)


def _operations_text(
    operations: Sequence[OperationCost], limit: int | None, step_seconds: float
) -> str:
    ordered = sorted(operations, key=lambda op: -op.total_seconds)
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
    left = len(ordered) - len(shown)
    note = ""
    if left:
        rest = sum(op.total_seconds for op in ordered[len(shown) :])
        note = (
            f"\n(and {left} more operations, {rest:.4f} s, {100 * rest / step_seconds:.2f} % "
            "of the step; --all shows them)"
        )
    return table(rows, headers) + note


def operation_size(op: OperationCost) -> str:
    """The shape of a kernel, or the buffer of a collective."""
    return op.shape or format_quantity(op.nbytes, "size_bytes")


def operation_rate(op: OperationCost) -> str:
    """FLOP/s of a product, bytes/s of what moves bytes."""
    if op.kind.startswith(("GEMM", "attention")):
        return format_quantity(op.rate_per_s, "rate_flops_per_s")
    return format_quantity(op.rate_per_s, "rate_bytes_per_s")


def _axes_text(explanation: Explanation) -> str:
    exposed = explanation.exposed_seconds_by_axis
    parts = (f"{axis} {seconds:.4f} s" for axis, seconds in exposed.items())
    return "Exposed communication by axis: " + ", ".join(parts)


def _memory_text(p: Prediction) -> str:
    rows = [[term, f"{gib(size):.2f}"] for term, size in p.memory_terms_bytes.items()]
    rows.append(["total", f"{gib(p.memory_bytes):.2f}"])
    short = gib(p.memory_bytes - p.memory_capacity_bytes)
    verdict = (
        f"fits, {-short:.2f} GiB free"
        if p.fits
        else f"out of memory, {short:.2f} GiB short; largest term {p.largest_memory_term}"
    )
    capacity = f"{gib(p.memory_capacity_bytes):.1f} GiB"
    return table(rows, ["memory term", "GiB"]) + f"\nOf {capacity} per GPU: {verdict}"


def _sensitivity_text(explanation: Explanation, step_seconds: float) -> str:
    rows = [
        [s.resource, f"{s.saved_seconds:.4f}", f"{100 * s.saved_seconds / step_seconds:.2f}"]
        for s in explanation.sensitivities
    ]
    return table(rows, ["10 % more (latency, jitter, interference: less)", "saves s", "% of step"])


def key_values(pairs: Iterable[tuple[str, str]]) -> str:
    """Two aligned columns."""
    listed = list(pairs)
    width = max(len(key) for key, _ in listed)
    return "\n".join(f"{key:<{width}}  {value}" for key, value in listed)
