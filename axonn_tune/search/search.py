"""The question that a search answers: a scenario, what is fixed, and what may vary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from axonn_tune.spec.layout import PAPER_ORDER, Layout
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import RECOMPUTES
from axonn_tune.spec.scenario import Scenario

COST_MODELS = ("full", "paper")


@dataclass(frozen=True)
class Constraints:
    """The limits that the user sets to a search.

    axes
        Size of each axis that is fixed.
    max_tp
        Largest number of ranks that may split the products of one token.
    orders
        Rank orders that are tried.
    micro_batch
        Number of sequences that one rank processes at once; None tries all.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    max_tp: int | None = None
    orders: tuple[str, ...] = (PAPER_ORDER,)
    micro_batch: int | None = None


@dataclass(frozen=True)
class Search:
    """A question whose answer is a ranking.

    scenario
        Model, job, machine and strategy.
    constraints
        Limits that the user sets.
    recomputes
        Recomputations that are tried.
    cost_model
        ``"full"``, or ``"paper"`` to order by AxoNN's own equations.
    include_oom
        Whether configurations that do not fit in memory are ranked too.
    every_configuration
        Whether every configuration of a layout is ranked, and not only its best.
    """

    scenario: Scenario
    constraints: Constraints = field(default_factory=Constraints)
    recomputes: tuple[str, ...] = RECOMPUTES
    cost_model: str = "full"
    include_oom: bool = False
    every_configuration: bool = False

    def on(self, machine: Machine) -> Search:
        """Return the same search on another machine."""
        return replace(self, scenario=replace(self.scenario, machine=machine))

    def on_gpus(self, n_gpus: int) -> Search:
        """Return the same search for another number of GPUs."""
        job = replace(self.scenario.job, n_gpus=n_gpus)
        return replace(self, scenario=replace(self.scenario, job=job))

    def of_layout(self, layout: Layout) -> Search:
        """Return the search of one layout, whether it fits in memory or not."""
        axes = {axis: layout.size(axis) for axis in self.scenario.strategy.axes.names}
        constraints = replace(self.constraints, axes=axes)
        return replace(self, constraints=constraints, include_oom=True)
