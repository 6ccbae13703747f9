"""Checks of the fields of the shared types, written so that NaN fails."""

from __future__ import annotations

import math
from collections.abc import Iterable

from axonn_tune.errors import InputError, spelling_hint

# Products of two counts must stay exact in int64.
LARGEST_COUNT = 2**30
# No message and no kernel of one GPU moves a petabyte.
LARGEST_BYTES = 2**50
# No link, kernel or host makes a rank wait for an hour, no clock shows a shorter time,
# and no machine has more bytes or FLOPs, per second or in all.
LONGEST_WAIT_SECONDS = 3600.0
SHORTEST_SECONDS = 1e-12
LARGEST_AMOUNT = 1e24
LONGEST_NAME = 200


def require_positive(owner: str, name: str, value: float, hint: str = "") -> None:
    """Raise InputError unless the value is a finite number above zero."""
    if not (0 < value < math.inf):
        raise InputError(f"{owner}: {name} is {value!r}; allowed: above 0{hint}")


def require_between(owner: str, name: str, value: float, low: float, high: float) -> None:
    """Raise InputError unless the value is a number in ``[low, high]``."""
    if not (low <= value <= high):
        raise InputError(f"{owner}: {name} is {value!r}; allowed: {low:g} to {high:g}")


def require_amount(owner: str, name: str, value: float) -> None:
    """Raise InputError unless the value is a possible number of bytes or FLOPs, or a rate."""
    require_between(owner, name, value, 1.0, LARGEST_AMOUNT)


def require_wait(owner: str, name: str, value: float) -> None:
    """Raise InputError unless the value is a possible time of a kernel's or a message's wait."""
    require_between(owner, name, value, 0.0, LONGEST_WAIT_SECONDS)


def require_duration(owner: str, name: str, value: float) -> None:
    """Raise InputError unless the value is a possible time of one kernel or collective."""
    require_between(owner, name, value, SHORTEST_SECONDS, LONGEST_WAIT_SECONDS)


def require_efficiency(owner: str, name: str, value: float) -> None:
    """Raise InputError unless the value is above zero and at most 1."""
    if not (0 < value <= 1):
        raise InputError(f"{owner}: {name} is {value!r}; allowed: above 0, at most 1")


def is_name(text: str) -> bool:
    """Return whether a name can be printed on one line."""
    return text.isprintable() and len(text) <= LONGEST_NAME


def require_name(owner: str, value: str) -> None:
    """Raise InputError unless the value is a name, as `is_name` says."""
    if not is_name(value):
        raise InputError(
            f"{owner}: name is {value[:LONGEST_NAME]!r}; allowed: up to {LONGEST_NAME} characters "
            "that can be printed"
        )


def require_not_negative(owner: str, name: str, value: float) -> None:
    """Raise InputError unless the value is finite and not negative."""
    if not (0 <= value < math.inf):
        raise InputError(f"{owner}: {name} is {value!r}; allowed: 0 or above")


def require_count(
    owner: str, name: str, value: int, least: int = 1, most: int = LARGEST_COUNT
) -> None:
    """Raise InputError unless the value is a whole number from `least` to `most`."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value <= most:
        raise InputError(
            f"{owner}: {name} is {value!r}; allowed: a whole number, {least} to {most}"
        )


def require_fraction(owner: str, name: str, value: float) -> None:
    """Raise InputError unless the value lies in ``[0, 1]``."""
    require_between(owner, name, value, 0.0, 1.0)


def require_choice(owner: str, name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise InputError unless the name is among the allowed ones."""
    choices = list(allowed)
    if value not in choices:
        named = ", ".join(choice or "nothing" for choice in choices)
        raise InputError(
            f"{owner}: {name} is {value!r}; allowed: {named}{spelling_hint(str(value), choices)}"
        )


def whole_number(text: str) -> int | None:
    """Return the number that decimal digits mean, up to `LARGEST_COUNT`; None for other text."""
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(LARGEST_COUNT))
    return int(text) if is_number and int(text) <= LARGEST_COUNT else None


def positive_number(text: str) -> float | None:
    """Return the finite number above 0 that a text means; None for other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 < value < math.inf else None
