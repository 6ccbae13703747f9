"""Grids, rank orders and the table of candidates."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from axonn_tune.errors import InputError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

AXES = ("x", "y", "z", "data")
PIPELINE = "pipeline"
# What users call them too.
ALIASES = {"tp": "tensor", "cp": "context", "dp": "data", "pp": PIPELINE}
PAPER_ORDER = "xyzd"
# Fastest varying axis of the rank number first; the paper's order comes first.
ORDERS = tuple("".join(letters) for letters in permutations(PAPER_ORDER))


@dataclass(frozen=True)
class Axes:
    """The axes along which a strategy arranges its ranks.

    names: in rank order, fastest varying first. batch: those that split the global batch.
    groups: over what collectives run, axes or products of neighbouring ones, such as
    ``context*data``.
    """

    names: tuple[str, ...]
    batch: tuple[str, ...]
    groups: tuple[str, ...]

    @property
    def is_grid(self) -> bool:
        """Whether its layouts are grids of AxoNN, with or without a pipeline."""
        return set(AXES) <= set(self.names)

    @property
    def has_orders(self) -> bool:
        """Whether the rank order is part of a candidate: that of the four axes alone."""
        return self.names == AXES


AXONN_AXES = Axes(AXES, ("z", "data"), AXES)


@dataclass(frozen=True, order=True)
class Grid:
    """One G_x x G_y x G_z x G_data grid, on each of so many stages of a pipeline."""

    x: int
    y: int
    z: int
    data: int
    pipeline: int = 1

    @classmethod
    def parse(cls, text: str) -> Grid:
        """Read ``'8x4x4x8'``: x, y, z, data, and if there is a fifth, stages.

        Raises
        ------
        InputError
            Not four or five whole numbers above zero.
        """
        sizes = re.split(r"[x×,]", text.strip())
        are_sizes = all(re.fullmatch(r"[1-9]\d{0,8}", size) for size in sizes)
        if len(sizes) not in (4, 5) or not are_sizes:
            raise InputError(
                f"grid '{text}' is not four sizes; write G_x x G_y x G_z x G_data, "
                "for example 8x4x4x8"
            )
        return cls(*(int(size) for size in sizes))

    @property
    def sizes(self) -> dict[str, int]:
        """Size by axis."""
        of_axes = {axis: getattr(self, axis) for axis in AXES}
        return of_axes if self.pipeline == 1 else {**of_axes, PIPELINE: self.pipeline}

    @property
    def n_ranks(self) -> int:
        """Product of the sizes."""
        return self.x * self.y * self.z * self.data * self.pipeline

    def __str__(self) -> str:
        return "x".join(str(size) for size in self.sizes.values())


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes of a strategy other than AxoNN's, by name in rank order."""

    sizes: Mapping[str, int]

    @property
    def n_ranks(self) -> int:
        """Product of the sizes."""
        return math.prod(self.sizes.values())

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.sizes.items())


AnyGrid: TypeAlias = Grid | Layout


def parse_grid(text: str, axes: Axes) -> AnyGrid:
    """Read ``'8x4x4x8'`` for AxoNN, ``'tensor=8,data=16'`` for others; axes left out are 1.

    Raises
    ------
    InputError
        Not sizes of the axes.
    """
    if axes.is_grid:
        grid = Grid.parse(text)
        if grid.pipeline > 1 and PIPELINE not in axes.names:
            raise InputError(f"grid '{text}' has a fifth size, the stages of axonn-pipeline")
        return grid
    given: dict[str, int] = {}
    for part in text.strip().split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        name = ALIASES.get(name, name)
        if name not in axes.names or not re.fullmatch(r"[1-9]\d{0,8}", size):
            example = ",".join(f"{axis}=2" for axis in axes.names)
            raise InputError(
                f"layout '{text}': '{part}' is not the size of an axis; for example {example}"
            )
        if given.setdefault(name, int(size)) != int(size):
            raise InputError(f"layout '{text}': {name} has two sizes; give one")
    return Layout({axis: given.get(axis, 1) for axis in axes.names})


def check_order(text: str) -> str:
    """An order such as ``'xyzd'``: the four axes, fastest varying first.

    Raises
    ------
    InputError
        Not a permutation of x, y, z, d.
    """
    if text not in ORDERS:
        raise InputError(
            f"order '{text}' is not a permutation of 'xyzd' (fastest varying axis first, d = data)"
        )
    return text


@lru_cache
def _axes_before(axes: Axes) -> npt.NDArray[np.bool_]:
    """``[order, axis, other]``: whether `other` varies faster than `axis`."""
    place = np.arange(len(axes.names))[None]
    if axes.has_orders:
        place = np.array([[order.index(axis[0]) for axis in AXES] for order in ORDERS])
    before: npt.NDArray[np.bool_] = place[:, None, :] < place[:, :, None]
    return before


