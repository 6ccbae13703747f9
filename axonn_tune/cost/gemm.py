"""Seconds of matrix products: an efficiency curve, corrected by measured points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from axonn_tune.cost.curve import ByIdentity, Spline
from axonn_tune.cost.memory_bound import achieved_memory_bandwidth, moved_copy_seconds
from axonn_tune.spec.job import BYTES_PER_ELEMENT
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import MODES, Array, Size

# How far modes lie apart, in doublings of a size: a product says more of the same sizes in another
# mode than of other sizes. Held-out products on a CPU were met equally well from 0.3 to 1.
MODE_DISTANCE = 0.5
# By how much the efficiency curve alone misses a product: a convention. Fitted to 192 products of
# a CPU it missed the median one by 14 percent; libraries of GPUs follow tiles more closely.
CURVE_ERROR = 0.10


def gemm_seconds(
    m: Size,
    n: Size,
    k: Size,
    mode: str,
    machine: Machine,
    dtype: str,
    kernel_tuning: bool,
) -> Array:
    """Time of an (m x k) times (k x n) product.

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
    m, n, k = (np.asarray(size, dtype=np.float64) for size in (m, n, k))
    natural = _mode_seconds(m, n, k, mode, machine, dtype)
    if not kernel_tuning:
        return natural
    element_bytes = BYTES_PER_ELEMENT[dtype]
    copy = moved_copy_seconds(element_bytes * np.minimum(m * k, k * n), machine, dtype)
    others = [_mode_seconds(m, n, k, o, machine, dtype) + copy for o in MODES if o != mode]
    fastest: Array = np.minimum.reduce([natural, *others])
    return fastest


def _mode_seconds(m: Array, n: Array, k: Array, mode: str, machine: Machine, dtype: str) -> Array:
    seconds = curve_seconds(m, n, k, mode, machine, dtype)
    correction = _correction(ByIdentity(machine), dtype)
    if correction is None:
        return seconds
    m, n, k = np.broadcast_arrays(m, n, k)
    log_ratio = correction(_coordinates(m.ravel(), n.ravel(), k.ravel(), [mode] * m.size))
    corrected: Array = seconds * np.exp(log_ratio).reshape(m.shape)
    return corrected


def interpolation_error(machine: Machine, dtype: str) -> float:
    """Relative standard deviation by which a product that was not timed is missed.

    What leaving each measured one out shows; without any, `CURVE_ERROR`.
    """
    correction = _correction(ByIdentity(machine), dtype)
    return CURVE_ERROR if correction is None else correction.leave_one_out_error()


@lru_cache(maxsize=64)
def _correction(machine: ByIdentity[Machine], dtype: str) -> Spline | None:
    """Logarithm of measured over curve; None where nothing was measured."""
    points = [p for p in machine.value.gemm.points if p.dtype == dtype]
    if not points:
        return None
    m, n, k, measured = np.array([[p.m, p.n, p.k, p.seconds] for p in points]).T
    modes = [p.mode for p in points]
    by_curve = np.empty(len(points))
    for mode in set(modes):
        of = np.array([other == mode for other in modes])
        by_curve[of] = curve_seconds(m[of], n[of], k[of], mode, machine.value, dtype)
    return Spline(_coordinates(m, n, k, modes), np.log(measured / by_curve))


def _coordinates(m: Array, n: Array, k: Array, modes: Sequence[str]) -> Array:
    """Where a product lies among others: log2 of its sizes, and its mode, shape (N, 6)."""
    is_mode = np.array([[mode == other for other in MODES] for mode in modes], dtype=np.float64)
    sizes = np.log2(np.stack([m, n, k], axis=1))
    return np.concatenate([sizes, is_mode * (MODE_DISTANCE / math.sqrt(2.0))], axis=1)


def curve_seconds(m: Array, n: Array, k: Array, mode: str, machine: Machine, dtype: str) -> Array:
    """The efficiency curve: whole waves of output tiles, or the memory traffic if that is longer.

    A product of m x n is cut into tiles; the multiprocessors work on one tile each, in
    waves, and a last wave that is not full costs as much as a full one. Each tile loses
    the time of `k_overhead` elements of k to its prologue and epilogue (NVIDIA, "Matrix
    Multiplication Background User's Guide", tile and wave quantisation). The best of the
    profile's tile shapes is taken, as the libraries' heuristics do.

        t = launch + max(waves * 2 r c (k + k0) / rate_of_one_multiprocessor, bytes / bandwidth)
    """
    gemm, gpu = machine.gemm, machine.gpu
    rate = machine.peak_flops_per_s(dtype) * gemm.sustained_fraction.value
    rate = rate * gemm.mode_fraction[mode].value / gpu.n_multiprocessors
    per_tile = 2.0 * (k + gemm.k_overhead.value) / rate
    best = np.full(np.broadcast_shapes(m.shape, n.shape, k.shape), np.inf)
    for tile in gemm.tiles:
        n_tiles = np.ceil(m / tile.rows) * np.ceil(n / tile.columns)
        waves = np.ceil(n_tiles / gpu.n_multiprocessors)
        area = tile.rows * tile.columns / tile.speed_fraction
        np.minimum(best, waves * (area * per_tile), out=best)
    traffic = BYTES_PER_ELEMENT[dtype] * (m * k + k * n + m * n)
    moved = traffic / achieved_memory_bandwidth(machine)
    seconds: Array = machine.kernels.launch_seconds.value + np.maximum(best, moved)
    return seconds
