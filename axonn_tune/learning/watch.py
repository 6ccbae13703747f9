"""Watch steps from night to night: whether they became slower, and what alone would explain it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from axonn_tune.learning.learn import Trial
from axonn_tune.spec.learnable import learnable
from axonn_tune.spec.plan import Array
from axonn_tune.step.prediction import Prediction

# Smaller changes of a step are not reported: repeated runs differ by as much.
LEAST_CHANGE = 0.03
# Standard deviations, by convention, of a step's time from night to night and of the logarithm of a
# resource that broke: of several explanations, the one that is likeliest by these is named.
_NIGHTLY = 0.01
_BROKEN = 0.5
# Least share of the squares of all changes that a resource must explain to be named, by convention.
_LEAST_EXPLAINED = 0.5
# Changes of a resource that are tried: so much more, or its inverse less.
_CHANGES = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 1.5, 2.3, 4.0)


@dataclass(frozen=True)
class Drift:
    """How steps changed since a baseline.

    n_runs
        Number of runs that were compared.
    change_fraction
        Time of a step over that of the baseline, minus one, mean of the runs.
    n_slower, n_faster
        Number of runs of configurations whose steps take longer, and less time, than before, by
        more than repeated runs differ.
    n_configurations
        Number of different configurations among the runs.
    slowest_fraction, fastest_fraction
        The same of the configurations whose steps have gained, and have lost, most time.
    error_fraction
        Predicted over measured time, minus one, mean of the runs.
    slowest
        Name of a run of the configuration whose steps have gained most time.
    culprit
        Name of the resource whose change alone explains those of the runs best; empty if the runs
        are alike, so that they do not tell, or have hardly changed, or if it explains less than
        half of what changed.
    culprit_fraction
        Change of the speed of this resource, or of the inverse of a time, that would explain them.
    """

    n_runs: int
    n_slower: int
    n_faster: int
    n_configurations: int
    change_fraction: float
    slowest_fraction: float
    fastest_fraction: float
    error_fraction: float
    slowest: str
    culprit: str = ""
    culprit_fraction: float = 0.0

    @property
    def is_slower(self) -> bool:
        """Whether some steps take longer than before, by more than repeated runs differ."""
        return self.n_slower > 0

    @property
    def is_faster(self) -> bool:
        """Whether some steps take less time than before, by more than repeated runs differ."""
        return self.n_faster > 0


def drift(baseline: Sequence[Trial], now: Sequence[Trial]) -> Drift:
    """Return how runs changed since those of a baseline.

    Runs of equal configurations are compared with each other. If the baseline does not have a
    configuration, the prediction says how long it would have taken there.
    """
    usual = median(_log_error(trial) for trial in baseline)
    changes = np.array([_log_change(baseline, trial, usual) for trial in now])
    errors = fmean(math.exp(-_log_error(trial)) - 1.0 for trial in now)
    keys = [_key(trial.prediction) for trial in now]
    of_each = [median(changes[[other == key for other in keys]]) for key in keys]
    fractions = np.expm1(of_each)
    seen = Drift(
        n_runs=len(now),
        n_slower=int(np.sum(fractions >= LEAST_CHANGE)),
        n_faster=int(np.sum(fractions <= -LEAST_CHANGE)),
        n_configurations=len(set(keys)),
        change_fraction=math.expm1(changes.mean()),
        slowest_fraction=float(fractions.max()),
        fastest_fraction=float(fractions.min()),
        error_fraction=errors,
        slowest=now[int(fractions.argmax())].name,
    )
    if not (seen.is_slower or seen.is_faster) or seen.n_configurations < 2:
        return seen
    name, factor = _explanation(now, changes)
    return replace(seen, culprit=name, culprit_fraction=factor - 1.0)


def _log_error(trial: Trial) -> float:
    """Return the logarithm of measured over predicted time."""
    return math.log(trial.measured_seconds / trial.prediction.step_seconds)


def _log_change(baseline: Sequence[Trial], trial: Trial, usual: float) -> float:
    """Return the logarithm of a run's time over that of the baseline."""
    alike = [other for other in baseline if _key(other.prediction) == _key(trial.prediction)]
    before = median(map(_log_error, alike)) if alike else usual
    return _log_error(trial) - before


def _key(prediction: Prediction) -> str:
    """Return a text that runs of equal jobs and configurations share."""
    scenario = prediction.scenario
    return repr((scenario.model, scenario.job, prediction.configuration))


def _explanation(trials: Sequence[Trial], changes: Array) -> tuple[str, float]:
    """Return the resource whose change alone explains changes best, and its factor.

    The name is empty if most of the changes is left.
    """
    machine = trials[0].prediction.scenario.machine
    stated = np.log([trial.prediction.step_seconds for trial in trials])
    signs = -math.copysign(1.0, changes.mean())
    surprise: dict[tuple[str, float], float] = {}
    unexplained: dict[tuple[str, float], float] = {}
    for resource in learnable(machine):
        for change in _CHANGES:
            factor = (1.0 + change) ** signs
            other = resource.improved(factor)
            shown = np.log([trial.seconds_on(other) for trial in trials]) - stated
            left = changes - shown
            unexplained[resource.name, factor] = left @ left
            # How unlikely it is that the resource itself changes so much counts, too.
            surprise[resource.name, factor] = (
                left @ left / _NIGHTLY**2 + (math.log(factor) / _BROKEN) ** 2
            )
    likeliest = min(surprise, key=lambda explanation: surprise[explanation])
    if unexplained[likeliest] > (1.0 - _LEAST_EXPLAINED) * (changes @ changes):
        return "", 1.0
    return likeliest
