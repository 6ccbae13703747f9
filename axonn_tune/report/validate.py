"""What ``validate`` shows: predicted and measured steps as text, records, JUnit XML, a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np

from axonn_tune.report.figure import draw_diagonal, new_figure
from axonn_tune.report.phrases import percent, signed_percent
from axonn_tune.report.table import table
from axonn_tune.spec.validation import Outcome, Validation
from axonn_tune.units import counted, format_seconds, gib
from axonn_tune.validation.agreement import LARGE_ERROR, Agreement
from axonn_tune.validation.limits import Check


def agreement_text(
    validation: Validation, agreement: Agreement | None, checks: Sequence[Check]
) -> str:
    """Return the error of each configuration and its cause, then the errors over all of them.

    Parameters
    ----------
    agreement : Agreement or None
        None where nothing ran.
    checks : sequence of Check
        The limits that the user set, each with its verdict.
    """
    v = validation
    head = (
        f"{v.model} on {v.n_ranks} x {v.device} ({v.backend}), machine {v.machine}\n"
        f"strategy {v.strategy}{f' with the engine {v.engine}' if v.engine else ''}; "
        f"global batch {counted(v.global_batch, 'sequence')} of {v.seq_len}, {v.dtype}, "
        f"{v.attention} attention, overlap {v.overlap}; {len(v.outcomes)} of "
        f"{counted(v.n_ranked, 'configuration')}"
    )
    rows = [_row(outcome) for outcome in sorted(v.outcomes, key=lambda o: o.predicted.rank)]
    headers = ["rank", "grid", "micro-batch", "recompute", "predicted", "measured", "error %"]
    parts = [head, table(rows, [*headers, "largest cause"])]
    for outcome in v.outcomes:
        if outcome.failure:
            parts.append(f"{outcome.configuration} failed: {outcome.failure}")
    parts.append("nothing ran" if agreement is None else _summary(v, agreement))
    if checks:
        parts.append("\n".join(check.text for check in checks))
    return "\n\n".join(parts)


def _row(outcome: Outcome) -> list[str]:
    configuration = outcome.configuration
    ran = not outcome.failure
    return [
        str(outcome.predicted.rank),
        configuration.ordered_layout,
        str(configuration.micro_batch),
        configuration.recompute,
        format_seconds(outcome.predicted.step_seconds),
        format_seconds(outcome.measured_seconds) if ran else "failed",
        signed_percent(outcome.error_fraction) if ran else "-",
        cause_text(outcome),
    ]


def cause_text(outcome: Outcome) -> str:
    """Return the operation that makes a large error, and which share of the step the error is."""
    if outcome.failure or abs(outcome.error_fraction) < LARGE_ERROR or outcome.cause is None:
        return ""
    share = 100 * outcome.cause.excess_seconds / outcome.measured_seconds
    exposed = "exposed " if outcome.cause.axis else ""
    return f"{exposed}{outcome.cause.name} {share:+.1f} %"


def _summary(validation: Validation, agreement: Agreement) -> str:
    best = agreement.best
    worst = agreement.worst
    suggested = validation.suggested
    lines = [
        f"error    mean {percent(agreement.mape)} % (MAPE), "
        f"bias {signed_percent(agreement.bias)} %, "
        f"largest {signed_percent(worst.error_fraction)} % on {worst.configuration.layout}",
    ]
    if agreement.spearman is not None and agreement.kendall is not None:
        lines.append(f"order    Spearman {agreement.spearman:.3f}, Kendall {agreement.kendall:.3f}")
    if agreement.regret is None:
        lines.append(f"regret   unknown: the suggested {suggested.configuration} failed")
    else:
        lines.append(
            f"regret   {percent(agreement.regret)} %: suggested {suggested.configuration.layout} "
            f"({format_seconds(suggested.measured_seconds)}), best measured "
            f"{best.configuration.layout} ({format_seconds(best.measured_seconds)})"
        )
    if agreement.memory_mape is not None:
        most = max(outcome.peak_memory_bytes or 0.0 for outcome in validation.measured)
        lines.append(
            f"memory   mean error {percent(agreement.memory_mape)} % of the tensors' peak, "
            f"most {gib(most):.2f} GiB"
        )
    return "\n".join(lines)


def outcome_records(validation: Validation) -> list[dict[str, Any]]:
    """Return a flat record for each configuration, for CSV."""
    return [_record(outcome) for outcome in validation.outcomes]


def _record(outcome: Outcome) -> dict[str, Any]:
    configuration = outcome.configuration
    predicted = outcome.predicted
    ran = not outcome.failure
    return {
        "rank": predicted.rank,
        **{f"g_{axis}": size for axis, size in configuration.layout.sizes.items()},
        "order": configuration.order,
        "micro_batch": configuration.micro_batch,
        "recompute": configuration.recompute,
        "predicted_seconds": predicted.step_seconds,
        "predicted_low_seconds": predicted.low_seconds,
        "predicted_high_seconds": predicted.high_seconds,
        "measured_seconds": outcome.measured_seconds if ran else None,
        "n_steps": len(outcome.step_seconds),
        "error_fraction": outcome.error_fraction if ran else None,
        "cause": outcome.cause.name if outcome.cause else None,
        "predicted_memory_bytes": predicted.memory_bytes,
        "predicted_allocated_bytes": predicted.allocated_bytes,
        "measured_memory_bytes": outcome.peak_memory_bytes,
        "measured_held_bytes": outcome.held_memory_bytes,
        "failure": outcome.failure or None,
    }


def junit_text(validation: Validation, checks: Sequence[Check]) -> str:
    """Return a test case per configuration, which fails where the run did, and one per limit."""
    suite = ElementTree.Element("testsuite", name=f"axonn-tune validate {validation.model}")
    n_failures = 0
    for outcome in validation.outcomes:
        seconds = 0.0 if outcome.failure else sum(outcome.step_seconds)
        case = _case(suite, "configurations", str(outcome.configuration), seconds)
        if outcome.failure:
            n_failures += 1
            ElementTree.SubElement(case, "failure", message=outcome.failure)
        else:
            error = f"error {signed_percent(outcome.error_fraction)} % {cause_text(outcome)}"
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


def validation_figure(validation: Validation) -> Any:
    """Draw predicted over measured steps, and the signed error of each configuration."""
    figure, (left, right) = new_figure(1, 2)
    ran = sorted(validation.measured, key=lambda outcome: outcome.measured_seconds)
    _draw_agreement(left, ran)
    _draw_errors(right, ran)
    figure.suptitle(
        f"{validation.model} on {validation.machine}, {counted(validation.n_ranks, 'rank')}, "
        f"overlap {validation.overlap}"
    )
    return figure


def _draw_agreement(axes: Any, ran: Sequence[Outcome]) -> None:
    measured = np.array([outcome.measured_seconds for outcome in ran])
    predicted = np.array([outcome.predicted.step_seconds for outcome in ran])
    below = measured - np.array([min(outcome.step_seconds) for outcome in ran])
    above = np.array([max(outcome.step_seconds) for outcome in ran]) - measured
    draw_diagonal(axes, np.array([min(*measured, *predicted), max(*measured, *predicted)]))
    axes.errorbar(measured, predicted, xerr=np.stack([below, above]), fmt="o", markersize=4)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="measured step, s (median; from the fastest to the slowest)",
        ylabel="predicted step, s",
        title="Predicted over measured",
    )
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3, which="both")


def _draw_errors(axes: Any, ran: Sequence[Outcome]) -> None:
    names = [str(outcome.configuration.layout) for outcome in ran]
    errors = [100.0 * outcome.error_fraction for outcome in ran]
    axes.barh(range(len(ran)), errors, color=["C3" if error < 0 else "C0" for error in errors])
    axes.set_yticks(range(len(ran)), names, fontsize="small")
    axes.invert_yaxis()
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.set(xlabel="predicted over measured, less one, %", title="Error, the fastest grid first")
    axes.grid(alpha=0.3, axis="x")
