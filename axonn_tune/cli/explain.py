"""``axonn-tune explain``."""

from __future__ import annotations

from typing import Any

import click

from axonn_tune.cli.options import (
    format_option,
    output_option,
    plot_option,
    search_options,
)


@click.command("explain")
@search_options
@click.option(
    "--grid",
    required=True,
    metavar="GRID",
    help="8x4x4x8 (G_x, G_y, G_z, G_data), or tensor=8,data=16.",
)
@click.option("--all", "show_all", is_flag=True, help="Show every operation, not the 25 longest.")
@plot_option
@format_option("table", "json")
@output_option
def command(
    grid: str,
    show_all: bool,
    plot: str | None,
    output_format: str,
    output: str | None,
    **options: Any,
) -> None:
    """Show where the time and the memory of one grid go.

    Without --micro-batch and --recompute, the best that fit the grid.

    \b
    Examples:
      axonn-tune explain --gpus 1024 --model 80b --grid 8x4x4x8
      axonn-tune explain --gpus 64 --model 20b --grid 1x4x16x1 --machine frontier --format json
      axonn-tune explain --gpus 1024 --model 80b --grid 1x4x64x4 --plot step.png
    """
    from axonn_tune.api import build_search
    from axonn_tune.cli.output import as_json, check_plot, emit
    from axonn_tune.search.one_layout import best_of_layout
    from axonn_tune.step.explain import explain

    check_plot(plot)
    search = build_search(**options)
    prediction = best_of_layout(search, grid)
    explanation = explain(prediction)
    if plot is not None:
        from axonn_tune.io.files import write_bytes
        from axonn_tune.report.search_plots import explanation_figure

        write_bytes(plot, explanation_figure(explanation, plot))
    if output_format == "json":
        from axonn_tune.report.records import explanation_document

        emit(as_json(explanation_document(search, explanation)), output)
        return
    from axonn_tune.report.text import explanation_text

    emit(explanation_text(explanation, None if show_all else 25), output)
