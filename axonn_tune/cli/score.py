"""``axonn-tune score``."""

from __future__ import annotations

import click

from axonn_tune.cli.options import format_option, output_option, quiet_option
from axonn_tune.cli.progress import Progress


@click.command("score")
@click.argument("runs")
@click.option("--machine", help="Machine of the rows that name none.  [default: perlmutter]")
@quiet_option
@format_option("table", "json", "csv")
@output_option
def command(
    runs: str, machine: str | None, quiet: bool, output_format: str, output: str | None
) -> None:
    """Predict a table of your own runs and say how well.

    RUNS is a CSV file with a run in each row: model, gpus, layout, global_batch and step_seconds,
    and whatever else is known (docs/score.md).

    \b
    Examples:
      axonn-tune score runs.csv --machine dgx-h100
      axonn-tune score runs.csv --format json --output score.json
    """
    from axonn_tune.cli.output import emit_as
    from axonn_tune.report import score as report
    from axonn_tune.scoring import score

    scored = score(runs, machine, Progress("Predicting", quiet))
    emit_as(
        output_format,
        output,
        table=lambda: report.score_text(scored),
        json=lambda: report.score_document(scored),
        csv=lambda: report.score_records(scored),
    )
