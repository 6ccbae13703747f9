"""Rates of a GPU's kernels, fitted to timed ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from scipy.optimize import least_squares

from axonn_tune.calibrate.findings import Findings
from axonn_tune.calibrate.fit.scatter import Floats, residual_scale
from axonn_tune.cost.gemm import curve_seconds
from axonn_tune.spec.machine import Gpu, Machine, Quantity, Tile
from axonn_tune.spec.plan import MODES
from axonn_tune.spec.points import AttentionPoint, GemmPoint, MemoryPoint

# A CPU's libraries block products for its caches, in pieces that are small beside a matrix.
CPU_TILES = (Tile(16, 16, 1.0),)
# Where nothing is known of a GPU: the tile on which NVIDIA's guide builds its examples (NVIDIA,
# "Matrix Multiplication Background User's Guide").
GPU_TILES = (Tile(128, 128, 1.0),)
FIRST_K_OVERHEAD = 64.0
_MODEL_NUMBER = re.compile(r"\b(?:[A-Z]|GH|GB|MI)\d{2,3}[A-Z]?\b")


def known_gpu(device_name: str, memory_bytes: float, machines: Sequence[Machine]) -> Machine | None:
    """The machine whose GPU has the model number of a device (A100, MI250X), nearest in memory."""
    words = set(_MODEL_NUMBER.findall(device_name.upper()))
    same = [m for m in machines if words & set(_MODEL_NUMBER.findall(m.gpu.name.upper()))]
    return min(same, key=lambda m: abs(m.gpu.memory_bytes.value - memory_bytes), default=None)


def best_rates(points: Sequence[GemmPoint]) -> dict[str, Quantity]:
    """The highest rate of each dtype, where no peak is published."""
    rates: dict[str, list[float]] = {}
    for p in points:
        rates.setdefault(p.dtype, []).append(2.0 * p.m * p.n * p.k / p.seconds)
    return {
        dtype: Quantity(max(of), "measured", f"best of {len(of)} products; no peak is published")
        for dtype, of in rates.items()
    }


def copy_rates(points: Sequence[MemoryPoint]) -> tuple[Quantity, Quantity]:
    """Bytes per second of the largest plain copy, and the time of the smallest one."""
    copies = sorted((p for p in points if p.kernel == "copy"), key=lambda p: p.nbytes)
    first, last = copies[0], copies[-1]
    return (
        Quantity(
            last.nbytes / last.seconds,
            "measured",
            f"plain copy that moves {last.nbytes} bytes",
            last.spread_fraction,
        ),
        Quantity(
            first.seconds,
            "measured",
            f"plain copy that moves {first.nbytes} bytes",
            first.spread_fraction,
        ),
    )


def flash_fraction(
    points: Sequence[AttentionPoint], backward: bool, peak: Mapping[str, Quantity]
) -> Quantity:
    """FLOPs of causal attention that are computed, per second, over the peak: the median shape.

    Half of 4 b s^2 a d forward, 2.5 times that backward (as `cost.attention`).
    """
    of = [p for p in points if p.fused and p.backward == backward]
    fractions = [
        2.0 * p.n_sequences * p.n_heads * p.head_dim * float(p.seq_len) ** 2
        * (2.5 if backward else 1.0) / p.seconds / peak[p.dtype].value
        for p in of
    ]  # fmt: skip
    spread = median(p.spread_fraction for p in of)
    return Quantity(median(fractions), "measured", f"median of {len(of)} shapes", spread)


def with_fitted_curve(machine: Machine, points: Sequence[GemmPoint], dtype: str) -> Machine:
    """The machine with the efficiency curve that fits the points of a dtype best.

    Fitted are the rate of each mode and the overhead in k, by a robust loss of the logarithm of
    fitted over measured time; the points stay to correct the curve.
    """
    of = [p for p in points if p.dtype == dtype]
    modes = [mode for mode in MODES if any(p.mode == mode for p in of)]
    sizes = {m: np.array([[p.m, p.n, p.k] for p in of if p.mode == m], float).T for m in modes}
    measured = {m: np.array([p.seconds for p in of if p.mode == m]) for m in modes}

    def residuals(logs: Floats) -> Floats:
        changed = _with_curve(machine, dict(zip(modes, np.exp(logs), strict=False)), logs[-1], "")
        parts = [np.log(_curve(sizes[m], m, changed, dtype) / measured[m]) for m in modes]
        joined: Floats = np.concatenate(parts)
        return joined

    peak = machine.peak_flops_per_s(dtype)
    best = [max(2.0 * sizes[m].prod(axis=0) / measured[m]) / peak for m in modes]
    start = np.log([*best, FIRST_K_OVERHEAD])
    fitted = least_squares(residuals, start, loss="soft_l1", f_scale=0.1).x
    source = f"fit of {len(of)} products in {dtype}"
    result = _with_curve(
        machine, dict(zip(modes, np.exp(fitted), strict=False)), fitted[-1], source
    )
    spread = min(residual_scale(residuals(fitted)), 1.0)
    sustained = replace(result.gemm.sustained_fraction, spread_fraction=spread)
    gemm = replace(result.gemm, sustained_fraction=sustained, points=tuple(points))
    return replace(result, gemm=gemm)


def _curve(sizes: Floats, mode: str, machine: Machine, dtype: str) -> Floats:
    m, n, k = sizes
    return curve_seconds(m, n, k, mode, machine, dtype)


def _with_curve(
    machine: Machine, rates: Mapping[str, float], log_k_overhead: float, source: str
) -> Machine:
    """Rates over the peak by mode; a mode that was not measured is taken as the best."""
    source = source or "trial"
    best = max(rates.values())
    gemm = replace(
        machine.gemm,
        sustained_fraction=Quantity(best, "measured", source),
        k_overhead=Quantity(float(np.exp(log_k_overhead)), "measured", source),
        mode_fraction={
            mode: Quantity(float(rates.get(mode, best) / best), "measured", source)
            for mode in MODES
        },
        points=(),
    )
    return replace(machine, gemm=gemm)


def gpu_of(findings: Findings, known: Machine | None) -> Gpu:
    """The GPU as published if it is known, else as far as it was measured."""
    measured = best_rates(findings.gemm_points)
    if known is not None:
        peaks = {**measured, **known.gpu.peak_flops_per_s}
        return replace(known.gpu, peak_flops_per_s=peaks)
    bandwidth, _ = copy_rates(findings.memory_points)
    return Gpu(
        name=findings.device_name,
        n_multiprocessors=findings.n_multiprocessors,
        memory_bytes=Quantity(findings.memory_bytes, "measured", "as the system tells"),
        memory_bandwidth_bytes_per_s=bandwidth,
        peak_flops_per_s=measured,
    )
