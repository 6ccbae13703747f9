"""The question that a search answers: a scenario, what is fixed, and what may vary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from axonn_tune.search.batches import BatchRule
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
    partial_recompute
        Whether candidates that would not fit otherwise are also tried with a part of their layers
        recomputed, if `recomputes` has ``none``.
    cost_model
        ``"full"``, or ``"paper"`` to order by AxoNN's own equations.
    include_oom
        Whether configurations that do not fit in memory are ranked too.
    every_configuration
        Whether every configuration of a layout is ranked, and not only its best.
    exhaustive
        Whether every configuration is played to the end, even if a bound of its time shows that it
        is not the best of its layout.
    n_best
        How many layouts are wanted, the best ones; None for all. The others are left out, and not
        played where a bound of their time shows that they are slower.
    batch_rule
        How the global batch follows from the number of GPUs; None where it does not.
    other_batches
        Global batches that are tried besides the job's; the one with the least time per sequence is
        taken.
    """

    scenario: Scenario
    constraints: Constraints = field(default_factory=Constraints)
    recomputes: tuple[str, ...] = RECOMPUTES
    cost_model: str = "full"
    include_oom: bool = False
    every_configuration: bool = False
    exhaustive: bool = False
    n_best: int | None = None
    partial_recompute: bool = False
    batch_rule: BatchRule | None = None
    other_batches: tuple[int, ...] = ()

    def on(self, machine: Machine) -> Search:
        """Return the same search on another machine."""
        return replace(self, scenario=replace(self.scenario, machine=machine))

    def on_gpus(self, n_gpus: int) -> Search:
        """Return the same search for another number of GPUs, by the same rule for the batch."""
        batches = self.batches
        if self.batch_rule is not None:
            batches = self.batch_rule.batches(n_gpus, self.scenario.strategy.axes)
        job = replace(self.scenario.job, n_gpus=n_gpus)
        return replace(self, scenario=replace(self.scenario, job=job)).on_batches(batches)

    def on_batches(self, batches: Sequence[int]) -> Search:
        """Return the same search with these global batches."""
        job = replace(self.scenario.job, global_batch=batches[0])
        scenario = replace(self.scenario, job=job)
        return replace(self, scenario=scenario, other_batches=tuple(batches[1:]))

    @property
    def times_all(self) -> bool:
        """Whether every configuration is timed, even if it cannot be the best of its layout."""
        return self.include_oom or self.every_configuration or self.exhaustive

    @property
    def n_wanted(self) -> int | None:
        """How many of the fastest layouts are wanted; None where all have to be ranked."""
        is_by_time = self.cost_model == "full"
        ranks_all = self.include_oom or self.every_configuration or not is_by_time
        return None if ranks_all else self.n_best

    @property
    def batches(self) -> list[int]:
        """The global batches that are tried."""
        return [self.scenario.job.global_batch, *self.other_batches]

    @property
    def compares_batches(self) -> bool:
        """Whether the search chooses, or has chosen, the global batch among several."""
        return self.batch_rule is not None and self.batch_rule.within_fraction is not None

    def of_layout(self, layout: Layout) -> Search:
        """Return the search of one layout, whether it fits in memory or not."""
        axes = {axis: layout.size(axis) for axis in self.scenario.strategy.axes.sized}
        constraints = replace(self.constraints, axes=axes)
        return replace(self, constraints=constraints, include_oom=True)
