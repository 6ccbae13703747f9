"""The best configuration of every strategy, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_tune.errors import NoCandidateError
from axonn_tune.search.best import Best, best_of
from axonn_tune.search.each import Each
from axonn_tune.search.rank import Ranking, run
from axonn_tune.search.search import Search


def compare(searches: Sequence[Search], each: Each = iter) -> list[Best]:
    """Search each strategy; the fastest first, those without a configuration last."""
    found = [best_of(search) for search in each(searches)]
    return sorted(found, key=lambda c: c.best.step_seconds if c.best else float("inf"))


def rankings(searches: Sequence[Search], each: Each = iter) -> list[Ranking]:
    """All candidates of every search that has any.

    Raises
    ------
    NoCandidateError
        None has; what the last one says.
    """
    found, last = [], None
    for search in each(searches):
        try:
            found.append(run(search))
        except NoCandidateError as error:
            last = error
    if last is not None and not found:
        raise last
    return found
