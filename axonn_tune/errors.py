"""Errors that a user can cause; the command line prints them in one line and exits with 2."""

from __future__ import annotations

from collections.abc import Iterable


class AxonnTuneError(Exception):
    """Base of every error that names a wrong input and what is allowed instead."""


class InputError(AxonnTuneError):
    """A flag, an argument or a field has a value that is not allowed."""


class FileError(AxonnTuneError):
    """A file is missing, malformed or cannot be written."""


class NoCandidateError(AxonnTuneError):
    """No grid satisfies the constraints; the message says which one fell to what."""


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'a' or 'b'?"`` for the known names closest to `name`, else all of them."""
    from difflib import get_close_matches

    choices = list(known)
    close = get_close_matches(name.lower(), choices, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(f"'{choice}'" for choice in close) + "?"
    return "; known: " + ", ".join(choices) if choices else ""
