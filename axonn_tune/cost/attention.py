"""The time of softmax attention, fused and unfused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from axonn_tune.cost.curve import Spline, spline_through
from axonn_tune.cost.gemm import Products
from axonn_tune.cost.memory_bound import memory_bound_seconds
from axonn_tune.spec.blocks import attended_keys
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array, Attention
from axonn_tune.spec.points import AttentionPoint
from axonn_tune.spec.precision import BYTES_PER_ELEMENT

# Passes of the softmax over the scores: forward reads and writes them; backward reads them and
# their gradient and writes one. The time of a product includes its own reads and writes.
UNFUSED_FORWARD_PASSES = 2.0
UNFUSED_BACKWARD_PASSES = 3.0

# Fused attention computes scores by whole blocks of 128 tokens, also where a mask or the end of a
# sequence cuts them (Dao-AILab/flash-attention, hopper/tile_size.h, heads of 128). Machines' rates
# were measured from 2,048 tokens on, so that they contain what such sequences lose.
_BLOCK_TOKENS = 128.0
_RATED_TOKENS = 2048.0


class _Kind(NamedTuple):
    """What distinguishes kinds of attention kernels.

    `windowed_heads` is the number of features of a head where there is a window, and 0 elsewhere.
    `number_format` is the format of the operands, and `library` names the library of the kernel.
    """

    backward: bool
    fused: bool
    masked: bool
    windowed_heads: int
    number_format: str
    library: str


class AttentionPrices:
    """The prices of softmax attention of one dtype on a machine.

    A formula gives the time; where attention was measured, the ratio to it corrects the formula.
    """

    def __init__(self, machine: Machine, dtype: str, products: Products) -> None:
        self._machine = machine
        self._dtype = dtype
        self._products = products
        self._corrections: dict[_Kind, Spline | None] = {}

    def seconds(self, operation: Attention) -> Array:
        """Return the time of an operation, in the shape of its sizes."""
        n_sequences, n_heads, s = (
            np.asarray(size, dtype=np.float64)
            for size in np.broadcast_arrays(
                operation.n_sequences, operation.n_heads, operation.seq_len
            )
        )
        batch = n_sequences * n_heads
        d = float(operation.head_dim)
        backward, fused, masked = operation.backward, operation.fused, operation.masked
        seconds = self._formula(batch, s, d, backward, fused, masked)
        number_format = operation.number_format or self._dtype
        windowed_heads = operation.head_dim if operation.window else 0
        kind = _Kind(backward, fused, masked, windowed_heads, number_format, operation.library)
        correction = self._correction(kind)
        if correction is not None:
            flat = batch.ravel()
            points = _coordinates(flat, s.ravel(), np.full(flat.shape, d))
            seconds = seconds * np.exp(correction(points)).reshape(seconds.shape)
        if operation.dropout:
            seconds = seconds * self._dropout_factor(operation.backward)
        if fused and operation.window:
            seconds = seconds * _computed_share(int(operation.seq_len), operation.window)
        return operation.n_launches * seconds / operation.rate

    def _dropout_factor(self, backward: bool) -> float:
        """Return the time of fused attention with dropout over that without it."""
        rates = self._machine.kernels
        factor = rates.dropout_backward_factor if backward else rates.dropout_forward_factor
        return factor.value

    def _correction(self, kind: _Kind) -> Spline | None:
        """Return the logarithm of measured over computed time, or None without measured points.

        Where attention was not measured without a mask, it is as fast as with one, and where it was
        not measured in a low format, it is as fast as in the job's type. Where the library's was
        not measured, the library that was measured first stands for it. Where heads of its size
        were not measured with a window, blocks of scores take as long as without one.
        """
        if kind not in self._corrections:
            points = self._points(kind)
            correction = None
            if points:
                correction = self._fitted(points)
            elif kind.number_format != self._dtype:
                correction = self._correction(kind._replace(number_format=self._dtype))
            elif not kind.masked:
                correction = self._correction(kind._replace(masked=True))
            elif kind.windowed_heads:
                correction = self._correction(kind._replace(windowed_heads=0))
            self._corrections[kind] = correction
        return self._corrections[kind]

    def _points(self, kind: _Kind) -> Sequence[AttentionPoint]:
        """Return the points nearest to a kind; none if it was not measured in its number format."""
        wanted = (kind.backward, kind.fused, kind.windowed_heads, kind.number_format)
        alike = [
            p
            for p in self._machine.kernels.attention_points
            if (p.backward, p.fused, p.head_dim if p.window else 0, p.dtype) == wanted
        ]
        of_library = [p for p in alike if p.library == kind.library]
        others = [p for p in alike if p.masked == kind.masked]
        return (
            [p for p in of_library if p.masked == kind.masked]
            or [p for p in of_library if p.masked]
            or [p for p in others if p.library == others[0].library]
        )

    def _fitted(self, points: Sequence[AttentionPoint]) -> Spline:
        """Return the correction that goes through the measured points of one kind.

        Without a mask there is twice the work.
        """
        sizes = np.array(
            [[p.n_sequences * p.n_heads, p.seq_len, p.head_dim] for p in points], float
        )
        by_formula = [
            (1.0 if p.masked else 2.0)
            * self._formula(batch, s, d, p.backward, p.fused, p.masked)
            * _computed_share(p.seq_len, p.window)
            for p, (batch, s, d) in zip(points, sizes, strict=True)
        ]
        measured = np.array([p.seconds for p in points])
        return spline_through(_coordinates(*sizes.T), np.log(measured / np.array(by_formula)))

    def _formula(
        self, batch: Array, s: Array, d: float, backward: bool, fused: bool, masked: bool
    ) -> Array:
        """Return the time of one kernel for `batch` heads over all sequences.

        Flash attention (Dao, arXiv 2307.08691) computes the causal half of the score matrix and
        recomputes it in the backward pass: 4 b s^2 a d / 2 FLOPs forward, 2.5 times that backward
        (section 3.1), at the machine's flash rates. For short sequences it computes more than that,
        since they fill its blocks badly. Unfused attention computes the whole matrix as batched
        products of inner length d (forward) and moves it through memory.
        """
        machine = self._machine
        rates = machine.kernels
        if fused:
            fraction = rates.flash_backward_fraction if backward else rates.flash_forward_fraction
            flops = 4.0 * batch * s * s * d / 2.0 * (2.5 if backward else 1.0)
            rate = machine.peak_flops_per_s(self._dtype) * fraction.value
            flops = flops * _lost_in_blocks(s, masked)
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


def _computed_share(seq_len: int, window: int) -> float:
    """Return the share of the causal half of the scores that whole blocks across a window hold.

    A window reaches into one block more than its tokens would fill. Without a window the share is
    1.
    """
    if not window:
        return 1.0
    attended_fraction = attended_keys(seq_len, window) / seq_len
    return min(1.0, attended_fraction * (1.0 + _BLOCK_TOKENS / window))


def _lost_in_blocks(s: Array, masked: bool) -> Array:
    """Return the extra work per score of short sequences, over that of rated ones; at least 1."""
    rated = np.asarray(_RATED_TOKENS)
    return np.asarray(_in_blocks(np.minimum(s, rated), masked) / _in_blocks(rated, masked))


def _in_blocks(s: Array, masked: bool) -> Array:
    """Return how many scores are computed for each that counts."""
    n_blocks = np.ceil(s / _BLOCK_TOKENS)
    covered = n_blocks * (n_blocks + 1.0) if masked else n_blocks**2
    return np.asarray(covered * (_BLOCK_TOKENS / s) ** 2)


def _coordinates(batch: Array, seq_len: Array, head_dim: Array) -> Array:
    """Return the coordinates of each attention for interpolation: log2 of its sizes, shape (N, 3).

    The length comes first: where it was varied together with the batch, it stands for both.
    """
    return np.log2(np.stack([seq_len, batch, head_dim], axis=1))
