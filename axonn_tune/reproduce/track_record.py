"""Track records from comparisons: how the predicted times and rates of runs have fared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

from axonn_tune.reproduce.comparison import Comparison, grouped
from axonn_tune.reproduce.reproduction import Reproduction
from axonn_tune.spec.track_record import FAR_FRACTION, TrackRecord, TrackRecords

# Metrics that follow from the time of one step alone.
_OF_STEPS = (
    "step_seconds",
    "tflops_per_gpu",
    "hardware_tflops_per_gpu",
    "tokens_per_second_per_gpu",
    "fraction_of_peak",
    "pflops",
)


def track_records(reproduction: Reproduction) -> TrackRecords:
    """Return the records of every strategy, engine and family of GPUs, in order of their names."""
    steps = [timed.comparison for table in reproduction.steps.values() for timed in table]
    kinds = grouped(
        (c for c in (*reproduction.results, *steps) if _counts(c)),
        lambda c: (c.strategy, c.engine, c.gpu, c.kind),
    )
    return TrackRecords(tuple(_record(*kind, kinds[kind]) for kind in sorted(kinds)))


def _counts(c: Comparison) -> bool:
    """Return whether a comparison tells how well the time of a step is predicted."""
    return c.metric in _OF_STEPS and c.error_fraction is not None and not c.is_fitted


def _record(
    strategy: str, engine: str, gpu: str, kind: str, comparisons: Sequence[Comparison]
) -> TrackRecord:
    errors = [c.error_fraction for c in comparisons if c.error_fraction is not None]
    return TrackRecord(
        strategy,
        engine,
        gpu,
        n_runs=len(errors),
        n_far=sum(abs(error) > FAR_FRACTION for error in errors),
        mean_error_fraction=mean(map(abs, errors)),
        spread=math.sqrt(mean(math.log1p(error) ** 2 for error in errors)),
        kind=kind,
    )
