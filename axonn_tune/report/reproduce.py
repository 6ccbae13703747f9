"""What ``reproduce`` shows: predicted against published, as text, data, a figure and a page.

The page is docs/validation.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from axonn_tune.cost.gemm import CURVE_ERROR
from axonn_tune.report.figure import draw_diagonal, new_figure
from axonn_tune.report.phrases import percent
from axonn_tune.report.table import table
from axonn_tune.reproduce.comparison import (
    Comparison,
    ErrorSummary,
    grouped,
    ordered_pairs,
    summarise,
)
from axonn_tune.reproduce.reproduction import Reproduction
from axonn_tune.reproduce.steps import GroupError, TimedRun, group_errors
from axonn_tune.spec.machine import ORIGINS, Machine
from axonn_tune.spec.provenance import quantities
from axonn_tune.step.spread import MODEL_ERROR, UNSTATED_SPREAD

HEADERS = ("machine", "run", "metric", "published", "predicted", "error %", "how", "certainty")
_ERROR_HEADERS = ("mean %", "bias %", "median %", "p90 %", "largest %")
SUMMARY_HEADERS = ("system", "numbers", *_ERROR_HEADERS, "pairs in order")
STEP_HEADERS = ("steps", "group", "rows", *_ERROR_HEADERS, "Spearman", "regret %", "naive mean %")


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


def _error_text(c: Comparison) -> str:
    if c.is_verdict and c.predicted is not None:
        return "right" if c.predicted == c.published else "wrong"
    return "-" if c.error_fraction is None else f"{100 * c.error_fraction:+.1f}"


def _error_cells(errors: ErrorSummary | None) -> list[str]:
    """Return the cells below `_ERROR_HEADERS`."""
    if errors is None:
        return ["-"] * len(_ERROR_HEADERS)
    return [
        percent(errors.mape),
        f"{100 * errors.bias:+.1f}",
        percent(errors.median),
        percent(errors.p90),
        percent(errors.max_error),
    ]


def summary_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """Return one row for each system, and one over all."""
    groups = {**grouped(comparisons, lambda c: c.system), "all": list(comparisons)}
    rows = []
    for system, group in groups.items():
        errors = summarise(group)
        n_numbers = 0 if errors is None else errors.n
        n_right, n_pairs = ordered_pairs(group)
        pairs = f"{n_right} of {n_pairs}" if n_pairs else "-"
        rows.append([system, str(n_numbers), *_error_cells(errors), pairs])
    return rows


def step_rows(reproduction: Reproduction) -> list[list[str]]:
    """Return one row for each group of measured steps."""
    return [
        [
            name,
            group.name,
            str(group.model.n),
            *_error_cells(group.model),
            f"{group.spearman:.3f}",
            percent(group.regret),
            percent(group.naive.mape),
        ]
        for name, timed in reproduction.steps.items()
        for group in group_errors(timed)
    ]


def _by_sharing_law(links: Sequence[Comparison]) -> list[Comparison]:
    """Return the rings that follow from the sharing law, not from an entry of the profile."""
    return [c for c in links if c.setting == "sharing law"]


def reproduction_text(reproduction: Reproduction) -> str:
    """Return every table as text."""
    return "\n".join(
        [
            table(comparison_rows(reproduction.results), HEADERS),
            "",
            table(summary_rows(reproduction.results), SUMMARY_HEADERS),
            "",
            table(step_rows(reproduction), STEP_HEADERS),
            "",
            table(comparison_rows(reproduction.links), HEADERS),
            "",
            _link_line(reproduction),
        ]
    )


def _link_line(reproduction: Reproduction) -> str:
    errors = summarise(_by_sharing_law(reproduction.links))
    assert errors is not None, "the published tables have rings across nodes"
    return (
        f"Rings by the sharing law: {errors.n}, mean error {percent(errors.mape)} %, largest "
        f"{percent(errors.max_error)} %"
    )


def reproduction_markdown(reproduction: Reproduction, machines: Sequence[Machine]) -> str:
    """Return the page docs/validation.md."""
    results = reproduction.results
    parts = [
        "# Validation: predicted against published",
        "",
        "Written by `axonn-tune reproduce --format markdown --output docs/validation.md`; a test",
        "fails when this page and the code disagree. One profile holds for all rows of a machine,",
        "and no constant belongs to a row. `--format csv` prints every row, also of the measured",
        "steps.",
        "",
        "![Predicted over published](validation.png)",
        "",
        "## By system",
        "",
        "An error is predicted over published, minus one. *Pairs in order*: pairs of",
        "configurations that a source compares, of which the prediction has the order right.",
        "",
        markdown_table(summary_rows(results), SUMMARY_HEADERS),
        "",
        _READING,
        "",
        "## Measured steps of Megatron-LM on A100",
        "",
        markdown_table(step_rows(reproduction), STEP_HEADERS),
        "",
        _STEPS_READING,
    ]
    for system, group in grouped(results, lambda c: c.system).items():
        sources = ", ".join(dict.fromkeys(c.source for c in group))
        parts += ["", f"## {system}", "", f"Sources: {sources}.", ""]
        parts.append(markdown_table(comparison_rows(group), HEADERS))
    parts += [
        "",
        "## Bandwidth of rings",
        "",
        markdown_table(comparison_rows(reproduction.links), HEADERS),
        "",
        f"{_link_line(reproduction)}.",
        "",
        "Rings inside a node are entries of the profiles and agree by construction; rings across",
        "nodes follow from one bandwidth per machine and the law",
        "beta / min(ranks per node, stride).",
        "",
        "## Free parameters",
        "",
        "Numbers that are neither measured nor published, by profile:",
        "",
        *_parameter_lines(machines),
        "",
        *_FITTED,
        "",
        "Constants of the algorithm that are choices of a system, not of a machine, stand with",
        "their source in `axonn_tune/strategies/`: gradient buckets, dtypes of gradients and",
        "optimizer states, the bytes of quantised messages.",
        "",
        *_CONVENTIONS,
    ]
    return "\n".join(parts)


_FITTED = [
    "One number is fitted: `kernels.issue_seconds` of the A100 profiles with eight GPUs in a",
    "node, to the steps of one node with hidden size 1024 (table above); it serves for all other",
    "rows of those machines.",
]

_UNSTATED = ", ".join(
    f"{100 * spread:.0f} % {origin}" for origin, spread in UNSTATED_SPREAD.items()
)
_CONVENTIONS = [
    "Conventions of the intervals and of `P(best)`, which move no prediction",
    "(`axonn_tune/search/uncertainty.py`, `axonn_tune/cost/gemm.py`): spreads of numbers that",
    f"state none, {_UNSTATED}; what the model leaves out,",
    f"{100 * MODEL_ERROR:.0f} % for each candidate; products without measured points, "
    f"{100 * CURVE_ERROR:.0f} %.",
]

_READING = """How to read it: where a source does not say what was run (AxoNN's grids, the
micro-batch of SC21's Table 1, all of Megatron-DeepSpeed on Frontier), the best configuration of
the model stands for it; where they ran another, or a shipped profile is too kind to the machine,
the prediction is too fast. Rows marked `recalled` are from memory and count as hints. Known
misses: DeepSpeed's ZeRO-3 of 2021 exposes far more communication than its volumes and latencies
explain; the two public logs of AxoNN do not state gradient accumulation (one micro-step is
assumed); the batch of Alps' 6144 GPUs is assumed; of ZeRO++ only the 18B shape is stated;
on Frontier no batch, layout or version is known, and quantised messages were slower there than
their bytes say. MegaScale's parallel blocks and sliding windows are not modelled."""

_STEPS_READING = """Layouts that vTrain published with their times (VIA-Research/vTrain, data/,
MIT licence). Recomputation and vocabulary are not in the files: full recomputation and 51200 are
taken for all rows. *naive*: FLOPs at one fraction of the peak, fitted to these very rows, times
the bubble. *regret*: how much slower the layout that is predicted to be the fastest is than the
fastest measured one, mean over jobs (same model, GPUs and batch). For comparison, on the
whole sets of 109 and 1,440 rows of which these are a part: Calculon 15.3 % on several nodes and
38.9 % on one; vTrain's own claim 14.7 % and 8.4 %."""


def markdown_table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _parameter_lines(machines: Sequence[Machine]) -> list[str]:
    lines = []
    for machine in machines:
        named = list(quantities(machine))
        counts = {origin: sum(q.origin == origin for _, q in named) for origin in ORIGINS}
        assumed = ", ".join(f"`{name}` = {q.value:g}" for name, q in named if q.origin == "assumed")
        lines.append(
            f"- **{machine.name}**: {counts['measured']} measured, "
            f"{counts['published']} published, {counts['assumed']} assumed: {assumed}; "
            f"{len(machine.gemm.tiles)} GEMM tiles with assumed relative speeds"
        )
    return lines


def reproduction_records(reproduction: Reproduction) -> list[dict[str, Any]]:
    """Return a flat record for each comparison: end results, steps, rings."""
    steps = [timed.comparison for table in reproduction.steps.values() for timed in table]
    rows = [*reproduction.results, *steps, *reproduction.links]
    return [comparison_record(row) for row in rows]


def reproduction_document(reproduction: Reproduction) -> dict[str, Any]:
    """Return what ``reproduce --format json`` prints."""
    results = reproduction.results
    by_system = {**grouped(results, lambda c: c.system), "all": list(results)}
    return {
        "schema_version": 2,
        "results": [comparison_record(c) for c in results],
        "links": [comparison_record(c) for c in reproduction.links],
        "steps": [
            comparison_record(t.comparison) | {"naive": t.naive_seconds, "table": name}
            for name, timed in reproduction.steps.items()
            for t in timed
        ],
        "summary": {
            system: {**_summary_record(group), "pairs": ordered_pairs(group)}
            for system, group in by_system.items()
        },
        "links_summary": _summary_record(_by_sharing_law(reproduction.links)),
        "steps_summary": {
            name: [_group_record(group) for group in group_errors(timed)]
            for name, timed in reproduction.steps.items()
        },
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
    errors = summarise(comparisons)
    return {} if errors is None else dict(vars(errors))


def _group_record(group: GroupError) -> dict[str, Any]:
    return {
        "group": group.name,
        "model": vars(group.model),
        "naive": vars(group.naive),
        "spearman": group.spearman,
        "regret": group.regret,
    }


def reproduction_figure(reproduction: Reproduction) -> Any:
    """Draw predicted over published end results, and predicted over measured steps."""
    figure, (left, right) = new_figure(1, 2)
    _draw_results(left, reproduction.results)
    _draw_steps(right, reproduction.steps)
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


def _draw_steps(axes: Any, steps: Mapping[str, Sequence[TimedRun]]) -> None:
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
        title="Steps of Megatron-LM on A100 (vTrain)",
    )
    axes.legend(fontsize="small")
