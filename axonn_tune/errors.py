"""Errors that a user can cause, and the wording that their messages share.

The command line prints such an error in one line and exits with 2.
"""

from __future__ import annotations

from collections.abc import Iterable

# A message names up to twenty problems of a file; the value of an option may be as long as a page.
LONGEST_MESSAGE = 4000


class AxonnTuneError(Exception):
    """The base of every error that names a wrong input and says what is allowed instead.

    The message is one line, whatever the input holds that it quotes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class InputError(AxonnTuneError):
    """A flag, an argument or a field has a value that is not allowed."""


class FileError(AxonnTuneError):
    """A file is missing, is malformed or cannot be written."""


class NoCandidateError(AxonnTuneError):
    """No grid satisfies the constraints; the message says which of them ruled the grids out."""


def shortened(text: str) -> str:
    """Return a message without the middle of what it quotes, if it is longer than people read.

    Its beginning names the culprit, and its end what is allowed.
    """
    half = LONGEST_MESSAGE // 2
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:half]} [...] {text[-half:]}"


def one_line(text: str) -> str:
    """Return the text without line breaks and other control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def spelling_hint(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'a' or 'b'?"`` with the known names most similar to `name`.

    The hint is empty if no known name is similar.
    """
    from difflib import get_close_matches

    similar = get_close_matches(name.lower(), list(known), n=3, cutoff=0.5)
    if not similar:
        return ""
    return "; did you mean " + " or ".join(f"'{choice}'" for choice in similar) + "?"


def choices_hint(name: str, known: Iterable[str]) -> str:
    """Return the `spelling_hint`, or a list of all known names if none is similar to `name`."""
    choices = list(known)
    all_choices = "; known: " + ", ".join(choices) if choices else ""
    return spelling_hint(name, choices) or all_choices
