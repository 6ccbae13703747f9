"""The best configuration of every strategy, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_tune.search.best import Best, best_of
from axonn_tune.search.each import Each
from axonn_tune.search.problem import Search


def compare(searches: Sequence[Search], each: Each = iter) -> list[Best]:
    """Search each strategy; the fastest first, those without a configuration last."""
    found = [best_of(search) for search in each(searches)]
    return sorted(found, key=lambda c: c.best.step_seconds if c.best else float("inf"))
