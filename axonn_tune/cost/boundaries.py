"""How the groups of an axis lie across the units of a level, such as the nodes of a cluster."""

from __future__ import annotations

from math import gcd

import numpy as np

from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import Array


def rings_through_boundary(stride: Ints, size: Ints, unit_ranks: int) -> Ints:
    """Return the number of rings of an axis that leave a unit at the same time, shape (P,).

    The number is 0 if every ring stays inside a unit. The groups of an axis are the ranks
    ``b + r + i * stride`` for i < size, with b a multiple of ``stride * size`` (the first rank of
    a block) and r < stride. A unit is a run of U = `unit_ranks` ranks. Where blocks and units are
    aligned this is the published law min(U, stride) (Singh et al., arXiv 2502.08145, section on
    the performance model); otherwise, as with three ranks on nodes of four, the busiest unit
    counts.

    Parameters
    ----------
    stride, size : arrays of int, shape (P,)
    """
    span = stride * size
    aligned = (span % unit_ranks == 0) & ((stride % unit_ranks == 0) | (unit_ranks % stride == 0))
    inside = (unit_ranks % span == 0) | (size == 1)
    rings = np.where(inside, 0, np.minimum(unit_ranks, stride))
    for row in np.flatnonzero(~aligned & ~inside):
        rings[row] = _busiest_unit(int(stride[row]), int(size[row]), unit_ranks)
    return rings


def _busiest_unit(stride: int, size: int, unit_ranks: int) -> int:
    """Return the number of rings that leave the busiest of all units.

    Units differ in where their first rank stands in a block, which can be at any multiple of
    gcd(U, stride * size).
    """
    span = stride * size
    busiest = 0
    for offset in range(0, span, gcd(unit_ranks, span)):
        n_leaving = 0
        block_start = -offset  # counted from the unit's first rank
        while block_start < unit_ranks:
            low = max(block_start, 0)
            high = min(block_start + span, unit_ranks)
            ring_of = np.arange(low - block_start, high - block_start) % stride
            members = np.bincount(ring_of, minlength=1)
            n_leaving += int(((members > 0) & (members < size)).sum())
            block_start += span
        busiest = max(busiest, n_leaving)
    return busiest


def units_visited(stride: Ints, size: Ints, unit_ranks: int) -> Array:
    """Return the number of units in which the most spread group of an axis has ranks, shape (P,).

    A group's first rank stands at a multiple of gcd(stride * size, U) from the start of a
    unit, plus up to stride - 1. Where the stride is at most U, no unit between the first and
    the last rank is left out; where it is larger, every rank is in another unit.
    """
    step = np.gcd(stride * size, unit_ranks)
    latest_start = unit_ranks - step + np.minimum(stride, step) - 1
    spanned = (latest_start + (size - 1) * stride) // unit_ranks + 1
    return np.minimum(size, spanned).astype(np.float64)
