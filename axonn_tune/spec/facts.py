"""Facts that an engine may state: numbers with an origin, in place of what else holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from axonn_tune.spec.checks import require_between
from axonn_tune.spec.quantity import Quantity

# No engine moves the bytes of a kernel more often than this, or cuts it into more kernels.
LARGEST_FACTOR = 1000.0


def value_or(quantity: Quantity | None, default: float) -> float:
    """Return the value of a fact, or the default where the engine states none."""
    return default if quantity is None else quantity.value


def require_facts(owner: str, facts: Any, names: Iterable[str], low: float, high: float) -> None:
    """Raise InputError unless all of some facts that an engine states lie in ``[low, high]``."""
    for name in names:
        quantity = getattr(facts, name)
        if quantity is not None:
            require_between(owner, name, quantity.value, low, high)
