"""Files that state only what differs from another one, their base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BASE = "base"
# What tells one model, machine or engine from another, and so is never taken from the base.
_OWN_KEYS = ("name", "title", "description")
# Keys of a number, or of a table, with its origin: these belong together.
_EVIDENCE_KEYS = {"value", "origin", "source"}


def on_base(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file says that has a base, both as plain data.

    Keys of the file come on top of those of the base, in mappings inside of them, too. A number
    with its origin, a table of points and a list take the place of what the base has. An entry of a
    list that has only a name is the entry of that name in the base, and null takes a key away.
    """
    described = {key: value for key, value in base.items() if key not in _OWN_KEYS}
    return _merged(described, {key: value for key, value in own.items() if key != BASE})


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of both mappings; those of the file count."""
    merged = dict(base)
    for key, value in own.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _on_top(merged.get(key), value)
    return merged


def _on_top(base: Any, own: Any) -> Any:
    """Return a value of the file, completed by what the base has in its place."""
    if isinstance(base, dict) and isinstance(own, dict) and not _EVIDENCE_KEYS & own.keys():
        return _merged(base, own)
    if isinstance(base, list) and isinstance(own, list):
        named = {entry["name"]: entry for entry in base if _has_name(entry)}
        return [
            named.get(entry["name"], entry) if _has_name(entry) and len(entry) == 1 else entry
            for entry in own
        ]
    return own


def _has_name(entry: Any) -> bool:
    """Return whether an entry of a list is a mapping with a name."""
    return isinstance(entry, dict) and isinstance(entry.get("name"), str)
