"""The best configuration of every strategy, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_tune.errors import NoCandidateError
from axonn_tune.search.rank import Best, Each, Ranking, best_of, rank_candidates
from axonn_tune.search.search import Search


def compare(searches: Sequence[Search], each: Each = iter) -> list[Best]:
    """Return the best of each search, the fastest first; searches without a result come last."""
    return sorted((best_of(search) for search in each(searches)), key=_seconds)


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
