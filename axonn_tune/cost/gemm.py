"""The time of matrix products: an efficiency curve, corrected by measured points."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np

from axonn_tune.cost.curve import Spline
from axonn_tune.cost.memory_bound import achieved_memory_bandwidth, moved_copy_seconds
from axonn_tune.spec.candidates import distinct
from axonn_tune.spec.gpu import Tile
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import MODES, Array, Size
from axonn_tune.spec.points import GemmPoint, GroupedGemmPoint
from axonn_tune.spec.precision import FORMATS, operand_bytes, result_bytes

AnyProduct = TypeVar("AnyProduct", GemmPoint, GroupedGemmPoint)

# Distance between modes, in doublings of a size: a product tells more about the same sizes in
# another mode than about other sizes. Held-out products on a CPU were met equally well from 0.3
# to 1.
MODE_DISTANCE = 0.5
# Relative error of the efficiency curve alone for a product, by convention. Fitted to 192 products
# of a CPU it missed the median one by 14 percent; libraries of GPUs follow tiles more closely.
CURVE_ERROR = 0.10


class EfficiencyCurve(NamedTuple):
    """The speed at which a GPU forms products of one number format, by the sizes alone.

    A product of m x n is cut into tiles; the multiprocessors work on one tile each, in
    waves, and a last wave that is not full costs as much as a full one. Each tile loses
    the time of `k_overhead` elements of k to its prologue and epilogue (NVIDIA, "Matrix
    Multiplication Background User's Guide", tile and wave quantisation). The best of the
    profile's tile shapes is taken, as the libraries' heuristics do.

        t = launch + max(waves * 2 r c (k + k0) / rate_of_one_multiprocessor, bytes / bandwidth)
    """

    sustained_flops_per_s: float
    mode_fractions: tuple[float, ...]  # in the order of `MODES`
    n_multiprocessors: int
    k_overhead: float
    tiles: tuple[Tile, ...]
    launch_seconds: float
    bytes_per_s: float
    element_bytes: float
    result_bytes: float

    @classmethod
    def of(cls, machine: Machine, dtype: str) -> EfficiencyCurve:
        """Return the curve of a machine; `dtype` is the format of both operands."""
        gemm = machine.gemm
        return cls(
            sustained_flops_per_s=machine.peak_flops_per_s(dtype) * gemm.sustained_fraction.value,
            mode_fractions=tuple(gemm.mode_fraction[mode].value for mode in MODES),
            n_multiprocessors=machine.gpu.n_multiprocessors,
            k_overhead=gemm.k_overhead.value,
            tiles=gemm.tiles,
            launch_seconds=machine.kernels.launch_seconds.value,
            bytes_per_s=achieved_memory_bandwidth(machine),
            element_bytes=operand_bytes(dtype),
            result_bytes=result_bytes(dtype),
        )

    def seconds(self, m: Array, n: Array, k: Array, mode: str) -> Array:
        """Return the time of (m x k) times (k x n) products, in the shape of the sizes."""
        return self.seconds_by_mode(m, n, k, [mode])[0]

    def seconds_by_mode(self, m: Array, n: Array, k: Array, modes: Sequence[str]) -> Array:
        """Return the time of (m x k) times (k x n) products in some modes, shape (modes, ...)."""
        in_waves = self._wave_seconds(m, n, k, modes, 1.0)
        moved_bytes = self.element_bytes * (m * k + k * n) + self.result_bytes * (m * n)
        return self.launch_seconds + np.maximum(in_waves, moved_bytes / self.bytes_per_s)

    def grouped_seconds(
        self,
        m: Array,
        n: Array,
        k: Array,
        mode: str,
        n_groups: Array,
        n_at_once: float,
        sum_bytes: float,
    ) -> Array:
        """Return the time of `n_groups` products of (m x k) times (k x n), `n_at_once` at a time.

        Products that run at the same time share the multiprocessors. If `sum_bytes` is not 0, the
        result is added to sums, whose elements of so many bytes are read and written.
        """
        at_once = np.minimum(n_at_once, n_groups)
        in_waves = self._wave_seconds(m, n, k, [mode], at_once)[0] * (n_groups / at_once)
        written_bytes = 2.0 * sum_bytes if sum_bytes else self.result_bytes
        moved_bytes = self.element_bytes * (m * k + k * n) + written_bytes * m * n
        return self.launch_seconds + np.maximum(in_waves, n_groups * moved_bytes / self.bytes_per_s)

    def _wave_seconds(
        self, m: Array, n: Array, k: Array, modes: Sequence[str], at_once: Size
    ) -> Array:
        """Return the time in which the multiprocessors form the tiles of `at_once` products.

        The result has an entry for each mode, shape (modes, ...).
        """
        shape = np.broadcast_shapes(m.shape, n.shape, k.shape)
        area_in_waves = np.full(shape, np.inf)
        for tile in self.tiles:
            n_tiles = at_once * np.ceil(m / tile.rows) * np.ceil(n / tile.columns)
            waves = np.ceil(n_tiles / self.n_multiprocessors)
            area = tile.rows * tile.columns / tile.speed_fraction
            np.minimum(area_in_waves, waves * area, out=area_in_waves)
        fractions = np.array([self.mode_fractions[MODES.index(mode)] for mode in modes])
        rates = self.sustained_flops_per_s * fractions / self.n_multiprocessors
        work = area_in_waves * (2.0 * (k + self.k_overhead))
        return work / rates.reshape(-1, *[1] * len(shape))


class Products:
    """The prices of matrix products of one number format on a machine.

    The efficiency curve gives the time, and measured points correct it. In a low format without
    points, the points of the nearest format that has some correct it: products are assumed to reach
    the same share of their peak.
    """

    def __init__(self, machine: Machine, dtype: str) -> None:
        self._machine = machine
        self._dtype = dtype
        self._curve = EfficiencyCurve.of(machine, dtype)
        self._correction = nearest_correction(machine, dtype, machine.gemm.points, _correction)

    def seconds(self, m: Size, n: Size, k: Size, mode: str, kernel_tuning: bool) -> Array:
        """Return the time of an (m x k) times (k x n) product.

        With kernel tuning the fastest of the three modes is taken; a mode other than the
        natural one pays for a transposed copy of the smaller operand.

        Parameters
        ----------
        m, n, k : array_like, shape (K,)
            Rows, columns and inner length of the local product.

        Returns
        -------
        ndarray, shape (K,) [s]
        """
        m, n, k = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (m, n, k)))
        modes = [mode, *(other for other in MODES if other != mode and kernel_tuning)]
        seconds = self._curve.seconds_by_mode(m, n, k, modes) * self._corrections(m, n, k, modes)
        if kernel_tuning:
            smaller_bytes = self._curve.element_bytes * np.minimum(m * k, k * n)
            seconds[1:] += moved_copy_seconds(smaller_bytes, self._machine, self._dtype)
        return np.asarray(seconds.min(axis=0))

    def correction(self, m: Array, n: Array, k: Array, mode: str) -> Array:
        """Return the ratio of the time by measured points to the curve's time; 1 without points."""
        return self._corrections(m, n, k, [mode])[0]

    def _corrections(self, m: Array, n: Array, k: Array, modes: Sequence[str]) -> Array:
        """Return the correction of products in some modes, shape (modes, ...); equal ones share it.

        Without points it is 1.
        """
        if self._correction is None:
            return np.ones(1)
        rows, product_of = distinct(m.ravel(), n.ravel(), k.ravel())
        products = np.stack([size.ravel()[rows] for size in (m, n, k)])
        m_of, n_of, k_of = np.tile(products, len(modes))
        mode_of = np.repeat(modes, rows.size).tolist()
        log_ratio = self._correction(coordinates(m_of, n_of, k_of, mode_of))
        return np.exp(log_ratio).reshape(len(modes), -1)[:, product_of].reshape(-1, *m.shape)

    @property
    def interpolation_error(self) -> float:
        """The relative standard deviation of the error for a product that was not timed.

        It is found by leaving each measured product out; without any it is `CURVE_ERROR`.
        """
        return CURVE_ERROR if self._correction is None else self._correction.leave_one_out_error()


def nearest_correction(
    machine: Machine,
    dtype: str,
    points: Sequence[AnyProduct],
    fitted: Callable[[EfficiencyCurve, tuple[AnyProduct, ...]], Spline],
) -> Spline | None:
    """Return the correction by points of a format, or else of the nearest one that has some.

    The points of a similar format stand for those of a format that was not measured. Without any
    there is no correction. `fitted` finds the correction of a curve.
    """
    low_format = FORMATS.get(dtype)
    near: Sequence[str] = () if low_format is None else low_format.nearest
    for known in (dtype, *near):
        own = tuple(point for point in points if point.dtype == known)
        if own and known in machine.gpu.peak_flops_per_s:
            return fitted(EfficiencyCurve.of(machine, known), own)
    return None


@lru_cache(maxsize=64)
def _correction(curve: EfficiencyCurve, points: tuple[GemmPoint, ...]) -> Spline:
    """Return the logarithm of the measured time over the curve's, by a product's coordinates."""
    m, n, k, measured = np.array([[p.m, p.n, p.k, p.seconds] for p in points]).T
    modes = [point.mode for point in points]
    by_curve = np.empty(len(points))
    for mode in set(modes):
        rows = np.array([other == mode for other in modes])
        by_curve[rows] = curve.seconds(m[rows], n[rows], k[rows], mode)
    return Spline(coordinates(m, n, k, modes), np.log(measured / by_curve))


def coordinates(m: Array, n: Array, k: Array, modes: Sequence[str]) -> Array:
    """Return each product's coordinates for interpolation: log2 of sizes, mode; shape (N, 6)."""
    is_mode = (np.asarray(modes)[:, None] == np.asarray(MODES)).astype(np.float64)
    sizes = np.log2(np.stack([m, n, k], axis=1))
    return np.concatenate([sizes, is_mode * (MODE_DISTANCE / math.sqrt(2.0))], axis=1)
