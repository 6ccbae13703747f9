"""``axonn-tune reproduce``."""

from __future__ import annotations

import click

from axonn_tune.cli.options import format_option, output_option


@click.command("reproduce")
@format_option("table", "markdown", "json")
@output_option
def command(output_format: str, output: str | None) -> None:
    """Predict the published results of AxoNN's papers and compare.

    \b
    Examples:
      axonn-tune reproduce
      axonn-tune reproduce --format markdown --output docs/validation.md
    """
    from axonn_tune.cli.output import as_json, emit
    from axonn_tune.io.presets import list_machines, load_machine, load_model
    from axonn_tune.io.published import load_published
    from axonn_tune.report import validation
    from axonn_tune.validate.reproduce import Loaders, compare_links, compare_runs

    loaders = Loaders(load_model, load_machine)
    runs = compare_runs(load_published("axonn"), loaders)
    links = compare_links(load_published("axonn_links"), loaders)
    if output_format == "json":
        emit(as_json(validation.validation_document(runs, links)), output)
    elif output_format == "markdown":
        machines = [load_machine(name) for name in list_machines()]
        emit(validation.validation_markdown(runs, links, machines), output)
    else:
        emit(validation.validation_text(runs, links), output)
