"""What ``suggest`` shows: a ranking as text, as plain data and as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from axonn_tune.report.figure import legend_below, new_figure, plain_log_scale
from axonn_tune.report.memory import memory_lines, memory_text, near_lines
from axonn_tune.report.phrases import (
    assumption_line,
    grid_form,
    interval_text,
    mfu_remarks,
    model_on_gpus,
    percent,
    signed_percent,
    tokens_per_second_text,
)
from axonn_tune.report.records import SCHEMA_VERSION, assumptions, record
from axonn_tune.report.table import Column, fitted_table_of
from axonn_tune.report.trust import trust_lines
from axonn_tune.search.pareto import pareto_front
from axonn_tune.search.rank import Ranking
from axonn_tune.search.search import Search
from axonn_tune.search.uncertainty import tied
from axonn_tune.spec.strategy import Strategy
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import counted, gib

# A row that is the fastest with at least this probability is the winner.
CLEAR = 0.8
# If there is no winner, the fastest rows that together have this probability count as tied.
TIE_SHARE = 0.9
# Columns that a table may leave out for want of room, the least important first.
_DROPPABLE = ("TFLOP/s", "tokens/s", "bubble", "exposed", "MFU %")
# Number of candidates whose steps a figure draws as bars.
MOST_BARS = 30


def ranking_text(ranking: Ranking, top_n: int) -> str:
    """Return the best configurations as a table, and what was assumed."""
    predictions = ranking.top(top_n)
    search = ranking.search
    head = (
        f"{model_on_gpus(search.scenario, with_parameters=True)}: best {len(predictions)} of "
        f"{len(ranking) + ranking.n_left_out} {_what_is_ranked(search)} "
        f"({_what_is_evaluated(ranking)})"
    )
    rows = fitted_table_of(predictions, _columns(search, predictions), _DROPPABLE)
    remarks = [*near_lines(ranking, predictions), *memory_lines(predictions)]
    remarks += [*tie_lines(ranking), *_batch_lines(ranking), *trust_lines(search)]
    remarks += [*mfu_remarks(predictions), assumption_line(search)]
    return "\n".join([head, "", rows, "", *remarks])


def _what_is_evaluated(ranking: Ranking) -> str:
    """Return the number of configurations, and of those that a bound of their time settled."""
    text = f"{counted(ranking.n_evaluated, 'configuration')} evaluated"
    if ranking.n_bounded:
        text += f", {ranking.n_bounded} of them by a lower bound only"
    return text


def _what_is_ranked(search: Search) -> str:
    if search.every_configuration:
        return "configurations"
    axes = search.scenario.strategy.axes
    layouts = f"grids {grid_form(axes)}" if axes.is_grid else "layouts"
    return layouts if len(search.constraints.orders) == 1 else f"{layouts} and orders"


def _columns(search: Search, predictions: Sequence[Prediction]) -> list[Column[Prediction]]:
    """Return the columns of a ranking; some are left out where they would say nothing."""
    strategy = search.scenario.strategy
    orders = {p.configuration.order for p in predictions} | set(search.constraints.orders)
    columns: list[Column[Prediction]] = [("#", lambda p: p.place)]
    columns.append(_layout_column(strategy, len(orders) > 1))
    if any(p.configuration.n_virtual > 1 for p in predictions):
        columns.append(("virtual", lambda p: p.configuration.n_virtual))
    columns += [
        ("mbs", lambda p: p.configuration.micro_batch),
        ("recompute", lambda p: p.configuration.recompute),
    ]
    if search.cost_model == "paper":
        columns.append(("paper s", lambda p: f"{p.paper_communication_seconds or 0.0:.3f}"))
    columns += [
        ("step s", lambda p: f"{p.step_seconds:.3f}"),
        ("90 % interval", interval_text),
        ("P(best)", lambda p: "-" if p.p_best is None else f"{percent(p.p_best, 0)} %"),
        ("TFLOP/s", lambda p: f"{p.tflops_per_gpu:.1f}"),
        ("MFU %", lambda p: percent(p.mfu)),
        ("tokens/s", tokens_per_second_text),
        ("exposed", lambda p: f"{percent(p.exposed_communication_fraction)} %"),
    ]
    if any(p.bubble_seconds > 0 for p in predictions):
        columns.append(("bubble", lambda p: f"{percent(p.bubble_seconds / p.step_seconds)} %"))
    columns.append((f"GiB of {gib(search.scenario.memory_capacity_bytes):.0f}", memory_text))
    return columns


def _layout_column(strategy: Strategy, names_order: bool) -> Column[Prediction]:
    """Return the column of layouts as `--grid` reads them, if asked for with their rank order."""
    if not strategy.axes.is_grid:
        return "layout", lambda p: p.layout.brief
    if not names_order:
        return "grid", lambda p: p.layout
    return "grid, order", lambda p: f"{p.layout} {p.configuration.order}"


def tie_lines(ranking: Ranking) -> list[str]:
    """Return a line that says so if the profile's spreads do not tell which row is the fastest."""
    p_best = ranking.uncertainty.p_best
    if not p_best.size or p_best.max() >= CLEAR:
        return []
    count = tied(p_best, TIE_SHARE)
    return [
        f"No clear winner: one of {count} rows is the fastest with {percent(TIE_SHARE, 0)} % "
        "probability; they differ by less than the uncertainty of the profile."
    ]


