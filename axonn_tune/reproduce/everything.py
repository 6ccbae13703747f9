"""All published numbers beside their predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from axonn_tune.reproduce.axonn_papers import compare_links, compare_runs
from axonn_tune.reproduce.comparison import Comparison
from axonn_tune.reproduce.loaders import Loaders, Row
from axonn_tune.reproduce.papers import all_runs, vtrain
from axonn_tune.reproduce.predicted import Timed, compare_frontier, compare_published, time_runs
from axonn_tune.search.rank import Each

# Tables of measured steps, by what they hold.
STEPS = {
    "several nodes": ("vtrain_a100_multi", "a100-800g"),
    "one node": ("vtrain_a100_single", "a100-800g"),
}


@dataclass(frozen=True)
class Reproduction:
    """End results, ring bandwidths, and measured steps by table."""

    results: Sequence[Comparison]
    links: Sequence[Comparison]
    steps: Mapping[str, Sequence[Timed]]


def reproduce(
    load: Callable[[str], Sequence[Row]], loaders: Loaders, each: Each = iter
) -> Reproduction:
    """Predict everything; `load` finds a published table by name."""
    return Reproduction(
        [
            *compare_runs(load("axonn"), loaders, each),
            *compare_published(list(all_runs(load, loaders)), each),
            *compare_frontier(load("frontier"), loaders),
        ],
        compare_links(load("axonn_links"), loaders),
        {
            name: time_runs(list(vtrain(load(table), loaders.machine(machine))), each)
            for name, (table, machine) in STEPS.items()
        },
    )
