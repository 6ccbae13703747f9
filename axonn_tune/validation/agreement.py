"""How well predicted and measured steps agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from axonn_tune.correlation import rank_correlation
from axonn_tune.spec.validation import Outcome, Validation

# The operation that causes an error is named where the error is at least this large.
LARGE_ERROR = 0.1


@dataclass(frozen=True)
class Agreement:
    """Holds the errors over all configurations that ran, as fractions.

    mape
        Mean absolute error.
    bias
        Mean signed error.
    worst
        The outcome with the largest error.
    spearman, kendall
        Rank correlations; None for fewer than three configurations.
    best
        The outcome with the fastest measured step.
    regret
        How much slower the suggested configuration is than the best one measured; None where the
        suggested one failed.
    memory_mape
        Mean absolute error of the memory of tensors; None where memory was not counted.
    """

    mape: float
    bias: float
    worst: Outcome
    spearman: float | None
    kendall: float | None
    best: Outcome
    regret: float | None
    memory_mape: float | None


def agreement(validation: Validation) -> Agreement | None:
    """Sum up a validation; return None where nothing ran."""
    ran = validation.measured
    if not ran:
        return None
    best = min(ran, key=lambda outcome: outcome.measured_seconds)
    suggested = validation.suggested
    spearman, kendall = _rank_correlations(ran)
    memory = [abs(o.memory_error_fraction) for o in ran if o.memory_error_fraction is not None]
    regret = None
    if not suggested.failure:
        regret = suggested.measured_seconds / best.measured_seconds - 1.0
    return Agreement(
        mape=mape(ran),
        bias=fmean(outcome.error_fraction for outcome in ran),
        worst=max(ran, key=lambda outcome: abs(outcome.error_fraction)),
        spearman=spearman,
        kendall=kendall,
        best=best,
        regret=regret,
        memory_mape=fmean(memory) if memory else None,
    )


def mape(outcomes: Sequence[Outcome]) -> float:
    """Return the mean absolute error of the predicted step times, relative to the measured ones."""
    return fmean(abs(outcome.error_fraction) for outcome in outcomes)


def _rank_correlations(outcomes: Sequence[Outcome]) -> tuple[float | None, float | None]:
    """Return Spearman's rho and Kendall's tau-b."""
    if len(outcomes) < 3:
        return None, None
    predicted = [outcome.predicted.step_seconds for outcome in outcomes]
    measured = [outcome.measured_seconds for outcome in outcomes]
    rho = rank_correlation(predicted, measured)
    if rho is None:
        return None, None
    from scipy.stats import kendalltau

    return rho, float(kendalltau(predicted, measured).statistic)
