"""What the log of a benchmark of collectives contains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# Kinds of collective by a word in the name of a program, of a log file or in a table.
_KINDS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "send_recv",
    "send_recv": "send_recv",
}
ALLOWED_KINDS = f"allowed: {', '.join(dict.fromkeys(_KINDS.values()))}"


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
    n_ranks: int
    n_hosts: int = 0


@dataclass(frozen=True)
class CollectiveLog:
    """Holds all timings of a file, and a warning for every line that was left out."""

    timings: tuple[CollectiveTiming, ...]
    warnings: tuple[str, ...] = ()


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number, without the prefix of mpirun (``[1,0]<stdout>:``)."""
    for number, line in enumerate(text.splitlines(), 1):
        prefix, mark, rest = line.partition("<stdout>:")
        yield number, (rest if mark and prefix.startswith("[") else line).strip()


def kind_in(name: str) -> str | None:
    """Return the kind of collective that a name contains, or None.

    A v after the word, as in alltoallv, says that the parts of the ranks differ in size: that is
    none of the kinds.
    """
    lowered = name.lower()
    return next((kind for word, kind in _KINDS.items() if re.search(f"{word}(?!v)", lowered)), None)
