"""Published numbers beside predicted ones: errors, and whether the order is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, median
from typing import TypeVar

import numpy as np

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True)
class Comparison:
    """One published number with its prediction; None where it is not predicted.

    system: whose measurement it is. group: of numbers that the source compares.
    """

    machine: str
    subject: str
    metric: str
    published: float
    predicted: float | None
    setting: str
    certainty: str
    source: str
    system: str = "AxoNN"
    group: str = ""

    @property
    def error_fraction(self) -> float | None:
        """Signed relative error of the prediction; None for a verdict (published 0 or none)."""
        if self.predicted is None or not self.published or self.is_verdict:
            return None
        return self.predicted / self.published - 1.0

    @property
    def is_verdict(self) -> bool:
        """Whether it says yes or no, not how much."""
        return self.metric == "fits"


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of a set of comparisons, as fractions."""

    n: int
    bias: float
    mape: float
    median: float
    p90: float
    max_error: float


def summarise(comparisons: Sequence[Comparison]) -> ErrorSummary | None:
    """Errors over all predicted comparisons; None if there are none."""
    return summary_of([c.error_fraction for c in comparisons if c.error_fraction is not None])


def summary_of(errors: Sequence[float]) -> ErrorSummary | None:
    """Of signed relative errors."""
    if not errors:
        return None
    sizes = [abs(error) for error in errors]
    return ErrorSummary(
        n=len(errors),
        bias=mean(errors),
        mape=mean(sizes),
        median=median(sizes),
        p90=float(np.percentile(sizes, 90)),
        max_error=max(sizes),
    )


def ordered_pairs(comparisons: Iterable[Comparison]) -> tuple[int, int]:
    """Pairs within a group whose order the prediction has right, and all such pairs.

    Numbers of one metric that are equal as published have no order.
    """
    right = total = 0
    for group in grouped(comparisons, lambda c: (c.group, c.metric)).values():
        known = [(c.published, c.predicted) for c in group if c.predicted is not None]
        for (a, predicted_a), (b, predicted_b) in combinations(known, 2):
            if a != b and group[0].group:
                total += 1
                right += (a < b) == (predicted_a < predicted_b)
    return right, total


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by key, in order of appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
