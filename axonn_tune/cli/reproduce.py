"""``axonn-tune reproduce``."""

from __future__ import annotations

import click

from axonn_tune.cli.options import format_option, output_option, plot_option
from axonn_tune.cli.progress import Progress, quiet_option


@click.command("reproduce")
@plot_option
@quiet_option
@format_option("table", "markdown", "json", "csv")
@output_option
def command(plot: str | None, quiet: bool, output_format: str, output: str | None) -> None:
    """Predict published results of AxoNN, Megatron-LM, ZeRO and others, and compare.

    \b
    Examples:
      axonn-tune reproduce
      axonn-tune reproduce --format csv --output rows.csv
      axonn-tune reproduce --format markdown --output docs/validation.md --plot docs/validation.png
    """
    from axonn_tune.cli.output import as_csv, as_json, check_plot, emit
    from axonn_tune.io.files import write_bytes
    from axonn_tune.io.package_data import load_published
    from axonn_tune.io.presets import list_machines, load_machine, load_model
    from axonn_tune.report import validation
    from axonn_tune.reproduce.everything import reproduce
    from axonn_tune.reproduce.loaders import Loaders

    check_plot(plot)
    found = reproduce(
        load_published, Loaders(load_model, load_machine), Progress("Predicting", quiet)
    )
    if plot is not None:
        from axonn_tune.report.plots import published_figure

        write_bytes(plot, published_figure(found, plot))
    if output_format == "json":
        emit(as_json(validation.validation_document(found)), output)
    elif output_format == "markdown":
        machines = [load_machine(name) for name in list_machines()]
        emit(validation.validation_markdown(found, machines), output)
    elif output_format == "csv":
        steps = [timed.comparison for table in found.steps.values() for timed in table]
        rows = [*found.results, *steps, *found.links]
        emit(as_csv([validation.comparison_record(row) for row in rows]), output)
    else:
        emit(validation.validation_text(found), output)
