"""Plans of candidates, their compiled schedules, and the times of their kernels.

None of these depends on the rank order: what follows from a candidate's layout is made once for all
of its orders. Kernels are priced once for each distinct shape, by the columns on which their sizes
depend (`Strategy.compute_key`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from axonn_tune.cost.prices import KernelPrices
from axonn_tune.simulate.lanes import LaneSharing, shared_lanes
from axonn_tune.simulate.program import Program, compile_program
from axonn_tune.spec.candidates import CandidateTable, Ints, distinct
from axonn_tune.spec.plan import (
    Array,
    Collective,
    Compute,
    Operation,
    Part,
    Size,
    Transfer,
    sized,
)
from axonn_tune.spec.scenario import Scenario


class Schedules:
    """The plan of candidates that one plan describes, and its compiled schedules."""

    def __init__(self, scenario: Scenario, table: CandidateTable) -> None:
        self.table = table
        self.plan = scenario.plan(table)
        self.shape_rows, self.shape_of = distinct_shapes(scenario.strategy.compute_key, table)
        if self.shape_rows.size == len(table):
            self.shape_rows = self.shape_of = np.arange(len(table))
        self._shape_suffices: dict[str, bool] = {}

    def shape_operation(self, operation: Operation) -> Operation:
        """Return an operation with its sizes for each distinct shape, shape (K,)."""
        # If every candidate has its own shape, there is one operation per candidate already.
        if self.shape_rows is self.shape_of:
            return operation
        return sized(operation, self.shape_rows)

    def shape_suffices(self, operation: Operation) -> bool:
        """Return whether a kernel has the same price for all candidates of a shape.

        The other kernels run over what a rank stores, such as its share of the gradients.
        """
        name = operation.name
        if name not in self._shape_suffices:
            self._shape_suffices[name] = self.shape_rows is self.shape_of or all(
                np.array_equal(size, size[self.shape_rows][self.shape_of])
                for size in vars(operation).values()
                if isinstance(size, np.ndarray)
            )
        return self._shape_suffices[name]

    def program(self, part: Part, rows: Ints, group_lanes: Ints) -> tuple[Program, LaneSharing]:
        """Return the compiled schedule of a part for candidates whose groups have these lanes.

        Parameters
        ----------
        part : Part
        rows : array of int, shape (C,)
            Rows of the plan whose operations the candidates have.
        group_lanes : array of int, shape (G, C)
            Lane of each group, as `cost.prices.lanes` returns them.

        Returns
        -------
        Program
            One schedule for all of the candidates.
        LaneSharing
            What the candidates do not share of its lanes.
        """
        groups = self.table.placements.axes.groups
        axes = {
            op.axis
            for phase in part.phases
            for op in phase.operations
            if isinstance(op, Collective)
        }
        used = [i for i, group in enumerate(groups) if group in axes]
        axis_lanes, sharing = shared_lanes([groups[i] for i in used], group_lanes[used])
        return compile_program(part.phases, axis_lanes).of(rows), sharing


class KernelTimes:
    """The times of the kernels of plans; kernels that are alike are priced once."""

    def __init__(self, schedules: Schedules, prices: KernelPrices) -> None:
        self.prices = prices
        self.schedules = schedules
        self._of_shapes: dict[str, Array] = {}
        self._in_a_row: dict[tuple[str, ...], tuple[Array, Array | None]] = {}

    def of_shapes(self, kernel: Compute) -> Array:
        """Return the time of a kernel for each distinct shape, shape (K,)."""
        if kernel.name not in self._of_shapes:
            operation = self.schedules.shape_operation(kernel)
            assert not isinstance(operation, Transfer)
            seconds = self.prices.seconds_once(operation)
            self._of_shapes[kernel.name] = np.broadcast_to(seconds, self.schedules.shape_rows.shape)
        return self._of_shapes[kernel.name]

    def pace(self, part: Part) -> Size:
        """Return how long kernels take in a part in terms of their times elsewhere, by row."""
        return self.prices.last_stage_factor(self.schedules.table) if part.is_of_last_stage else 1.0

    def in_a_row(self, kernels: Sequence[Compute], rows: Ints, shapes: Ints) -> Array:
        """Return the time of kernels that run back to back, shape (C,).

        Parameters
        ----------
        kernels : sequence of Compute
        rows, shapes : arrays of int, shape (C,)
            Rows of the plan, and the shape of each of them.
        """
        key = names_of(kernels)
        if key not in self._in_a_row:
            self._in_a_row[key] = self._added_up(kernels)
        of_shapes, of_rows = self._in_a_row[key]
        seconds = of_shapes[shapes]
        return seconds if of_rows is None else seconds + of_rows[rows]

    def _added_up(self, kernels: Sequence[Compute]) -> tuple[Array, Array | None]:
        """Return the times of some kernels, added up.

        They come by shape where shapes suffice, shape (K,), and by row of the plan otherwise; None
        if no kernel has a time for each row.
        """
        of_shapes = np.zeros(self.schedules.shape_rows.shape)
        of_rows = np.zeros(())
        for kernel in kernels:
            if self.schedules.shape_suffices(kernel):
                of_shapes = of_shapes + self.of_shapes(kernel)
            else:
                of_rows = of_rows + self.prices.seconds_once(kernel)
        return (of_shapes, of_rows) if of_rows.ndim else (of_shapes + of_rows, None)


def names_of(kernels: Iterable[Compute]) -> tuple[str, ...]:
    """Return the names of kernels, by which their prices are known in the whole plan."""
    return tuple([kernel.name for kernel in kernels])


def distinct_shapes(compute_key: tuple[str, ...], table: CandidateTable) -> tuple[Ints, Ints]:
    """Return the rows of distinct shapes, and each row's shape, as `distinct` does."""
    axes = [table.placements.size(axis) for axis in compute_key if axis != "micro_batch"]
    _, by_placement = distinct(*axes, np.zeros(len(table.placements), dtype=np.int64))
    return distinct(by_placement[table.placement], table.micro_batch)
