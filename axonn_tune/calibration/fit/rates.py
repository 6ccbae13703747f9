"""Rates of a GPU and of its kernels, fitted to timed kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from axonn_tune.calibration.fit.robust import Floats, residual_scale
from axonn_tune.calibration.measured_cluster import MeasuredCluster
from axonn_tune.cost.gemm import EfficiencyCurve
from axonn_tune.spec.checks import LARGEST_COUNT
from axonn_tune.spec.gpu import Gpu, Tile
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import MODES
from axonn_tune.spec.points import AttentionPoint, GemmPoint, MemoryPoint
from axonn_tune.spec.quantity import Quantity

# The libraries of a CPU cut products into pieces for its caches, much smaller than a matrix.
CPU_TILES = (Tile(16, 16, 1.0),)
# An unknown GPU gets the tile of the examples in NVIDIA's guide (NVIDIA, "Matrix Multiplication
# Background User's Guide").
GPU_TILES = (Tile(128, 128, 1.0),)
FIRST_K_OVERHEAD = 64.0
# A device reports a few per cent less memory than it is sold with; GB and GiB differ by 7 %.
_SAME_MEMORY_FRACTION = 0.08
_MODEL_NUMBER = re.compile(r"\b(?:[A-Z]|GH|GB|MI)\d{2,3}[A-Z]?\b")


def known_gpu(
    device_name: str, memory_bytes: float, n_multiprocessors: int, machines: Sequence[Machine]
) -> Machine | None:
    """Return the machine whose GPU is the device, and among several the nearest in memory.

    A model number (H100) alone does not tell: the card for PCIe bears that of the module, and has
    fewer multiprocessors and a slower memory.
    """
    words = set(_MODEL_NUMBER.findall(device_name.upper()))

    def apart(machine: Machine) -> float:
        return abs(machine.gpu.memory_bytes.value / memory_bytes - 1.0)

    same = [
        machine
        for machine in machines
        if words & set(_MODEL_NUMBER.findall(machine.gpu.name.upper()))
        and machine.gpu.n_multiprocessors == n_multiprocessors
        and apart(machine) < _SAME_MEMORY_FRACTION
    ]
    return min(same, key=apart, default=None)


def best_rates(points: Sequence[GemmPoint]) -> dict[str, Quantity]:
    """Return the highest rate of each dtype, for a GPU whose peak is not published."""
    rates: dict[str, list[float]] = {}
    for p in points:
        rates.setdefault(p.dtype, []).append(2.0 * p.m * p.n * p.k / p.seconds)
    return {
        dtype: Quantity(
            max(measured), "measured", f"best of {len(measured)} products; no peak is published"
        )
        for dtype, measured in rates.items()
    }


def copy_rates(points: Sequence[MemoryPoint]) -> tuple[Quantity, Quantity]:
    """Return the bytes per second of the largest plain copy and the time of the smallest one."""
    copies = sorted((p for p in points if p.kernel == "copy"), key=lambda p: p.nbytes)
    smallest = copies[0]
    largest = copies[-1]
    return (
        Quantity(
            largest.nbytes / largest.seconds,
            "measured",
            f"plain copy that moves {largest.nbytes} bytes",
            largest.spread_fraction,
        ),
        Quantity(
            smallest.seconds,
            "measured",
            f"plain copy that moves {smallest.nbytes} bytes",
            smallest.spread_fraction,
        ),
    )


def strided_rate(points: Sequence[MemoryPoint]) -> Quantity | None:
    """Return the bytes per second of the kernel that handles one element at a time, if timed."""
    for point in points:
        if point.kernel == "strided":
            return Quantity(
                point.nbytes / point.seconds,
                "measured",
                f"product of rows with one row that moves {point.nbytes} bytes",
                point.spread_fraction,
            )
    return None


def flash_fraction(
    points: Sequence[AttentionPoint], backward: bool, peak: Mapping[str, Quantity]
) -> Quantity:
    """Return the FLOP/s of fused causal attention over the peak, as the median over shapes.

    The forward pass computes half of 4 b s^2 a d FLOPs, the backward pass 2.5 times that, as
    `cost.attention` counts them.
    """
    fused = [p for p in points if p.fused and p.backward == backward and not p.window]
    fractions = [
        2.0 * p.n_sequences * p.n_heads * p.head_dim * float(p.seq_len) ** 2
        * (2.5 if backward else 1.0) / p.seconds / peak[p.dtype].value
        for p in fused
    ]  # fmt: skip
    spread = median(p.spread_fraction for p in fused)
    # A CPU, whose peak is the best of the measured products, may compute attention faster.
    fraction = min(median(fractions), 1.0)
    return Quantity(fraction, "measured", f"median of {len(fused)} shapes", spread)


def with_fitted_curve(machine: Machine, points: Sequence[GemmPoint], dtype: str) -> Machine:
    """Return the machine with the efficiency curve that fits the points of a dtype best.

    The rate of each mode and the overhead in k are fitted by a robust loss of the logarithm of
    fitted over measured time; the points stay to correct the curve.
    """
    fitted_points = [p for p in points if p.dtype == dtype]
    by_mode = {mode: [p for p in fitted_points if p.mode == mode] for mode in MODES}
    modes = [mode for mode in MODES if by_mode[mode]]
    sizes = {mode: np.array([[p.m, p.n, p.k] for p in by_mode[mode]], float).T for mode in modes}
    measured = {mode: np.array([p.seconds for p in by_mode[mode]]) for mode in modes}

    def curve(logs: Floats, source: str) -> Machine:
        """Return the machine with exp(logs): a rate for each mode, then the overhead in k."""
        *rates, k_overhead = np.exp(logs).tolist()
        return _with_curve(machine, dict(zip(modes, rates, strict=True)), k_overhead, source)

    def residuals(logs: Floats) -> Floats:
        trial = EfficiencyCurve.of(curve(logs, "trial"), dtype)
        parts = []
        for mode in modes:
            m, n, k = sizes[mode]
            parts.append(np.log(trial.seconds(m, n, k, mode) / measured[mode]))
        return np.concatenate(parts)

    peak = machine.peak_flops_per_s(dtype)
    best = [max(2.0 * sizes[mode].prod(axis=0) / measured[mode]) / peak for mode in modes]
    # No product is faster than the peak, and a profile holds no larger overhead.
    most = np.log([*(1.0 for _ in modes), LARGEST_COUNT])
    start = np.minimum(np.log([*best, FIRST_K_OVERHEAD]), most)
    fitted = least_squares(residuals, start, bounds=(-np.inf, most), loss="soft_l1", f_scale=0.1).x
    result = curve(fitted, f"fit of {len(fitted_points)} products in {dtype}")
    spread = min(residual_scale(residuals(fitted)), 1.0)
    sustained = replace(result.gemm.sustained_fraction, spread_fraction=spread)
    gemm = replace(result.gemm, sustained_fraction=sustained, points=tuple(points))
    return replace(result, gemm=gemm)


def _with_curve(
    machine: Machine, rates: Mapping[str, float], k_overhead: float, source: str
) -> Machine:
    """Return the machine with other rates over the peak, by mode.

    A mode that was not measured gets the best rate of the others.
    """
    best = max(rates.values())
    gemm = replace(
        machine.gemm,
        sustained_fraction=Quantity(best, "measured", source),
        k_overhead=Quantity(k_overhead, "measured", source),
        mode_fraction={
            mode: Quantity(rates.get(mode, best) / best, "measured", source) for mode in MODES
        },
        points=(),
    )
    return replace(machine, gemm=gemm)


def fitted_gpu(cluster: MeasuredCluster, known: Machine | None) -> Gpu:
    """Return the GPU as published if it is known, else as far as it was measured."""
    measured_peaks = best_rates(cluster.gemm_points)
    if known is not None:
        peaks = {**measured_peaks, **known.gpu.peak_flops_per_s}
        return replace(known.gpu, peak_flops_per_s=peaks)
    bandwidth, _ = copy_rates(cluster.memory_points)
    return Gpu(
        name=cluster.device_name,
        n_multiprocessors=cluster.n_multiprocessors,
        memory_bytes=Quantity(cluster.memory_bytes, "measured", "as the system tells"),
        memory_bandwidth_bytes_per_s=bandwidth,
        peak_flops_per_s=measured_peaks,
    )
