"""What ``reproduce`` shows: predicted against published, as text, data and a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from axonn_tune.report.figure import draw_diagonal, new_figure
from axonn_tune.report.phrases import percent, signed_percent
from axonn_tune.report.table import fitted_table
from axonn_tune.reproduce.collectives import CollectiveErrors, collective_errors
from axonn_tune.reproduce.comparison import (
    FACTS,
    Comparison,
    ErrorSummary,
    grouped,
    ordered_pairs,
    summarise,
    summary_of,
)
from axonn_tune.reproduce.reproduction import Reproduction
from axonn_tune.reproduce.score import JudgedRun, MemoryVerdicts, memory_verdicts
from axonn_tune.reproduce.steps import GroupError, TimedRun, group_errors
from axonn_tune.reproduce.track_record import track_records

LINK_HEADERS = ("machine", "run", "metric", "published", "predicted", "error %", "how", "certainty")
RUN_HEADERS = (*LINK_HEADERS, "assumed")
_ERROR_HEADERS = ("mean %", "bias %", "median %", "p90 %", "largest %")
SUMMARY_HEADERS = ("system", "facts", "numbers", *_ERROR_HEADERS, "pairs in order")
STRATEGY_HEADERS = ("strategy and engine", "facts", "numbers", *_ERROR_HEADERS)
STEP_HEADERS = (
    "steps",
    "group",
    "rows",
    *_ERROR_HEADERS,
    "near: rows",
    "near: mean %",
    "near: p90 %",
    "Spearman",
    "Spearman: per job",
    "pairs in order",
    "regret: mean %",
    "regret: median %",
    "naive: mean %",
    "assumed",
)
MEMORY_HEADERS = ("steps", "ran", "predicted not to fit", "memory measured", *_ERROR_HEADERS)
# Columns that a table of text leaves out for want of room, the least important first.
_DROPPABLE = (
    "assumed",
    "how",
    "certainty",
    "naive: mean %",
    "pairs in order",
    "Spearman: per job",
    "largest %",
    "near: rows",
    "near: p90 %",
    "p90 %",
    "regret: mean %",
    "bias %",
    "machine",
    "median %",
)
COLLECTIVE_HEADERS = ("ranks are", "machine", "kind", "ranks", "rows", *_ERROR_HEADERS)


def comparison_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return one row of text for each comparison."""
    return [
        [
            c.machine,
            c.subject,
            c.metric,
            f"{c.published:.4g}",
            "-" if c.predicted is None else f"{c.predicted:.4g}",
            _error_text(c),
            c.setting,
            c.certainty,
        ]
        for c in comparisons
    ]


def run_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return one row of text for each training run, with what was assumed of it."""
    return [
        [*row, ", ".join(c.assumed) or "-"]
        for row, c in zip(comparison_rows(comparisons), comparisons, strict=True)
    ]


def _error_text(c: Comparison) -> str:
    if c.is_verdict and c.predicted is not None:
        return "right" if c.predicted == c.published else "wrong"
    return "-" if c.error_fraction is None else signed_percent(c.error_fraction)


def _error_cells(errors: ErrorSummary | None) -> list[str]:
    """Return the cells below `_ERROR_HEADERS`."""
    if errors is None:
        return ["-"] * len(_ERROR_HEADERS)
    return [
        percent(errors.mape),
        signed_percent(errors.bias),
        percent(errors.median),
        percent(errors.p90),
        percent(errors.max_error),
    ]


def summary_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return the errors of each system and over all, runs with assumed facts apart."""
    return [
        [system, facts, *_counted_cells(group), _pairs_text(*ordered_pairs(group))]
        for system, facts, group in _by_facts(comparisons, lambda c: c.system)
    ]


def strategy_rows(reproduction: Reproduction) -> list[list[str]]:
    """Return the errors of each strategy and engine over end results and steps, by facts."""
    predicted = [c for c in _all_runs(reproduction) if c.strategy]
    return [
        [strategy, facts, *_counted_cells(group)]
        for strategy, facts, group in _by_facts(predicted, _kind)
    ]


