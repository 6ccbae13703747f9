"""``axonn-tune machines``."""

from __future__ import annotations

import click


@click.group("machines")
def command() -> None:
    """List and show hardware profiles.

    \b
    Examples:
      axonn-tune machines list
      axonn-tune machines show frontier
    """


@command.command("list")
def list_command() -> None:
    """List the presets and the machines in AXONN_TUNE_PATH.

    \b
    Example:
      axonn-tune machines list
    """
    from axonn_tune.io.presets import list_machines, load_machine
    from axonn_tune.report.presets import machines_table

    click.echo(machines_table([load_machine(name) for name in list_machines()]))


@command.command("show")
@click.argument("name")
def show_command(name: str) -> None:
    """Show every number of a profile with its origin and source.

    \b
    Examples:
      axonn-tune machines show perlmutter
      axonn-tune machines show ./mycluster.yaml
    """
    from axonn_tune.io.presets import load_machine
    from axonn_tune.report.presets import machine_text

    click.echo(machine_text(load_machine(name)))
