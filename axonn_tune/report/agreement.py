"""A validation as text, CSV records and JUnit XML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

from axonn_tune.report.text import table
from axonn_tune.spec.validation import OperationTime, Outcome, Validation
from axonn_tune.units import format_seconds, gib
from axonn_tune.validate.agreement import LARGE_ERROR, Agreement
from axonn_tune.validate.limits import Check


def agreement_text(validation: Validation, found: Agreement | None, checks: Sequence[Check]) -> str:
    """Every configuration with its error and the cause of a large one, then the whole."""
    v = validation
    head = (
        f"{v.model} on {v.n_ranks} x {v.device} ({v.backend}), machine {v.machine}\n"
        f"global batch {v.global_batch} sequences of {v.seq_len}, {v.dtype}, {v.attention} "
        f"attention, overlap {v.overlap}; {len(v.outcomes)} of {v.n_ranked} configurations"
    )
    rows = [_row(outcome) for outcome in sorted(v.outcomes, key=lambda o: o.predicted.rank)]
    headers = ["rank", "grid", "micro-batch", "recompute", "predicted", "measured", "error %"]
    parts = [head, table(rows, [*headers, "largest cause"])]
    failed = [outcome for outcome in v.outcomes if outcome.failure]
    parts += [f"{outcome.configuration} failed: {outcome.failure}" for outcome in failed]
    parts.append("nothing ran" if found is None else _summary(v, found))
    parts += ["\n".join(check.text for check in checks)] if checks else []
    return "\n\n".join(parts)


def _row(outcome: Outcome) -> list[str]:
    c, p = outcome.configuration, outcome.predicted
    measured, error = "failed", "-"
    if not outcome.failure:
        measured = format_seconds(outcome.measured_seconds)
        error = f"{100 * outcome.error_fraction:+.1f}"
    return [
        str(p.rank),
        c.ordered_layout,
        str(c.micro_batch),
        c.recompute,
        format_seconds(p.step_seconds),
        measured,
        error,
        cause_text(outcome),
    ]


def cause_text(outcome: Outcome) -> str:
    """The operation that makes a large error, and by how much of the step."""
    if outcome.failure or abs(outcome.error_fraction) < LARGE_ERROR or outcome.cause is None:
        return ""
    share = 100 * outcome.cause.excess_seconds / outcome.measured_seconds
    return f"{_operation(outcome.cause)} {share:+.1f} %"


def _operation(operation: OperationTime) -> str:
    exposed = "exposed " if operation.axis else ""
    return f"{exposed}{operation.name}"


def _summary(validation: Validation, found: Agreement) -> str:
    worst, best, suggested = found.worst, found.best, validation.suggested
    lines = [
        f"error    mean {100 * found.mape:.1f} % (MAPE), bias {100 * found.bias:+.1f} %, largest "
        f"{100 * worst.error_fraction:+.1f} % on {worst.configuration.layout}",
    ]
    if found.spearman is not None and found.kendall is not None:
        lines.append(f"order    Spearman {found.spearman:.3f}, Kendall {found.kendall:.3f}")
    if found.regret is None:
        lines.append(f"regret   unknown: the suggested {suggested.configuration} failed")
    else:
        lines.append(
            f"regret   {100 * found.regret:.1f} %: suggested {suggested.configuration.layout} "
            f"({format_seconds(suggested.measured_seconds)}), best measured "
            f"{best.configuration.layout} ({format_seconds(best.measured_seconds)})"
        )
    if found.memory_mape is not None:
        most = max(outcome.peak_memory_bytes or 0.0 for outcome in validation.measured)
        lines.append(
            f"memory   mean error {100 * found.memory_mape:.1f} %, most {gib(most):.2f} GiB"
        )
    return "\n".join(lines)


def outcome_records(validation: Validation) -> list[dict[str, Any]]:
    """A flat record per configuration, for CSV."""
    return [_record(outcome) for outcome in validation.outcomes]


def _record(outcome: Outcome) -> dict[str, Any]:
    c, p = outcome.configuration, outcome.predicted
    ran = not outcome.failure
    return {
        "rank": p.rank,
        **{f"g_{axis}": size for axis, size in c.layout.sizes.items()},
        "order": c.order,
        "micro_batch": c.micro_batch,
        "recompute": c.recompute,
        "predicted_seconds": p.step_seconds,
        "predicted_low_seconds": p.low_seconds,
        "predicted_high_seconds": p.high_seconds,
        "measured_seconds": outcome.measured_seconds if ran else None,
        "n_steps": len(outcome.step_seconds),
        "error_fraction": outcome.error_fraction if ran else None,
        "cause": outcome.cause.name if outcome.cause else None,
        "predicted_memory_bytes": p.memory_bytes,
        "measured_memory_bytes": outcome.peak_memory_bytes,
        "failure": outcome.failure or None,
    }


def junit_text(validation: Validation, checks: Sequence[Check]) -> str:
    """A test case per configuration, which fails where the run did, and one per limit."""
    suite = ElementTree.Element("testsuite", name=f"axonn-tune validate {validation.model}")
    n_failures = 0
    for outcome in validation.outcomes:
        seconds = 0.0 if outcome.failure else sum(outcome.step_seconds)
        case = _case(suite, "configurations", str(outcome.configuration), seconds)
        if outcome.failure:
            n_failures += 1
            ElementTree.SubElement(case, "failure", message=outcome.failure)
        else:
            error = f"error {100 * outcome.error_fraction:+.1f} % {cause_text(outcome)}"
            ElementTree.SubElement(case, "system-out").text = error.strip()
    for check in checks:
        case = _case(suite, "limits", check.name, 0.0)
        if not check.holds:
            n_failures += 1
            ElementTree.SubElement(case, "failure", message=check.text)
    n_cases = len(validation.outcomes) + len(checks)
    suite.set("tests", str(n_cases))
    suite.set("failures", str(n_failures))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True)


def _case(suite: ElementTree.Element, group: str, name: str, seconds: float) -> ElementTree.Element:
    attributes = {"classname": group, "name": name, "time": f"{seconds:.6g}"}
    return ElementTree.SubElement(suite, "testcase", attributes)
