"""Send a result to the terminal or, atomically, to a file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.errors import one_line

if TYPE_CHECKING:
    from axonn_tune.search.rank import Detail

# Styles of a table's head (the line above its dashes), of what does not fit in memory, and of the
# remark that nothing wins clearly.
_STYLES: tuple[tuple[re.Pattern[str], dict[str, Any]], ...] = (
    (re.compile(r"^.+(?=\n-+(?:  -+)+$)", re.MULTILINE), {"bold": True}),
    (re.compile(r"\bOOM\b|\bout of memory\b|\bnothing fits\b"), {"fg": "red"}),
    (re.compile(r"^No clear winner:.*$", re.MULTILINE), {"fg": "yellow"}),
)


# What a terminal would obey, such as ESC and BEL; a description in a file may hold it.
_CONTROLS = re.compile(r"[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def _styled(text: str) -> str:
    for pattern, style in _STYLES:
        before, after = click.style("|", **style).split("|")
        text = pattern.sub(rf"{before}\g<0>{after}", text)
    return text


# Text behind the machine's name in the line of assumptions, if the user did not choose a machine.
_DEFAULT_REMARK = " (the default; choose with --machine)"
# Number of operations that a table shows without --all.
SHOWN_OPERATIONS = 25
# Number of characters that a line of a table has in a file.
_FILE_WIDTH = 100


def emit(text: str, output: str | None) -> None:
    """Write the text, or print it, in color on a terminal unless NO_COLOR is set (no-color.org)."""
    if output is None:
        printable = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text.rstrip("\n"))
        click.echo(_styled(printable), color=False if os.environ.get("NO_COLOR") else None)
        return
    from axonn_tune.io.files import write_text

    write_text(output, text.rstrip("\n") + "\n")


def emit_as(
    output_format: str,
    output: str | None,
    *,
    table: Callable[[], str],
    json: Callable[[], Any],
    yaml: Callable[[], Any] | None = None,
    csv: Callable[[], list[dict[str, Any]]] | None = None,
    markdown: Callable[[], str] | None = None,
) -> None:
    """Emit a result in one format; only the callable of that format is called.

    Parameters
    ----------
    table, markdown : callable
        Returns the text.
    json, yaml : callable
        Returns the document.
    csv : callable
        Returns the records.
    """
    if output_format == "json":
        text = as_json(json())
    elif output_format == "yaml" and yaml is not None:
        from axonn_tune.io.yaml_files import dump_yaml

        text = dump_yaml(yaml())
    elif output_format == "csv" and csv is not None:
        text = as_csv(csv())
    elif output_format == "markdown" and markdown is not None:
        text = markdown()
    else:
        text = in_width_of(output, table)
    emit(text, output)


def in_width_of(output: str | None, text: Callable[[], str]) -> str:
    """Return a text whose tables suit a wide terminal, or the lines of a file."""
    from axonn_tune.report.table import tables_of_width

    with tables_of_width(_FILE_WIDTH if output is not None else _printed_width()):
        return text()


def _printed_width() -> int:
    """Return the columns of the terminal, or those that COLUMNS says, but not fewer than a file's.

    A narrow terminal wraps the lines of a table, and so keeps its columns.
    """
    import shutil

    return max(shutil.get_terminal_size((_FILE_WIDTH, 24)).columns, _FILE_WIDTH)


def detail_shown(output_format: str) -> Detail:
    """Return what the best predictions of several searches have to state in a format.

    Tables of them leave out the chance to be the fastest, which takes a third of the time.
    """
    return "interval" if output_format == "table" else "chance"


def with_machine_remark(text: str, machine: str | None) -> str:
    """Return a report that says that its machine is the default, unless the user gave one."""
    if machine is not None:
        return text
    head = r"^Assumed: machine [^,]+"
    return re.sub(head, rf"\g<0>{_DEFAULT_REMARK}", text, count=1, flags=re.MULTILINE)


def check_plot(path: str | None) -> None:
    """Fail before the work if the figure that is asked for cannot be drawn after it."""
    if path is not None:
        from axonn_tune.report import figure

        figure.figure_format(path)


def check_folders(*paths: str | None) -> None:
    """Fail before the work if a file that is asked for cannot be written after it."""
    from axonn_tune.errors import FileError

    for path in paths:
        if path is not None:
            folder = os.path.dirname(os.path.realpath(path))
            if not os.path.isdir(folder):
                raise FileError(f"{path} cannot be written: there is no folder {folder}")
            if not os.access(folder, os.W_OK) and not os.path.exists(path):
                raise FileError(f"{path} cannot be written: permission denied")


def save_plot(path: str | None, draw: Callable[[], Any]) -> None:
    """Draw a figure and write it, if one is asked for."""
    if path is not None:
        from axonn_tune.io.files import write_bytes
        from axonn_tune.report.figure import figure_bytes

        write_bytes(path, figure_bytes(draw(), path))


def say_on_stderr(remark: str) -> None:
    """Print a remark in one line beside the result, which pipes and files take without it."""
    click.echo(f"axonn-tune: {one_line(remark)}", err=True)


def say_profile_is_written(path: str) -> None:
    """Name the profile that a command has written, and the command that reads it."""
    import shlex

    click.echo(
        f"\nWritten to {path}. Next: axonn-tune suggest --machine {shlex.quote(path)} "
        "--gpus ... --model ..."
    )


def as_json(document: Any, compact: bool = False) -> str:
    """Return JSON without NaN, indented for people or compact."""
    import json

    layout: dict[str, Any] = {"separators": (",", ":")} if compact else {"indent": 2}
    return json.dumps(document, allow_nan=False, **layout)


def _cell(value: Any) -> Any:
    """Return a value of a CSV file; a text that a spreadsheet would compute gets a quote before."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@"))
    return f"'{value}" if is_formula else value


def as_csv(records: list[dict[str, Any]]) -> str:
    """Return a line for each record under a header of all their fields."""
    import csv
    import io

    buffer = io.StringIO()
    fields = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(buffer, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in record.items()} for record in records)
    return buffer.getvalue().rstrip("\n")
