"""What ``score`` shows: how well a table of runs is predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from textwrap import fill
from typing import Any

from axonn_tune.report.figure import new_figure
from axonn_tune.report.phrases import percent, signed_percent
from axonn_tune.report.records import SCHEMA_VERSION
from axonn_tune.report.reproduce import draw_steps, error_record, regret_text
from axonn_tune.report.table import table
from axonn_tune.reproduce.comparison import grouped, summary_of
from axonn_tune.reproduce.score import JudgedRun, Score
from axonn_tune.reproduce.steps import GroupError, TimedRun, group_errors
from axonn_tune.spec.checks import require_choice
from axonn_tune.units import counted, gib

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


# The errors of a table can be grouped by these properties of a run, and by the axes of layouts.
_GROUPINGS: dict[str, Callable[[TimedRun], str | int]] = {
    "engine": lambda timed: timed.run.system,
    "machine": lambda timed: timed.run.search.scenario.machine.name,
    "model": lambda timed: timed.run.search.scenario.model.name,
    "gpus": lambda timed: timed.run.search.scenario.job.n_gpus,
    "micro_batch": lambda timed: timed.prediction.configuration.micro_batch,
    "recompute": lambda timed: timed.prediction.configuration.recompute,
}


def score_text(score: Score, by: Sequence[str]) -> str:
    """Return the errors by engine and machine, the runs with the largest, and the memory.

    There is another table of errors for each name in `by`.
    """
    parts = []
    if score.timed:
        groups = [_group_row(group) for group in _groups(score.timed)]
        parts.append(table(groups, _GROUP_HEADERS))
        parts += [_table_by(score.timed, name) for name in by]
        worst = sorted(score.timed, key=lambda timed: -abs(timed.error))[:_SHOWN_RUNS]
        parts.append("Runs with the largest errors:\n" + table(_run_rows(worst), _RUN_HEADERS))
    parts.append(_memory_text(score))
    parts.append(_READING)
    return "\n\n".join(parts)


_READING = fill(
    "An error is predicted over measured, minus one. Near the best are runs that took at most "
    "twice as long as the fastest of their job (model, machine, GPUs, batch, sequence length, "
    "precision). Regret is how much slower the layout that is predicted to be the fastest is than "
    "the fastest one, median over jobs of several layouts. For Spearman and regret, a layout that "
    "was measured more than once has the mean of its times. Naive is one fraction of the peak, "
    "fitted to these very runs.",
    100,
)


def _table_by(timed: Sequence[TimedRun], name: str) -> str:
    """Return the errors of the runs that agree in a fact, or in the size of an axis."""
    rows = [_group_row(group) for group in _groups_by(timed, name)]
    return table(rows, (name, *_GROUP_HEADERS[1:]))


def check_groupings(score: Score, by: Sequence[str]) -> None:
    """Raise InputError if a name of `by` is neither a fact nor an axis of one of the runs."""
    axes = dict.fromkeys(axis for each in score.judged for axis in each.prediction.layout.sizes)
    for name in by:
        require_choice("score", "--by", name, (*_GROUPINGS, *axes))


def _groups_by(timed: Sequence[TimedRun], name: str) -> list[GroupError]:
    """Return the errors by a fact or by the size of an axis, in the order of the values."""

    def value_of(each: TimedRun) -> str | int:
        of_fact = _GROUPINGS.get(name)
        return of_fact(each) if of_fact else each.prediction.layout.sizes.get(name, 1)

    values = sorted({value_of(each) for each in timed})
    groups = {each.name: each for each in group_errors(timed, lambda t: str(value_of(t)))[1:]}
    return [groups[str(value)] for value in values]


def _groups(timed: Sequence[TimedRun]) -> list[GroupError]:
    """Return the errors of all runs and of each group; those of all only if there are several."""
    groups = group_errors(timed)
    return groups[1:] if len(groups) == 2 else groups


def _group_row(group: GroupError) -> list[str]:
    return [
        group.name,
        str(group.model.n),
        percent(group.model.mape),
        signed_percent(group.model.bias),
        percent(group.model.median),
        percent(group.model.p90),
        percent(group.near.mape),
        "-" if group.spearman is None else f"{group.spearman:.2f}",
        regret_text(group.median_regret),
        percent(group.naive.mape),
    ]


def _run_rows(timed: Sequence[TimedRun]) -> list[list[str]]:
    """Return a row for each run."""
    return [
        [
            run.run.subject,
            f"{run.measured_seconds:.4g}",
            f"{run.predicted_seconds:.4g}",
            signed_percent(run.error),
        ]
        for run in timed
    ]


def _were(number: int) -> str:
    return f"{number} was" if number == 1 else f"{number} were"


def _memory_text(score: Score) -> str:
    """Return a sentence on what fits, and one on the errors where memory was measured."""
    memory = score.memory
    n_ran = memory.n_right_ok + memory.n_wrong_oom
    n_oom = memory.n_right_oom + memory.n_wrong_ok
    text = f"Memory: of {counted(n_ran, 'run')} that ran, "
    text += f"{_were(memory.n_wrong_oom)} predicted not to fit"
    if n_oom:
        text += f"; of {n_oom} that ran out of memory, {_were(memory.n_wrong_ok)} predicted to fit"
    errors = summary_of(memory.errors)
    if errors is not None:
        text += (
            f". Where memory was measured ({errors.n}), it is predicted with a mean error of "
            f"{percent(errors.mape)} % (bias {signed_percent(errors.bias)} %)"
        )
    return fill(text + ".", 100)


def score_records(score: Score) -> list[dict[str, Any]]:
    """Return a flat record for each run; one that ran out of memory has no measured time."""
    timed = iter(score.timed)
    return [_run_record(each, None if each.ran_out else next(timed)) for each in score.judged]


def _run_record(judged: JudgedRun, timed: TimedRun | None) -> dict[str, Any]:
    """Return the record of a run, whose step may have been timed, and its memory measured."""
    held = judged.run.published.get("memory_gib")
    return {
        "run": judged.run.subject,
        "group": judged.run.group,
        "status": "oom" if judged.ran_out else "ok",
        "predicted_to_fit": judged.prediction.fits,
        "measured_seconds": None if timed is None else timed.measured_seconds,
        "predicted_seconds": judged.prediction.step_seconds,
        "error_fraction": None if timed is None else timed.error,
        "measured_memory_gib": held,
        "predicted_memory_gib": gib(judged.prediction.allocator_bytes),
    }


def score_figure(score: Score) -> Any:
    """Draw predicted over measured steps, with a colour for each engine and machine."""
    figure, axes = new_figure(1, 1)
    draw_steps(axes, grouped(score.timed, lambda timed: timed.run.group))
    return figure


def score_page(score: Score, title: str, written: str, by: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the page of a score shows: sentences, tables of texts, and every run's step.

    Parameters
    ----------
    written : str
        What wrote the page, and when.
    """
    timed = score.timed
    tables = []
    if timed:
        tables.append(_page_table("Errors", _groups(timed)))
        tables += [_page_table(f"Errors by {name}", _groups_by(timed, name)) for name in by]
        tables.append({"title": "Runs", "headers": _RUN_HEADERS, "rows": _run_rows(timed)})
    return {
        "title": title,
        "written": written,
        "sentences": [_memory_text(score), _READING],
        "tables": tables,
        "runs": [
            {
                "name": each.run.subject,
                "group": each.run.group,
                "measured": each.measured_seconds,
                "predicted": each.predicted_seconds,
            }
            for each in timed
        ],
    }


def _page_table(title: str, groups: Sequence[GroupError]) -> dict[str, Any]:
    """Return a table of the errors of groups."""
    rows = [_group_row(group) for group in groups]
    return {"title": title, "headers": _GROUP_HEADERS, "rows": rows}


def score_document(score: Score, by: Sequence[str] = ()) -> dict[str, Any]:
    """Return the errors by group, those of the memory, and every run."""
    memory = score.memory
    groups = _groups(score.timed) if score.timed else []
    groups_by = {name: _groups_by(score.timed, name) for name in by if score.timed}
    return {
        "schema_version": SCHEMA_VERSION,
        "groups": [_group_record(group) for group in groups],
        "by": {name: [_group_record(group) for group in own] for name, own in groups_by.items()},
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
        "job_spearman": group.job_spearman,
        "pairs": (group.n_ordered_pairs, group.n_pairs),
        "median_regret": group.median_regret,
    }
