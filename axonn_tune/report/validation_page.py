"""The page docs/validation.md: predicted against published, with how to read it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from textwrap import fill

from axonn_tune.cost.gemm import CURVE_ERROR
from axonn_tune.report.free_parameters import (
    ASSUMED_HEADERS,
    ENGINE_HEADERS,
    FITTED_HEADERS,
    ORIGIN_HEADERS,
    assumed_rows,
    engine_rows,
    fitted_rows,
    origin_rows,
)
from axonn_tune.report.phrases import percent
from axonn_tune.report.reproduce import (
    COLLECTIVE_HEADERS,
    LINK_HEADERS,
    MEMORY_HEADERS,
    RUN_HEADERS,
    STEP_HEADERS,
    STRATEGY_HEADERS,
    SUMMARY_HEADERS,
    collective_rows,
    comparison_rows,
    link_line,
    memory_rows,
    run_rows,
    step_rows,
    strategy_rows,
    summary_rows,
)
from axonn_tune.reproduce.comparison import FACTS, Comparison, grouped
from axonn_tune.reproduce.reproduction import Reproduction
from axonn_tune.reproduce.track_record import track_records
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.machine import Machine
from axonn_tune.step.spread import MODEL_ERROR, UNSTATED_SPREAD

_GPU_HEADERS = ("strategy", "engine", "GPU", "kind", "runs", "far", "mean %")


def reproduction_markdown(
    reproduction: Reproduction,
    machines: Sequence[Machine],
    engines: Sequence[Engine],
    note: Callable[[str], str],
) -> str:
    """Return the page docs/validation.md; `note` finds the prose that belongs to a heading."""
    results = reproduction.results
    steps = grouped(step_rows(reproduction), lambda row: row[0])
    overview = [row for rows in steps.values() for row in rows if _is_of_all(row)]
    systems = grouped(results, lambda result: result.system)
    by_ranks = collective_rows(reproduction, by_ranks=True)

    def section(title: str, *parts: str, level: int = 2) -> list[str]:
        return [f"{'#' * level} {title}", note(note_name(title)), *parts]

    return "\n\n".join(
        [
            "# Validation: predicted against published",
            note("introduction"),
            "![Predicted over published](validation.png)",
            *section(
                "By system",
                _FACTS_READING,
                markdown_table(_linked(summary_rows(results)), SUMMARY_HEADERS),
            ),
            *section(
                "By strategy and engine",
                markdown_table(strategy_rows(reproduction), STRATEGY_HEADERS),
            ),
            *section("By engine and GPU", markdown_table(_gpu_rows(reproduction), _GPU_HEADERS)),
            *section("Measured steps", markdown_table(_linked(overview), STEP_HEADERS)),
            *(
                part
                for name, rows in steps.items()
                for part in section(name, _groups_table(rows), level=3)
            ),
            *section(
                "Memory of the measured steps",
                markdown_table(memory_rows(reproduction), MEMORY_HEADERS),
            ),
            *section("Memory of nanotron", level=3),
            *section("End results"),
            *(
                part
                for name, group in systems.items()
                for part in section(name, *_of_system(group), level=3)
            ),
            *section(
                "Bandwidth of rings",
                f"{link_line(reproduction)}.",
                markdown_table(comparison_rows(reproduction.links), LINK_HEADERS),
            ),
            *section("Collectives", markdown_table(by_ranks, COLLECTIVE_HEADERS)),
            *section("Free parameters"),
            *section(
                "Fitted",
                markdown_table(fitted_rows(machines, engines), FITTED_HEADERS),
                note("fitted-beside"),
                level=3,
            ),
            *section(
                "Assumed of machines",
                markdown_table(origin_rows(machines), ORIGIN_HEADERS),
                markdown_table(assumed_rows(machines), ASSUMED_HEADERS),
                level=3,
            ),
            *section(
                "Stated of engines",
                markdown_table(engine_rows(engines), ENGINE_HEADERS),
                level=3,
            ),
            *section("Intervals", _CONVENTIONS, level=3),
        ]
    )


def note_name(title: str) -> str:
    """Return the name of the file that has the prose below a heading."""
    return title.lower().replace(" ", "-")


def _is_of_all(row: Sequence[str]) -> bool:
    """Return whether a row is about all steps of a table, with or without runs set apart."""
    return row[1].startswith("all")


def _groups_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the groups of one table of measured steps."""
    return markdown_table([row[1:] for row in rows if not _is_of_all(row)], STEP_HEADERS[1:])


def _of_system(group: Sequence[Comparison]) -> tuple[str, str]:
    """Return a sentence on the sources of one system, and the table of its runs."""
    sources = "; ".join(dict.fromkeys(result.source for result in group))
    return f"Sources of the numbers: {sources}.", markdown_table(run_rows(group), RUN_HEADERS)


def _gpu_rows(reproduction: Reproduction) -> list[list[str]]:
    """Return the track record of each strategy, engine, family of GPUs and kind."""
    return [
        [
            record.strategy,
            record.engine or "-",
            record.gpu,
            record.kind or "-",
            str(record.n_runs),
            str(record.n_far),
            percent(record.mean_error_fraction),
        ]
        for record in track_records(reproduction).records
    ]


def _linked(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the rows, of which each name leads to the section that it heads."""
    return [
        [name if name == "all" else f"[{name}](#{_anchor(name)})", *cells] for name, *cells in rows
    ]


def _anchor(title: str) -> str:
    """Return the anchor that GitHub and Sphinx give a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


_FACTS_READING = fill(
    f"A prediction needs these facts of a run: {', '.join(FACTS)}. A row counts as *known* where "
    "its source states them all. It counts as *assumed in part* where something near had to be "
    "taken for one of them, because the source is silent or the model cannot express it. The "
    "tables name what was assumed of each run; its other facts are known.",
    100,
)

_UNSTATED = ", ".join(
    f"{100 * spread:.0f} % {origin}" for origin, spread in UNSTATED_SPREAD.items()
)
_CONVENTIONS = f"""\
- Spreads of numbers that state none: {_UNSTATED}.
- What the model leaves out: {100 * MODEL_ERROR:.0f} % for each candidate.
- Products without measured points: {100 * CURVE_ERROR:.0f} %."""


def markdown_table(rows: Sequence[Sequence[str]], headers: Sequence[str]) -> str:
    """Return a table in Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
