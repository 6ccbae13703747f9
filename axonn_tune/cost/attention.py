"""The time of softmax attention, fused and unfused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axonn_tune.cost.curve import Spline
from axonn_tune.cost.gemm import Products
from axonn_tune.cost.memory_bound import memory_bound_seconds
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array, Attention
from axonn_tune.spec.points import AttentionPoint
from axonn_tune.spec.precision import BYTES_PER_ELEMENT

# Passes of the softmax over the scores: forward reads and writes them; backward reads them and
# their gradient and writes one. The time of a product includes its own reads and writes.
UNFUSED_FORWARD_PASSES = 2.0
UNFUSED_BACKWARD_PASSES = 3.0


class AttentionPrices:
    """The prices of softmax attention of one dtype on a machine.

    A formula gives the time; where attention was measured, the ratio to it corrects the formula.
    """

    def __init__(self, machine: Machine, dtype: str, products: Products) -> None:
        self._machine = machine
        self._dtype = dtype
        self._products = products
        self._corrections: dict[tuple[bool, bool], Spline | None] = {}

    def seconds(self, operation: Attention) -> Array:
        """Return the time of an operation, in the shape of its sizes."""
        n_sequences, n_heads = (
            np.asarray(size, dtype=np.float64)
            for size in np.broadcast_arrays(operation.n_sequences, operation.n_heads)
        )
        batch = n_sequences * n_heads
        s = float(operation.seq_len)
        d = float(operation.head_dim)
        seconds = self._formula(batch, s, d, operation.backward, operation.fused)
        correction = self._correction(operation.backward, operation.fused)
        if correction is not None:
            flat = batch.ravel()
            points = _coordinates(flat, np.full(flat.shape, s), np.full(flat.shape, d))
            seconds = seconds * np.exp(correction(points)).reshape(seconds.shape)
        return seconds * operation.attended_fraction / operation.rate

    def _correction(self, backward: bool, fused: bool) -> Spline | None:
        """Return the logarithm of measured over computed time, or None without measured points."""
        key = (backward, fused)
        if key not in self._corrections:
            kind = (backward, fused, self._dtype)
            points = [
                p
                for p in self._machine.kernels.attention_points
                if (p.backward, p.fused, p.dtype) == kind
            ]
            self._corrections[key] = self._fitted(points, backward, fused) if points else None
        return self._corrections[key]

    def _fitted(self, points: Sequence[AttentionPoint], backward: bool, fused: bool) -> Spline:
        """Return the correction that goes through the measured points."""
        sizes = np.array(
            [[p.n_sequences * p.n_heads, p.seq_len, p.head_dim] for p in points], float
        )
        by_formula = [self._formula(batch, s, d, backward, fused) for batch, s, d in sizes]
        measured = np.array([p.seconds for p in points])
        return Spline(_coordinates(*sizes.T), np.log(measured / np.array(by_formula)))

    def _formula(self, batch: Array, s: float, d: float, backward: bool, fused: bool) -> Array:
        """Return the time for `batch` heads over all sequences.

        Flash attention (Dao, arXiv 2307.08691) computes the causal half of the score matrix
        and recomputes it in the backward pass: 4 b s^2 a d / 2 FLOPs forward, 2.5 times that
        backward (section 3.1), at the machine's flash rates. Unfused attention computes the
        whole matrix as batched products of inner length d (forward) and moves it through
        memory.
        """
        machine = self._machine
        rates = machine.kernels
        if fused:
            fraction = rates.flash_backward_fraction if backward else rates.flash_forward_fraction
            flops = 4.0 * batch * s * s * d / 2.0 * (2.5 if backward else 1.0)
            rate = machine.peak_flops_per_s(self._dtype) * fraction.value
            return np.asarray(flops) / rate + rates.launch_seconds.value
        batch = np.asarray(batch, dtype=np.float64)
        scores = self._products.seconds(s * batch, s, d, "NT", kernel_tuning=False)
        values = self._products.seconds(s * batch, d, s, "NN", kernel_tuning=False)
        n_products = 2.0 if backward else 1.0
        passes = UNFUSED_BACKWARD_PASSES if backward else UNFUSED_FORWARD_PASSES
        score_bytes = batch * s * s * BYTES_PER_ELEMENT[self._dtype]
        traffic = memory_bound_seconds(passes * score_bytes, machine, "softmax", self._dtype)
        traffic = traffic + 2.0 * rates.launch_seconds.value
        return n_products * (scores + values) + traffic


def attention_seconds(operation: Attention, machine: Machine, dtype: str) -> Array:
    """Return the time of attention on a machine; see `AttentionPrices`."""
    return AttentionPrices(machine, dtype, Products(machine, dtype)).seconds(operation)


def _coordinates(batch: Array, seq_len: Array, head_dim: Array) -> Array:
    """Return the point of each attention among others, log2 of its sizes, shape (N, 3)."""
    return np.log2(np.stack([batch, seq_len, head_dim], axis=1))
