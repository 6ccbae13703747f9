"""A number with its origin: how it is known, and who says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import require_choice, require_fraction, require_positive

ORIGINS = ("measured", "published", "fitted", "assumed")


@dataclass(frozen=True)
class Quantity:
    """A number of a profile, with its origin.

    value
        The number, in the unit that the field's name ends with.
    origin
        How the number is known: measured, published, fitted or assumed.
    source
        Who measured or published it, on which steps it was fitted, or why it is assumed.
    spread_fraction
        Relative standard deviation of the number.
    """

    value: float
    origin: str
    source: str
    spread_fraction: float = 0.0

    def __post_init__(self) -> None:
        require_choice("quantity", "origin", self.origin, ORIGINS)
        require_fraction("quantity", "spread_fraction", self.spread_fraction)
        if not self.source:
            raise InputError("quantity: source is empty; say where the number comes from")

    def scaled(self, factor: float) -> Quantity:
        """Return this quantity with its value times `factor`, for sensitivities."""
        return replace(self, value=self.value * factor)


def require_all_positive(owner: str, instance: Any) -> None:
    """Raise InputError unless every quantity in the fields of `instance` is above zero."""
    for item in fields(instance):
        value = getattr(instance, item.name)
        entries = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, entry in entries:
            if isinstance(entry, Quantity):
                name = f"{item.name}.{key}" if key else item.name
                require_positive(owner, name, entry.value)
