"""Published numbers next to predicted ones: errors, and whether the order is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean, median
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")
Key = TypeVar("Key")

# Facts about a training run that a prediction needs; where a source does not state one, or the
# model cannot express it, something near is assumed.
FACTS = (
    "model",
    "vocabulary",
    "sequence length",
    "global batch",
    "number of GPUs",
    "GPU",
    "network",
    "layout",
    "virtual stages",
    "micro-batch",
    "recomputation",
    "software",
)


@dataclass(frozen=True)
class Comparison:
    """One published number with its prediction.

    subject
        What was run, or which ring was measured.
    predicted
        The predicted number; None where nothing is predicted.
    setting
        What was assumed for the prediction.
    certainty
        Part of the source that has the number: a table, a figure or the abstract. A number that is
        `recalled` was written down from memory.
    system
        System whose measurement it is.
    group
        Name that is shared by the numbers that the source compares.
    assumed
        Those of the `FACTS` that were assumed for the prediction.
    strategy, engine, gpu, kind
        Names of the strategy and the engine whose plan stands for the run, the family of its GPU,
        and what it has that dense models in the job's type have not (`Scenario.kind`).
    is_fitted
        Whether a number was fitted to the run, so that it is not predicted.
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
    assumed: tuple[str, ...] = ()
    strategy: str = ""
    engine: str = ""
    gpu: str = ""
    kind: str = ""
    is_fitted: bool = False

    @property
    def known(self) -> tuple[str, ...]:
        """The facts that the source states."""
        return tuple(fact for fact in FACTS if fact not in self.assumed)

    @property
    def error_fraction(self) -> float | None:
        """The signed relative error of the prediction; None for a verdict (published 0 or none)."""
        if self.predicted is None or not self.published or self.is_verdict:
            return None
        return self.predicted / self.published - 1.0

    @property
    def is_verdict(self) -> bool:
        """Whether the number says yes or no, not how much."""
        return self.metric == "fits"


@dataclass(frozen=True)
class ErrorSummary:
    """Summarises the errors of a set of comparisons, as fractions."""

    n: int
    bias: float
    mape: float
    median: float
    p90: float
    max_error: float


def summarise(comparisons: Sequence[Comparison]) -> ErrorSummary | None:
    """Return the errors over all predicted comparisons; None if there are none."""
    return summary_of([c.error_fraction for c in comparisons if c.error_fraction is not None])


def summary_of(errors: Sequence[float]) -> ErrorSummary | None:
    """Sum up signed relative errors; return None if there are none."""
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
    """Count the pairs within a group whose order the prediction has right, and all such pairs.

    Numbers of one metric that are equal as published have no order.
    """
    n_right = 0
    n_pairs = 0
    for group in grouped(comparisons, lambda c: (c.group, c.metric)).values():
        known = [(c.published, c.predicted) for c in group if c.predicted is not None]
        for (a, predicted_a), (b, predicted_b) in combinations(known, 2):
            if a != b and group[0].group:
                n_pairs += 1
                n_right += (a < b) == (predicted_a < predicted_b)
    return n_right, n_pairs


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by key, in order of appearance."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
