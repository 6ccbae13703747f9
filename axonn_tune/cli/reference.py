"""The command reference, docs/cli.md: ``python -m axonn_tune.cli.reference > docs/cli.md``."""

from __future__ import annotations

from collections.abc import Iterator

import click

from axonn_tune.cli.main import cli

WIDTH = 90


def reference_markdown() -> str:
    """Return every command with its help text."""
    parts = ["# Command reference", "", "Written by `python -m axonn_tune.cli.reference`."]
    root = click.Context(cli, info_name="axonn-tune", **cli.context_settings)
    for context in _contexts(root):
        context.terminal_width = WIDTH
        help_text = context.command.get_help(context).strip()
        parts += ["", f"## {context.command_path}", "", "```text", help_text, "```"]
    return "\n".join(parts)


def _contexts(context: click.Context) -> Iterator[click.Context]:
    """Yield the context of a command and of all commands below it."""
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            if command is not None:
                yield from _contexts(click.Context(command, info_name=name, parent=context))


if __name__ == "__main__":
    click.echo(reference_markdown())
