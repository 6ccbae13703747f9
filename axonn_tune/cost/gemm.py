"""Seconds of matrix products: an efficiency curve, corrected by measured points."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axonn_tune.cost.curve import interpolated
from axonn_tune.cost.memory_bound import achieved_memory_bandwidth, moved_copy_seconds
from axonn_tune.spec.job import BYTES_PER_ELEMENT
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import MODES, Array, Size
from axonn_tune.spec.points import GemmPoint


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
    points = [p for p in machine.gemm.points if p.mode == mode and p.dtype == dtype]
    if not points:
        return seconds
    return seconds * _measured_over_curve(m, n, k, points, machine)


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


def _measured_over_curve(
    m: Array, n: Array, k: Array, points: Sequence[GemmPoint], machine: Machine
) -> Array:
    """Ratio of measured time to the curve, interpolated in log2 of the sizes."""
    sizes = np.array([[p.m, p.n, p.k] for p in points], dtype=np.float64).T
    measured = np.array([p.seconds for p in points])
    curve = curve_seconds(sizes[0], sizes[1], sizes[2], points[0].mode, machine, points[0].dtype)
    wanted = [np.log2(size) for size in np.broadcast_arrays(m, n, k)]
    shape = wanted[0].shape
    flat = [size.ravel() for size in wanted]
    log_ratio = interpolated(flat, list(np.log2(sizes)), np.log(measured / curve))
    ratio: Array = np.exp(log_ratio).reshape(shape)
    return ratio
