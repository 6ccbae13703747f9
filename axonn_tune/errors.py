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


def closest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'a' or 'b'?"`` for the known names closest to `name`, or nothing."""
    from difflib import get_close_matches

    close = get_close_matches(name.lower(), list(known), n=3, cutoff=0.5)
    return "; did you mean " + " or ".join(f"'{c}'" for c in close) + "?" if close else ""


def nearest(name: str, known: Iterable[str]) -> str:
    """`closest`, or all known names where none is close."""
    choices = list(known)
    return closest(name, choices) or ("; known: " + ", ".join(choices) if choices else "")
