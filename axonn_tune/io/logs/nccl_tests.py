"""Read the output of nccl-tests and rccl-tests (github.com/NVIDIA/nccl-tests).

The header names every rank with its host. A row holds size, count and type, and then time,
algbw, busbw and the number of wrong elements, first out of place and then in place. A report of
single iterations (-I) adds columns to both sets, and timestamps (-S) end the row. Without a check
(-c 0), N/A stands for the number of wrong elements. Sizes are those of full buffers: an all-gather
counts all that a rank receives, a reduce-scatter all that it sends.

With -C 1 the time is called cputime: it ends when the host has issued the last collective, and not
when that has run (BenchTime in src/common.cu of nccl-tests).
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

_RANK = re.compile(r"#\s*Rank\s+\d+\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_COLUMNS = re.compile(r"#\s*size\s+count\s+type\b.*\b(cpu)?time\s+algbw\s+busbw")
_STARTING = re.compile(r"#\s*Collective test starting:\s*(\S+)")
_ROW = re.compile(r"\d+\s+\d+\s+\w+")
_TIME_UNIT = "(us)"
_COUNT = re.compile(r"\d+|[\d.]+e\+\d+")  # printed with %g: a million is 1e+06
# Under this heading stand two cells, a date and a time of day.
_TIMESTAMP = "timestamp"
# A row begins with size, count and type; reductions and roots may follow, which are not read.
_N_FIRST_CELLS = 3
# The number of wrong elements is the fourth cell from the time on, after two bandwidths.
_WRONG = 3


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
        The kind of collective is unknown, or the times are those of hosts or not in microseconds.
    """
    known_kind = kind
    hosts: list[str] = []
    groups: set[str] = set()
    timings = []
    warnings = []
    place = 0
    for number, line in numbered_lines(text):
        where = f"{path}, line {number}"
        if (starting := _STARTING.match(line)) and kind is None:
            known_kind = _kind_of_program(starting[1], where)
        elif rank := _RANK.match(line):
            hosts.append(rank[2])
            groups.add(rank[1])
        elif columns := _COLUMNS.match(line):
            if columns[1]:
                raise FileError(
                    f"{where}: the column cputime has the time of the host, which may end "
                    "before the collectives do; allowed: times without --report_cputime (-C 1)"
                )
            place = _place_of_time(line)
            _require_one_group(groups, where)
        elif line.startswith("#"):
            if place and "(B)" in line and _TIME_UNIT not in line:
                raise FileError(f"{where}: times are not in {_TIME_UNIT}: {line.lstrip('# ')}")
        elif place and _ROW.match(line):
            cells = line.split()
            problem = _problem(cells, place)
            if problem:
                warnings.append(f"{where}: {problem}; left out")
                continue
            cells = cells[place:]
            row_kind = known_kind or kind_in(path) or _kind_by_ratio(cells, line, len(hosts), where)
            nbytes = int(line.split()[0])
            seconds = 1e-6 * float(cells[0])
            if nbytes and seconds:
                timings.append(
                    CollectiveTiming(row_kind, nbytes, seconds, len(hosts), len(set(hosts)))
                )
    return CollectiveLog(tuple(timings), tuple(warnings))


def _place_of_time(header: str) -> int:
    """Return where the first time of a row stands, counted from its end: a negative number.

    From the begin it cannot be counted, since some versions print an empty cell for a collective
    that reduces nothing or has no root.
    """
    headings = header.lstrip("# ").split()
    last = headings[headings.index("time") :]
    return -(len(last) + last.count(_TIMESTAMP))


def _require_one_group(groups: set[str], where: str) -> None:
    """Raise FileError if the test ran once for each of several groups, all at the same time."""
    if len(groups) > 1:
        raise FileError(
            f"{where}: NCCL_TESTS_SPLIT made {len(groups)} groups of the ranks; allowed: one group "
            "of all ranks"
        )


def _kind_of_program(program: str, where: str) -> str:
    kind = kind_in(program)
    if kind is None:
        raise FileError(f"{where}: {program} times no collective that is modelled; {ALLOWED_KINDS}")
    return kind


def _problem(cells: list[str], place: int) -> str:
    """Return why a row cannot be used, or nothing."""
    if len(cells) < _N_FIRST_CELLS - place:
        return "the row is cut short"
    time, n_wrong = cells[place], cells[place + _WRONG]
    try:
        time_us = float(time)
    except ValueError:
        return f"the time is '{time}'"
    if time_us < 0:  # the root, -1, stands there if the row has lost its last cell
        return "the row is cut short"
    if _COUNT.fullmatch(n_wrong) and float(n_wrong) > 0:
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
