"""``axonn-tune score``."""

from __future__ import annotations

import click

from axonn_tune.cli.options import format_option, output_option, plot_option, quiet_option
from axonn_tune.cli.progress import Progress


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
@quiet_option
@format_option("table", "json", "csv")
@output_option
def command(
    runs: str,
    machine: str | None,
    by: tuple[str, ...],
    plot: str | None,
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
    """
    from axonn_tune.cli.output import check_plot, emit_as, save_plot
    from axonn_tune.report import score as report
    from axonn_tune.scoring import score

    check_plot(plot)
    scored = score(runs, machine, Progress("Predicting", quiet))
    save_plot(plot, lambda: report.score_figure(scored))
    emit_as(
        output_format,
        output,
        table=lambda: report.score_text(scored, by),
        json=lambda: report.score_document(scored, by),
        csv=lambda: report.score_records(scored),
    )
