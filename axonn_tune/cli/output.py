"""Send a result to the terminal or, atomically, to a file."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import click

# What stands out on a terminal: a table's head, the line above its dashes; what does not fit;
# what is not sure.
_STYLES: tuple[tuple[re.Pattern[str], dict[str, Any]], ...] = (
    (re.compile(r"^.+(?=\n-+(?:  -+)+$)", re.MULTILINE), {"bold": True}),
    (re.compile(r"\bOOM\b|\bout of memory\b|\bnothing fits\b"), {"fg": "red"}),
    (re.compile(r"^No clear winner:.*$", re.MULTILINE), {"fg": "yellow"}),
)


def _styled(text: str) -> str:
    for pattern, style in _STYLES:
        before, after = click.style("|", **style).split("|")
        text = pattern.sub(rf"{before}\g<0>{after}", text)
    return text


def emit(text: str, output: str | None) -> None:
    """Print, with colors on a terminal unless NO_COLOR is set (no-color.org), or write."""
    if output is None:
        click.echo(_styled(text), color=False if os.environ.get("NO_COLOR") else None)
        return
    from axonn_tune.io.files import write_text

    write_text(output, text.rstrip("\n") + "\n")


def check_plot(path: str | None) -> None:
    """Fail before the work where the figure that is asked for cannot be drawn after it."""
    if path is not None:
        from axonn_tune.report import figure

        figure.check_plot(path)


def as_json(document: Any, compact: bool = False) -> str:
    """JSON without NaN, for people to read or compact."""
    layout: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 2}
    return json.dumps(document, allow_nan=False, **layout)


def as_csv(records: list[dict[str, Any]]) -> str:
    """One line per record under a header of all their fields."""
    import csv
    import io

    buffer = io.StringIO()
    fields = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(buffer, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return buffer.getvalue().rstrip("\n")
