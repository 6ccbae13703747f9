"""Read tables with a header, as CSV files of measurements have it, and choose among their rows."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf, nan

from axonn_tune.errors import FileError, InputError

# Names that a column of times may have, and the seconds in its unit.
TIME_UNITS = {
    "seconds": 1.0,
    "time_s": 1.0,
    "s": 1.0,
    "ms": 1e-3,
    "time_ms": 1e-3,
    "latency_ms": 1e-3,
    "us": 1e-6,
    "time_us": 1e-6,
    "usec": 1e-6,
    "latency_us": 1e-6,
}
# Names that the column of the measured machine may have.
_SYSTEMS = ("system", "machine")


@dataclass(frozen=True)
class Table:
    """A table in a file.

    Parameters
    ----------
    columns : tuple of str
        The names of the columns, in lower case.
    rows : tuple
        The number of each line, and its cells by the names of their columns.
    """

    path: str
    columns: tuple[str, ...]
    rows: tuple[tuple[int, dict[str, str]], ...]

    def has_columns(self, *wanted: tuple[str, ...]) -> bool:
        """Return whether the table has a column of each kind, under any of its names."""
        return all(set(names) & set(self.columns) for names in wanted)

    def column(self, names: tuple[str, ...]) -> str:
        """Return the first of the columns that has one of the names.

        Raises
        ------
        FileError
            There is none.
        """
        for column in self.columns:
            if column in names:
                return column
        raise FileError(f"{self.path}: no column {' or '.join(names)}")

    def of_one_system(self, where: Mapping[str, str]) -> Table:
        """Return the rows that have the given values; conditions on other columns are skipped.

        Raises
        ------
        InputError
            No row is left, or the rows that are left come from several machines.
        """
        table = self
        for column in (column for column in where if column in self.columns):
            known = table._values(column)
            if where[column] not in known:
                raise InputError(
                    f"{self.path}: no row has {column}={where[column]}; allowed: {', '.join(known)}"
                )
            chosen = (entry for entry in table.rows if entry[1].get(column) == where[column])
            table = replace(table, rows=tuple(chosen))
        for column in (column for column in _SYSTEMS if column in self.columns):
            if len(systems := table._values(column)) > 1:
                raise InputError(
                    f"{self.path}: it holds several machines; give --where {column}=NAME; "
                    f"allowed: {', '.join(systems)}"
                )
        return table

    def _values(self, column: str) -> list[str]:
        """Return the different values of a column in their order."""
        return list(dict.fromkeys(row.get(column, "") for _, row in self.rows))


def parse_table(text: str, path: str) -> Table:
    """Return the table that a text holds; blank lines and comments (#) are skipped.

    Cells are separated by semicolons where the line has one, and by commas elsewhere.
    """
    lines = list(_numbered_lines(text))
    if not lines:
        return Table(path, (), ())
    columns = tuple(name.lower() for name in _cells(lines[0][1]))
    rows = ((number, dict(zip(columns, _cells(line), strict=False))) for number, line in lines[1:])
    return Table(path, columns, tuple(rows))


def cell(row: Mapping[str, str], column: str) -> str:
    """Return the cell of a row in a column.

    Raises
    ------
    InputError
        The row is too short.
    """
    if column not in row:
        raise InputError(f"the row is cut short: it has no cell in column '{column}'")
    return row[column]


def number_in(row: Mapping[str, str], column: str) -> float:
    """Return the number in a column of a row, which is above 0.

    Raises
    ------
    InputError
        There is no such number.
    """
    text = cell(row, column)
    try:
        number = float(text)
    except ValueError:
        number = nan
    if not 0.0 < number < inf:
        raise InputError(f"{column} is '{text}'; allowed: a number above 0")
    return number


def count_in(row: Mapping[str, str], column: str) -> int:
    """Return the whole number in a column of a row, which may be written as 8.0.

    Raises
    ------
    InputError
        There is no such number.
    """
    text = cell(row, column)
    whole = text.removesuffix(".0")
    if not (whole.isascii() and whole.isdecimal()) or not whole.strip("0"):
        raise InputError(f"{column} is '{text}'; allowed: a whole number above 0")
    return int(whole)


def _numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            yield number, line


def _cells(line: str) -> list[str]:
    separator = ";" if ";" in line else ","
    return [cell.strip() for cell in next(csv.reader([line], delimiter=separator))]
