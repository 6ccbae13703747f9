"""How predictions have fared: the errors of the published runs that they were compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

# A prediction that errs by more than this fraction of the published number is far off.
FAR_FRACTION = 0.2
# Fewer runs than this say little about the next one.
LEAST_RUNS = 3


@dataclass(frozen=True)
class TrackRecord:
    """The errors of the predicted times or rates of published runs that are of one kind.

    strategy, engine, gpu
        The strategy, its engine and the family of the GPU that all runs share; empty where they
        differ.
    n_runs
        Number of runs.
    n_far
        Number of runs whose prediction is far off.
    mean_error_fraction
        Mean of |predicted / published - 1|.
    spread
        Root mean square of ln(predicted / published).
    kind
        What distinguishes the runs from those of dense models in the job's type (see
        `Scenario.kind`).
    """

    strategy: str
    engine: str
    gpu: str
    n_runs: int
    n_far: int
    mean_error_fraction: float
    spread: float
    kind: str = ""


def joined(records: Sequence[TrackRecord]) -> TrackRecord | None:
    """Return the record of the runs of all given records; None if there are no runs."""
    n_runs = sum(record.n_runs for record in records)
    if not n_runs:
        return None

    def mean(value: Callable[[TrackRecord], float]) -> float:
        return sum(record.n_runs * value(record) for record in records) / n_runs

    return TrackRecord(
        strategy=_shared(record.strategy for record in records),
        engine=_shared(record.engine for record in records),
        gpu=_shared(record.gpu for record in records),
        n_runs=n_runs,
        n_far=sum(record.n_far for record in records),
        mean_error_fraction=mean(lambda record: record.mean_error_fraction),
        spread=math.sqrt(mean(lambda record: record.spread**2)),
        kind=_shared(record.kind for record in records),
    )


def _shared(names: Iterable[str]) -> str:
    """Return the name that all share, or an empty text."""
    distinct = set(names)
    return distinct.pop() if len(distinct) == 1 else ""


@dataclass(frozen=True)
class TrackRecords:
    """The track records of all kinds of runs, each run in one of them."""

    records: tuple[TrackRecord, ...] = ()

    def of(self, strategy: str, engine: str, gpu: str, kind: str = "") -> TrackRecord | None:
        """Return the record of the runs that are most like a prediction, if there are enough.

        Those of its kind come before all others. Of these, those of its strategy with its engine on
        its GPU come first, then those with its engine on all machines, with any engine on its GPU,
        and all runs of the strategy.
        """
        of_strategy = [record for record in self.records if record.strategy == strategy]
        alike = [record for record in of_strategy if record.kind == kind]
        return _nearest(alike, engine, gpu) or _nearest(of_strategy, engine, gpu)

    @property
    def largest_spread(self) -> float:
        """The spread of the strategy whose predictions have fared worst; 0 without records."""
        by_strategy = {
            record.strategy: [r for r in self.records if r.strategy == record.strategy]
            for record in self.records
        }
        joint = (joined(records) for records in by_strategy.values())
        return max((record.spread for record in joint if record is not None), default=0.0)


def _nearest(of_strategy: Sequence[TrackRecord], engine: str, gpu: str) -> TrackRecord | None:
    """Return the record of enough runs whose engine and GPU are the most similar, if any."""
    of_engine = [record for record in of_strategy if record.engine == engine]
    kinds = (
        [record for record in of_engine if record.gpu == gpu],
        of_engine,
        [record for record in of_strategy if record.gpu == gpu],
        of_strategy,
    )
    candidates = (joined(kind) for kind in kinds)
    return next((r for r in candidates if r is not None and r.n_runs >= LEAST_RUNS), None)


NO_TRACK_RECORDS = TrackRecords()
