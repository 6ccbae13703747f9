"""The best configuration of every strategy, or of given layouts, side by side."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

from axonn_tune.errors import NoCandidateError
from axonn_tune.processes import mapped
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.search.rank import Best, Detail, Each, Ranking, best_of, rank_candidates
from axonn_tune.search.search import Search
from axonn_tune.step.predict import predict
from axonn_tune.step.prediction import Prediction


def compare(searches: Sequence[Search], each: Each = iter, detail: Detail = "chance") -> list[Best]:
    """Return the best of each search, the fastest first; searches without a result come last."""
    return sorted(mapped(partial(best_of, detail=detail), searches, each=each), key=_seconds)


def compare_layouts(layouts: Sequence[tuple[Search, str]], each: Each) -> list[Best]:
    """Return the best configuration of each layout in its search, as `compare` orders them.

    What does not fit in memory comes after what does.

    Raises
    ------
    InputError
        A layout breaks a rule of its strategy; the message says which.
    """
    return sorted(mapped(_best_of_layout, layouts, each=each), key=_seconds)


def _best_of_layout(of_search: tuple[Search, str]) -> Best:
    """Return the best configuration of a layout, whether it fits in memory or not."""
    search, layout = of_search
    best = best_of_layout(search, layout)
    batch = best.scenario.job.global_batch
    prediction = predict(best.scenario, best.configuration, with_interval=True)
    return Best(search.on_batches([batch]), prediction)


def without_twins(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return predictions without those that run an earlier one of them by another name.

    A grid of AxoNN is the same on a pipeline of one stage.
    """
    first: dict[Hashable, Prediction] = {}
    for prediction in predictions:
        seconds = f"{prediction.step_seconds:.9g}"
        first.setdefault((prediction.configuration, prediction.scenario.job, seconds), prediction)
    return list(first.values())


def _seconds(best: Best) -> tuple[bool, float]:
    """Return whether a result is missing or does not fit, and its time for each token."""
    if best.prediction is None:
        return True, float("inf")
    return not best.prediction.fits, best.prediction.seconds_per_token


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