def _kind(c: Comparison) -> str:
    """Return the strategy of a prediction, with its engine if it is of one."""
    return f"{c.strategy}, {c.engine}" if c.engine else c.strategy


def _all_runs(reproduction: Reproduction) -> list[Comparison]:
    """Return the comparisons of all training runs: end results and measured steps."""
    steps = [timed.comparison for table in reproduction.steps.values() for timed in table]
    return [*reproduction.results, *steps]


def _by_facts(
    comparisons: Sequence[Comparison], key: Callable[[Comparison], str]
) -> list[tuple[str, str, list[Comparison]]]:
    """Return the known and the assumed rows of each group and of all, and both together."""
    parts = []
    for name, group in {**grouped(comparisons, key), "all": list(comparisons)}.items():
        by_facts = grouped(group, lambda c: "assumed in part" if c.assumed else "known")
        parts += [(name, facts, part) for facts, part in sorted(by_facts.items(), reverse=True)]
        if len(by_facts) > 1:
            parts.append((name, "all", group))
    return parts


def _counted_cells(comparisons: Sequence[Comparison]) -> list[str]:
    """Return how many comparisons have an error, and the cells of their errors."""
    errors = summarise(comparisons)
    return ["0" if errors is None else str(errors.n), *_error_cells(errors)]


def _correlation_text(rho: float | None) -> str:
    return "-" if rho is None else f"{rho:.3f}"


def regret_text(regret: float | None) -> str:
    """Return a regret in per cent; a dash where no job has several layouts."""
    return "-" if regret is None else percent(regret)


def _pairs_text(n_right: int, n_pairs: int) -> str:
    """Return how many pairs are in order."""
    return f"{n_right} of {n_pairs}" if n_pairs else "-"


def step_rows(reproduction: Reproduction) -> list[list[str]]:
    """Return one row for each group of measured steps."""
    return [
        [
            name,
            group.name,
            str(group.model.n),
            *_error_cells(group.model),
            str(group.near.n),
            percent(group.near.mape),
            percent(group.near.p90),
            _correlation_text(group.spearman),
            _correlation_text(group.job_spearman),
            _pairs_text(group.n_ordered_pairs, group.n_pairs),
            regret_text(group.regret),
            regret_text(group.median_regret),
            percent(group.naive.mape),
            ", ".join(group.assumed) or "-",
        ]
        for name, timed in reproduction.steps.items()
        for group in group_errors(timed)
    ]


def memory_rows(reproduction: Reproduction) -> list[list[str]]:
    """Return what was predicted of the memory of each table of measured steps."""
    return [
        [
            name,
            str(len(timed)),
            str(verdicts.n_wrong_oom),
            str(len(verdicts.errors)),
            *_error_cells(summary_of(verdicts.errors)),
        ]
        for name, timed, verdicts in _memory_verdicts(reproduction)
    ]


def _memory_verdicts(
    reproduction: Reproduction,
) -> Iterator[tuple[str, Sequence[TimedRun], MemoryVerdicts]]:
    """Yield each table of measured steps, all of which ran, with the verdicts on their memory."""
    for name, timed in reproduction.steps.items():
        yield name, timed, memory_verdicts([JudgedRun(t.run, t.prediction) for t in timed])


def collective_rows(reproduction: Reproduction, by_ranks: bool) -> list[list[str]]:
    """Return the errors of each machine and kind of collective, or of each number of ranks, too."""
    return [
        [
            place,
            group.machine or "all",
            group.kind or "all",
            str(group.n_ranks or "all"),
            str(group.errors.n),
            *_error_cells(group.errors),
        ]
        for place, timed in reproduction.collectives.items()
        for group in collective_errors(timed)
        if by_ranks or not group.n_ranks
    ]


