"""``axonn-tune models``."""

from __future__ import annotations

import click

from axonn_tune.cli.options import output_option


@click.group("models")
def command() -> None:
    """List and show model presets.

    \b
    Examples:
      axonn-tune models list
      axonn-tune models show llama3-70b
      axonn-tune models template --output my-model.yaml
    """


@command.command("list")
def list_command() -> None:
    """List the presets and the models in AXONN_TUNE_PATH.

    \b
    Example:
      axonn-tune models list
    """
    from axonn_tune.cli.output import emit
    from axonn_tune.io.presets import as_found, list_models, load_model
    from axonn_tune.report.models import models_table

    emit(models_table(as_found(load_model, list_models())), None)


@command.command("show")
@click.argument("name")
def show_command(name: str) -> None:
    """Show the shape, the parameters and the source of one model.

    \b
    Examples:
      axonn-tune models show 80b
      axonn-tune models show ./config.json
    """
    from axonn_tune.cli.output import emit
    from axonn_tune.io.presets import load_model
    from axonn_tune.report.models import model_text

    emit(model_text(load_model(name)), None)


@command.command("template")
@output_option
def template_command(output: str | None) -> None:
    """Print a commented file with which to begin a model of your own.

    \b
    Examples:
      axonn-tune models template
      axonn-tune models template --output my-model.yaml
    """
    from axonn_tune.cli.output import emit
    from axonn_tune.io.package_data import template

    emit(template("model"), output)
