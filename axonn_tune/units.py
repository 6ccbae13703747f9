"""Read and print physical quantities: ``"25 GB/s"`` becomes 2.5e10 and back.

Prefixes of units are known only here. Units are SI, so ``GB`` is 1e9 bytes; ``KiB``, ``MiB``,
``GiB`` and so on are powers of 1024. Bits are refused: a link rate in Gbit/s that is read as
GB/s is wrong by a factor of eight.
"""

from __future__ import annotations

import math
import re

from axonn_tune.errors import InputError

HOUR_SECONDS = 3600.0
DAY_SECONDS = 86400.0
GIB_BYTES = 2.0**30
YEAR_SECONDS = 365.25 * DAY_SECONDS
LARGEST_SIZE_BYTES = 1e18

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SECONDS = {
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "ns": 1e-9,
    "min": 60.0,
    "h": HOUR_SECONDS,
    "d": DAY_SECONDS,
    "y": YEAR_SECONDS,
}
_QUANTITY = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\s\d]\S*)?\s*")

# The suffix of a field's name fixes the units of its value. Error messages show these examples.
_EXAMPLES = {
    "_bytes_per_s": "25 GB/s",
    "_flops_per_s": "312 TFLOP/s",
    "_bytes": "40 GB",
    "_seconds": "5 us",
    "_fraction": "0.9",
    "_watts": "2.4 kW",
}

# These units take a prefix.
_UNITS = {"_bytes_per_s": "B/s", "_bytes": "B", "_flops_per_s": "FLOP/s", "_watts": "W"}


def suffix_of(field_name: str) -> str | None:
    """Return the unit suffix of a field's name, or None if its value is a plain number."""
    return next((suffix for suffix in _EXAMPLES if f"_{field_name}".endswith(suffix)), None)


def parse_quantity(text: str | float | int, field_name: str, needs_unit: bool = False) -> float:
    """Return the SI value of a field from a number with an optional unit.

    Parameters
    ----------
    text : str or number
        A text such as ``"25 GB/s"``, ``"5 us"`` or ``"312 TFLOP/s"``, or a number in SI.
    field_name : str
        Name of the field. Its suffix (``_bytes_per_s``, ``_seconds``, ...) fixes the units.
    needs_unit : bool
        Whether a text must name the unit of a field that has one; fractions and zero need none.

    Raises
    ------
    InputError
        The text is not a number, or its unit is unknown, missing or one of bits.
    """
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise InputError(f"{field_name}: expected a number, got {text!r}")
    if not isinstance(text, str):
        return float(text)
    suffix = suffix_of(field_name)
    example = f", for example '{_EXAMPLES[suffix]}'" if suffix else ""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise InputError(f"{field_name}: '{text}' is not a number{example}")
    number = float(match[1])
    unit = match[2] or ""
    if needs_unit and number and not unit and suffix not in (None, "_fraction"):
        raise InputError(f"{field_name}: '{text}' has no unit{example}")
    scale = 1.0 if unit == "" else _scale(unit, suffix)
    if scale is None:
        is_bits = re.fullmatch(r"[kKMGTP]i?(b|bit|bits)(/s|ps)?", unit) is not None
        hint = f" (bits: divide by 8 and write {unit[0]}B)" if is_bits else example
        raise InputError(f"{field_name}: unit '{unit}' in '{text}' is not allowed{hint}")
    return number * scale


def _scale(unit: str, suffix: str | None) -> float | None:
    """Return a unit's value in SI, or None if fields with this suffix do not allow it."""
    if suffix == "_seconds":
        return _SECONDS.get(unit)
    if suffix == "_fraction":
        return 0.01 if unit == "%" else None
    ending = _UNITS.get(suffix or "")
    if ending is None or not unit.endswith(ending):
        return None
    prefix = unit.removesuffix(ending)
    return _DECIMAL.get(prefix, _BINARY.get(prefix))


def rounded(value: float, digits: int) -> float:
    """Return a number rounded to some significant digits."""
    return float(f"{value:.{digits}g}")


def _with_prefix(value: float, unit: str, digits: int) -> str:
    shown = rounded(value, digits)
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(shown) >= scale:
            return f"{shown / scale:.{digits}g} {prefix}{unit}"
    return f"{shown:.{digits}g} {unit}"


def format_quantity(value: float, field_name: str, digits: int = 4) -> str:
    """Return an SI value as text, in the unit that the suffix of the field's name fixes.

    >>> format_quantity(2.5e10, "bandwidth_bytes_per_s")
    '25 GB/s'
    """
    suffix = suffix_of(field_name)
    if suffix == "_seconds":
        return format_seconds(value, digits)
    unit = _UNITS.get(suffix or "")
    return f"{value:.{digits}g}" if unit is None else _with_prefix(value, unit, digits)


def format_seconds(seconds: float, digits: int = 4) -> str:
    """Return a time as text, in a unit that fits.

    >>> format_seconds(0.0123)
    '12.3 ms'
    """
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    if abs(seconds) >= 2 * DAY_SECONDS:
        return f"{seconds / DAY_SECONDS:.{digits}g} d"
    if abs(seconds) >= 2 * HOUR_SECONDS:
        return f"{seconds / HOUR_SECONDS:.{digits}g} h"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.{digits}g} {unit}"
    return f"{seconds / 1e-9:.{digits}g} ns"


def gib(n_bytes: float) -> float:
    """Return a number of bytes in GiB."""
    return n_bytes / GIB_BYTES


def format_count(value: float) -> str:
    """Return a count as text, with B for 1e9 as in "a model of 80B parameters".

    >>> format_count(8.0e10)
    '80B'
    """
    for prefix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{prefix}"
    return f"{value:.4g}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, of which only the plural of regular ones is known.

    >>> counted(1, "run"), counted(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def parse_count(text: str, owner: str) -> float:
    """Return the number that a text such as ``"2T"`` or ``"300B"`` means.

    Parameters
    ----------
    owner : str
        The flag or field that holds the text, as error messages call it.

    Raises
    ------
    InputError
        The text is not a count.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)(e\d+)?\s*([kKMBGT]?)\s*", text)
    if match is None:
        raise InputError(f"{owner}: '{text}' is not a count, for example 2T or 300B")
    number = float(match[1] + (match[2] or ""))
    return number * {**_DECIMAL, "B": 1e9}[match[3]]


def parse_size(text: str, owner: str, needs_unit: bool = False) -> int:
    """Return the whole number of bytes that a text such as ``"64 MiB"`` means.

    Parameters
    ----------
    owner : str
        The flag or field that holds the text, as error messages call it.
    needs_unit : bool
        Whether a size other than zero must name its unit.

    Raises
    ------
    InputError
        The text is not a size.
    """
    try:
        nbytes = parse_quantity(text, "_bytes", needs_unit)
    except InputError as error:
        raise InputError(str(error).replace("_bytes:", f"{owner}:", 1)) from None
    if not 0 <= nbytes <= LARGEST_SIZE_BYTES:
        raise InputError(f"{owner}: '{text}'; allowed: 0 to 1 EB")
    return round(nbytes)
