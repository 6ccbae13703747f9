"""The time of grouped products: equal products with weights of their own, as experts have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axonn_tune.cost.curve import Spline, spline_through
from axonn_tune.cost.gemm import EfficiencyCurve, Products, coordinates, nearest_correction
from axonn_tune.spec.candidates import distinct
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array, GroupedGemm
from axonn_tune.spec.points import GroupedGemmPoint


class GroupedProducts:
    """The prices of grouped products of one number format on a machine.

    The tiles of the products that run at the same time share the multiprocessors, so that few rows
    for each expert leave multiprocessors idle. Where grouped products were measured, their ratio to
    this formula corrects it; elsewhere the correction of a single product with all their rows does.
    A low format without points takes the points of the nearest format that has some.
    """

    def __init__(self, machine: Machine, dtype: str, products: Products) -> None:
        self._products = products
        self._curve = EfficiencyCurve.of(machine, dtype)
        points = machine.gemm.grouped_points
        self._correction = nearest_correction(machine, dtype, points, _fitted)

    def seconds(self, operation: GroupedGemm) -> Array:
        """Return the time of an operation, in the shape of its sizes."""
        given = (operation.m, operation.n, operation.k, operation.n_groups)
        sizes = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in given))
        rows, group_of = distinct(*(size.ravel() for size in sizes))
        m, n, k, n_groups = (size.ravel()[rows] for size in sizes)
        mode = operation.mode
        seconds = self._curve.grouped_seconds(
            m, n, k, mode, n_groups, operation.n_at_once, operation.sum_bytes
        )
        if self._correction is None:
            seconds = seconds * self._products.correction(*_joined(m, n, k, n_groups, mode), mode)
        else:
            points = _coordinates(m, n, k, n_groups, [mode] * m.size)
            seconds = seconds * np.exp(self._correction(points))
        return seconds[group_of].reshape(sizes[0].shape)


def _fitted(curve: EfficiencyCurve, points: Sequence[GroupedGemmPoint]) -> Spline:
    """Return the logarithm of the measured time over the curve's, by a group's coordinates."""
    m, n, k, n_groups = np.array([[p.m, p.n, p.k, p.n_groups] for p in points], float).T
    by_curve = [
        curve.grouped_seconds(
            m[[i]], n[[i]], k[[i]], p.mode, n_groups[[i]], p.n_at_once, p.sum_bytes
        ).item()
        for i, p in enumerate(points)
    ]
    measured = np.array([p.seconds for p in points])
    modes = [p.mode for p in points]
    return spline_through(
        _coordinates(m, n, k, n_groups, modes), np.log(measured / np.array(by_curve))
    )


def _coordinates(m: Array, n: Array, k: Array, n_groups: Array, modes: Sequence[str]) -> Array:
    """Return the coordinates of each group of products for interpolation, shape (N, 7)."""
    return np.concatenate([coordinates(m, n, k, modes), np.log2(n_groups)[:, None]], axis=1)


def _joined(m: Array, n: Array, k: Array, n_groups: Array, mode: str) -> tuple[Array, Array, Array]:
    """Return the sizes of the single product that is most like a group of products.

    It has the rows of all of them, which are its inner length where it forms weights' gradients.
    """
    return (m, n, k * n_groups) if mode == "TN" else (m * n_groups, n, k)
