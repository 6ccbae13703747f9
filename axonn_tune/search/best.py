"""The best configuration of a search, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.errors import NoCandidateError
from axonn_tune.search.rank import run
from axonn_tune.search.search import Search
from axonn_tune.step.prediction import Prediction


@dataclass(frozen=True)
class Best:
    """Of one search; `reason` says why it found nothing."""

    search: Search
    best: Prediction | None
    reason: str = ""


def best_of(search: Search, with_interval: bool = True) -> Best:
    """Search, and do not fail where nothing is legal or fits; an interval doubles the time."""
    try:
        ranking = run(search)
        return Best(search, ranking.top(1)[0] if with_interval else ranking.prediction(0))
    except NoCandidateError as error:
        return Best(search, None, str(error))