def _by_sharing_law(links: Sequence[Comparison]) -> list[Comparison]:
    """Return the rings that follow from the sharing law, not from an entry of the profile."""
    return [c for c in links if c.setting == "sharing law"]


def reproduction_text(reproduction: Reproduction) -> str:
    """Return every table as text, without the columns for which a line has no room."""

    def fitted(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
        return fitted_table(rows, headers, _DROPPABLE)

    parts = [
        fitted(run_rows(reproduction.results), RUN_HEADERS),
        fitted(summary_rows(reproduction.results), SUMMARY_HEADERS),
        fitted(strategy_rows(reproduction), STRATEGY_HEADERS),
        fitted(step_rows(reproduction), STEP_HEADERS),
        fitted(memory_rows(reproduction), MEMORY_HEADERS),
        fitted(comparison_rows(reproduction.links), LINK_HEADERS),
        link_line(reproduction),
        fitted(collective_rows(reproduction, by_ranks=False), COLLECTIVE_HEADERS),
    ]
    return "\n\n".join(parts)


def link_line(reproduction: Reproduction) -> str:
    """Return the errors of the rings that follow from the sharing law, as a sentence."""
    errors = summarise(_by_sharing_law(reproduction.links))
    assert errors is not None, "the published tables have rings across nodes"
    return (
        f"Rings by the sharing law: {errors.n}, mean error {percent(errors.mape)} %, largest "
        f"{percent(errors.max_error)} %"
    )


def reproduction_records(reproduction: Reproduction) -> list[dict[str, Any]]:
    """Return a flat record for each comparison: end results, steps, rings, collectives."""
    collectives = [t.comparison for timed in reproduction.collectives.values() for t in timed]
    return [
        *(run_record(c) for c in _all_runs(reproduction)),
        *(comparison_record(c) for c in (*reproduction.links, *collectives)),
    ]


def track_record_rows(reproduction: Reproduction) -> list[dict[str, Any]]:
    """Return how the predictions of each strategy have fared, in as many digits as people read."""
    return [
        {
            **vars(record),
            "mean_error_fraction": f"{record.mean_error_fraction:.4f}",
            "spread": f"{record.spread:.4f}",
        }
        for record in track_records(reproduction).records
    ]


def reproduction_document(reproduction: Reproduction) -> dict[str, Any]:
    """Return what ``reproduce --format json`` prints."""
    results = reproduction.results
    return {
        "schema_version": 2,
        "facts": list(FACTS),
        "results": [run_record(c) for c in results],
        "links": [comparison_record(c) for c in reproduction.links],
        "steps": [
            run_record(t.comparison) | {"naive": t.naive_seconds, "table": name}
            for name, timed in reproduction.steps.items()
            for t in timed
        ],
        "collectives": [
            comparison_record(t.comparison)
            | {"table": name, "kind": t.kind, "n_ranks": t.n_ranks, "nbytes": t.nbytes}
            for name, timed in reproduction.collectives.items()
            for t in timed
        ],
        "summary": _summary_document(results, lambda c: c.system),
        "strategy_summary": _summary_document(_all_runs(reproduction), lambda c: c.strategy),
        "links_summary": _summary_record(_by_sharing_law(reproduction.links)),
        "steps_summary": {
            name: [_group_record(group) for group in group_errors(timed)]
            for name, timed in reproduction.steps.items()
        },
        "memory_summary": {
            name: {
                "ran": len(timed),
                "predicted_oom": verdicts.n_wrong_oom,
                "errors": error_record(summary_of(verdicts.errors)),
            }
            for name, timed, verdicts in _memory_verdicts(reproduction)
        },
        "collectives_summary": {
            name: [_collective_record(group) for group in collective_errors(timed)]
            for name, timed in reproduction.collectives.items()
        },
    }


def _summary_document(
    comparisons: Sequence[Comparison], key: Callable[[Comparison], str]
) -> dict[str, Any]:
    """Return the errors of each group and over all, whole and by what is known of the runs."""
    groups = {**grouped(comparisons, key), "all": list(comparisons)}
    return {
        name: {
            **_summary_record(group),
            "pairs": ordered_pairs(group),
            "known": _summary_record([c for c in group if not c.assumed]),
            "assumed": _summary_record([c for c in group if c.assumed]),
        }
        for name, group in groups.items()
        if name
    }


def run_record(c: Comparison) -> dict[str, Any]:
    """Return the comparison of a training run as a flat record, with what is known of the run."""
    return comparison_record(c) | {
        "strategy": c.strategy,
        "known": ", ".join(c.known),
        "assumed": ", ".join(c.assumed),
    }


def comparison_record(c: Comparison) -> dict[str, Any]:
    """Return a comparison as a flat record."""
    return {
        "system": c.system,
        "group": c.group,
        "machine": c.machine,
        "run": c.subject,
        "metric": c.metric,
        "published": c.published,
        "predicted": c.predicted,
        "error_fraction": c.error_fraction,
        "setting": c.setting,
        "certainty": c.certainty,
        "source": c.source,
    }


def _summary_record(comparisons: Sequence[Comparison]) -> dict[str, float]:
    return error_record(summarise(comparisons)) or {}


def error_record(errors: ErrorSummary | None) -> dict[str, float] | None:
    """Return the errors of some runs as a record; None if there are no runs."""
    return None if errors is None else dict(vars(errors))


def _group_record(group: GroupError) -> dict[str, Any]:
    return {
        "group": group.name,
        "model": vars(group.model),
        "naive": vars(group.naive),
        "near": vars(group.near),
        "spearman": group.spearman,
        "job_spearman": group.job_spearman,
        "pairs": (group.n_ordered_pairs, group.n_pairs),
        "regret": group.regret,
        "median_regret": group.median_regret,
        "assumed": ", ".join(group.assumed),
    }


def _collective_record(group: CollectiveErrors) -> dict[str, Any]:
    return {
        "machine": group.machine,
        "kind": group.kind,
        "n_ranks": group.n_ranks,
        **vars(group.errors),
    }


def reproduction_figure(reproduction: Reproduction) -> Any:
    """Draw predicted over published end results, and predicted over measured steps."""
    figure, (left, right) = new_figure(1, 2)
    _draw_results(left, reproduction.results)
    draw_steps(right, reproduction.steps)
    return figure


def _draw_results(axes: Any, results: Sequence[Comparison]) -> None:
    predicted = [c for c in results if c.error_fraction is not None]
    systems = grouped(predicted, lambda c: c.system)
    for row, group in enumerate(systems.values()):
        ratios = [1.0 + (c.error_fraction or 0.0) for c in group]
        axes.plot(ratios, [row] * len(group), "o", color=f"C{row % 10}", alpha=0.6)
    axes.set_yticks(range(len(systems)), list(systems), fontsize="small")
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="predicted over published", title="End results")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.axvspan(0.9, 1.1, alpha=0.15)
    left, right = axes.get_xlim()
    axes.set_xlim(min(0.5, left), max(2.0, right))
    axes.grid(alpha=0.3, axis="x")
    axes.minorticks_off()
    ticks = ("0.2", "0.3", "0.5", "0.8", "1", "1.25", "2", "3")
    axes.set_xticks([float(tick) for tick in ticks], ticks)


def draw_steps(axes: Any, steps: Mapping[str, Sequence[TimedRun]]) -> None:
    """Draw predicted over measured steps, with a colour for each name."""
    for color, (name, timed) in enumerate(steps.items()):
        measured = [t.measured_seconds for t in timed]
        predicted = [t.predicted_seconds for t in timed]
        axes.plot(measured, predicted, "o", color=f"C{color}", markersize=3, alpha=0.6, label=name)
    draw_diagonal(axes, np.array(axes.get_xlim()))
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="measured step, s",
        ylabel="predicted step, s",
        title="Measured steps",
    )
    axes.legend(fontsize="small")
