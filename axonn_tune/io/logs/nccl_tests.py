"""Read the output of nccl-tests and rccl-tests (github.com/NVIDIA/nccl-tests).

The header names every rank with its host. A row holds size, count and type, and then time,
algbw, busbw and what was wrong, first out of place and then in place. A report of single
iterations (-I) adds columns to both sets, and timestamps (-S) end the row; the line of headings
tells where each column is. What was wrong is the number of wrong elements (#wrong), or before
August 2022 the largest error of an element (error), and N/A without a check (-c 0). Sizes are
those of full buffers: an all-gather counts all that a rank receives, a reduce-scatter all that it
sends.

With -C 1 the time is called cputime: it ends when the host has issued the last collective, and not
when that has run (BenchTime in src/common.cu of nccl-tests). With -k 1, which there was from
July 2024 (7bd5758) to September 2025 (d39f59d), copies to or from the host run beside the
collectives, whose bandwidth has a column of its own (copybw). Neither is the time of a collective
alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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
_SIDE_WORK = re.compile(r"#.*\b(side_work: [1-9]|copybw\b)")
_STARTING = re.compile(r"#\s*Collective test starting:\s*(\S+)")
_ROW = re.compile(r"\d+\s+\d+\s+\w+")
_TIME_UNIT = "(us)"
# Headings of what was wrong: the number of wrong elements, and the largest error of an element.
_WRONG = "#wrong"
_ERROR = "error"
# The largest error that passes, by type and for each rank but one; whole numbers have none
# (DeltaMaxValue in src/common.cu of nccl-tests from 2017 to 2022, 51af557^).
_ALLOWED_ERRORS = {"half": 1e-2, "bfloat16": 1e-2, "float": 1e-5, "double": 1e-12}
# Under this heading stand two cells, a date and a time of day.
_TIMESTAMP = "timestamp"
# A row begins with size, count and type; reductions and roots may follow, which are not read.
_N_FIRST_CELLS = 3


@dataclass(frozen=True)
class _Columns:
    """Where a row has its first time, and what was wrong there: places counted from its end.

    From the beginning they cannot be counted, since some versions print an empty cell for a
    collective that reduces nothing or has no root.

    counts
        Whether wrong elements are counted, and not the largest error stated.
    """

    time: int
    wrong: int
    counts: bool


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
        The kind of collective is unknown, a heading is missing, or the times are those of hosts,
        not in microseconds, or of collectives beside copies.
    """
    known_kind = kind
    hosts: list[str] = []
    groups: set[str] = set()
    timings = []
    warnings = []
    places: _Columns | None = None
    for number, line in numbered_lines(text):
        where = f"{path}, line {number}"
        if _SIDE_WORK.match(line):
            raise FileError(
                f"{where}: copies ran beside the collectives; allowed: times without --side_work "
                "(-k 1)"
            )
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
            places = _places(line, where)
            _require_one_group(groups, where)
        elif line.startswith("#"):
            if places and "(B)" in line and _TIME_UNIT not in line:
                raise FileError(f"{where}: times are not in {_TIME_UNIT}: {line.lstrip('# ')}")
        elif places and _ROW.match(line):
            cells = line.split()
            problem = _problem(cells, places, len(hosts))
            if problem:
                warnings.append(f"{where}: {problem}; left out")
                continue
            cells = cells[places.time :]
            row_kind = known_kind or kind_in(path) or _kind_by_ratio(cells, line, len(hosts), where)
            nbytes = int(line.split()[0])
            seconds = 1e-6 * float(cells[0])
            if nbytes and seconds:
                timings.append(
                    CollectiveTiming(row_kind, nbytes, seconds, len(hosts), len(set(hosts)))
                )
    return CollectiveLog(tuple(timings), tuple(warnings))


def _places(header: str, where: str) -> _Columns:
    """Return where a row has its first time, and what was wrong there."""
    headings = header.split()
    last = headings[headings.index("time") :]
    time = -(len(last) + last.count(_TIMESTAMP))
    for heading in (_WRONG, _ERROR):
        if heading in last:
            return _Columns(time, time + last.index(heading), heading == _WRONG)
    raise FileError(
        f"{where}: no column says what was wrong; allowed: a column {_WRONG} or {_ERROR}"
    )


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


def _problem(cells: list[str], places: _Columns, n_ranks: int) -> str:
    """Return why a row cannot be used, or nothing."""
    if len(cells) < _N_FIRST_CELLS - places.time:
        return "the row is cut short"
    time, wrong = cells[places.time], cells[places.wrong]
    try:
        time_us = float(time)
    except ValueError:
        return f"the time is '{time}'"
    if time_us < 0:  # the root, -1, stands there if the row has lost its last cell
        return "the row is cut short"
    if wrong == "N/A":
        return ""
    try:
        amount = float(wrong)
    except ValueError:
        return f"what was wrong is '{wrong}'"
    if places.counts:
        return f"{wrong} elements were wrong" if amount else ""
    allowed = _ALLOWED_ERRORS.get(cells[_N_FIRST_CELLS - 1], 0.0) * (n_ranks - 1)
    # The error is printed with one digit, and so is the limit to which it is compared.
    if n_ranks and not amount <= float(f"{allowed:.0e}"):
        return f"the error is {wrong}, more than {allowed:.0e}"
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
