"""What the log of a benchmark of collectives contains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveTiming:
    """The seconds that a collective of one kind and size took.

    Parameters
    ----------
    nbytes : int
        Size of the full buffer, as `Collective` counts it. [bytes]
    n_ranks, n_hosts : int
        Number of ranks and of hosts of the job; 0 where the log does not say.
    """

    kind: str
    nbytes: int
    seconds: float
    n_ranks: int = 0
    n_hosts: int = 0


@dataclass(frozen=True)
class CollectiveLog:
    """All timings of a file, and a warning for every line that was left out."""

    timings: tuple[CollectiveTiming, ...]
    warnings: tuple[str, ...] = ()


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, without the prefix of mpirun (``[1,0]<stdout>:``)."""
    for number, line in enumerate(text.splitlines(), 1):
        prefix, mark, rest = line.partition("<stdout>:")
        yield number, (rest if mark and prefix.startswith("[") else line).strip()
