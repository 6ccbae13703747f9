"""``axonn-tune explain``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    LAYOUT_HELP,
    format_option,
    layout_options,
    output_option,
    plot_option,
)
from axonn_tune.cli.output import SHOWN_OPERATIONS

if TYPE_CHECKING:
    from axonn_tune.step.traced import MeasuredLine


@click.command("explain")
@layout_options
@click.option(
    "--grid",
    required=True,
    metavar="LAYOUT",
    help=LAYOUT_HELP,
)
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help=f"Show every operation, not only the {SHOWN_OPERATIONS} longest.",
)
@click.option(
    "--measured",
    metavar="TRACE",
    help="Trace of one rank by torch's profiler (JSON), to set beside the prediction.",
)
@plot_option
@format_option("table", "json")
@output_option
def command(
    grid: str,
    show_all: bool,
    measured: str | None,
    plot: str | None,
    output_format: str,
    output: str | None,
    **options: Any,
) -> None:
    """Show where the time and the memory of one grid go.

    Without --micro-batch and --recompute, the command takes the best ones for the grid.

    \b
    Examples:
      axonn-tune explain --gpus 1024 --model 80b --grid 8x4x4x8
      axonn-tune explain --gpus 64 --model 20b --grid 1x4x16x1 --machine frontier --format json
      axonn-tune explain --gpus 1024 --model 80b --grid 1x4x64x4 --plot step.png
      axonn-tune explain --gpus 8 --model llama3-8b --grid 1x1x8x1 --measured trace.json
    """
    from axonn_tune.api.searching import build_search
    from axonn_tune.cli.output import check_plot, emit_as, save_plot
    from axonn_tune.report import explain as report
    from axonn_tune.search.one_layout import best_of_layout
    from axonn_tune.step.explain import explain

    check_plot(plot)
    trace = None
    if measured is not None:
        from axonn_tune.io.kineto import load_trace

        trace = load_trace(measured)
    search = build_search(**options)
    prediction = best_of_layout(search, grid)
    search = search.on_batches([prediction.scenario.job.global_batch])
    explanation = explain(prediction)
    n_operations = None if show_all else SHOWN_OPERATIONS
    save_plot(plot, lambda: report.explanation_figure(explanation))
    lines: Sequence[MeasuredLine] = ()
    if trace is not None:
        from axonn_tune.step.traced import beside_trace

        lines = beside_trace(explanation, trace)

    def text() -> str:
        explained = report.explanation_text(search, explanation, n_operations)
        if trace is None:
            return explained
        from axonn_tune.report.traced import traced_text

        return f"{explained}\n\n{traced_text(lines, str(measured), trace.n_steps, n_operations)}"

    def document() -> dict[str, Any]:
        explained = report.explanation_document(search, explanation)
        if trace is None:
            return explained
        from axonn_tune.report.traced import traced_records

        return {**explained, "measured": traced_records(lines)}

    emit_as(output_format, output, table=text, json=document)