@dataclass(frozen=True, eq=False)
class Placements:
    """Grids with a rank order each, as columns of shape (P,).

    `sizes` has shape (A, P), the axes as they are listed; `order` indexes `ORDERS`.
    """

    sizes: Ints
    order: Ints
    axes: Axes = AXONN_AXES

    @classmethod
    def of(
        cls,
        grids: Sequence[AnyGrid],
        orders: Sequence[str] = (PAPER_ORDER,),
        axes: Axes = AXONN_AXES,
    ) -> Placements:
        """Every grid in every order; orders that place a grid's ranks alike are kept once.

        An axis of size one has no place, so of the orders that differ only in where such
        axes stand the first one listed is kept.
        """
        columns = [[grid.sizes.get(axis, 1) for axis in axes.names] for grid in grids]
        sizes = np.array(columns, dtype=np.int64).reshape(-1, len(axes.names)).T
        return cls.of_sizes(sizes, orders, axes)

    @classmethod
    def of_sizes(
        cls, sizes: Ints, orders: Sequence[str] = (PAPER_ORDER,), axes: Axes = AXONN_AXES
    ) -> Placements:
        """As `of`, from an array of shape (A, number of grids)."""
        n_grids = sizes.shape[1]
        if len(orders) == 1:
            index = np.full(n_grids, ORDERS.index(orders[0]), dtype=np.int64)
            return cls(sizes, index, axes)
        pattern = (sizes[: len(AXES)] > 1).T @ np.array([1, 2, 4, 8])
        kept_by_pattern = [_distinct_orders(orders, bits) for bits in range(16)]
        counts = np.array([len(kept) for kept in kept_by_pattern])[pattern]
        order = np.concatenate([kept_by_pattern[bits] for bits in pattern] or [[]])
        return cls(np.repeat(sizes, counts, axis=1), order.astype(np.int64), axes)

    def __len__(self) -> int:
        return int(self.order.size)

    def take(self, rows: Ints | slice | npt.NDArray[np.bool_]) -> Placements:
        """The placements of the given rows."""
        return Placements(self.sizes[:, rows], self.order[rows], self.axes)

    @cached_property
    def strides(self) -> Ints:
        """Distance in rank numbers between neighbours of each axis's group, shape (A, P)."""
        before = _axes_before(self.axes)[self.order]  # (P, axis, other)
        factors = np.where(before, self.sizes.T[:, None, :], 1)
        product: Ints = factors.prod(axis=2).T
        return product

    def size(self, group: str) -> Ints:
        """Ranks of each group of an axis, or of a product of axes, shape (P,)."""
        product: Ints = self.sizes[self._rows(group)].prod(axis=0)
        return product

    def stride(self, group: str) -> Ints:
        """Distance in rank numbers between neighbours of each group, shape (P,)."""
        nearest: Ints = self.strides[self._rows(group)].min(axis=0)
        return nearest

    def _rows(self, group: str) -> list[int]:
        return [self.axes.names.index(axis) for axis in group.split("*")]

    def grid(self, row: int) -> AnyGrid:
        """The grid of one row."""
        sizes = [int(size) for size in self.sizes[:, row]]
        of_axes = dict(zip(self.axes.names, sizes, strict=True))
        return Grid(**of_axes) if self.axes.is_grid else Layout(of_axes)


def _distinct_orders(orders: Sequence[str], present_bits: int) -> list[int]:
    present = {axis[0] for bit, axis in enumerate(AXES) if present_bits >> bit & 1}
    seen: dict[str, int] = {}
    for order in orders:
        seen.setdefault("".join(a for a in order if a in present), ORDERS.index(order))
    return list(seen.values())


@dataclass(frozen=True, eq=False)
class CandidateTable:
    """Candidates as columns: a row is a placement with a micro-batch.

    `placement` indexes `placements`; `micro_batch` counts sequences that one rank
    processes at once. Both have shape (C,).
    """

    placements: Placements
    placement: Ints
    micro_batch: Ints

    @classmethod
    def single(
        cls,
        grid: AnyGrid,
        order: str = PAPER_ORDER,
        micro_batch: int = 1,
        axes: Axes = AXONN_AXES,
    ) -> CandidateTable:
        """A table of length one."""
        placements = Placements.of([grid], (check_order(order),), axes)
        return cls(placements, np.zeros(1, np.int64), np.array([micro_batch], np.int64))

    def __len__(self) -> int:
        return int(self.placement.size)

    def take(self, rows: Ints | slice | npt.NDArray[np.bool_]) -> CandidateTable:
        """The candidates of the given rows, over the same placements."""
        return CandidateTable(self.placements, self.placement[rows], self.micro_batch[rows])

    def size(self, group: str) -> Floats:
        """Ranks along an axis, or a product of axes, shape (C,)."""
        if group not in self._sizes:
            self._sizes[group] = self.placements.size(group).astype(np.float64)[self.placement]
        return self._sizes[group]

    @cached_property
    def _sizes(self) -> dict[str, Floats]:
        return {}

    @property
    def n_stages(self) -> int:
        """Stages of the pipeline, which all candidates of a plan share."""
        if PIPELINE not in self.placements.axes.names or not len(self):
            return 1
        sizes = self.size(PIPELINE)
        assert (sizes == sizes[0]).all(), "candidates of one plan have the same stages"
        return int(sizes[0])

    @cached_property
    def sequences_at_once(self) -> Floats:
        """`micro_batch` as float64, shape (C,)."""
        return self.micro_batch.astype(np.float64)

    def n_microsteps(self, global_batch: int) -> Floats:
        """Gradient accumulation: micro-steps that make one global batch, shape (C,)."""
        over = "*".join(self.placements.axes.batch)
        per_microstep = self.size(over) * self.sequences_at_once
        steps: Floats = global_batch / per_microstep
        return steps


def distinct(*columns: Ints) -> tuple[Ints, Ints]:
    """The first row of each distinct combination, and for each row its combination.

    Parameters
    ----------
    columns : arrays of non-negative int, shape (C,)

    Returns
    -------
    rows : shape (K,)
    inverse : shape (C,), values in [0, K)
    """
    code = np.zeros(columns[0].shape, dtype=np.int64)
    for column in columns:
        values, index = np.unique(column, return_inverse=True)
        code = code * values.size + index
    _, rows, inverse = np.unique(code, return_index=True, return_inverse=True)
    return rows, inverse
