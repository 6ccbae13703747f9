"""``axonn-tune reproduce``."""

from __future__ import annotations

import click

from axonn_tune.cli.options import format_option, output_option, plot_option, quiet_option
from axonn_tune.cli.progress import Progress


@click.command("reproduce")
@plot_option
@quiet_option
@format_option("table", "markdown", "json", "csv", "track-records")
@output_option
def command(plot: str | None, quiet: bool, output_format: str, output: str | None) -> None:
    """Predict published results of AxoNN, Megatron-LM, ZeRO, FSDP and others, and compare.

    Collectives that others measured are held against the profiles of their machines, too. The
    format track-records holds how predictions of each strategy have fared, which rankings state.

    \b
    Examples:
      axonn-tune reproduce
      axonn-tune reproduce --format csv --output rows.csv
      axonn-tune reproduce --format markdown --output docs/validation.md --plot docs/validation.png
      axonn-tune reproduce --format track-records --output axonn_tune/reproduce/track_records.csv
    """
    from axonn_tune.cli.output import as_csv, check_plot, emit, emit_as, save_plot
    from axonn_tune.io.package_data import load_published, note_on_validation
    from axonn_tune.io.presets import (
        list_engines,
        list_machines,
        load_engine,
        load_machine,
        load_model,
    )
    from axonn_tune.report import reproduce as report
    from axonn_tune.report.validation_page import reproduction_markdown
    from axonn_tune.reproduce.reproduction import reproduce
    from axonn_tune.reproduce.runs import Loaders

    check_plot(plot)
    loaders = Loaders(load_model, load_machine, load_engine)
    reproduction = reproduce(load_published, loaders, Progress("Predicting", quiet))
    save_plot(plot, lambda: report.reproduction_figure(reproduction))
    if output_format == "track-records":
        emit(as_csv(report.track_record_rows(reproduction)), output)
        return
    emit_as(
        output_format,
        output,
        table=lambda: report.reproduction_text(reproduction),
        json=lambda: report.reproduction_document(reproduction),
        csv=lambda: report.reproduction_records(reproduction),
        markdown=lambda: reproduction_markdown(
            reproduction,
            [load_machine(name) for name in list_machines()],
            [load_engine(name) for name in list_engines()],
            note_on_validation,
        ),
    )