def _batch_lines(ranking: Ranking) -> list[str]:
    """Return a line that says how much longer the best step of other global batches takes."""
    per_sequence = {batch: seconds / batch for batch, seconds in ranking.batch_seconds.items()}
    if not per_sequence:
        return []
    least = min(per_sequence.values())
    times = [
        f"{batch} {signed_percent(seconds / least - 1.0)} %"
        for batch, seconds in sorted(per_sequence.items())
    ]
    return [f"Time of the best step for each token, by global batch: {', '.join(times)}."]


def rejected_text(rejected: Mapping[str, int]) -> str:
    """Say how many grids, or configurations of grids, were rejected for each reason."""
    if not rejected:
        return "Rejected: none."
    lines = (f"  {count:>8}  {reason}" for reason, count in rejected.items())
    return "\n".join(["Rejected (grids; out of memory: configurations):", *lines])


def ranking_document(ranking: Ranking, top_n: int | None) -> dict[str, Any]:
    """Return what ``suggest --format json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "assumptions": assumptions(ranking.search),
        "results": [record(prediction) for prediction in ranking.top(top_n)],
        "nearly_fits": []
        if ranking.near is None
        else [record(prediction) for prediction in ranking.near.top(top_n)],
        "batch_seconds": {str(batch): s for batch, s in ranking.batch_seconds.items()},
        "rejected": dict(ranking.rejected),
        "evaluated": ranking.n_evaluated,
    }


def ranking_figure(ranking: Ranking, top_n: int) -> Any:
    """Draw the parts of the step of the best candidates, and time against memory of all."""
    figure, (left, right) = new_figure(1, 2)
    _draw_parts(left, ranking.top(min(top_n, MOST_BARS)))
    _draw_tradeoff(right, ranking)
    figure.suptitle(model_on_gpus(ranking.search.scenario))
    return figure


def _draw_parts(axes: Any, predictions: Sequence[Prediction]) -> None:
    from axonn_tune.report.explain import step_parts
    from axonn_tune.step.explain import explain

    rows = range(len(predictions))
    parts_of_steps = [step_parts(explain(p, with_sensitivities=False)) for p in predictions]
    names = list(dict.fromkeys(name for parts in parts_of_steps for name in parts))
    names.sort(key=lambda name: (name.startswith("exposed"), name == "bubble"))
    left = np.zeros(len(predictions))
    for name in names:
        seconds = np.array([parts.get(name, 0.0) for parts in parts_of_steps])
        axes.barh(rows, seconds, left=left, label=name)
        left += seconds
    ends = np.array([p.step_seconds_interval or (p.step_seconds,) * 2 for p in predictions])
    axes.errorbar(left, rows, xerr=np.abs(ends.T - left), fmt="none", color="black", lw=0.8)
    labels = [
        f"{p.layout} mbs {p.configuration.micro_batch} {p.configuration.recompute}"
        for p in predictions
    ]
    axes.set_yticks(rows, labels, fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="step, s (90 % interval)", title="What a step is made of")
    legend_below(axes)
    axes.grid(alpha=0.3, axis="x")


def _draw_tradeoff(axes: Any, ranking: Ranking) -> None:
    seconds = ranking.step_seconds
    memory = np.array([gib(n_bytes) for n_bytes in ranking.stated_bytes])
    for fits, color, label in ((True, "C0", "fits"), (False, "C3", "out of memory")):
        rows = ranking.fits == fits
        if rows.any():
            axes.plot(memory[rows], seconds[rows], ".", color=color, alpha=0.6, label=label)
    front = pareto_front(list(seconds), list(memory), list(ranking.fits))
    axes.step(
        memory[front], seconds[front], where="post", color="black", lw=0.8, label="Pareto front"
    )
    capacity = gib(ranking.search.scenario.memory_capacity_bytes)
    axes.axvline(capacity, color="black", linestyle="--", linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="GiB of one GPU",
        ylabel="step, s",
        title="Time and memory",
    )
    plain_log_scale(axes.xaxis)
    plain_log_scale(axes.yaxis)
    legend_below(axes)
    axes.grid(alpha=0.3, which="both")
