"""Read the output of the OSU micro-benchmarks (mvapich.cse.ohio-state.edu/benchmarks).

Rows hold a size in bytes and a latency in microseconds, or a bandwidth in 1e6 bytes per second.
What a size counts differs (sources of the benchmarks, c/mpi/collective): osu_allgather and
osu_alltoall the part for one rank, osu_allreduce and osu_reduce_scatter the full buffer.
"""

from __future__ import annotations

import re

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.logs.record import Log, LogRecord, numbered

_TITLE = re.compile(r"#\s*OSU\s+(?:\S+\s+)?(.+?)\s+Test\b")
_PER_RANK = ("all_gather", "all_to_all")
_TITLES = {
    "allreduce latency": "all_reduce",
    "allgather latency": "all_gather",
    "reduce_scatter latency": "reduce_scatter",
    "all-to-all personalized exchange latency": "all_to_all",
    "alltoall latency": "all_to_all",
    "latency": "send_recv",
    "bandwidth": "send_recv",
}


def is_osu(text: str) -> bool:
    """Whether a log is of the OSU micro-benchmarks."""
    return any(_TITLE.match(line) for _, line in numbered(text))


def parse_osu(text: str, path: str, n_ranks: int | None) -> Log:
    """All rows; `n_ranks` is of the job, which the log does not tell.

    Raises
    ------
    InputError
        The number of ranks is missing.
    FileError
        A benchmark that times nothing modelled.
    """
    kind, title = None, ""
    records, warnings = [], []
    for number, line in numbered(text):
        where = f"{path}, line {number}"
        if found := _TITLE.match(line):
            title = found[1].lower()
            kind = _TITLES.get(title)
            if kind is None:
                raise FileError(f"{where}: OSU's {found[1]} test times nothing that is modelled")
        elif kind is not None and re.match(r"\d+\s", line):
            cells = line.split()
            try:
                size, value = int(cells[0]), float(cells[1])
            except (ValueError, IndexError):
                warnings.append(f"{where}: not a size and a number; left out")
                continue
            if size and value > 0:
                seconds = size / (1e6 * value) if title == "bandwidth" else 1e-6 * value
                records.append(_record(kind, size, seconds, n_ranks, path))
    return Log(tuple(records), tuple(warnings))


def _record(kind: str, size: int, seconds: float, n_ranks: int | None, path: str) -> LogRecord:
    if kind == "send_recv":
        return LogRecord(kind, size, seconds, 2)
    if n_ranks is None:
        raise InputError(f"{path}: OSU's logs do not tell how many ranks ran; give --log-ranks")
    return LogRecord(kind, size * (n_ranks if kind in _PER_RANK else 1), seconds, n_ranks)
