"""What the log of a benchmark says of one collective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

# Programs of nccl-tests and OSU by the words in their names, and the kinds that they time.
PROGRAMS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}


@dataclass(frozen=True)
class LogRecord:
    """A collective of one size; `nbytes` is the full buffer, as `Collective` counts it.

    n_ranks, n_hosts: of the job; 0 where the log does not say.
    """

    kind: str
    nbytes: int
    seconds: float
    n_ranks: int = 0
    n_hosts: int = 0


@dataclass(frozen=True)
class Log:
    """All records of a file, and what was wrong with lines that were left out."""

    records: tuple[LogRecord, ...]
    warnings: tuple[str, ...] = ()


def kind_of_program(text: str) -> str | None:
    """The kind that a program's name, or a file's, tells."""
    lowered = text.lower()
    return next((kind for word, kind in PROGRAMS.items() if word in lowered), None)


def numbered(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without what mpirun puts before them (``[1,0]<stdout>:``)."""
    for number, line in enumerate(text.splitlines(), 1):
        head, mark, rest = line.partition("<stdout>:")
        yield number, (rest if mark and head.startswith("[") else line).strip()
