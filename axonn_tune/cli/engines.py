"""``axonn-tune engines``."""

from __future__ import annotations

import click


@click.group("engines")
def command() -> None:
    """List, show and compare engines: the software that carries out a strategy.

    \b
    Examples:
      axonn-tune engines list
      axonn-tune engines show deepspeed
    """


@command.command("list")
def list_command() -> None:
    """List the engines of the package and those in AXONN_TUNE_PATH.

    \b
    Example:
      axonn-tune engines list
    """
    from axonn_tune.io.presets import list_engines, load_engine
    from axonn_tune.report.engines import engines_table

    click.echo(engines_table([load_engine(name) for name in list_engines()]))


@command.command("show")
@click.argument("name")
def show_command(name: str) -> None:
    """Show every fact of one engine with its origin and source.

    \b
    Examples:
      axonn-tune engines show llm-foundry
      axonn-tune engines show ./myengine.yaml
    """
    from axonn_tune.io.presets import load_engine
    from axonn_tune.report.engines import engine_text

    click.echo(engine_text(load_engine(name)))


@command.command("diff")
@click.argument("old")
@click.argument("new")
def diff_command(old: str, new: str) -> None:
    """Show in which facts two engines differ.

    \b
    Example:
      axonn-tune engines diff fsdp2 fsdp2-eager
    """
    from axonn_tune.io.presets import load_engine
    from axonn_tune.report.engines import difference_text

    click.echo(difference_text(load_engine(old), load_engine(new)))
