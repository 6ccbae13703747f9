"""Collectives that others measured, next to what the profiles of their machines imply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from axonn_tune.cost.prices import group_seconds
from axonn_tune.reproduce.comparison import Comparison, ErrorSummary, grouped, summarise
from axonn_tune.reproduce.runs import Loaders, Row

_MIB = 2.0**20
# What is equal for collectives that differ in their bytes alone.
_GROUP_COLUMNS = ("machine", "kind", "ranks")
# The table, its source and its certainty, by where the ranks are.
_TABLES = {
    "across nodes": ("collectives_pccl", "arXiv 2504.18658v2 (IPDPS 2026)", "figure"),
    "across nodes of AWS": (
        "collectives_aws_p5",
        "crazyguitar/aws-gpu-communication-benchmark at fd167f97 (CC BY 4.0)",
        "table",
    ),
    "on Alps": (
        "collectives_alps",
        "swiss-ai/nodes_test at 91fb55a0, eth-cscs/cscs-docs at 80abed13 and "
        "eth-cscs/cscs-reframe-tests at 2f813557",
        "table",
    ),
    "inside a node": (
        "collectives_one_node",
        "aiconfigurator-core 0.12.0 (NVIDIA, Apache-2.0)",
        "table",
    ),
}


@dataclass(frozen=True)
class TimedCollective:
    """One collective over consecutive ranks, with the time that it took and the predicted one.

    nbytes
        Size of the whole buffer, for an all-gather that of the gathered one.
    """

    kind: str
    n_ranks: int
    nbytes: float
    comparison: Comparison

    @property
    def machine(self) -> str:
        """The machine on which it was measured."""
        return self.comparison.machine


@dataclass(frozen=True)
class CollectiveErrors:
    """Holds the errors of the collectives of one machine, one kind and one number of ranks.

    An empty text stands for all machines or all kinds, and 0 for all numbers of ranks.
    """

    machine: str
    kind: str
    n_ranks: int
    errors: ErrorSummary


def timed_collectives(
    load: Callable[[str], Sequence[Row]], loaders: Loaders
) -> dict[str, Sequence[TimedCollective]]:
    """Predict the measured collectives, by where their ranks are; `load` finds a table by name."""
    return {
        place: _time_collectives(load(table), loaders, source, certainty)
        for place, (table, source, certainty) in _TABLES.items()
    }


def _time_collectives(
    rows: Sequence[Row], loaders: Loaders, source: str, certainty: str
) -> list[TimedCollective]:
    """Predict the rows of a table; those of one machine, kind and number of ranks come at once.

    One group holds all ranks, and they fill one node after another.
    """
    timed: dict[int, TimedCollective] = {}
    alike = grouped(range(len(rows)), lambda i: tuple(rows[i][c] for c in _GROUP_COLUMNS))
    for (machine, kind, n_ranks), indices in alike.items():
        nbytes = np.array([float(rows[i]["mebibytes"]) * _MIB for i in indices])
        seconds = group_seconds(loaders.machine(machine), kind, 1, int(n_ranks), nbytes)
        for i, of_row, predicted in zip(indices, nbytes.tolist(), seconds.tolist(), strict=True):
            timed[i] = _timed_collective(rows[i], of_row, predicted, source, certainty)
    return [timed[i] for i in range(len(rows))]


def _timed_collective(
    row: Row, nbytes: float, predicted: float, source: str, certainty: str
) -> TimedCollective:
    """Return a row beside its predicted time."""
    name = row["machine"]
    n_ranks = int(row["ranks"])
    comparison = Comparison(
        machine=name,
        subject=f"{row['kind']} of {row['mebibytes']} MiB over {n_ranks} ranks",
        metric="collective_seconds",
        published=1e-3 * float(row["milliseconds"]),
        predicted=predicted,
        setting="one group of consecutive ranks",
        certainty=certainty,
        source=source,
        system=row["library"],
    )
    return TimedCollective(row["kind"], n_ranks, nbytes, comparison)


def collective_errors(timed: Sequence[TimedCollective]) -> list[CollectiveErrors]:
    """Return the errors of every group of collectives, each after the larger one that holds it."""
    found = [
        *_errors_by(timed, lambda t: ("", "", 0)),
        *_errors_by(timed, lambda t: (t.machine, "", 0)),
        *_errors_by(timed, lambda t: (t.machine, t.kind, 0)),
        *_errors_by(timed, lambda t: (t.machine, t.kind, t.n_ranks)),
    ]
    return sorted(found, key=lambda e: (e.machine, e.kind, e.n_ranks))


def _errors_by(
    timed: Sequence[TimedCollective], key: Callable[[TimedCollective], tuple[str, str, int]]
) -> Iterator[CollectiveErrors]:
    """Yield the errors of each group of collectives that has a prediction."""
    for (machine, kind, n_ranks), group in grouped(timed, key).items():
        errors = summarise([t.comparison for t in group])
        if errors is not None:
            yield CollectiveErrors(machine, kind, n_ranks, errors)
