"""Search every candidate of a job and rank them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from axonn_tune.cost import paper
from axonn_tune.cost.placements import PairedLinks
from axonn_tune.errors import InputError, NoCandidateError
from axonn_tune.search.bounds import ROUNDING, contender_times, every_time
from axonn_tune.search.candidates import (
    executions,
    legal_layouts,
    legal_placements,
    no_grid_error,
    with_micro_batches,
)
from axonn_tune.search.no_fit import LARGEST_GPU_COUNT, nothing_fits, nothing_fits_in_host
from axonn_tune.search.parts import (
    OrderedPart,
    PlannedParts,
    SizedPart,
    in_orders,
    least_seconds,
    planned_parts,
    played_parts,
    sized_parts,
)
from axonn_tune.search.search import Search
from axonn_tune.search.uncertainty import N_ROWS, Uncertainty, uncertainty
from axonn_tune.simulate.step import PlayedStep
from axonn_tune.spec.candidates import CandidateTable, Ints, Placements, Rows, distinct
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.plan import Array
from axonn_tune.spec.recomputation import extent
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.evaluate import Evaluation
from axonn_tune.step.predict import peak_bytes, predictions_of
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.spread import deviations, spread

# The candidates are ordered by the time of their kernels alone. If n are wanted, the n-th time is
# the mark, and all candidates whose kernels take at most this factor times the mark are played
# first. Messages often add no more than that, and to play a few candidates more takes less time
# than to play a second time.
PROMISING_FACTOR = 1.3
MEMORY_REASON = "out of memory"
HOST_MEMORY_REASON = "out of the host's memory"
VARIANT_REASON = (
    "the stages cannot be cut into that number of virtual stages, or their schedule needs more "
    "micro-batches"
)
# A function that walks through a sequence, as `iter` does; a caller may show the progress in it.
Each: TypeAlias = Callable[[Sequence[Any]], Iterable[Any]]
# What is told of a best configuration: its time, an interval of it, too, or also the chance to be
# the fastest, for which its rivals are looked at.
Detail: TypeAlias = Literal["time", "interval", "chance"]


@dataclass(frozen=True, eq=False)
class Ranking:
    """The result of a search in rank order; columns have one entry per candidate.

    A layout, in each rank order that was searched, is represented by its best configuration,
    unless the search asks for every configuration.

    search
        The search, with the one global batch of all candidates.
    table
        Candidates, the best first.
    step_seconds, exposed_seconds, bubble_seconds
        Times of a step, of its exposed communication and of its bubble.
    memory_bytes
        Peak memory of a rank that decides whether it fits (see `stated_bytes`).
    fits
        Whether the memory suffices.
    paper_seconds
        Communication time by AxoNN's own equations, by placement of the table; None for layouts
        that are no grids.
    rejected
        Number of placements or configurations that were rejected, by reason.
    n_evaluated
        Number of configurations that were compared, without those that nearly fit.
    n_bounded
        Number of these configurations whose exact times are not known: a bound of their time showed
        that their layout has a faster one, or that enough layouts are faster.
    n_left_out
        Number of layouts that fit, each in one order, and have no row, since they are slower than
        the best (see `Search.n_best`) or their order makes no difference.
    batch_seconds
        Time of the best step by global batch, where several were tried and had candidates.
    near
        Ranking by time of the candidates that nearly fit and are faster than those of the same
        layout that do; None if there are none.
    """

    search: Search
    table: CandidateTable
    step_seconds: Array
    exposed_seconds: Array
    bubble_seconds: Array
    memory_bytes: Array
    fits: np.ndarray
    paper_seconds: Array | None
    rejected: Mapping[str, int]
    n_evaluated: int
    n_bounded: int
    n_left_out: int = 0
    batch_seconds: Mapping[int, float] = field(default_factory=dict)
    near: Ranking | None = None

    def __len__(self) -> int:
        return len(self.table)

    def top(self, n: int | None = None) -> list[Prediction]:
        """Return the first n predictions, or all; the fastest of them state their uncertainty."""
        count = len(self) if n is None else min(n, len(self))
        known = self.uncertainty
        index = {int(row): i for i, row in enumerate(known.rows)}
        return [
            replace(
                prediction,
                spread_fraction=float(known.spread[index[row]]) if row in index else None,
                p_best=float(known.p_best[index[row]]) if row in index else None,
            )
            for row, prediction in enumerate(self._predictions(np.arange(count)))
        ]

    def best(self, detail: Detail = "chance") -> Prediction:
        """Return the first prediction; its interval and chance are stated as far as is wanted."""
        if detail == "chance":
            return self.top(1)[0]
        best = self.prediction(0)
        if detail == "time":
            return best
        scenario = self.search.scenario
        of_best = spread(scenario, *deviations(scenario, self.table.take(slice(1))))
        return replace(best, spread_fraction=float(of_best[0]))

    @cached_property
    def uncertainty(self) -> Uncertainty:
        """The uncertainty of the times of the fastest rows that fit."""
        return uncertainty(self.search.scenario, self.table, self.step_seconds, self.fits)

    @cached_property
    def stated_bytes(self) -> Array:
        """The peak memory as predictions state it, with freed memory that no search looks for."""
        stated = np.empty(len(self))
        for rows in self.table.alike():
            stated[rows] = peak_bytes(self.search.scenario, self.table.take(rows))
        return stated

    def prediction(self, row: int) -> Prediction:
        """Return the prediction at one row; row 0 is the best."""
        return self._predictions(np.array([row]))[0]

    def _predictions(self, rows: Ints) -> list[Prediction]:
        """Return the predictions at some rows; those that are alike are worked out together."""
        table = self.table.take(rows)
        found: dict[int, Prediction] = {}
        for alike in table.alike():
            found |= zip(alike.tolist(), self._alike_predictions(rows[alike]), strict=True)
        return [replace(found[i], place=row + 1) for i, row in enumerate(rows.tolist())]

    def _alike_predictions(self, rows: Ints) -> list[Prediction]:
        """Return the predictions at rows that are alike, without their places."""
        table = self.table.take(rows)
        times = Evaluation(
            self.step_seconds[rows], self.exposed_seconds[rows], self.bubble_seconds[rows]
        )
        of_paper = None if self.paper_seconds is None else self.paper_seconds[table.placement]
        return predictions_of(self.search.scenario, table, times, of_paper)


class Best(NamedTuple):
    """The best configuration that a search found, or the reason why it found none."""

    search: Search
    prediction: Prediction | None
    reason: str = ""

    def known(self) -> Prediction:
        """Return the prediction.

        Raises
        ------
        NoCandidateError
            There is none, for this reason.
        """
        if self.prediction is None:
            raise NoCandidateError(self.reason)
        return self.prediction


def best_of(search: Search, detail: Detail = "chance") -> Best:
    """Return the best configuration, or the reason why no layout is legal or fits.

    An interval takes a fifth of the time of a search, and a chance half of it, or as long.
    """
    try:
        n_best = N_ROWS if detail == "chance" else 1
        ranking = rank_candidates(replace(search, n_best=n_best))
        return Best(replace(ranking.search, n_best=search.n_best), ranking.best(detail))
    except NoCandidateError as error:
        return Best(search, None, str(error))


def rank_candidates(search: Search) -> Ranking:
    """Evaluate every candidate that fits (with `include_oom` every candidate) and rank them.

    Where several global batches may be tried, the ranking is that of the batch whose best step
    takes the least time for each sequence.

    Raises
    ------
    NoCandidateError
        No layout is legal, or none fits; the message says which GPU count would do.
    """
    if not search.other_batches:
        return _rank(search)
    rankings, errors = [], []
    for batch in search.batches:
        try:
            rankings.append(_rank(search.on_batches([batch])))
        except NoCandidateError as error:
            errors.append(error)
    if not rankings:
        raise errors[0]
    batch_seconds = {
        ranking.search.scenario.job.global_batch: float(ranking.step_seconds[0])
        for ranking in rankings
    }
    return replace(min(rankings, key=_seconds_per_sequence), batch_seconds=batch_seconds)


def with_best_batch(search: Search) -> Search:
    """Return the search with the one global batch that is the fastest for each sequence."""
    return rank_candidates(search).search if search.other_batches else search


def rank_best(search: Search, n: int | None) -> Ranking:
    """Rank the n best layouts, but at least the `N_ROWS` that chances need; or rank all.

    It is the beginning of what `rank_candidates` returns.
    """
    return rank_candidates(search if n is None else replace(search, n_best=max(n, N_ROWS)))


def only_configuration(search: Search) -> Configuration | None:
    """Return the only configuration of a search that also ranks what does not fit in memory.

    It is None if the search has to choose, or has to say why there is nothing to choose from.
    """
    is_free = search.other_batches or search.partial_recompute or not search.include_oom
    if is_free or search.scenario.job.offloads_optimizer:
        return None
    table, _ = with_micro_batches(search, legal_placements(search)[0])
    tables = list(executions(search, table))
    return tables[0].configuration(0) if [len(table) for table in tables] == [1] else None


def _seconds_per_sequence(ranking: Ranking) -> tuple[bool, float]:
    """Return the time of the best step for each sequence; what fits comes before what does not."""
    seconds = float(ranking.step_seconds[0]) / ranking.search.scenario.job.global_batch
    return not bool(ranking.fits[0]), seconds


def _rank(search: Search) -> Ranking:
    """Evaluate the candidates of a search that has one global batch; see `rank_candidates`."""
    scenario = search.scenario
    _check_offload(scenario)
    layouts, rejected = _layouts(search)
    n_orders = layouts.n_orders(search.constraints.orders)
    table, without_micro_batch = with_micro_batches(search, layouts, n_orders)
    rejected |= without_micro_batch
    if not len(table):
        raise no_grid_error(search, rejected)
    parts = sized_parts(search, table)
    if not parts:
        n_candidates = int(n_orders[table.placement].sum())
        raise no_grid_error(search, {**rejected, VARIANT_REASON: n_candidates})
    n_oom = sum(part.n_oom for part in parts)
    if n_oom:
        rejected[MEMORY_REASON] = n_oom
    n_out_of_host = sum(part.n_out_of_host for part in parts)
    if n_out_of_host:
        rejected[HOST_MEMORY_REASON] = n_out_of_host
    if not search.include_oom and not any(part.fits.any() for part in parts):
        if n_out_of_host:
            raise nothing_fits_in_host(search, min(part.least_host_bytes for part in parts))
        may_fit = any(len(part.table) for part in parts)
        raise nothing_fits(search, min(part.least_bytes for part in parts), may_fit)
    of_part = (part.table.placement[part.fits | search.include_oom] for part in parts)
    ranked = np.concatenate(list(of_part))
    n_layouts = int(n_orders[np.bincount(ranked, minlength=len(layouts)) > 0].sum())
    n_evaluated = int(n_orders[ranked].sum()) + sum(part.n_slower for part in parts)
    ranking = _best_ranking(search, parts, rejected, n_evaluated)
    return ranking if search.every_configuration else _wanted(ranking, n_layouts)


def _best_ranking(
    search: Search, parts: Sequence[SizedPart], rejected: Mapping[str, int], n_evaluated: int
) -> Ranking:
    """Return the ranking of all candidates, or of those that may be among the ones wanted.

    Where layouts stand in several orders, the kernels of a candidate bound its time in all of them.
    """
    planned = planned_parts(search.scenario, parts)

    def ranking_of(taken: Sequence[Rows]) -> Ranking:
        return _ranked(_played(search, parts, planned, taken, rejected, n_evaluated))

    n_wanted = search.n_wanted
    if n_wanted is None or search.exhaustive or len(search.constraints.orders) == 1:
        return ranking_of([slice(None)] * len(parts))
    planned = [group.kept() for group in planned]
    least = least_seconds(planned, parts)
    of_fitting = [seconds[part.fits] for seconds, part in zip(least, parts, strict=True)]
    n_first = min(n_wanted, sum(map(len, of_fitting)))
    limit = PROMISING_FACTOR * float(
        np.partition(np.concatenate(of_fitting), n_first - 1)[n_first - 1]
    )
    while True:
        taken = [~(seconds > limit * (1.0 + ROUNDING)) for seconds in least]
        ranking = ranking_of(taken)
        is_enough = len(ranking) >= n_wanted
        to_beat = float(ranking.step_seconds[n_wanted - 1]) if is_enough else np.inf
        if to_beat <= limit or all(map(np.all, taken)):
            return ranking
        limit = to_beat


def _played(
    search: Search,
    parts: Sequence[SizedPart],
    planned: Sequence[PlannedParts],
    taken: Sequence[Rows],
    rejected: Mapping[str, int],
    n_evaluated: int,
) -> Ranking:
    """Return some candidates of each part in all orders that may be shown, in rank order."""
    scenario = search.scenario
    ordered = in_orders(parts, search.constraints.orders, taken)
    placements = ordered[0].table.placements
    links = PairedLinks.of(scenario.machine, placements, scenario.sent_once)
    paper_seconds = None
    if placements.axes.is_grid:
        paper_seconds = paper.communication_seconds(
            scenario.model, scenario.job, placements, links.placed
        )
    steps = played_parts(scenario, planned, ordered, links)
    return _ranking_of_all(search, ordered, steps, rejected, n_evaluated, paper_seconds)


def _wanted(ranking: Ranking, n_layouts: int) -> Ranking:
    """Return as many layouts as are wanted, and of what nearly fits only what beats the last."""
    n_wanted = ranking.search.n_wanted
    if n_wanted is not None and n_layouts > n_wanted:
        near = ranking.near
        ranking = replace(_taken(ranking, np.arange(len(ranking))[:n_wanted]), near=None)
        if near is not None:
            faster = np.flatnonzero(near.step_seconds < ranking.step_seconds[-1])
            ranking = replace(ranking, near=_taken(near, faster) if faster.size else None)
    return replace(ranking, n_left_out=n_layouts - len(ranking))


def _check_offload(scenario: Scenario) -> None:
    """Raise NoCandidateError if the engine cannot offload what the job offloads."""
    engine = scenario.strategy.engine
    if scenario.job.offloads_optimizer and engine.offload is None:
        raise NoCandidateError(
            f"engine {engine.title or 'of ' + scenario.strategy.name} keeps optimizer states on "
            "the GPU; allowed with --offload optimizer: an engine that `axonn-tune engines list` "
            "shows to offload"
        )


def _layouts(search: Search) -> tuple[Placements, dict[str, int]]:
    """Return `legal_layouts` of the search; raise an error if there are none."""
    n_gpus = search.scenario.job.n_gpus
    if n_gpus > LARGEST_GPU_COUNT:
        raise InputError(
            f"--gpus {n_gpus} is above {LARGEST_GPU_COUNT}, the largest count searched"
        )
    layouts, rejected = legal_layouts(search)
    if not len(layouts):
        raise no_grid_error(search, rejected)
    return layouts, rejected


def _ranked(everything: Ranking) -> Ranking:
    """Return the ranking of all candidates, which come in any order; see `Ranking.near`."""
    if everything.search.include_oom or everything.fits.all():
        return _best_of_each(everything, _rank_keys(everything))
    fitting = _taken(everything, np.flatnonzero(everything.fits))
    fitting = _best_of_each(fitting, _rank_keys(fitting))
    near = _taken(everything, np.flatnonzero(~everything.fits))
    to_beat = np.full(len(near.table.placements), np.inf)
    np.minimum.at(to_beat, fitting.table.placement, fitting.step_seconds)
    to_beat *= 1.0 - ROUNDING
    faster = np.flatnonzero(near.step_seconds < to_beat[near.table.placement])
    if not faster.size:
        return fitting
    near = _taken(near, faster)
    by_time = [extent(near.table.recompute), near.memory_bytes, _rounded(near.step_seconds)]
    return replace(fitting, near=_best_of_each(near, by_time))


def _rank_keys(ranking: Ranking) -> list[np.ndarray]:
    """Return what the order of a ranking goes by, the most important last, as `lexsort` takes it.

    Candidates that do not fit come last, the leanest of them first.
    """
    table, memory, fits = ranking.table, ranking.memory_bytes, ranking.fits
    seconds = np.where(fits, _rounded(ranking.step_seconds), memory)
    keys = [memory, extent(table.recompute), seconds, ~fits]
    if ranking.search.cost_model == "paper" and ranking.paper_seconds is not None:
        keys.insert(-1, np.where(fits, ranking.paper_seconds[table.placement], 0.0))
    return keys


def _ranking_of_all(
    search: Search,
    parts: Sequence[OrderedPart],
    steps: Sequence[PlayedStep],
    rejected: Mapping[str, int],
    n_evaluated: int,
    paper_seconds: Array | None,
) -> Ranking:
    """Return the configurations that may be shown, in no order."""
    table = reduce(CandidateTable.joined, (part.table for part in parts))
    fits = np.concatenate([part.fits for part in parts])
    memory = np.concatenate([part.memory for part in parts])
    if search.times_all:
        rows, times = every_time(steps)
    else:
        # Orders of a layout may turn out to make no difference, so that more of them are wanted.
        n_wanted = search.n_wanted if len(search.constraints.orders) == 1 else None
        rows, times = contender_times(steps, table.placement, fits, n_wanted)
    table, fits, memory = table.take(rows), fits[rows], memory[rows]
    step, exposed, bubble = times
    return Ranking(
        search=search,
        table=table,
        step_seconds=step,
        exposed_seconds=exposed,
        bubble_seconds=bubble,
        memory_bytes=memory,
        fits=fits,
        paper_seconds=paper_seconds,
        rejected=rejected,
        n_evaluated=n_evaluated,
        n_bounded=n_evaluated - (len(table) if search.include_oom else int(fits.sum())),
    )


def _best_of_each(ranking: Ranking, keys: Sequence[np.ndarray]) -> Ranking:
    """Return the best configuration of each placement, unless all are wanted, in rank order."""
    if ranking.search.every_configuration:
        return _taken(ranking, np.lexsort(keys))
    rows = _first_of_each(ranking.table.placement, keys)
    return _without_twins(_taken(ranking, rows[np.lexsort([key[rows] for key in keys])]))


def _first_of_each(placement: Ints, keys: Sequence[np.ndarray]) -> Ints:
    """Return the row of each placement that comes first by some keys, the most important last.

    To rule out row after row takes a fraction of the time of sorting all of them.
    """
    rows = np.arange(placement.size)
    for key in reversed(keys):
        of_rows, values = placement[rows], key[rows].astype(np.float64)
        least = np.full(int(of_rows.max(initial=0)) + 1, np.inf)
        np.minimum.at(least, of_rows, values)
        rows = rows[values == least[of_rows]]
    _, first = np.unique(placement[rows], return_index=True)
    return rows[np.sort(first)]


def _without_twins(ranking: Ranking) -> Ranking:
    """Return a ranking with one row for the rank orders of a layout that make no difference."""
    if len(ranking.search.constraints.orders) == 1:
        return ranking
    table = ranking.table
    seconds = _rounded(ranking.step_seconds)
    layout = table.placements.layout_numbers[table.placement]
    first, _ = distinct(layout, table.micro_batch, table.recompute, table.n_virtual, seconds)
    return _taken(ranking, np.sort(first))


def _rounded(seconds: Array) -> Ints:
    """Return numbers that order times, and are the same where only rounding tells times apart."""
    return np.round(np.log(seconds) / ROUNDING).astype(np.int64)


def _taken(ranking: Ranking, rows: Ints) -> Ranking:
    """Return some rows of a ranking, in the order in which they are given."""
    return replace(
        ranking,
        table=ranking.table.take(rows),
        step_seconds=ranking.step_seconds[rows],
        exposed_seconds=ranking.exposed_seconds[rows],
        bubble_seconds=ranking.bubble_seconds[rows],
        memory_bytes=ranking.memory_bytes[rows],
        fits=ranking.fits[rows],
    )
