"""Send a result to the terminal or, atomically, to a file."""

from __future__ import annotations

import json
from typing import Any

import click


def emit(text: str, output: str | None) -> None:
    """Print, or write to `output`."""
    if output is None:
        click.echo(text)
        return
    from axonn_tune.io.yaml_files import write_text

    write_text(output, text.rstrip("\n") + "\n")


def as_json(document: Any) -> str:
    """JSON without NaN."""
    return json.dumps(document, indent=2, allow_nan=False)


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
