"""Grids, rank orders and the table of candidates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np
import numpy.typing as npt

from axonn_tune.errors import InputError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

AXES = ("x", "y", "z", "data")
PAPER_ORDER = "xyzd"
# Fastest varying axis of the rank number first; the paper's order comes first.
ORDERS = tuple("".join(letters) for letters in permutations(PAPER_ORDER))


@dataclass(frozen=True, order=True)
class Grid:
    """One G_x x G_y x G_z x G_data grid."""

    x: int
    y: int
    z: int
    data: int

    @classmethod
    def parse(cls, text: str) -> Grid:
        """Read ``'8x4x4x8'``: x, y, z, data.

        Raises
        ------
        InputError
            Not four whole numbers above zero.
        """
        sizes = re.split(r"[x×,]", text.strip())
        if len(sizes) != 4 or not all(re.fullmatch(r"[1-9]\d{0,8}", size) for size in sizes):
            raise InputError(
                f"grid '{text}' is not four sizes; write G_x x G_y x G_z x G_data, "
                "for example 8x4x4x8"
            )
        return cls(*(int(size) for size in sizes))

    @property
    def n_ranks(self) -> int:
        """Product of the four sizes."""
        return self.x * self.y * self.z * self.data

    def __str__(self) -> str:
        return f"{self.x}x{self.y}x{self.z}x{self.data}"


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


def _axes_before() -> npt.NDArray[np.bool_]:
    """``[order, axis, other]``: whether `other` varies faster than `axis`."""
    letters = [axis[0] for axis in AXES]
    return np.array([[[o.index(b) < o.index(a) for b in letters] for a in letters] for o in ORDERS])


_BEFORE = _axes_before()


@dataclass(frozen=True, eq=False)
class Placements:
    """Grids with a rank order each, as columns of shape (P,).

    `sizes` has shape (4, P), the axes in the order x, y, z, data; `order` indexes `ORDERS`.
    """

    sizes: Ints
    order: Ints

    @classmethod
    def of(cls, grids: Sequence[Grid], orders: Sequence[str] = (PAPER_ORDER,)) -> Placements:
        """Every grid in every order; orders that place a grid's ranks alike are kept once.

        An axis of size one has no place, so of the orders that differ only in where such
        axes stand the first one listed is kept.
        """
        sizes = np.array([[g.x, g.y, g.z, g.data] for g in grids], dtype=np.int64).reshape(-1, 4).T
        return cls.of_sizes(sizes, orders)

    @classmethod
    def of_sizes(cls, sizes: Ints, orders: Sequence[str] = (PAPER_ORDER,)) -> Placements:
        """As `of`, from an array of shape (4, number of grids)."""
        n_grids = sizes.shape[1]
        if len(orders) == 1:
            index = np.full(n_grids, ORDERS.index(orders[0]), dtype=np.int64)
            return cls(sizes, index)
        pattern = (sizes > 1).T @ np.array([1, 2, 4, 8])
        kept_by_pattern = [_distinct_orders(orders, bits) for bits in range(16)]
        counts = np.array([len(kept) for kept in kept_by_pattern])[pattern]
        order = np.concatenate([kept_by_pattern[bits] for bits in pattern] or [[]])
        return cls(np.repeat(sizes, counts, axis=1), order.astype(np.int64))

    def __len__(self) -> int:
        return int(self.order.size)

    def take(self, rows: Ints | slice | npt.NDArray[np.bool_]) -> Placements:
        """The placements of the given rows."""
        return Placements(self.sizes[:, rows], self.order[rows])

    @cached_property
    def strides(self) -> Ints:
        """Distance in rank numbers between neighbours of each axis's group, shape (4, P)."""
        before = _BEFORE[self.order]  # (P, axis, other)
        factors = np.where(before, self.sizes.T[:, None, :], 1)
        product: Ints = factors.prod(axis=2).T
        return product

    def grid(self, row: int) -> Grid:
        """The grid of one row."""
        return Grid(*(int(size) for size in self.sizes[:, row]))


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
    def single(cls, grid: Grid, order: str = PAPER_ORDER, micro_batch: int = 1) -> CandidateTable:
        """A table of length one."""
        placements = Placements.of([grid], (check_order(order),))
        return cls(placements, np.zeros(1, np.int64), np.array([micro_batch], np.int64))

    def __len__(self) -> int:
        return int(self.placement.size)

    def take(self, rows: Ints | slice | npt.NDArray[np.bool_]) -> CandidateTable:
        """The candidates of the given rows, over the same placements."""
        return CandidateTable(self.placements, self.placement[rows], self.micro_batch[rows])

    def size(self, axis: str) -> Floats:
        """Ranks along one axis, shape (C,)."""
        sizes: Floats = self._sizes[AXES.index(axis)]
        return sizes

    @cached_property
    def _sizes(self) -> Floats:
        return self.placements.sizes.astype(np.float64)[:, self.placement]

    @cached_property
    def sequences_at_once(self) -> Floats:
        """`micro_batch` as float64, shape (C,)."""
        return self.micro_batch.astype(np.float64)

    def n_microsteps(self, global_batch: int) -> Floats:
        """Gradient accumulation: micro-steps that make one global batch, shape (C,)."""
        per_microstep = self.size("z") * self.size("data") * self.sequences_at_once
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
