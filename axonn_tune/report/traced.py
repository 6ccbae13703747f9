"""What ``explain --measured`` shows: a traced step beside its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from axonn_tune.report.table import fitted_table
from axonn_tune.step.traced import MeasuredLine
from axonn_tune.units import counted

# Characters of a name that a table shows.
_WIDEST_NAME = 44


def traced_text(lines: Sequence[MeasuredLine], source: str, n_steps: int, limit: int | None) -> str:
    """Return a table of what both sides have, and lists of what one side lacks.

    Parameters
    ----------
    limit : int or None
        Number of lines of each table, the longest first; None shows all.
    """
    both = [line for line in lines if line.is_on_both_sides]
    rows = [
        [
            line.kind,
            line.size or "-",
            _shortened(line.predicted_names),
            f"{line.predicted_calls:g}",
            f"{line.traced_calls:g}",
            f"{line.predicted_seconds:.4f}",
            f"{line.traced_seconds:.4f}",
            f"{line.predicted_seconds / line.traced_seconds:.2f}" if line.traced_seconds else "-",
        ]
        for line in both[:limit]
    ]
    headers = ["kind", "size", "operations", "calls", "traced calls", "predicted s", "traced s"]
    parts = [
        f"Beside {source} ({counted(n_steps, 'step')}), in one step:",
        fitted_table(rows, [*headers, "ratio"], ("operations", "calls", "traced calls")),
        "The time of a traced collective includes the wait for other ranks.",
        _lacking("Traced, but not in the plan", lines, "predicted_names", limit),
        _lacking("In the plan, but not traced", lines, "traced_names", limit),
    ]
    return "\n\n".join(part for part in parts if part)


def _lacking(title: str, lines: Sequence[MeasuredLine], absent: str, limit: int | None) -> str:
    """Return a table of the lines that one side lacks; it is empty if there are none."""
    chosen = [line for line in lines if not getattr(line, absent)]
    if not chosen:
        return ""
    rows = [
        [
            line.kind,
            line.size or "-",
            f"{line.predicted_calls + line.traced_calls:g}",
            f"{line.predicted_seconds + line.traced_seconds:.4f}",
            _shortened(line.predicted_names or line.traced_names),
        ]
        for line in chosen[:limit]
    ]
    text = fitted_table(rows, ["kind", "size", "calls", "s", "names"], ("names",))
    hidden = len(chosen) - len(rows)
    more = f"\n(and {hidden} more; --all shows them)" if hidden else ""
    return f"{title}:\n{text}{more}"


def _shortened(names: Sequence[str]) -> str:
    """Return the first name, cut to fit, and how many more there are."""
    first = names[0] if len(names[0]) <= _WIDEST_NAME else f"{names[0][: _WIDEST_NAME - 3]}..."
    return first if len(names) == 1 else f"{first} +{len(names) - 1}"


def traced_records(lines: Sequence[MeasuredLine]) -> list[dict[str, Any]]:
    """Return all lines as plain data."""
    return [asdict(line) for line in lines]
