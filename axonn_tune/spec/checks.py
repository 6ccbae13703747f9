"""Checks of the fields of the shared types, written so that NaN fails."""

from __future__ import annotations

import math
from collections.abc import Iterable

from axonn_tune.errors import InputError, spelling_hint

# Products of two counts must stay exact in int64.
LARGEST_COUNT = 2**30
LONGEST_NAME = 200


def require_positive(owner: str, name: str, value: float, hint: str = "") -> None:
    """Raise InputError unless the value is a finite number above zero."""
    if not (0 < value < math.inf):
        raise InputError(f"{owner}: {name} is {value!r}; allowed: above 0{hint}")


def require_name(owner: str, value: str) -> None:
    """Raise InputError unless a name can be printed on one line."""
    if not value.isprintable() or len(value) > LONGEST_NAME:
        raise InputError(
            f"{owner}: name is {value[:LONGEST_NAME]!r}; allowed: up to {LONGEST_NAME} characters "
            "that can be printed"
        )


def require_count(owner: str, name: str, value: int, least: int = 1) -> None:
    """Raise InputError unless the value is a whole number from `least` to `LARGEST_COUNT`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value <= LARGEST_COUNT:
        raise InputError(
            f"{owner}: {name} is {value!r}; allowed: a whole number, {least} to {LARGEST_COUNT}"
        )


def require_fraction(owner: str, name: str, value: float, low: float = 0.0) -> None:
    """Raise InputError unless the value lies in ``[low, 1]``."""
    if not (low <= value <= 1):
        raise InputError(f"{owner}: {name} is {value!r}; allowed: {low:g} to 1")


def require_choice(owner: str, name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise InputError unless the name is among the allowed ones."""
    choices = list(allowed)
    if value not in choices:
        raise InputError(
            f"{owner}: {name} is {value!r}; allowed: {', '.join(choices)}"
            f"{spelling_hint(str(value), choices)}"
        )
