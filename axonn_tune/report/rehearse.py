"""What ``rehearse`` shows: a rehearsed step next to its plan, as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from axonn_tune.report.phrases import assumption_line, model_on_gpus
from axonn_tune.report.records import SCHEMA_VERSION, assumptions, record
from axonn_tune.report.table import fitted_table, table_of
from axonn_tune.search.search import Search
from axonn_tune.units import format_quantity, format_seconds, gib
from axonn_tune.validation.rehearsed import SMALL_BYTES, Comparison, Line, MemoryLine


def comparison_text(search: Search, comparison: Comparison, most_memory_error: float) -> str:
    """Return the operations and the memory of a rehearsed step next to the planned ones.

    Parameters
    ----------
    most_memory_error : float
        Largest error of the peak memory that counts as agreement, as a fraction.
    """
    return "\n".join(
        [
            *_head_lines(comparison),
            "",
            _lines_text(comparison.lines),
            "",
            _memory_text(comparison.memory),
            "",
            *verdict_lines(comparison, most_memory_error),
            "",
            assumption_line(search),
        ]
    )


def _head_lines(comparison: Comparison) -> list[str]:
    p = comparison.prediction
    configuration = p.configuration
    engine = p.scenario.strategy.engine
    shown = comparison.n_microsteps
    share = f"{p.n_microsteps} of {shown}" if p.n_microsteps < shown else f"all {shown}"
    return [
        f"{model_on_gpus(p.scenario)}, {p.scenario.strategy.name}"
        f"{f' ({engine.title})' if engine.title else ''}, layout {configuration.ordered_layout}, "
        f"micro-batch {configuration.micro_batch}, recompute {configuration.recompute}",
        f"rehearsed rank 0 of {comparison.rehearsal.n_ranks}, {share} micro-steps, in "
        f"{format_seconds(comparison.rehearsal.seconds, 3)}",
    ]


def _lines_text(lines: Sequence[Line]) -> str:
    rows = [
        [
            line.subject.kind,
            size_text(line),
            line.subject.group or "-",
            line.planned,
            line.rehearsed,
            _mark(line),
            _names_text(line.names),
        ]
        for line in lines
    ]
    headers = ["kind", "size", "over", "planned", "rehearsed", "differs", "planned as"]
    return fitted_table(rows, headers, ())


def size_text(line: Line) -> str:
    """Return the sizes of a kernel, or the bytes of a message."""
    if line.subject.group:
        return format_quantity(line.subject.nbytes, "size_bytes")
    *sizes, last = line.subject.sizes
    if line.subject.kind != "product":
        return " x ".join(map(str, line.subject.sizes))
    batched = f"{last} times " if last > 1 else ""
    return batched + " x ".join(map(str, sizes))


def _mark(line: Line) -> str:
    if line.differs:
        return f"{line.rehearsed - line.planned:+d}"
    return "" if line.subject.is_judged else "(small)"


def _names_text(names: Sequence[str]) -> str:
    if not names:
        return "not planned"
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _memory_text(memory: Sequence[MemoryLine]) -> str:
    return table_of(
        memory,
        [
            ("held at the peak by", lambda line: line.holder),
            ("planned GiB", lambda line: f"{gib(line.planned_bytes):.3f}"),
            ("rehearsed GiB", lambda line: f"{gib(line.rehearsed_bytes):.3f}"),
            ("more GiB", lambda line: f"{gib(line.rehearsed_bytes - line.planned_bytes):+.3f}"),
        ],
    )


def verdict_lines(comparison: Comparison, most_memory_error: float) -> list[str]:
    """Say whether the program does what is planned, and whether it needs the planned memory."""
    judged = [line for line in comparison.lines if line.subject.is_judged]
    differing = comparison.differing
    operations = f"all {len(judged)} products, attentions and collectives are as planned"
    if differing:
        operations = (
            f"{len(differing)} of {len(judged)} products, attentions and collectives differ from "
            "the plan"
        )
    if len(judged) < len(comparison.lines):
        operations += f" (messages of up to {SMALL_BYTES} bytes are not judged)"
    error = 100 * comparison.memory_error
    agrees = abs(comparison.memory_error) <= most_memory_error
    planned = gib(comparison.planned_peak_bytes)
    measured = gib(comparison.rehearsal.peak_bytes)
    ratio = comparison.rehearsed_kernel_bytes / max(comparison.planned_kernel_bytes, 1.0)
    return [
        f"Operations: {operations}.",
        f"Peak memory of tensors: planned {planned:.3f} GiB, rehearsed {measured:.3f} GiB; the "
        f"plan is off by {error:+.2f} %, {'within' if agrees else 'more than'} "
        f"{100 * most_memory_error:g} %.",
        f"Other kernels move {ratio:.2f} times the planned bytes, since no compiler has fused them "
        "(not judged).",
    ]


def comparison_document(
    search: Search, comparison: Comparison, most_memory_error: float
) -> dict[str, Any]:
    """Return what ``rehearse --format json`` prints."""
    agrees = abs(comparison.memory_error) <= most_memory_error
    return {
        "schema_version": SCHEMA_VERSION,
        "assumptions": assumptions(search),
        "result": record(comparison.prediction),
        "n_ranks": comparison.rehearsal.n_ranks,
        "rehearsed_microsteps": comparison.prediction.n_microsteps,
        "n_microsteps": comparison.n_microsteps,
        "rehearsal_seconds": comparison.rehearsal.seconds,
        "operations": [
            {
                **asdict(line.subject),
                "names": list(line.names),
                "planned": line.planned,
                "rehearsed": line.rehearsed,
                "judged": line.subject.is_judged,
                "differs": line.differs,
            }
            for line in comparison.lines
        ],
        "memory": [asdict(line) for line in comparison.memory],
        "planned_peak_bytes": comparison.planned_peak_bytes,
        "rehearsed_peak_bytes": comparison.rehearsal.peak_bytes,
        "memory_error": comparison.memory_error,
        "planned_kernel_bytes": comparison.planned_kernel_bytes,
        "rehearsed_kernel_bytes": comparison.rehearsed_kernel_bytes,
        "operations_agree": not comparison.differing,
        "memory_agrees": agrees,
    }
