"""Read the output of nccl-tests and rccl-tests (github.com/NVIDIA/nccl-tests).

The header names every rank with its host. A row holds size, count and type, and then time,
algbw, busbw and the number of wrong elements, first out of place and then in place. Sizes are
those of full buffers: an all-gather counts all that a rank receives, a reduce-scatter all that
it sends.
"""

from __future__ import annotations

import re

from axonn_tune.errors import FileError
from axonn_tune.io.logs.collective_log import (
    ALLOWED_KINDS,
    CollectiveLog,
    CollectiveTiming,
    kind_in,
    numbered_lines,
)

_RANK = re.compile(r"#\s*Rank\s+\d+\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_COLUMNS = re.compile(r"#\s*size\s+count\s+type\b.*\btime\s+algbw\s+busbw")
_STARTING = re.compile(r"#\s*Collective test starting:\s*(\S+)")
_ROW = re.compile(r"\d+\s+\d+\s+\w+")
_TIME_UNIT = "(us)"
# A set of cells is time, algbw, busbw and wrong; a row has one set out of place, one in place.
_CELLS_PER_SET = 4


def is_nccl_tests(text: str) -> bool:
    """Return whether a log was written by nccl-tests or rccl-tests."""
    return any(_COLUMNS.match(line) for _, line in numbered_lines(text))


def parse_nccl_tests(text: str, path: str, kind: str | None) -> CollectiveLog:
    """Return the timings of all rows that are complete and whose results were right.

    The out-of-place time is used, because training runs its collectives out of place.

    Parameters
    ----------
    kind : str, optional
        The kind of collective. If it is None, the log, the name of its file, or the ratio of
        its two bandwidths must tell.

    Raises
    ------
    FileError
        The kind of collective is unknown, or the times are not in microseconds.
    """
    known_kind = kind
    hosts: list[str] = []
    timings = []
    warnings = []
    n_sets = 0
    for number, line in numbered_lines(text):
        where = f"{path}, line {number}"
        if (starting := _STARTING.match(line)) and kind is None:
            known_kind = _kind_of_program(starting[1], where)
        elif rank := _RANK.match(line):
            hosts.append(rank[1])
        elif _COLUMNS.match(line):
            n_sets = line.split().count("time")
        elif line.startswith("#"):
            if n_sets and "(B)" in line and _TIME_UNIT not in line:
                raise FileError(f"{where}: times are not in {_TIME_UNIT}: {line.lstrip('# ')}")
        elif n_sets and _ROW.match(line):
            cells = line.split()[-n_sets * _CELLS_PER_SET :]
            problem = _problem(line, n_sets, cells)
            if problem:
                warnings.append(f"{where}: {problem}; left out")
                continue
            row_kind = known_kind or kind_in(path) or _kind_by_ratio(cells, line, len(hosts), where)
            nbytes = int(line.split()[0])
            seconds = 1e-6 * float(cells[0])
            if nbytes and seconds:
                timings.append(
                    CollectiveTiming(row_kind, nbytes, seconds, len(hosts), len(set(hosts)))
                )
    return CollectiveLog(tuple(timings), tuple(warnings))


def _kind_of_program(program: str, where: str) -> str:
    kind = kind_in(program)
    if kind is None:
        raise FileError(f"{where}: {program} times no collective that is modelled; {ALLOWED_KINDS}")
    return kind


def _problem(line: str, n_sets: int, cells: list[str]) -> str:
    """Return why a row cannot be used, or nothing."""
    if len(line.split()) < 3 + n_sets * _CELLS_PER_SET:
        return "the row is cut short"
    try:
        float(cells[0])
    except ValueError:
        return f"the time is '{cells[0]}'"
    n_wrong = cells[_CELLS_PER_SET - 1]
    if n_wrong.isdecimal() and int(n_wrong) > 0:
        return f"{n_wrong} elements were wrong"
    return ""


def _kind_by_ratio(cells: list[str], line: str, n_ranks: int, where: str) -> str:
    """Return the kind that the ratio of busbw to algbw implies for n ranks, n > 2.

    The ratio is 2 (n - 1) / n for an all-reduce alone. It is (n - 1) / n for several kinds, of
    which only a reduce-scatter names a reduction in its row.
    """
    algbw = float(cells[1])
    busbw = float(cells[2])
    if n_ranks > 2 and algbw >= 1.0:
        if abs(busbw / algbw - 2 * (n_ranks - 1) / n_ranks) < 0.02:
            return "all_reduce"
        if abs(busbw / algbw - (n_ranks - 1) / n_ranks) < 0.02 and "sum" in line.split():
            return "reduce_scatter"
    raise FileError(
        f"{where}: neither the log nor its name tells which collective this is; give --kind"
    )
