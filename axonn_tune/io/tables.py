"""Read tables of runs: CSV with one run in each row."""

from __future__ import annotations

import csv
from collections.abc import Collection

from axonn_tune.errors import FileError, spelling_hint
from axonn_tune.io.files import FileName, file_name, read_text


def load_table(
    path: FileName, required: Collection[str], optional: Collection[str]
) -> list[dict[str, str]]:
    """Return the rows of a table by name of their column, with the texts of stated cells only.

    Lines that begin with # are comments. As spreadsheets write tables, cells may be separated by
    semicolons, and rows of empty cells are left out.

    Raises
    ------
    FileError
        The file cannot be read, a column is unknown or missing, or a row has too many cells or
        leaves a required one empty; the message names the row, counted from 1 below the header.
    """
    file_name(path, "the table")
    try:
        return _rows(path, csv_reader(path), required, optional)
    except csv.Error as error:
        raise FileError(f"{path}: malformed CSV: {error}") from None


def _hint(column: str, known: Collection[str]) -> str:
    """Return the nearest names of columns, and where all are: they are too many for a line."""
    return f"{spelling_hint(column, known) or ';'} docs/score.md has all columns"


def csv_reader(path: FileName) -> csv.DictReader[str]:
    """Return the reader of a CSV file in which lines that begin with # are comments."""
    lines = [line for line in read_text(path).splitlines() if not line.startswith("#")]
    header = next((line for line in lines if line.strip()), "")
    separator = ";" if ";" in header and "," not in header else ","
    return csv.DictReader(lines, delimiter=separator)


def _rows(
    path: FileName,
    reader: csv.DictReader[str],
    required: Collection[str],
    optional: Collection[str],
) -> list[dict[str, str]]:
    """Return the stated cells of all rows."""
    columns = reader.fieldnames or []
    known = [*required, *optional]
    for number, column in enumerate(columns, start=1):
        if not column:
            raise FileError(
                f"{path}: column {number} has no name; allowed: columns with names (pandas writes "
                "one without unless index=False)"
            )
        if column not in known:
            raise FileError(f"{path}: unknown column '{column}'{_hint(column, known)}")
    missing = [column for column in required if column not in columns]
    if missing:
        raise FileError(f"{path}: column {', '.join(missing)} is missing")
    rows = []
    for number, cells in enumerate(reader, start=1):
        if None in cells:
            raise FileError(f"{path}: row {number} has more cells than the header")
        row = {name: text.strip() for name, text in cells.items() if text and text.strip()}
        if not row:
            continue
        empty = [column for column in required if column not in row]
        if empty:
            raise FileError(f"{path}: row {number} has no {', '.join(empty)}")
        rows.append(row)
    if not rows:
        raise FileError(f"{path}: there are no runs below the header")
    return rows
