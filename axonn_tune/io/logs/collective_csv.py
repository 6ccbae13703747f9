"""Read timed collectives from a table: kind, number of ranks, bytes and a time."""

from __future__ import annotations

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.logs.collective_log import (
    ALLOWED_KINDS,
    CollectiveLog,
    CollectiveTiming,
    kind_in,
)
from axonn_tune.io.logs.table import TIME_UNITS, Table, cell, count_in, number_in

_KIND = ("kind", "op", "collective")
_RANKS = ("n_ranks", "ranks", "gpus", "gpus_one_node")
_BYTES = ("nbytes", "bytes")


def is_collective_table(table: Table) -> bool:
    """Return whether a table has a kind of collective, a number of ranks and bytes in its rows."""
    return table.has_columns(_KIND, _RANKS, _BYTES)


def parse_collectives(table: Table) -> CollectiveLog:
    """Return the timings of all rows; bytes are those of the full buffer, as in nccl-tests.

    Raises
    ------
    FileError
        The table has no column of times, or a value is not allowed in its column.
    """
    kind, ranks, nbytes, time = (
        table.column(names) for names in (_KIND, _RANKS, _BYTES, tuple(TIME_UNITS))
    )
    timings = []
    for number, row in table.rows:
        try:
            of_kind = _kind(cell(row, kind))
            seconds = TIME_UNITS[time] * number_in(row, time)
            n_bytes, n_ranks = count_in(row, nbytes), count_in(row, ranks)
        except (ValueError, InputError) as error:
            raise FileError(f"{table.path}, line {number}: {error}") from None
        timings.append(CollectiveTiming(of_kind, n_bytes, seconds, n_ranks))
    return CollectiveLog(tuple(timings))


def _kind(word: str) -> str:
    kind = kind_in(word)
    if kind is None:
        raise InputError(f"'{word}' is no collective that is modelled; {ALLOWED_KINDS}")
    return kind
