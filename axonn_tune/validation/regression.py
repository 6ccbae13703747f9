"""Check whether a validation is significantly worse than an earlier one.

Steps of a run resemble each other more than runs do, so the samples of one configuration say
little about a drift of the whole machine. A single configuration counts as slower only where a
bootstrap (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13: percentile
intervals) with a Bonferroni correction tells its samples from those of the baseline. The mean
change over all configurations, and the errors of the prediction, count where a bootstrap that draws
configurations and their steps tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.plan import Array
from axonn_tune.spec.validation import Outcome, Validation
from axonn_tune.units import counted
from axonn_tune.validation.agreement import mape
from axonn_tune.validation.limits import Check

FALSE_ALARM = 0.01  # probability that an unchanged machine fails one of the three checks
N_DRAWS = 4000
FEWEST_CONFIGURATIONS = 4  # fewer say nothing of configurations in general


# What two validations must have in common to be compared.
_PROGRAM = ("model", "strategy", "engine", "attention", "overlap")
_COMPARED = (*_PROGRAM, "n_ranks", "global_batch", "seq_len", "dtype")


@dataclass(frozen=True)
class _Pair:
    """One configuration in both validations."""

    name: str
    before: Outcome
    after: Outcome


def check_regressions(before: Validation, after: Validation, least_change: float) -> list[Check]:
    """Compare the configurations that both validations have.

    Parameters
    ----------
    least_change : float
        Smallest relative change that counts; smaller ones are ignored even if significant.
    """
    earlier = {o.configuration: o for o in before.outcomes}
    pairs = [
        _Pair(str(o.configuration), earlier[o.configuration], o)
        for o in after.outcomes
        if o.configuration in earlier
    ]
    checks = [_comparable(before, after, pairs), *_new_failures(pairs)]
    ran = [pair for pair in pairs if not pair.before.failure and not pair.after.failure]
    if not checks[0].holds or not ran:
        return checks
    random = np.random.default_rng(0)
    draws = [_drawn(pair, random) for pair in ran]
    checks += _slower(ran, draws, least_change)
    if len(ran) < FEWEST_CONFIGURATIONS:
        checks.append(_too_few(len(ran)))
    else:
        rows = random.integers(len(ran), size=(N_DRAWS, len(ran)))
        checks.append(_slower_on_average(ran, draws, rows, least_change))
        checks.append(_worse_predicted(ran, draws, rows, least_change))
    return checks


def _comparable(before: Validation, after: Validation, pairs: Sequence[_Pair]) -> Check:
    name = "comparable with the baseline"
    for field in _COMPARED:
        old = getattr(before, field)
        new = getattr(after, field)
        if old != new:
            text = f"FAILED  baseline has {field} {old}, this validation {new}"
            return Check(name, False, text)
    if not pairs:
        return Check(name, False, "FAILED  no configuration is in the baseline, too")
    are = "is" if len(pairs) == 1 else "are"
    both = f"{counted(len(pairs), 'configuration')} {are} in the baseline, too"
    return Check(name, True, f"passed  {both}")


def _too_few(n_configurations: int) -> Check:
    """Return a check that holds and says which two are left out."""
    text = (
        "not checked  the mean of all steps and the prediction, which need "
        f"{FEWEST_CONFIGURATIONS} configurations in common and have {n_configurations}"
    )
    return Check("enough configurations in common", True, text)


def _new_failures(pairs: Sequence[_Pair]) -> list[Check]:
    return [
        Check(f"{pair.name} runs", False, f"FAILED  {pair.name} ran in the baseline and fails now")
        for pair in pairs
        if pair.after.failure and not pair.before.failure
    ]


def _drawn(pair: _Pair, random: np.random.Generator) -> tuple[Array, Array]:
    """Return logarithms of medians of resampled steps, before and after, arrays of shape (D,)."""
    before = _medians(pair.before, random)
    after = _medians(pair.after, random)
    return np.log(before), np.log(after)


def _medians(outcome: Outcome, random: np.random.Generator) -> Array:
    samples = np.asarray(outcome.step_seconds)
    chosen = random.integers(samples.size, size=(N_DRAWS, samples.size))
    return np.asarray(np.median(samples[chosen], axis=1))


def _slower(
    pairs: Sequence[_Pair], draws: Sequence[tuple[Array, Array]], least_change: float
) -> list[Check]:
    """Return a failed check for each slower configuration, or one check that holds if none is."""
    checks = []
    for pair, (before, after) in zip(pairs, draws, strict=True):
        sure_change = float(np.quantile(after - before, FALSE_ALARM / len(pairs)))
        change = pair.after.measured_seconds / pair.before.measured_seconds - 1.0
        if sure_change > 0.0 and change > least_change:
            text = f"FAILED  {pair.name} is {100 * change:.1f} % slower than in the baseline"
            checks.append(Check(f"{pair.name} is not slower", False, text))
    if not checks:
        name = "no configuration is slower"
        checks.append(Check(name, True, f"passed  {name}"))
    return checks


def _slower_on_average(
    pairs: Sequence[_Pair],
    draws: Sequence[tuple[Array, Array]],
    rows: np.ndarray,
    least_change: float,
) -> Check:
    changes = np.stack([after - before for before, after in draws], axis=1)
    sure_change = _quantile_of_mean(changes, rows)
    logs = [math.log(p.after.measured_seconds / p.before.measured_seconds) for p in pairs]
    change = math.exp(float(np.mean(logs))) - 1.0
    holds = sure_change <= 0.0 or change <= least_change
    text = f"steps take {100 * change:+.1f} % longer than in the baseline, on average"
    return Check("steps on average", holds, ("passed  " if holds else "FAILED  ") + text)


def _worse_predicted(
    pairs: Sequence[_Pair],
    draws: Sequence[tuple[Array, Array]],
    rows: np.ndarray,
    least_change: float,
) -> Check:
    columns = []
    for pair, (before, after) in zip(pairs, draws, strict=True):
        was = np.abs(math.log(pair.before.predicted.step_seconds) - before)
        now = np.abs(math.log(pair.after.predicted.step_seconds) - after)
        columns.append(now - was)
    sure_change = _quantile_of_mean(np.stack(columns, axis=1), rows)
    error_before = mape([pair.before for pair in pairs])
    error_after = mape([pair.after for pair in pairs])
    holds = sure_change <= 0.0 or error_after - error_before <= least_change
    errors = f"{100 * error_after:.1f} %, in the baseline {100 * error_before:.1f} %"
    text = f"MAPE of the prediction {errors}"
    return Check("prediction", holds, ("passed  " if holds else "FAILED  ") + text)


def _quantile_of_mean(values: Array, rows: np.ndarray) -> float:
    """Return what the mean over drawn configurations surely exceeds; values of shape (D, N)."""
    means = np.take_along_axis(values, rows, axis=1).mean(axis=1)
    return float(np.quantile(means, FALSE_ALARM))
