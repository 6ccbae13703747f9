"""What ``score`` shows: how well a table of runs is predicted."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from axonn_tune.report.phrases import percent
from axonn_tune.report.table import table
from axonn_tune.reproduce.comparison import ErrorSummary, summary_of
from axonn_tune.reproduce.score import Score
from axonn_tune.reproduce.steps import GroupError, TimedRun, group_errors

_GROUP_HEADERS = (
    "runs of",
    "number",
    "mean %",
    "bias %",
    "median %",
    "p90 %",
    "near the best %",
    "Spearman",
    "regret %",
    "naive %",
)
_RUN_HEADERS = ("run", "measured s", "predicted s", "error %")
_SHOWN_RUNS = 5


def score_text(score: Score) -> str:
    """Return the errors by engine and machine, the runs with the largest, and the memory."""
    parts = []
    if score.timed:
        groups = [_group_row(group) for group in _groups(score.timed)]
        parts.append(table(groups, _GROUP_HEADERS))
        worst = sorted(score.timed, key=lambda timed: -abs(timed.error))[:_SHOWN_RUNS]
        parts.append("Runs with the largest errors:\n" + table(_run_rows(worst), _RUN_HEADERS))
    parts.append(_memory_text(score))
    parts.append(_READING)
    return "\n\n".join(parts)


_READING = fill(
    "An error is predicted over measured, minus one. Near the best are runs that took at most "
    "twice as long as the fastest of their job (model, machine, GPUs, batch). Regret is how much "
    "slower the layout that is predicted to be the fastest is than the fastest one, median over "
    "jobs. Naive is one fraction of the peak, fitted to these very runs.",
    100,
)


def _groups(timed: Sequence[TimedRun]) -> list[GroupError]:
    """Return the errors of all runs and of each group; those of all only if there are several."""
    groups = group_errors(timed)
    return groups[1:] if len(groups) == 2 else groups


def _group_row(group: GroupError) -> list[str]:
    return [
        group.name,
        str(group.model.n),
        percent(group.model.mape),
        f"{100.0 * group.model.bias:+.1f}",
        percent(group.model.median),
        percent(group.model.p90),
        percent(group.near.mape),
        "-" if group.spearman is None else f"{group.spearman:.2f}",
        percent(group.median_regret),
        percent(group.naive.mape),
    ]


def _run_rows(timed: Sequence[TimedRun]) -> list[list[str]]:
    """Return a row for each run."""
    return [
        [
            run.run.subject,
            f"{run.measured_seconds:.4g}",
            f"{run.predicted_seconds:.4g}",
            f"{100.0 * run.error:+.1f}",
        ]
        for run in timed
    ]


def _memory_text(score: Score) -> str:
    """Return a sentence on what fits, and one on the errors where memory was measured."""
    memory = score.memory
    n_ran = memory.n_right_ok + memory.n_wrong_oom
    n_oom = memory.n_right_oom + memory.n_wrong_ok
    text = f"Memory: of {n_ran} runs that ran, {memory.n_wrong_oom} were predicted not to fit"
    if n_oom:
        text += f"; of {n_oom} that ran out of memory, {memory.n_wrong_ok} were predicted to fit"
    errors = summary_of(memory.errors)
    if errors is not None:
        text += (
            f". Where memory was measured ({errors.n}), it is predicted with a mean error of "
            f"{percent(errors.mape)} % (bias {100.0 * errors.bias:+.1f} %)"
        )
    return fill(text + ".", 100)


def score_records(score: Score) -> list[dict[str, Any]]:
    """Return a flat record for each run that ran."""
    return [
        {
            "run": timed.run.subject,
            "group": timed.run.group,
            "measured_seconds": timed.measured_seconds,
            "predicted_seconds": timed.predicted_seconds,
            "error_fraction": timed.error,
        }
        for timed in score.timed
    ]


def score_document(score: Score) -> dict[str, Any]:
    """Return the errors by group, those of the memory, and every run."""
    memory = score.memory
    return {
        "groups": [_group_record(group) for group in _groups(score.timed)] if score.timed else [],
        "memory": {
            "ran_and_fit": memory.n_right_ok,
            "ran_but_predicted_oom": memory.n_wrong_oom,
            "oom_and_predicted_oom": memory.n_right_oom,
            "oom_but_predicted_to_fit": memory.n_wrong_ok,
            "errors": error_record(summary_of(memory.errors)),
        },
        "runs": score_records(score),
    }


def _group_record(group: GroupError) -> dict[str, Any]:
    return {
        "group": group.name,
        "errors": error_record(group.model),
        "near_the_best": error_record(group.near),
        "naive": error_record(group.naive),
        "spearman": group.spearman,
        "median_regret": group.median_regret,
    }


def error_record(errors: ErrorSummary | None) -> dict[str, float] | None:
    """Return the errors of some runs as a record; None if there are no runs."""
    return None if errors is None else dict(vars(errors))
