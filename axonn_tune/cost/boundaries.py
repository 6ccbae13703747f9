"""How the groups of an axis lie across the units of a level, such as the nodes of a cluster."""

from __future__ import annotations

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
    uneven = np.flatnonzero(~aligned & ~inside)
    rings[uneven] = _busiest_unit(stride[uneven], size[uneven], unit_ranks)
    return rings


def _busiest_unit(stride: Ints, size: Ints, unit_ranks: int) -> Ints:
    """Return the number of rings that leave the busiest of all units, shape (P,).

    Units differ in where their first rank stands in a block, which can be at any multiple of
    gcd(U, stride * size). Between the places at which the unit or one of the strides in it reaches
    an end of the block, the number of rings is a linear function of that place. So the busiest
    unit begins next to one of them.
    """
    span = stride * size
    step = np.gcd(span, unit_ranks)
    ends = [
        begin + shift
        for begin in (np.zeros_like(span), -unit_ranks)
        for shift in (-stride, np.zeros_like(span), stride)
    ]
    before = np.stack(ends) // step * step
    offset = np.concatenate([before, before + step]) % span  # shape (12, P)
    first_ranks = np.minimum(span - offset, unit_ranks)
    last_ranks = (unit_ranks - first_ranks) % span  # no ring leaves the whole blocks between
    in_first = _rings_cut(stride, size, offset, first_ranks)
    in_last = _rings_cut(stride, size, np.zeros_like(offset), last_ranks)
    rings: Ints = (in_first + in_last).max(axis=0, initial=0)
    return rings


def _rings_cut(stride: Ints, size: Ints, offset: Ints, n_ranks: Ints) -> Ints:
    """Return the rings with some ranks, but not all, among `n_ranks` of a block from an offset."""
    touched = np.minimum(n_ranks, stride)
    last_whole = np.minimum(stride, offset + n_ranks - (size - 1) * stride)
    return touched - np.maximum(last_whole - offset, 0)


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
