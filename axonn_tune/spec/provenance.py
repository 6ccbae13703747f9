"""The numbers of a profile, one by one, with their origins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from axonn_tune.spec.calibration import Calibration
from axonn_tune.spec.machine import Machine, Quantity, RingBandwidth, RingShare
from axonn_tune.spec.points import POINTS


def quantities(machine: Machine) -> Iterator[tuple[str, Quantity]]:
    """Yield every quantity of a profile with its dotted name, which ends in the unit's suffix."""
    yield from _walk(machine, "")


def _walk(value: Any, prefix: str) -> Iterator[tuple[str, Quantity]]:
    """Yield the quantities inside a value whose dotted name is `prefix`."""
    if isinstance(value, Quantity):
        yield prefix, value
    elif isinstance(value, Mapping):
        owner, _, last = prefix.rpartition(".")
        for key, entry in value.items():
            yield from _walk(entry, f"{owner}.{key}.{last}".lstrip("."))
    elif isinstance(value, tuple):
        for entry in value:
            if isinstance(entry, RingBandwidth):
                yield from _walk(entry, f"{prefix}.({entry.stride},{entry.size})")
            elif isinstance(entry, RingShare):
                yield from _walk(entry, f"{prefix}.({entry.kind},{entry.n_rings})")
            elif not isinstance(entry, POINTS):
                yield from _walk(entry, f"{prefix}.{getattr(entry, 'name', '')}")
    elif is_dataclass(value) and not isinstance(value, Calibration):
        for item in fields(value):
            yield from _walk(getattr(value, item.name), f"{prefix}.{item.name}".lstrip("."))
