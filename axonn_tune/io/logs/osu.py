"""Read the output of the OSU micro-benchmarks (mvapich.cse.ohio-state.edu/benchmarks).

A row holds a size in bytes and either a latency in microseconds or a bandwidth in 1e6 bytes per
second. Benchmarks count sizes differently (see their sources in c/mpi/collective):
osu_allgather and osu_alltoall give the part of one rank, osu_allreduce and osu_reduce_scatter
the full buffer.
"""

from __future__ import annotations

import re

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.logs.collective_log import CollectiveLog, CollectiveTiming, numbered_lines

_TITLE = re.compile(r"#\s*OSU\s+(?:\S+\s+)?(.+?)\s+Test\b")
_KIND_OF_TITLE = {
    "allreduce latency": "all_reduce",
    "allgather latency": "all_gather",
    "reduce_scatter latency": "reduce_scatter",
    "all-to-all personalized exchange latency": "all_to_all",
    "alltoall latency": "all_to_all",
    "latency": "send_recv",
    "bandwidth": "send_recv",
}
_KINDS_SIZED_PER_RANK = ("all_gather", "all_to_all")


def is_osu(text: str) -> bool:
    """Return whether a log was written by the OSU micro-benchmarks."""
    return any(_TITLE.match(line) for _, line in numbered_lines(text))


def parse_osu(text: str, path: str, n_ranks: int | None) -> CollectiveLog:
    """Return the timings of all rows.

    Parameters
    ----------
    n_ranks : int, optional
        Number of ranks of the job, which the log of a collective does not give.

    Raises
    ------
    InputError
        The number of ranks is missing.
    FileError
        The benchmark times nothing that is modelled.
    """
    kind = None
    title = ""
    timings = []
    warnings = []
    for number, line in numbered_lines(text):
        where = f"{path}, line {number}"
        if match := _TITLE.match(line):
            title = match[1].lower()
            kind = _KIND_OF_TITLE.get(title)
            if kind is None:
                raise FileError(
                    f"{where}: OSU's {match[1]} test times nothing that is modelled; allowed: "
                    f"{', '.join(_KIND_OF_TITLE)}"
                )
        elif kind is not None and re.match(r"\d+\s", line):
            cells = line.split()
            try:
                size = int(cells[0])
                value = float(cells[1])
            except (ValueError, IndexError):
                warnings.append(f"{where}: not a size and a number; left out")
                continue
            if size and value > 0:
                seconds = size / (1e6 * value) if title == "bandwidth" else 1e-6 * value
                timings.append(_timing(kind, size, seconds, n_ranks, path))
    return CollectiveLog(tuple(timings), tuple(warnings))


def _timing(
    kind: str, size: int, seconds: float, n_ranks: int | None, path: str
) -> CollectiveTiming:
    if kind == "send_recv":
        return CollectiveTiming(kind, size, seconds, n_ranks=2)
    if n_ranks is None:
        raise InputError(f"{path}: OSU's logs do not tell how many ranks ran; give --log-ranks")
    nbytes = size * n_ranks if kind in _KINDS_SIZED_PER_RANK else size
    return CollectiveTiming(kind, nbytes, seconds, n_ranks)
