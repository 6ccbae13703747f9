"""A configuration: all that must be known to run one training step on given ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from axonn_tune.spec.layout import PAPER_ORDER, Layout


@dataclass(frozen=True)
class Configuration:
    """A layout, and how it is executed.

    layout
        Number of ranks along each axis.
    order
        Rank order of a grid, the fastest varying axis first.
    micro_batch
        Number of sequences that one rank processes at once.
    recompute
        What the backward pass recomputes: none, selective, full, full:4 for four layers of each
        stage, or selective:moe_act,layernorm for single modules.
    n_virtual
        Number of virtual stages into which a rank's part of a pipeline is cut.
    """

    # Files name the layout of a configuration by its oldest form.
    FILE_KEYS: ClassVar[Mapping[str, str]] = {"layout": "grid"}
    ALWAYS_WRITTEN: ClassVar[tuple[str, ...]] = ("order", "micro_batch", "recompute")

    layout: Layout
    order: str = PAPER_ORDER
    micro_batch: int = 1
    recompute: str = "none"
    n_virtual: int = 1

    @property
    def ordered_layout(self) -> str:
        """The layout, and the rank order where it is not the paper's."""
        return f"{self.layout}" if self.order == PAPER_ORDER else f"{self.layout} {self.order}"

    @property
    def brief_layout(self) -> str:
        """The layout for a table: that of a grid, or else without the axes of size 1."""
        return self.ordered_layout if self.layout.is_grid else self.layout.brief

    @property
    def in_words(self) -> str:
        """All that must be known to run it, for a sentence; the rank order is told of a grid."""
        order = f", order {self.order}" if self.layout.is_grid else ""
        virtual = f", {self.n_virtual} virtual stages" if self.n_virtual > 1 else ""
        return (
            f"{self.layout}{order}{virtual}, micro-batch {self.micro_batch}, "
            f"recompute {self.recompute}"
        )

    def __str__(self) -> str:
        order = f" {self.order}" if self.layout.is_grid else ""
        virtual = f", {self.n_virtual} virtual stages" if self.n_virtual > 1 else ""
        return f"{self.layout}{order}{virtual}, micro-batch {self.micro_batch}, {self.recompute}"
