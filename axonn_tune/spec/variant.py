"""How a layout is executed, in what is the same for all candidates of one plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Variant:
    """Recomputation, and into how many virtual stages a rank's part of a pipeline is cut."""

    recompute: str = "none"
    n_virtual: int = 1
