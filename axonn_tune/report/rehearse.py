"""What ``rehearse`` shows: a step next to its plan, or its price, as text and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from axonn_tune.report.phrases import assumption_line, model_on_gpus
from axonn_tune.report.records import SCHEMA_VERSION, assumptions, record
from axonn_tune.report.table import table_of
from axonn_tune.search.search import Search
from axonn_tune.spec.rehearsal import HOLDERS, FusedAttention, Message, Product, Rehearsed
from axonn_tune.step.rehearsed import PricedRehearsal
from axonn_tune.units import counted, format_quantity, format_seconds, gib
from axonn_tune.validation.rehearsed import SMALL_BYTES, Line, MemoryLine, RehearsedStep

# What is said of a script of which more than one step may have been recorded.
WHOLE_SCRIPT = (
    "The script defines no function step(), so that all of its steps and its initialisation count."
)


def comparison_text(search: Search, comparison: RehearsedStep, most_memory_error: float) -> str:
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


def _head_lines(comparison: RehearsedStep) -> list[str]:
    p = comparison.prediction
    configuration = p.configuration
    engine = p.scenario.strategy.engine
    shown = comparison.n_microsteps
    share = counted(shown, "micro-step")
    if p.n_microsteps < shown:
        share = f"{p.n_microsteps} of {share}"
    elif shown > 1:
        share = f"all {share}"
    n_stages = configuration.layout.n_stages
    of_stage = f" (stage {comparison.stage} of stages 0 to {n_stages - 1})" if n_stages > 1 else ""
    return [
        f"{model_on_gpus(p.scenario)}, {p.scenario.strategy.name}"
        f"{f' ({engine.title})' if engine.title else ''}, layout {configuration.ordered_layout}, "
        f"micro-batch {configuration.micro_batch}, recompute {configuration.recompute}",
        f"rehearsed rank {comparison.rank} of {comparison.rehearsal.n_ranks}{of_stage}, {share}, "
        f"in {format_seconds(comparison.rehearsal.seconds, 3)}",
    ]


def _lines_text(lines: Sequence[Line]) -> str:
    ordered = sorted(lines, key=lambda line: not line.differs)
    return table_of(
        ordered,
        [
            ("planned as", _planned_text),
            ("size", size_text),
            ("over", lambda line: line.subject.group or "-"),
            ("planned", lambda line: line.planned),
            ("rehearsed", lambda line: line.rehearsed),
            ("differs", _mark),
        ],
    )


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


def _planned_text(line: Line) -> str:
    """Return the first name in the plan and the number of others, or what is not planned."""
    if not line.names:
        return f"{line.subject.kind}, not planned"
    first, *others = line.names
    return f"{first} (+{len(others)})" if others else first


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


def verdict_lines(comparison: RehearsedStep, most_memory_error: float) -> list[str]:
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
    error = round(100 * comparison.memory_error, 2) + 0.0  # no minus before a zero
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
    search: Search, comparison: RehearsedStep, most_memory_error: float
) -> dict[str, Any]:
    """Return what ``rehearse --format json`` prints."""
    agrees = abs(comparison.memory_error) <= most_memory_error
    return {
        "schema_version": SCHEMA_VERSION,
        "assumptions": assumptions(search),
        "result": record(comparison.prediction),
        "rank": comparison.rank,
        "n_ranks": comparison.rehearsal.n_ranks,
        "stage": comparison.stage,
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


def price_text(script: str, priced: PricedRehearsal, n_operations: int | None) -> str:
    """Return the time, the operations, the messages and the memory of a script's step.

    Parameters
    ----------
    n_operations : int or None
        Number of operations to show, the longest first; None shows all.
    """
    machine = priced.machine
    rehearsal = priced.rehearsal
    held = ", ".join(
        f"{holder} {gib(rehearsal.held_bytes.get(holder, 0.0)):.3f}" for holder in HOLDERS
    )
    return "\n".join(
        [
            f"{script}: rank 0 of {rehearsal.n_ranks}, rehearsed in "
            f"{format_seconds(rehearsal.seconds, 3)}, priced on {machine.name} "
            f"({machine.gpu.name})",
            f"{'step' if rehearsal.is_one_step else 'all steps'} between "
            f"{format_seconds(priced.hidden_step_seconds)}, with all communication "
            f"hidden that can be, and {format_seconds(priced.exposed_step_seconds)}, with none",
            f"compute {format_seconds(priced.compute_seconds)}, host "
            f"{format_seconds(priced.host_seconds)}, communication "
            f"{format_seconds(priced.communication_seconds)}; {priced.flops * 1e-12:.4g} TFLOP",
            *([] if rehearsal.is_one_step else [WHOLE_SCRIPT]),
            "",
            _priced_text(priced, n_operations),
            "",
            *_groups_lines(priced),
            f"Peak memory of tensors {gib(rehearsal.peak_bytes):.3f} GiB ({held}), of "
            f"{gib(machine.gpu.memory_bytes.value):.1f} GiB.",
        ]
    )


def _priced_text(priced: PricedRehearsal, limit: int | None) -> str:
    ordered = sorted(priced.operations, key=lambda o: -o.seconds)
    shown = ordered if limit is None else ordered[:limit]
    text = table_of(
        shown,
        [
            ("kind", lambda o: _kind_of(o.operation)),
            ("size", lambda o: _size_of(o.operation)),
            ("type", lambda o: o.operation.dtype),
            ("calls", lambda o: o.n_calls),
            ("each", lambda o: format_seconds(o.seconds / o.n_calls, 3)),
            ("total ms", lambda o: f"{1e3 * o.seconds:.3f}"),
        ],
    )
    hidden = ordered[len(shown) :]
    if hidden:
        milliseconds = 1e3 * sum(o.seconds for o in hidden)
        text += f"\n(and {len(hidden)} more, {milliseconds:.3f} ms; --all shows them)"
    return text


def _kind_of(operation: Rehearsed) -> str:
    if isinstance(operation, Product):
        return f"product {operation.mode}"
    if isinstance(operation, FusedAttention):
        return "attention backward" if operation.backward else "attention"
    return operation.kind if isinstance(operation, Message) else operation.name


def _size_of(operation: Rehearsed) -> str:
    if isinstance(operation, Product):
        batched = f"{operation.batch} times " if operation.batch > 1 else ""
        return f"{batched}{operation.m} x {operation.n} x {operation.k}"
    if isinstance(operation, FusedAttention):
        head = f"{operation.seq_len} x {operation.head_dim}"
        return f"{operation.n_sequences} x {operation.n_heads} heads x {head}"
    size = format_quantity(operation.nbytes, "size_bytes")
    return f"{size} over {operation.ranks_text}" if isinstance(operation, Message) else size


def _groups_lines(priced: PricedRehearsal) -> list[str]:
    """Return a table of the groups that exchange messages, if there are any."""
    texts: dict[tuple[int, ...], str] = {}
    n_calls: Counter[tuple[int, ...]] = Counter()
    nbytes: Counter[tuple[int, ...]] = Counter()
    for o in priced.operations:
        if isinstance(o.operation, Message):
            message = o.operation
            texts[message.ranks] = f"{message.ranks_text}, {message.stride} apart"
            n_calls[message.ranks] += o.n_calls
            nbytes[message.ranks] += o.n_calls * message.nbytes
    if not texts:
        return ["It sends no message.", ""]
    groups = table_of(
        list(texts),
        [
            ("group", lambda ranks: texts[ranks]),
            ("messages", lambda ranks: n_calls[ranks]),
            ("bytes", lambda ranks: format_quantity(nbytes[ranks], "size_bytes")),
            ("total ms", lambda ranks: f"{1e3 * priced.group_seconds[ranks]:.3f}"),
        ],
    )
    return [groups, ""]


def price_document(script: str, priced: PricedRehearsal) -> dict[str, Any]:
    """Return what ``rehearse --script --format json`` prints."""
    rehearsal = priced.rehearsal
    return {
        "schema_version": SCHEMA_VERSION,
        "script": script,
        "machine": priced.machine.name,
        "n_ranks": rehearsal.n_ranks,
        "is_one_step": rehearsal.is_one_step,
        "rehearsal_seconds": rehearsal.seconds,
        "hidden_step_seconds": priced.hidden_step_seconds,
        "exposed_step_seconds": priced.exposed_step_seconds,
        "compute_seconds": priced.compute_seconds,
        "host_seconds": priced.host_seconds,
        "communication_seconds": priced.communication_seconds,
        "flops": priced.flops,
        "peak_bytes": rehearsal.peak_bytes,
        "held_bytes": dict(rehearsal.held_bytes),
        "groups": [
            {"ranks": list(ranks), "seconds": seconds}
            for ranks, seconds in priced.group_seconds.items()
        ],
        "operations": [
            {
                "kind": _kind_of(o.operation),
                "n_calls": o.n_calls,
                "seconds": o.seconds,
                **asdict(o.operation),
            }
            for o in priced.operations
        ],
    }
