"""Lists of arguments in logs: ``name .... value``, as Megatron-LM and DeepSpeed print them."""

from __future__ import annotations

import re
from collections.abc import Iterable

# DeepSpeed prints no dots behind the longest names.
_DOTTED = re.compile(r"(?:^|[\s:\]>])([a-z]\w+)(?: \.{2,}|  ) ?(\S.*?)\s*$", re.MULTILINE)
_YAML = re.compile(r"^[^\w\n]*([a-z]\w+): ([^\s#][^\n#]*?)\s*$", re.MULTILINE)


def dotted_arguments(text: str) -> dict[str, str]:
    """Return the values of a list with dots by name, the first of each name."""
    return _first_of_each(_DOTTED.findall(text))


def yaml_arguments(text: str, names: Iterable[str]) -> dict[str, str]:
    """Return the values of some keys of a configuration that a program printed as YAML."""
    found = _first_of_each(_YAML.findall(text))
    return {name: found[name] for name in names if name in found}


def count(arguments: dict[str, str], name: str) -> int | None:
    """Return an argument that is a whole number of at least 1, or None."""
    value = arguments.get(name, "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


def is_true(arguments: dict[str, str], name: str) -> bool:
    """Return whether an argument is stated to be true."""
    return arguments.get(name, "").lower() == "true"


def _first_of_each(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the first stated value of each name; None and null state nothing."""
    values: dict[str, str] = {}
    for name, value in pairs:
        if value not in ("None", "null"):
            values.setdefault(name, value.strip("'\""))
    return values
