"""All published numbers next to their predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from axonn_tune.reproduce.axonn import compare_links, compare_runs
from axonn_tune.reproduce.comparison import Comparison
from axonn_tune.reproduce.results import compare_frontier, compare_published
from axonn_tune.reproduce.runs import Loaders, Row, all_runs, vtrain
from axonn_tune.reproduce.steps import TimedRun, time_runs
from axonn_tune.search.rank import Each

# Published table of measured steps, and its machine, by what the table holds.
STEPS = {
    "several nodes": ("vtrain_a100_multi", "a100-800g"),
    "one node": ("vtrain_a100_single", "a100-800g"),
}


@dataclass(frozen=True)
class Reproduction:
    """Comparisons of end results, of ring bandwidths, and of measured steps by table."""

    results: Sequence[Comparison]
    links: Sequence[Comparison]
    steps: Mapping[str, Sequence[TimedRun]]


def reproduce(
    load: Callable[[str], Sequence[Row]], loaders: Loaders, each: Each = iter
) -> Reproduction:
    """Predict everything; `load` finds a published table by name."""
    results = [
        *compare_runs(load("axonn"), loaders, each),
        *compare_published(all_runs(load, loaders), each),
        *compare_frontier(load("frontier"), loaders),
    ]
    links = compare_links(load("axonn_links"), loaders)
    steps = {
        name: time_runs(list(vtrain(load(table), loaders.machine(machine))), each)
        for name, (table, machine) in STEPS.items()
    }
    return Reproduction(results, links, steps)
