"""``axonn-tune score``."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    FilePath,
    NumberRange,
    format_option,
    output_option,
    plot_option,
    quiet_option,
    refuse,
)
from axonn_tune.cli.progress import Progress

if TYPE_CHECKING:
    from axonn_tune.reproduce.score import Score


@click.command("score")
@click.argument("runs")
@click.option("--machine", help="Machine of the rows that name none.  [default: perlmutter]")
@click.option(
    "--by",
    multiple=True,
    metavar="NAME",
    help="Show the errors by engine, machine, model, gpus, micro_batch, recompute or an axis, too; "
    "may be given again.",
)
@plot_option
@click.option(
    "--html", type=FilePath(dir_okay=False), help="Write all of it as a page, too, in one file."
)
@click.option(
    "--max-error",
    type=NumberRange(min=0, max=1),
    help="Exit 1 if the mean error of all runs is above this fraction, such as 0.2.",
)
@click.option(
    "--baseline",
    type=FilePath(dir_okay=False),
    metavar="TABLE",
    help="Print one line only: how the runs have changed since those of this table; the exit "
    "code is 1 if they became slower.",
)
@quiet_option
@format_option("table", "json", "csv")
@output_option
def command(
    runs: str,
    machine: str | None,
    by: tuple[str, ...],
    plot: str | None,
    html: str | None,
    max_error: float | None,
    baseline: str | None,
    quiet: bool,
    output_format: str,
    output: str | None,
) -> None:
    """Predict a table of your own runs and say how well.

    RUNS is a CSV file with a run in each row: model, gpus, layout, global_batch and step_seconds,
    and whatever else is known (docs/score.md).

    \b
    Examples:
      axonn-tune score runs.csv --machine dgx-h100
      axonn-tune score runs.csv --by model --by micro_batch --plot score.png
      axonn-tune score runs.csv --format json --output score.json
      axonn-tune score runs.csv --by recompute --html score.html
      axonn-tune score tonight.csv --machine dgx-h100 --max-error 0.15 --format json
      axonn-tune score tonight.csv --machine dgx-h100 --baseline yesterday.csv
    """
    from axonn_tune.api.scoring import score
    from axonn_tune.cli.output import (
        check_folders,
        check_plot,
        emit_as,
        save_plot,
        say_on_stderr,
    )
    from axonn_tune.report import score as report
    from axonn_tune.validation.limits import at_most

    if baseline is not None:
        ignored: dict[str, Any] = {"by": by, "plot": plot, "html": html}
        ignored |= {"max_error": max_error, "output_format": output_format, "output": output}
        refuse(ignored, "does not go with --baseline, which prints one line")
        _watch(runs, baseline, machine, quiet)
        return
    check_plot(plot)
    check_folders(plot, html, output)
    scored = score(runs, machine, Progress("Predicting", quiet), say_on_stderr)
    report.check_groupings(scored, by)
    save_plot(plot, lambda: report.score_figure(scored))
    if html is not None:
        _write_page(scored, f"Score of {runs}", by, html)
    emit_as(
        output_format,
        output,
        table=lambda: report.score_text(scored, by),
        json=lambda: report.score_document(scored, by),
        csv=lambda: report.score_records(scored),
    )
    if max_error is not None:
        check = at_most("mean error", scored.mean_error, max_error)
        click.echo(check.text, err=True)
        if not check.holds:
            sys.exit(1)


def _watch(runs: str, baseline: str, machine: str | None, quiet: bool) -> None:
    """Print how runs have changed since a baseline, and end with 1 if they became slower."""
    from axonn_tune.api.teaching import watch
    from axonn_tune.cli.output import say_on_stderr
    from axonn_tune.report.learn import drift_line

    drift = watch(runs, baseline, machine, Progress("Predicting", quiet), say_on_stderr)
    click.echo(drift_line(drift))
    if drift.is_slower:
        sys.exit(1)


def _write_page(scored: Score, title: str, by: tuple[str, ...], path: str) -> None:
    """Write the page of a score."""
    from axonn_tune import __version__
    from axonn_tune.cli.output import emit
    from axonn_tune.io.package_data import page_parts
    from axonn_tune.report.report import page_html
    from axonn_tune.report.score import score_page

    written = f"Written by axonn-tune {__version__} on {datetime.now():%Y-%m-%d}."
    emit(page_html(score_page(scored, title, written, by), page_parts("score")), path)
