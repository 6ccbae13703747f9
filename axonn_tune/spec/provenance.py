"""The numbers of a profile, one by one, with their origins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from axonn_tune.spec.calibration import Calibration
from axonn_tune.spec.links import RingBandwidth, RingShare
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.points import POINTS
from axonn_tune.spec.quantity import Quantity

T = TypeVar("T")


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


def restated(before: T, after: T, restate: Callable[[Quantity, Quantity], Quantity]) -> T:
    """Return `after` with every changed quantity replaced by `restate` of its old and new one."""
    if before is after:
        return after
    if isinstance(before, Quantity) and isinstance(after, Quantity):
        changed = before.value != after.value
        return cast(T, restate(before, after)) if changed else after
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        pairs = ((key, restated(before[key], after[key], restate)) for key in after)
        return cast(T, dict(pairs))
    if isinstance(before, tuple) and isinstance(after, tuple):
        entries = zip(before, after, strict=True)
        return cast(T, tuple(restated(old, new, restate) for old, new in entries))
    if is_dataclass(after) and not isinstance(after, (type, *POINTS)):
        names = (item.name for item in fields(after))
        parts = {
            name: restated(getattr(before, name), getattr(after, name), restate) for name in names
        }
        return cast(T, replace(after, **parts))
    return after
