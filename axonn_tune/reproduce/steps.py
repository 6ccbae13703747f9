"""Published times of training steps: the errors of their predictions, and of a naive baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from axonn_tune.correlation import rank_correlation
from axonn_tune.reproduce.comparison import Comparison, ErrorSummary, grouped, summary_of
from axonn_tune.reproduce.results import compare_number
from axonn_tune.reproduce.runs import Run
from axonn_tune.spec.model import Model
from axonn_tune.step.prediction import Prediction


@dataclass(frozen=True)
class TimedRun:
    """A run with its measured step, the predicted one, and what the naive baseline says.

    comparison
        The measured step beside the predicted one.
    naive_seconds
        FLOPs at one fitted fraction of the peak, times the bubble of the pipeline.
    """

    run: Run
    prediction: Prediction
    comparison: Comparison
    naive_seconds: float

    @property
    def measured_seconds(self) -> float:
        """The published time of a step."""
        return self.comparison.published

    @property
    def predicted_seconds(self) -> float:
        """The time of a step that this model predicts."""
        return self.prediction.step_seconds

    @property
    def error(self) -> float:
        """The predicted over the measured time, minus one."""
        return self.predicted_seconds / self.measured_seconds - 1.0

    @property
    def job(self) -> tuple[Model, str, int, int, int, str]:
        """What was trained on what; the layouts of one job are alternatives."""
        scenario = self.run.search.scenario
        job = scenario.job
        machine = scenario.machine.name
        batch = job.global_batch, job.seq_len
        return scenario.model, machine, job.n_gpus, *batch, job.precision


@dataclass(frozen=True)
class GroupError:
    """Holds the errors of a group of measured steps, and those of a naive baseline.

    assumed
        Facts that were assumed for some step of the group.
    near
        Errors of the steps that took at most twice as long as the fastest of their job: people
        choose among these.
    spearman
        Rank correlation of predicted with measured times of layouts; None where all times are
        equal. Here and below, a layout that was measured more than once has the mean of its times.
    job_spearman
        The same within each job that has at least three layouts, mean over these jobs; None where
        there is no such job.
    n_ordered_pairs, n_pairs
        Pairs of layouts of one job whose order the prediction has right, and all such pairs.
    regret, median_regret
        How much slower the layout that is predicted to be the fastest is than the fastest
        measured one, as a fraction, mean and median over jobs. Layouts that are predicted to be
        equally fast have the mean of their times. None where no job has several layouts.
    """

    name: str
    model: ErrorSummary
    naive: ErrorSummary
    near: ErrorSummary
    spearman: float | None
    job_spearman: float | None
    n_ordered_pairs: int
    n_pairs: int
    regret: float | None
    median_regret: float | None
    assumed: tuple[str, ...]


def time_runs(runs: Sequence[Run], predictions: Sequence[Prediction | None]) -> list[TimedRun]:
    """Set measured steps beside their predictions and the naive baseline."""
    predicted = []
    for run, prediction in zip(runs, predictions, strict=True):
        assert prediction is not None, "searches of measured runs include what does not fit"
        predicted.append((run, prediction))
    return beside_baseline(predicted)


def beside_baseline(predicted: Sequence[tuple[Run, Prediction]]) -> list[TimedRun]:
    """Set measured steps beside predictions and a baseline with one parameter, fitted to all."""
    comparisons = [compare_number(run, "step_seconds", p) for run, p in predicted]
    at_peak = [_seconds_at_peak(p) for _, p in predicted]
    hfu = _fitted_hfu(np.array(at_peak), np.array([c.published for c in comparisons]))
    return [
        TimedRun(run, prediction, comparison, seconds / hfu)
        for (run, prediction), comparison, seconds in zip(
            predicted, comparisons, at_peak, strict=True
        )
    ]


def _seconds_at_peak(p: Prediction) -> float:
    """Return the time of a step at the peak rate, with the bubble of the pipeline."""
    return p.hfu * p.step_seconds * (1.0 + (p.layout.n_stages - 1) / p.n_microsteps)


def _fitted_hfu(at_peak: np.ndarray, measured: np.ndarray) -> float:
    """Return the one fraction of peak with the least mean error over all rows."""
    fractions = np.linspace(0.05, 0.95, 901)
    errors = [np.abs(at_peak / fraction / measured - 1.0).mean() for fraction in fractions]
    return float(fractions[int(np.argmin(errors))])


def _own_group(timed: TimedRun) -> str:
    """Return the name of the group that a run states."""
    return timed.run.group


def group_errors(
    timed: Sequence[TimedRun], group_of: Callable[[TimedRun], str] = _own_group
) -> list[GroupError]:
    """Return the errors over all runs, over those that no rule sets apart, and over each group."""
    kept = [each for each in timed if not each.run.is_set_apart]
    without = {"all not set apart": kept} if 0 < len(kept) < len(timed) else {}
    groups = {"all": list(timed), **without, **grouped(timed, group_of)}
    return [_group_error(name, group) for name, group in groups.items()]


def _group_error(name: str, timed: Sequence[TimedRun]) -> GroupError:
    jobs = list(grouped(timed, lambda t: t.job).values())
    model_errors = summary_of([t.error for t in timed])
    naive_errors = summary_of([t.naive_seconds / t.measured_seconds - 1.0 for t in timed])
    near_errors = summary_of([t.error for t in _near_best(jobs)])
    assert model_errors and naive_errors and near_errors, "no group is empty"
    assumed = tuple(dict.fromkeys(fact for t in timed for fact in t.run.assumed))
    regrets = _regrets(jobs)
    return GroupError(
        name,
        model_errors,
        naive_errors,
        near_errors,
        rank_correlation(*_layout_times(timed)),
        _job_correlation(jobs),
        *_ordered_pairs(jobs),
        float(np.mean(regrets)) if regrets else None,
        float(np.median(regrets)) if regrets else None,
        assumed,
    )


def _layout_times(timed: Sequence[TimedRun]) -> tuple[np.ndarray, np.ndarray]:
    """Return the predicted times of layouts, and the means of their measured times.

    Runs of one job with equal configurations and predictions are measurements of one layout: how
    they differ from each other is noise, which no prediction can order.
    """
    layouts = grouped(timed, lambda t: (t.job, t.prediction.configuration, t.predicted_seconds))
    measured = [np.mean([t.measured_seconds for t in runs]) for runs in layouts.values()]
    return np.array([seconds for *_, seconds in layouts]), np.array(measured)


def _job_correlation(jobs: Sequence[Sequence[TimedRun]]) -> float | None:
    """Return Spearman's rho within jobs of at least three layouts, mean over the jobs."""
    times = map(_layout_times, jobs)
    large = [(p, measured) for p, measured in times if len(np.unique(p)) > 2]
    known = [rho for of_job in large if (rho := rank_correlation(*of_job)) is not None]
    return float(np.mean(known)) if known else None


