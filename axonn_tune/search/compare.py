"""The best configuration of every strategy, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axonn_tune.errors import NoCandidateError
from axonn_tune.search.each import Each
from axonn_tune.search.prediction import Prediction
from axonn_tune.search.problem import Search
from axonn_tune.search.rank import run


@dataclass(frozen=True)
class Contender:
    """The best of one strategy, or why it has none."""

    search: Search
    best: Prediction | None
    reason: str = ""


def compare(searches: Sequence[Search], each: Each = iter) -> list[Contender]:
    """Search each strategy; the fastest first, those without a configuration last."""
    contenders = []
    for search in each(searches):
        try:
            contenders.append(Contender(search, run(search).top(1)[0]))
        except NoCandidateError as error:
            contenders.append(Contender(search, None, str(error)))
    return sorted(contenders, key=lambda c: c.best.step_seconds if c.best else float("inf"))
