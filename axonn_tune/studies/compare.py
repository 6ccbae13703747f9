"""The best configuration of every strategy, side by side."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from axonn_tune.errors import NoCandidateError
from axonn_tune.search.rank import Best, Each, Ranking, best_of, rank_candidates
from axonn_tune.search.search import Search
from axonn_tune.step.prediction import Prediction


def compare(searches: Sequence[Search], each: Each = iter) -> list[Best]:
    """Return the best of each search, the fastest first; searches without a result come last.

    A search whose best step is that of an earlier search, under another strategy's name, has none.
    """
    return sorted(_without_twins([best_of(search) for search in each(searches)]), key=_seconds)


def _without_twins(results: Sequence[Best]) -> Iterator[Best]:
    """Yield the results; those whose step an earlier one has already say so instead."""
    names: dict[Hashable, str] = {}
    for result in results:
        if result.prediction is not None:
            key = run_key(result.prediction)
            if key in names:
                layout = result.prediction.layout
                reason = f"the best layout, {layout}, is also the best of {names[key]}"
                result = replace(result, prediction=None, reason=reason)
            names.setdefault(key, result.search.scenario.strategy.name)
        yield result


def run_key(prediction: Prediction) -> Hashable:
    """Return what is equal for predictions that differ in nothing but the strategy's name.

    A pipeline of one stage is such a case: it is a grid of AxoNN without a pipeline.
    """
    job = prediction.scenario.job
    return prediction.configuration, job.global_batch, prediction.step_seconds


def _seconds(best: Best) -> float:
    """Return the step time of a result for each token, infinite without one."""
    return float("inf") if best.prediction is None else best.prediction.seconds_per_token


def rankings(searches: Sequence[Search], each: Each = iter) -> list[Ranking]:
    """Return the rankings of the searches that have candidates.

    Raises
    ------
    NoCandidateError
        No search has a candidate; the message comes from the last search.
    """
    results = []
    last_error = None
    for search in each(searches):
        try:
            results.append(rank_candidates(search))
        except NoCandidateError as error:
            last_error = error
    if last_error is not None and not results:
        raise last_error
    return results
