"""Read the output of nccl-tests and rccl-tests (github.com/NVIDIA/nccl-tests).

The header names every rank with its host; rows hold size, count, type, then for out-of-place and
in-place time, algbw, busbw and the number of wrong elements. Sizes are full buffers (all-gather
counts what is received in all, reduce-scatter what is sent).
"""

from __future__ import annotations

import re

from axonn_tune.errors import FileError
from axonn_tune.io.logs.record import Log, LogRecord, kind_of_program, numbered

_RANK = re.compile(r"#\s*Rank\s+\d+\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")
_COLUMNS = re.compile(r"#\s*size\s+count\s+type\b.*\btime\s+algbw\s+busbw")
_STARTING = re.compile(r"#\s*Collective test starting:\s*(\S+)")
_PER_SET = 4  # time, algbw, busbw, wrong
_UNITS = "(us)"


def is_nccl_tests(text: str) -> bool:
    """Whether a log is of nccl-tests or rccl-tests."""
    return any(_COLUMNS.match(line) for _, line in numbered(text))


def parse_nccl_tests(text: str, path: str, kind: str | None) -> Log:
    """All rows that are whole and right; the out-of-place time counts, as collectives run so.

    Parameters
    ----------
    kind : str, optional
        Kind of collective, where neither the log nor the file's name tells.
    """
    hosts: list[str] = []
    records, warnings = [], []
    n_sets = 0
    told = kind
    for number, line in numbered(text):
        where = f"{path}, line {number}"
        if (starting := _STARTING.match(line)) and kind is None:
            told = _known_kind(starting[1], where)
        elif rank := _RANK.match(line):
            hosts.append(rank[1])
        elif _COLUMNS.match(line):
            n_sets = line.split().count("time")
        elif line.startswith("#"):
            if n_sets and "(B)" in line and _UNITS not in line:
                raise FileError(f"{where}: times are not in {_UNITS}: {line.lstrip('# ')}")
        elif n_sets and re.match(r"\d+\s+\d+\s+\w+", line):
            told = told or kind_of_program(path)
            cells = line.split()[-n_sets * _PER_SET :]
            problem = _problem(line, n_sets, cells)
            if problem:
                warnings.append(f"{where}: {problem}; left out")
                continue
            nbytes, seconds = int(line.split()[0]), 1e-6 * float(cells[0])
            inferred = told or _kind_by_ratio(cells, line, len(hosts), where)
            if nbytes and seconds:
                records.append(LogRecord(inferred, nbytes, seconds, len(hosts), len(set(hosts))))
    return Log(tuple(records), tuple(warnings))


def _known_kind(program: str, where: str) -> str:
    kind = kind_of_program(program)
    if kind is None:
        raise FileError(f"{where}: {program} times no collective that is modelled")
    return kind


def _problem(line: str, n_sets: int, cells: list[str]) -> str:
    if len(line.split()) < 3 + n_sets * _PER_SET:
        return "the row is cut short"
    try:
        float(cells[0])
    except ValueError:
        return f"the time is '{cells[0]}'"
    wrong = cells[_PER_SET - 1]
    if wrong not in ("N/A", "0") and float(wrong) > 0 and wrong.isdigit():
        return f"{wrong} elements were wrong"
    return ""


def _kind_by_ratio(cells: list[str], line: str, n_ranks: int, where: str) -> str:
    """Bus over algorithm bandwidth is 2 (n - 1) / n for all-reduce alone, beyond two ranks."""
    algbw, busbw = float(cells[1]), float(cells[2])
    if n_ranks > 2 and algbw >= 1.0:
        if abs(busbw / algbw - 2 * (n_ranks - 1) / n_ranks) < 0.02:
            return "all_reduce"
        if abs(busbw / algbw - (n_ranks - 1) / n_ranks) < 0.02 and "sum" in line.split():
            return "reduce_scatter"
    raise FileError(
        f"{where}: neither the log nor its name tells which collective this is; give --kind"
    )
