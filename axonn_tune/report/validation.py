"""Predicted against published, as text, as plain data, or as the page docs/validation.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axonn_tune.cost.gemm import CURVE_ERROR
from axonn_tune.report.text import table
from axonn_tune.reproduce.comparison import (
    Comparison,
    ErrorSummary,
    grouped,
    ordered_pairs,
    summarise,
)
from axonn_tune.reproduce.everything import Reproduction
from axonn_tune.reproduce.predicted import GroupError, group_errors
from axonn_tune.search.uncertainty import MODEL_ERROR, UNSTATED_SPREAD
from axonn_tune.spec.machine import ORIGINS, Machine
from axonn_tune.spec.provenance import quantities

HEADERS = ("machine", "run", "metric", "published", "predicted", "error %", "how", "certainty")
SUMMARY_HEADERS = (
    *("system", "numbers", "mean %", "bias %", "median %", "p90 %", "largest %"),
    "pairs in order",
)
STEP_HEADERS = (
    *("steps", "group", "rows", "mean %", "bias %", "median %", "p90 %", "largest %"),
    *("Spearman", "regret %", "naive mean %"),
)


def comparison_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """One row of text per comparison."""
    return [
        [
            c.machine,
            c.subject,
            c.metric,
            f"{c.published:.4g}",
            "-" if c.predicted is None else f"{c.predicted:.4g}",
            _error(c),
            c.setting,
            c.certainty,
        ]
        for c in comparisons
    ]


def _error(c: Comparison) -> str:
    if c.is_verdict and c.predicted is not None:
        return "right" if c.predicted == c.published else "wrong"
    return "-" if c.error_fraction is None else f"{100 * c.error_fraction:+.1f}"


def _figures(errors: ErrorSummary) -> list[str]:
    signed = f"{100 * errors.bias:+.1f}"
    others = (errors.median, errors.p90, errors.max_error)
    return [f"{100 * errors.mape:.1f}", signed, *(f"{100 * value:.1f}" for value in others)]


def summary_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """One row per system, and one over all."""
    groups = {**grouped(comparisons, lambda c: c.system), "all": list(comparisons)}
    rows = []
    for system, group in groups.items():
        errors = summarise(group)
        right, total = ordered_pairs(group)
        pairs = f"{right} of {total}" if total else "-"
        figures = ["-"] * 5 if errors is None else _figures(errors)
        rows.append([system, str(0 if errors is None else errors.n), *figures, pairs])
    return rows


def step_rows(reproduction: Reproduction) -> list[list[str]]:
    """One row per group of measured steps."""
    return [
        [
            name,
            group.name,
            str(group.model.n),
            *_figures(group.model),
            f"{group.spearman:.3f}",
            f"{100 * group.regret:.1f}",
            f"{100 * group.naive.mape:.1f}",
        ]
        for name, timed in reproduction.steps.items()
        for group in group_errors(timed)
    ]


def law(links: Sequence[Comparison]) -> list[Comparison]:
    """Rings that follow from the sharing law, not from an entry of the profile."""
    return [c for c in links if c.setting == "sharing law"]


def validation_text(reproduction: Reproduction) -> str:
    """For the terminal."""
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
    errors = summarise(law(reproduction.links))
    assert errors is not None
    return (
        f"Rings by the sharing law: {errors.n}, mean error {100 * errors.mape:.1f} %, largest "
        f"{100 * errors.max_error:.1f} %"
    )


def validation_markdown(reproduction: Reproduction, machines: Sequence[Machine]) -> str:
    """The page docs/validation.md."""
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
        parts += [markdown_table(comparison_rows(group), HEADERS)]
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
assumed); 6144 GPUs cannot share 8192 sequences evenly; of ZeRO++ only the 18B shape is stated;
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
    """A table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _parameter_lines(machines: Sequence[Machine]) -> list[str]:
    lines = []
    for machine in machines:
        found = list(quantities(machine))
        counts = {origin: sum(q.origin == origin for _, q in found) for origin in ORIGINS}
        assumed = ", ".join(f"`{name}` = {q.value:g}" for name, q in found if q.origin == "assumed")
        lines.append(
            f"- **{machine.name}**: {counts['measured']} measured, "
            f"{counts['published']} published, {counts['assumed']} assumed: {assumed}; "
            f"{len(machine.gemm.tiles)} GEMM tiles with assumed relative speeds"
        )
    return lines


def validation_document(reproduction: Reproduction) -> dict[str, Any]:
    """What ``reproduce --format json`` prints."""
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
        "links_summary": _summary_record(law(reproduction.links)),
        "steps_summary": {
            name: [_group_record(group) for group in group_errors(timed)]
            for name, timed in reproduction.steps.items()
        },
    }


def comparison_record(c: Comparison) -> dict[str, Any]:
    """One row, flat."""
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
