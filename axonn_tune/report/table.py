"""Tables and lists of named values as aligned text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from textwrap import fill
from typing import Any, TypeAlias, TypeVar

Item = TypeVar("Item")
# The header of a column, and what stands in it for an item.
Column: TypeAlias = tuple[str, Callable[[Item], Any]]
# Number of characters that a line should not exceed in a file, and that of prose anywhere.
WIDTH = 100
# The same of tables that are made at present: a terminal may have more room.
_table_width = ContextVar("table_width", default=WIDTH)
# What precedes a cell that stands below its row.
_INDENT = "    "


@contextmanager
def tables_of_width(width: int) -> Iterator[None]:
    """Let lines of tables that are made meanwhile have up to `width` characters."""
    before = _table_width.set(width)
    try:
        yield
    finally:
        _table_width.reset(before)


def table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """Align columns: numbers to the right, names to the left.

    This is written out because importing a table library costs a tenth of a whole `suggest`.
    """
    columns = zip(*rows, strict=True) if rows else [()] * len(headers)
    aligned = [
        _aligned(header, [str(cell) for cell in column])
        for header, column in zip(headers, columns, strict=True)
    ]
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def table_of(items: Iterable[Item], columns: Sequence[Column[Item]]) -> str:
    """Return a table with one row for each item."""
    rows = [[cell(item) for _, cell in columns] for item in items]
    return table(rows, [header for header, _ in columns])


def fitted_table_of(
    items: Sequence[Item], columns: Sequence[Column[Item]], droppable: Sequence[str]
) -> str:
    """Return a table that fits in a line, if leaving out some columns does it.

    A line has `WIDTH` characters unless `tables_of_width` says otherwise.

    A line below the table names the columns that are left out.

    Parameters
    ----------
    droppable : sequence of str
        Headers of the columns that may be left out, the least important first.
    """
    rows = [[cell(item) for _, cell in columns] for item in items]
    return fitted_table(rows, [header for header, _ in columns], droppable)


def fitted_table(
    rows: Sequence[Sequence[Any]], headers: Sequence[str], droppable: Sequence[str]
) -> str:
    """Return the table of rows and headers as `fitted_table_of` does."""
    shown = list(headers)
    text = table(rows, headers)
    for dropped in droppable:
        if max(map(len, text.splitlines())) <= _table_width.get():
            break
        shown = [header for header in shown if header != dropped]
        kept = [number for number, header in enumerate(headers) if header in shown]
        text = table([[row[number] for number in kept] for row in rows], shown)
    left_out = [header for header in headers if header not in shown]
    if not left_out:
        return text
    remark = f"Columns left out for lack of width: {', '.join(left_out)}"
    return f"{text}\n{fill(remark, WIDTH)}"


def cited_table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """Return a table that fits in a line of `WIDTH`, with long last cells below their row."""
    narrow = table([row[:-1] for row in rows], headers[:-1]).splitlines()
    width = max(map(len, narrow))
    room = WIDTH - width - 2
    lines = []
    for start, cell in zip(
        narrow, [headers[-1], "-" * room, *(row[-1] for row in rows)], strict=True
    ):
        text = str(cell)
        if len(text) <= room:
            lines.append(f"{start:<{width}}  {text}".rstrip())
        else:
            lines += [start, _wrapped(text, _INDENT, _INDENT)]
    return "\n".join(lines)


def _wrapped(text: str, first: str, others: str) -> str:
    """Return a text in lines of at most `WIDTH`, whose first and other lines begin as given."""
    return fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _aligned(header: str, cells: Sequence[str]) -> list[str]:
    width = max(len(cell) for cell in (header, *cells))
    numeric = all(cell[:1].isdigit() or cell[:1] in "+-.<>" for cell in cells)
    justify = str.rjust if numeric else str.ljust
    body = [justify(cell, width) for cell in cells]
    return [justify(header, width), "-" * width, *body]


def key_values(pairs: Iterable[tuple[str, str]]) -> str:
    """Align names and their values in two columns."""
    listed = list(pairs)
    width = max(len(key) for key, _ in listed)
    return "\n".join(f"{key:<{width}}  {value}" for key, value in listed)


def cited_values(pairs: Iterable[tuple[str, str]]) -> str:
    """Align names and their values as `key_values` does, in lines of at most `WIDTH` characters."""
    listed = list(pairs)
    indent = max(len(key) for key, _ in listed) + 2
    return "\n".join(
        _wrapped(value, f"{key:<{indent}}", " " * indent).rstrip() or key for key, value in listed
    )
