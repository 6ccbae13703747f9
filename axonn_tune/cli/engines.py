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
    from axonn_tune.cli.output import emit
    from axonn_tune.io.presets import as_found, list_engines, load_engine
    from axonn_tune.report.engines import engines_table

    emit(engines_table(as_found(load_engine, list_engines())), None)


@command.command("show")
@click.argument("name")
def show_command(name: str) -> None:
    """Show every fact of one engine with its origin and source.

    \b
    Examples:
      axonn-tune engines show llm-foundry
      axonn-tune engines show ./myengine.yaml
    """
    from axonn_tune.cli.output import emit
    from axonn_tune.io.presets import load_engine
    from axonn_tune.report.engines import engine_text

    emit(engine_text(load_engine(name)), None)


@command.command("diff")
@click.argument("old")
@click.argument("new")
def diff_command(old: str, new: str) -> None:
    """Show in which facts two engines differ.

    \b
    Example:
      axonn-tune engines diff fsdp2 fsdp2-eager
    """
    from axonn_tune.cli.output import emit
    from axonn_tune.io.presets import load_engine
    from axonn_tune.report.engines import difference_text

    emit(difference_text(load_engine(old), load_engine(new)), None)
