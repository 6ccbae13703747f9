"""Collectives whose steps were measured: steps of rings and of trees, and hops within a unit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from axonn_tune.cost.collectives import tree_share
from axonn_tune.cost.curve import Curve, used_curves
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import Array, Size


@dataclass(frozen=True, eq=False)
class SteppedLinks:
    """The measured steps of an algorithm over the groups of an axis, arrays of shape (P,).

    n_steps
        Number of steps.
    latency_seconds
        Time of all steps without any bytes: the latency of their hops.
    n_sharing
        Number of groups that share the outermost boundary.
    curve
        Index of the curve that holds for the group, -1 where there is none.
    curves
        Time of a step by its bytes.
    """

    n_steps: Array
    latency_seconds: Array
    n_sharing: Ints
    curve: Ints
    curves: tuple[Curve, ...]

    def take(self, rows: Ints) -> SteppedLinks:
        """Return the steps over the groups of these rows."""
        return SteppedLinks(
            self.n_steps[rows],
            self.latency_seconds[rows],
            self.n_sharing[rows],
            self.curve[rows],
            self.curves,
        )

    def seconds(self, nbytes: Array) -> Size:
        """Return the time of all steps of each group.

        Groups that share a boundary move their bytes through it together, so that a step of r
        groups takes as long as that of one group with r times the bytes. Below the smallest chunk
        that was measured, a straight line leads to the latency of the hops.

        Parameters
        ----------
        nbytes : array, shape (P,)
            Bytes of one step.

        Returns
        -------
        ndarray, shape (P,) [s]
            NaN where no step was measured.
        """
        if not self.curves:
            return np.nan
        seconds = np.full(self.curve.shape, np.nan)
        for curve, rows, steps in self._measured:
            together = steps.n_sharing * nbytes[rows]
            of_steps = curve.at(together) * steps.n_steps
            latency = np.minimum(steps.latency_seconds, of_steps)
            part = np.minimum(together / curve.nbytes[0], 1.0)
            seconds[rows] = latency + part * (of_steps - latency)
        return seconds

    @cached_property
    def _measured(self) -> list[tuple[Curve, Ints, SteppedLinks]]:
        """Each curve that holds for at least one group, with the rows and steps of its groups."""
        used = used_curves(self.curve, self.curves)
        return [(curve, rows, self.take(rows)) for curve, rows in used]


@dataclass(frozen=True, eq=False)
class SteppedTrees:
    """The measured steps of trees over the groups of an axis, arrays of shape (P,).

    Steps that were measured over two units hold there. Over more of them each further level of the
    tree adds its hops, and units send the buffer twice where each of two sends it once.

    steps
        The measured steps of one way, up or down.
    added_seconds
        Latency of the hops of one way beyond those that were measured.
    added_s_per_byte
        Time for which each byte of the buffer occupies the busiest link longer than it was
        measured, up and down.
    """

    steps: SteppedLinks
    added_seconds: Array
    added_s_per_byte: Array

    def take(self, rows: Ints) -> SteppedTrees:
        """Return the trees over the groups of these rows."""
        return SteppedTrees(
            self.steps.take(rows), self.added_seconds[rows], self.added_s_per_byte[rows]
        )

    def seconds(self, nbytes: Array) -> Size:
        """Return the time up and down the tree with messages of these bytes, shape (P,).

        It is NaN where no step was measured.
        """
        if not self.steps.curves:
            return np.nan
        seconds = 2.0 * (self.steps.seconds(nbytes) + self.added_seconds)
        if not self.added_s_per_byte.any():
            return seconds
        return seconds + nbytes * self.added_s_per_byte / tree_share(nbytes)


@dataclass(frozen=True, eq=False)
class HopDelays:
    """The extra time of hops on one level, beyond latency and bandwidth, in rings that leave it.

    steps
        The measured steps of these hops.
    bandwidth_bytes_per_s
        Bandwidth of each ring on this level, shape (P,).
    """

    steps: SteppedLinks
    bandwidth_bytes_per_s: Array

    def take(self, rows: Ints) -> HopDelays:
        """Return the delays of the groups of these rows."""
        return HopDelays(self.steps.take(rows), self.bandwidth_bytes_per_s[rows])

    def seconds(self, nbytes: Array) -> Array:
        """Return the delay of one way around the ring with chunks of these bytes, shape (P,).

        The delay is never negative, even where hops were measured to be faster than their latency:
        within the level, chunks of this size are parts of smaller buffers, for which NCCL takes
        protocols of low latency.
        """
        moved = self.steps.n_steps * nbytes / self.bandwidth_bytes_per_s
        delay = self.steps.seconds(nbytes) - moved - self.steps.latency_seconds
        return np.fmax(delay, 0.0)
