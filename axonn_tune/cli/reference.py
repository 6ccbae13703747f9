"""The command reference, docs/cli.md: ``python -m axonn_tune.cli.reference > docs/cli.md``."""

from __future__ import annotations

from collections.abc import Iterator

import click

from axonn_tune.cli.main import cli

WIDTH = 90


def reference_markdown() -> str:
    """Every command with its help text."""
    parts = ["# Command reference", "", "Written by `python -m axonn_tune.cli.reference`."]
    for path, command in _commands("axonn-tune", cli):
        context = click.Context(command, info_name=path, max_content_width=WIDTH)
        context.terminal_width = WIDTH
        parts += ["", f"## {path}", "", "```text", command.get_help(context).strip(), "```"]
    return "\n".join(parts)


def _commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path)
        for name in command.list_commands(context):
            sub = command.get_command(context, name)
            if sub is not None:
                yield from _commands(f"{path} {name}", sub)


if __name__ == "__main__":
    click.echo(reference_markdown())
