"""The difference of two profiles as text and as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from axonn_tune.calibrate.difference import Change, Difference
from axonn_tune.report.text import table
from axonn_tune.spec.machine import Machine
from axonn_tune.units import format_quantity, format_seconds


def difference_text(
    before: Machine, after: Machine, found: Difference, show_all: bool = False
) -> str:
    """What changed, most significant first; what did not in one line."""
    shown = found.changes if show_all else found.significant
    parts = [f"{before.name} -> {after.name}"]
    if before.gpu.name != after.gpu.name:
        parts.append("Warning: these are different machines.")
    if shown:
        headers = ["what", "before", "after", "change %", "z", "points", ""]
        parts.append(table([_row(change) for change in shown], headers))
    quiet = [c for c in found.changes if not c.is_significant]
    unknown = sum(c.z is None for c in quiet)
    parts.append(
        f"{len(found.significant)} significant changes; {len(quiet) - unknown} numbers and groups "
        f"of points within their spread; {unknown} state no spread and are not judged."
    )
    if found.only_in_one:
        parts.append("Only in one of them: " + ", ".join(found.only_in_one) + ".")
    if found.provenance:
        rows = [[name, a, b] for name, (a, b) in found.provenance.items()]
        parts.append(table(rows, ["measured with", "before", "after"]))
    parts += [
        f"Slow: rank {slow.rank} on {slow.host} multiplies at {100 * slow.after:.0f} % of the "
        "median rank's rate"
        + ("." if slow.before is None else f", {100 * slow.before:.0f} % before.")
        for slow in found.slow_ranks
    ]
    return "\n\n".join(parts)


def _row(change: Change) -> list[Any]:
    if change.n_points:
        values = [format_seconds(change.before), format_seconds(change.after)]
    else:
        values = [format_quantity(v, change.name) for v in (change.before, change.after)]
    verdict = ("worse" if change.is_worse else "better") if change.is_significant else ""
    z = "-" if change.z is None else f"{change.z:.1f}"
    percent = f"{100 * change.change_fraction:.1f}"
    return [change.name, *values, percent, z, change.n_points or "-", verdict]


def difference_document(before: Machine, after: Machine, found: Difference) -> dict[str, Any]:
    """What ``machines diff --format json`` prints."""
    return {
        "before": before.name,
        "after": after.name,
        "changes": [
            {**asdict(change), "change_fraction": change.change_fraction}
            for change in found.changes
        ],
        "only_in_one": list(found.only_in_one),
        "provenance": {name: list(pair) for name, pair in found.provenance.items()},
        "slow_ranks": [asdict(slow) for slow in found.slow_ranks],
    }
