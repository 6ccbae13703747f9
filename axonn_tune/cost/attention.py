"""Seconds of softmax attention, fused and unfused."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from axonn_tune.cost.curve import ByIdentity, Spline
from axonn_tune.cost.gemm import gemm_seconds
from axonn_tune.cost.memory_bound import memory_bound_seconds
from axonn_tune.spec.job import BYTES_PER_ELEMENT
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array, Attention

# Passes of the softmax over the scores: forward reads and writes them; backward reads them and
# their gradient and writes one. What the products read and write is in their own time.
UNFUSED_FORWARD_PASSES = 2.0
UNFUSED_BACKWARD_PASSES = 3.0


def attention_seconds(operation: Attention, machine: Machine, dtype: str) -> Array:
    """Time of softmax attention, by formula; where it was measured, corrected by the ratio."""
    n, heads = (
        np.asarray(size, dtype=np.float64)
        for size in np.broadcast_arrays(operation.n_sequences, operation.n_heads)
    )
    s, d = float(operation.seq_len), float(operation.head_dim)
    seconds = _formula(n * heads, s, d, operation.backward, operation.fused, machine, dtype)
    correction = _correction(ByIdentity(machine), operation.backward, operation.fused, dtype)
    if correction is None:
        return seconds
    batch = (n * heads).ravel()
    log_ratio = correction(_coordinates(batch, np.full(batch.shape, s), np.full(batch.shape, d)))
    corrected: Array = seconds * np.exp(log_ratio).reshape(seconds.shape)
    return corrected


@lru_cache(maxsize=64)
def _correction(
    machine: ByIdentity[Machine], backward: bool, fused: bool, dtype: str
) -> Spline | None:
    """Logarithm of measured time over that of the formula; None where nothing was measured."""
    points = [
        p
        for p in machine.value.kernels.attention_points
        if (p.backward, p.fused, p.dtype) == (backward, fused, dtype)
    ]
    if not points:
        return None
    sizes = np.array([[p.n_sequences * p.n_heads, p.seq_len, p.head_dim] for p in points], float)
    by_formula = [
        _formula(batch, s, d, backward, fused, machine.value, dtype) for batch, s, d in sizes
    ]
    measured = np.array([p.seconds for p in points])
    return Spline(_coordinates(*sizes.T), np.log(measured / np.array(by_formula)))


def _coordinates(batch: Array, seq_len: Array, head_dim: Array) -> Array:
    return np.log2(np.stack([batch, seq_len, head_dim], axis=1))


def _formula(
    batch: Array, s: float, d: float, backward: bool, fused: bool, machine: Machine, dtype: str
) -> Array:
    """Time for `batch` heads over all sequences.

    Flash attention (Dao, arXiv 2307.08691) computes the causal half of the score matrix
    and recomputes it in the backward pass: 4 b s^2 a d / 2 FLOPs forward, 2.5 times that
    backward (section 3.1), at the machine's flash rates. Unfused attention computes the
    whole matrix as batched products of inner length d (forward) and moves it through
    memory.
    """
    rates = machine.kernels
    if fused:
        fraction = rates.flash_backward_fraction if backward else rates.flash_forward_fraction
        flops = 4.0 * batch * s * s * d / 2.0 * (2.5 if backward else 1.0)
        rate = machine.peak_flops_per_s(dtype) * fraction.value
        seconds: Array = np.asarray(flops) / rate + rates.launch_seconds.value
        return seconds
    batch = np.asarray(batch, dtype=np.float64)
    scores = gemm_seconds(s * batch, s, d, "NT", machine, dtype, kernel_tuning=False)
    values = gemm_seconds(s * batch, d, s, "NN", machine, dtype, kernel_tuning=False)
    n_products = 2.0 if backward else 1.0
    passes = UNFUSED_BACKWARD_PASSES if backward else UNFUSED_FORWARD_PASSES
    score_bytes = batch * s * s * BYTES_PER_ELEMENT[dtype]
    traffic = memory_bound_seconds(passes * score_bytes, machine, "softmax", dtype)
    traffic = traffic + 2.0 * rates.launch_seconds.value
    total: Array = n_products * (scores + values) + traffic
    return total