def _ordered_pairs(jobs: Sequence[Sequence[TimedRun]]) -> tuple[int, int]:
    """Count the pairs of layouts of one job that are predicted in order, and all such pairs.

    Two layouts that are predicted to take equally long, or that took equally long, have no order.
    """
    n_right = n_pairs = 0
    for predicted, measured in map(_layout_times, jobs):
        orders = np.sign(predicted[:, None] - predicted) * np.sign(measured[:, None] - measured)
        n_right += int(np.count_nonzero(orders > 0)) // 2
        n_pairs += int(np.count_nonzero(orders)) // 2
    return n_right, n_pairs


def _near_best(jobs: Sequence[Sequence[TimedRun]]) -> list[TimedRun]:
    """Return the runs that took at most twice as long as the fastest run of their job."""
    near = []
    for layouts in jobs:
        fastest = min(t.measured_seconds for t in layouts)
        near += [t for t in layouts if t.measured_seconds <= 2.0 * fastest]
    return near


def _regrets(jobs: Sequence[Sequence[TimedRun]]) -> list[float]:
    """Return, for each job with several layouts, the fraction that the predicted choice loses."""
    losses = []
    for predicted, measured in map(_layout_times, jobs):
        if len(measured) > 1:
            chosen = measured[predicted == predicted.min()].mean()
            losses.append(float(chosen / measured.min() - 1.0))
    return losses
