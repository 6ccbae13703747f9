"""Candidates as columns: placements of ranks, and the configurations that are tried on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.layout import (
    AXES,
    AXONN_AXES,
    EXPERT,
    EXPERT_REPLICAS,
    LETTERS,
    ORDERS,
    PAPER_ORDER,
    PIPELINE,
    Axes,
    Layout,
    check_order,
)
from axonn_tune.spec.recomputation import recompute_code, recompute_text

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Rows = Ints | slice | npt.NDArray[np.bool_]


@lru_cache
def _axes_before(axes: Axes) -> npt.NDArray[np.bool_]:
    """Return whether `other` varies faster than `axis`, as bool of shape (order, axis, other)."""
    position = np.arange(len(axes.names))[None]
    if axes.has_orders:
        position = np.array([[order.index(LETTERS[axis]) for axis in AXES] for order in ORDERS])
    return position[:, None, :] < position[:, :, None]


@dataclass(frozen=True, eq=False)
class Placements:
    """Holds layouts with a rank order each, as columns of shape (P,).

    `sizes` has shape (A, P) in the order in which the axes are listed, the folded one being last;
    `order` indexes `ORDERS`.
    """

    sizes: Ints
    order: Ints
    axes: Axes

    @classmethod
    def of(
        cls,
        layouts: Sequence[Layout],
        orders: Sequence[str] = (PAPER_ORDER,),
        axes: Axes = AXONN_AXES,
    ) -> Placements:
        """Return every layout in every order; orders that place ranks equally are kept once.

        The position of an axis of size one in an order does not matter, so that of the orders that
        differ only there the first one listed is kept.
        """
        columns = [[layout.size(axis) for axis in axes.sized] for layout in layouts]
        sizes = np.array(columns, dtype=np.int64).reshape(-1, len(axes.sized)).T
        return cls.of_sizes(sizes, orders, axes)

    @classmethod
    def of_sizes(cls, sizes: Ints, orders: Sequence[str], axes: Axes) -> Placements:
        """Return the same as `of`, from an array of sizes of shape (A, number of layouts)."""
        order = np.full(sizes.shape[1], ORDERS.index(orders[0]), dtype=np.int64)
        return cls(sizes, order, axes).in_orders(orders)

    def __len__(self) -> int:
        return int(self.order.size)

    def in_orders(self, orders: Sequence[str]) -> Placements:
        """Return the layout of each row in every order; orders that place ranks equally count once.

        A layout has as many rows, one after another, as `n_orders` says.
        """
        if len(orders) == 1:
            return replace(self, order=np.full(len(self), ORDERS.index(orders[0]), np.int64))
        distinct_orders = _distinct_orders(tuple(orders))
        order = [distinct_orders[bits] for bits in self._present_bits.tolist()]
        sizes = np.repeat(self.sizes, self.n_orders(orders), axis=1)
        return Placements(sizes, np.concatenate([np.zeros(0, np.int64), *order]), self.axes)

    def n_orders(self, orders: Sequence[str]) -> Ints:
        """Return how many of some orders place the ranks of each layout differently, shape (P,)."""
        if len(orders) == 1:
            return np.ones(len(self), np.int64)
        counts = np.array([kept.size for kept in _distinct_orders(tuple(orders))])
        return counts[self._present_bits]

    @property
    def layout_numbers(self) -> Ints:
        """A number for the layout of each row, shape (P,); its orders stand one after another."""
        differs = (self.sizes[:, 1:] != self.sizes[:, :-1]).any(axis=0)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(differs)])[: len(self)]

    @property
    def _present_bits(self) -> Ints:
        """A bit for each axis that has more than one rank, shape (P,)."""
        return (self.sizes[: len(AXES)] > 1).T @ np.array([1, 2, 4, 8])

    def take(self, rows: Rows) -> Placements:
        """Return the placements of the given rows."""
        return Placements(self.sizes[:, rows], self.order[rows], self.axes)

    @cached_property
    def strides(self) -> Ints:
        """The distance in rank numbers between neighbours of each axis's group, shape (A, P).

        The folded axis has no row here.
        """
        before = _axes_before(self.axes)[self.order]  # (P, axis, other)
        arranging = self.sizes[: len(self.axes.names)]
        return np.where(before, arranging.T[:, None, :], 1).prod(axis=2).T

    @property
    def n_ranks(self) -> Ints:
        """The number of ranks of each job, shape (P,)."""
        return self.sizes[: len(self.axes.names)].prod(axis=0)

    def size(self, group: str) -> Ints:
        """Return the number of ranks in each group of an axis or product of axes, shape (P,).

        An empty group is that of a rank alone.
        """
        if group == EXPERT:
            return self.sizes[-1]
        if group == EXPERT_REPLICAS:
            return self.size(self.axes.folded) // self.sizes[-1]
        return self.sizes[self._rows(group)].prod(axis=0)

    def stride(self, group: str) -> Ints:
        """Return the distance in rank numbers between neighbours of each group, shape (P,)."""
        if group in (EXPERT, EXPERT_REPLICAS):
            first = self.stride(self.axes.folded)
            return first if group == EXPERT else first * self.sizes[-1]
        return self.strides[self._rows(group)].min(axis=0)

    def _rows(self, group: str) -> list[int]:
        """Return the rows of `sizes` that belong to an axis or a product of axes."""
        return [self.axes.names.index(axis) for axis in group.split("*") if group]

    def layout(self, row: int) -> Layout:
        """Return the layout of one row."""
        sizes = dict(zip(self.axes.sized, self.sizes[:, row].tolist(), strict=True))
        if self.axes.is_grid:
            sizes = {axis: sizes.get(axis, 1) for axis in (*AXES, PIPELINE)}
        return Layout(sizes)


@lru_cache
def _distinct_orders(orders: tuple[str, ...]) -> list[Ints]:
    """Return `_orders_of` for the bits of every choice of axes."""
    return [_orders_of(orders, present_bits) for present_bits in range(2 ** len(AXES))]


def _orders_of(orders: Sequence[str], present_bits: int) -> Ints:
    """Return the indices of the orders that differ in where they place the axes with these bits."""
    present = {LETTERS[axis] for bit, axis in enumerate(AXES) if present_bits >> bit & 1}
    seen: dict[str, int] = {}
    for order in orders:
        letters = "".join(letter for letter in order if letter in present)
        seen.setdefault(letters, ORDERS.index(order))
    return np.array(list(seen.values()), np.int64)


@dataclass(frozen=True, eq=False)
class CandidateTable:
    """Holds candidates as columns of shape (C,): a row is a configuration.

    placement
        Row of `placements`.
    micro_batch
        Number of sequences that one rank processes at once.
    recompute
        Number of the recomputation (see `spec.recomputation`); none where it is not given.
    n_virtual
        Number of virtual stages of a rank's part of a pipeline; 1 where it is not given.
    """

    placements: Placements
    placement: Ints
    micro_batch: Ints
    recompute: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    n_virtual: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        if self.recompute.size != len(self):
            object.__setattr__(self, "recompute", np.zeros(len(self), np.int64))
        if self.n_virtual.size != len(self):
            object.__setattr__(self, "n_virtual", np.ones(len(self), np.int64))

    @classmethod
    def single(cls, configuration: Configuration, axes: Axes = AXONN_AXES) -> CandidateTable:
        """Return the table that holds one configuration."""
        return cls.of([configuration], axes)

    @classmethod
    def of(cls, configurations: Sequence[Configuration], axes: Axes) -> CandidateTable:
        """Return the table that holds some configurations, each on a placement of its own."""
        sizes = [[c.layout.size(axis) for axis in axes.sized] for c in configurations]
        orders = [ORDERS.index(check_order(c.order)) for c in configurations]
        executions = [
            [c.micro_batch, recompute_code(c.recompute), c.n_virtual] for c in configurations
        ]
        placements = Placements(np.array(sizes, np.int64).T, np.array(orders, np.int64), axes)
        return cls(placements, np.arange(len(placements)), *np.array(executions, np.int64).T)

    def __len__(self) -> int:
        return int(self.placement.size)

    def configuration(self, row: int) -> Configuration:
        """Return the configuration of one row."""
        placement = int(self.placement[row])
        return Configuration(
            layout=self.placements.layout(placement),
            order=ORDERS[int(self.placements.order[placement])],
            micro_batch=int(self.micro_batch[row]),
            recompute=recompute_text(int(self.recompute[row])),
            n_virtual=int(self.n_virtual[row]),
        )

    def take(self, rows: Rows) -> CandidateTable:
        """Return the candidates of the given rows, over the same placements."""
        return CandidateTable(
            self.placements,
            self.placement[rows],
            self.micro_batch[rows],
            self.recompute[rows],
            self.n_virtual[rows],
        )

    def compact(self) -> CandidateTable:
        """Return the same rows without the placements that none of them has."""
        placements = self.placements.take(self.placement)
        return replace(self, placements=placements, placement=np.arange(len(self)))

    def executed(self, recompute: str, n_virtual: int) -> CandidateTable:
        """Return the same rows with another recomputation and number of virtual stages."""
        codes = np.full(len(self), recompute_code(recompute))
        return replace(self, recompute=codes, n_virtual=np.full(len(self), n_virtual))

    def joined(self, other: CandidateTable) -> CandidateTable:
        """Return the rows of this table and of another one over the same placements."""
        return CandidateTable(
            self.placements,
            np.concatenate([self.placement, other.placement]),
            np.concatenate([self.micro_batch, other.micro_batch]),
            np.concatenate([self.recompute, other.recompute]),
            np.concatenate([self.n_virtual, other.n_virtual]),
        )

    def alike(self) -> Iterator[Ints]:
        """Yield the rows of candidates that are alike, group by group.

        Candidates are called alike if their recomputation, their number of virtual stages and their
        number of stages are equal.
        """
        _, group = distinct(self.recompute, self.n_virtual, self.stages)
        for number in range(group.max(initial=-1) + 1):
            yield np.flatnonzero(group == number)

    def size(self, group: str) -> Floats:
        """Return the number of ranks along an axis, or a product of axes, shape (C,)."""
        if group not in self._sizes:
            self._sizes[group] = self.placements.size(group).astype(np.float64)[self.placement]
        return self._sizes[group]

    @cached_property
    def _sizes(self) -> dict[str, Floats]:
        """The results of `size` that are known already, by group."""
        return {}

    @cached_property
    def n_stages(self) -> int:
        """The number of stages of the pipeline, the same for candidates that are alike."""
        return _common(self.stages, 1)

    @cached_property
    def stages(self) -> Ints:
        """The number of stages of each candidate's pipeline, shape (C,)."""
        if PIPELINE not in self.placements.axes.names:
            return np.ones(len(self), np.int64)
        return self.placements.size(PIPELINE)[self.placement]

    @cached_property
    def n_chunks(self) -> int:
        """The number of virtual stages of all ranks, the same for candidates that share a plan."""
        return _common(self.stages * self.n_virtual, 1)

    @cached_property
    def is_pipelined(self) -> bool:
        """Whether there are stages at all, the same for candidates that share a plan."""
        return bool(_common(np.minimum(self.stages, 2), 1) > 1)

    @cached_property
    def common_recompute(self) -> str:
        """The recomputation, the same for candidates that are alike."""
        return recompute_text(_common(self.recompute, 0))

    @cached_property
    def common_n_virtual(self) -> int:
        """The number of virtual stages, the same for candidates that are alike."""
        return _common(self.n_virtual, 1)

    @cached_property
    def sequences_at_once(self) -> Floats:
        """The number of sequences that one rank processes at once, float64 of shape (C,)."""
        return self.micro_batch.astype(np.float64)

    def n_microsteps(self, global_batch: int) -> Floats:
        """Return the number of micro-steps that make one global batch, shape (C,)."""
        batch_group = "*".join(self.placements.axes.batch)
        return global_batch / (self.size(batch_group) * self.sequences_at_once)


def _common(column: Ints, otherwise: int) -> int:
    """Return the value that all entries share, or `otherwise` for an empty column."""
    if not column.size:
        return otherwise
    assert (column == column[0]).all(), "candidates of one plan are alike"
    return int(column[0])


def distinct(*columns: Ints | Floats) -> tuple[Ints, Ints]:
    """Return the first row of each distinct combination, and for each row its combination.

    Parameters
    ----------
    columns : arrays, shape (C,)

    Returns
    -------
    rows : array of int, shape (K,)
        Index of the first row of each combination.
    inverse : array of int, shape (C,)
        Index of each row's combination, in [0, K).
    """
    n_rows = columns[0].size
    by_columns = np.lexsort(columns[::-1])
    differs = np.arange(n_rows) == 0
    for column in columns:
        values = column[by_columns]
        differs[1:] |= values[1:] != values[:-1]
    inverse = np.empty(n_rows, dtype=np.int64)
    inverse[by_columns] = np.cumsum(differs) - 1
    return by_columns[differs], inverse
