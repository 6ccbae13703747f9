"""Predicted against published, as text or as the page docs/validation.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axonn_tune.cost.gemm import CURVE_ERROR
from axonn_tune.report.text import table
from axonn_tune.search.uncertainty import MODEL_ERROR, UNSTATED_SPREAD
from axonn_tune.spec.machine import ORIGINS, Machine
from axonn_tune.spec.provenance import quantities
from axonn_tune.validate.reproduce import Comparison, summarise

HEADERS = ("machine", "run", "metric", "published", "predicted", "error %", "how", "certainty")


def comparison_rows(comparisons: Sequence[Comparison]) -> list[list[str]]:
    """One row of text per comparison."""
    return [
        [
            c.machine,
            c.subject,
            c.metric,
            f"{c.published:.4g}",
            "-" if c.predicted is None else f"{c.predicted:.4g}",
            "-" if c.error_fraction is None else f"{100 * c.error_fraction:+.1f}",
            c.setting,
            c.certainty,
        ]
        for c in comparisons
    ]


def summary_line(name: str, comparisons: Sequence[Comparison]) -> str:
    """Bias, mean, median, 90th percentile and largest error of a set."""
    errors = summarise(comparisons)
    if errors is None:
        return f"{name}: nothing predicted"
    return (
        f"{name}: {errors.n} predicted, mean error {100 * errors.mape:.1f} %, bias "
        f"{100 * errors.bias:+.1f} %, median {100 * errors.median:.1f} %, "
        f"p90 {100 * errors.p90:.1f} %, largest {100 * errors.max_error:.1f} %"
    )


def by_machine(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Comparisons grouped by machine, in order of appearance."""
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(comparison.machine, []).append(comparison)
    return groups


def validation_text(runs: Sequence[Comparison], links: Sequence[Comparison]) -> str:
    """For the terminal."""
    parts = [table(comparison_rows(runs), HEADERS), ""]
    parts += [summary_line(machine, group) for machine, group in by_machine(runs).items()]
    parts += [summary_line("all runs", runs), "", table(comparison_rows(links), HEADERS)]
    return "\n".join([*parts, "", summary_line("links, sharing law", _law(links))])


def _law(links: Sequence[Comparison]) -> list[Comparison]:
    return [c for c in links if c.setting == "sharing law"]


def validation_markdown(
    runs: Sequence[Comparison], links: Sequence[Comparison], machines: Sequence[Machine]
) -> str:
    """The page docs/validation.md."""
    parts = [
        "# Validation: predicted against published",
        "",
        "Written by `axonn-tune reproduce --format markdown --output docs/validation.md`; a test",
        "fails when this page and the code disagree. No constant is fitted to a row: each profile",
        "holds for all rows of its machine, and every number in it is published, measured by",
        "others, or assumed, as `axonn-tune machines show NAME` lists.",
        "",
        "## End results of AxoNN's papers",
        "",
        _markdown_table(comparison_rows(runs), HEADERS),
        "",
        *[f"- {summary_line(machine, group)}" for machine, group in by_machine(runs).items()],
        f"- {summary_line('all runs', runs)}",
        "",
        _READING,
        "",
        "## Bandwidth of rings",
        "",
        _markdown_table(comparison_rows(links), HEADERS),
        "",
        f"- {summary_line('sharing law', _law(links))}",
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
        "Constants of the algorithm that are choices of the runtime, not of a machine, stand with",
        "their source in `axonn_tune/strategies/axonn4d.py`: gradient buckets of 25 MiB, fp32",
        "gradient sums, AdamW with an fp32 master copy.",
        "",
        *_CONVENTIONS,
    ]
    return "\n".join(parts)


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

_READING = """How to read it: an error is predicted over published, minus one. The papers
do not say which grid they ran, so the best grid of the model stands for it; where they ran
another, or the shipped profile is too kind to the machine, the prediction is too fast. Rows
marked `recalled` are from memory and count as hints. The two step times come from public logs
that do not state gradient accumulation; one micro-step per step is assumed. 6144 GPUs cannot
share 8192 sequences evenly, so a factor of three must go to X, across nodes of four; the
paper's batch for that run is not known."""


def _markdown_table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
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


def validation_document(runs: Sequence[Comparison], links: Sequence[Comparison]) -> dict[str, Any]:
    """What ``reproduce --format json`` prints."""
    return {
        "schema_version": 1,
        "runs": [_comparison_record(c) for c in runs],
        "links": [_comparison_record(c) for c in links],
        "summary": {
            name: _summary_record(group)
            for name, group in {
                **by_machine(runs),
                "all_runs": runs,
                "sharing_law": _law(links),
            }.items()
        },
    }


def _comparison_record(c: Comparison) -> dict[str, Any]:
    return {
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


def _summary_record(comparisons: Sequence[Comparison]) -> Mapping[str, float] | None:
    errors = summarise(comparisons)
    return None if errors is None else vars(errors)
