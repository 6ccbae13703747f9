"""``axonn-tune runs``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import logged_options, output_option
from axonn_tune.errors import InputError

if TYPE_CHECKING:
    from axonn_tune.io.runs import TableRow


@click.command("runs")
@click.argument("logs", nargs=-1, required=True)
@click.option(
    "--log-format",
    metavar="NAME",
    help="Format of the logs: megatron, nemo, torchtitan, nanotron, deepspeed, litgpt, "
    "llm-foundry, launch, run or csv.  [default: what they look like]",
)
@click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    help="Steps to leave out at the beginning.  [default: 2, or a tenth if that is more]",
)
@click.option(
    "--column",
    multiple=True,
    metavar="NAME=COLUMN",
    help="Column of a CSV file, such as step_seconds=time_ms; may be given again.",
)
@logged_options
@output_option
def command(
    logs: tuple[str, ...],
    log_format: str | None,
    warm_up: int | None,
    column: tuple[str, ...],
    output: str | None,
    **options: Any,
) -> None:
    """Read the logs of training runs into a table of runs, which score reads.

    A row has the layout and the sizes that the log says, or that the options give for all logs,
    the median of the step times and their spread (docs/runs.md).

    \b
    Examples:
      axonn-tune runs run1.log run2.log --output runs.csv
      axonn-tune runs titan.log --model llama3-8b --machine dgx-h100
      axonn-tune runs sweep.csv --column step_seconds=time_ms --model 20b --engine megatron-core
    """
    from axonn_tune.cli.output import as_csv, emit
    from axonn_tune.io.runs import read_runs, table_row
    from axonn_tune.io.runs.table import COLUMNS

    columns = _columns(column)
    given = {name: str(value) for name, value in options.items() if value is not None}
    rows = [
        _with_file(table_row(run, log, given, warm_up), output)
        for log in logs
        for run in read_runs(log, log_format, columns)
    ]
    used = [name for name in COLUMNS if any(name in row for row in rows)]
    emit(as_csv([{name: row.get(name, "") for name in used} for row in rows]), output)


def _columns(texts: tuple[str, ...]) -> dict[str, str]:
    """Return the columns of a CSV file by the column of a table of runs."""
    columns: dict[str, str] = {}
    for text in texts:
        name, _, column = (part.strip() for part in text.partition("="))
        if not name or not column:
            raise InputError(f"--column {text}: write NAME=COLUMN, such as step_seconds=time_ms")
        if name in columns:
            raise InputError(f"--column {text}: {name} has a column already; allowed: one")
        columns[name] = column
    return columns


def _with_file(row: TableRow, output: str | None) -> dict[str, str]:
    """Return the cells of a row; a model that is no preset is written beside the table."""
    from axonn_tune.io.yaml_files import save_yaml

    if row.model is None:
        return row.cells
    if output is None:
        raise InputError(
            f"{row.cells['source']}: no preset has the sizes of its model ({row.model.name}); give "
            "--model, or --output, beside which a file of the model is written"
        )
    path = Path(output).with_name(f"{Path(output).stem}-{row.model.name}.yaml")
    save_yaml(path, row.model)
    return {**row.cells, "model": str(path)}
