"""Texts that others chose, such as names and paths, in files that a shell or Slurm reads."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from axonn_tune.errors import InputError, one_line


def words(text: str, owner: str) -> list[str]:
    """Split a text into words, as a shell would, without expanding anything.

    Raises
    ------
    InputError
        A quote is never closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"{owner} {text!r}: {str(error).lower()}") from None


def command(given: Iterable[str]) -> str:
    """Return the words of a command, each of which the shell reads as it is."""
    return shlex.join(given)


def directive(given: Iterable[str]) -> str:
    """Return a line of options for sbatch, which reads quotes as a shell does.

    Unlike a shell, sbatch drops a backslash also between single quotes.
    """
    return "#SBATCH " + shlex.join(one_line(word).replace("\\", "\\\\") for word in given)


def export(name: str, value: str) -> str:
    """Return the line that sets a variable for all processes that follow."""
    return f"export {name}={shlex.quote(value)}"


def comment(text: str) -> str:
    """Return a comment of one line."""
    return f"# {one_line(text)}"
