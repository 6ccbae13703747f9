"""The slowdown of kernels and collectives that run at the same time.

While both run, a kernel needs 1 + s seconds and a collective 1 + r seconds for a second of work.
Times are measured from the start of the kernel; they are arrays of shape (C,) or numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.plan import Array


@dataclass(frozen=True)
class Interference:
    """The slowdowns of kernels and collectives.

    of_kernels
        Additional time, relative, of a kernel while a collective runs (s).
    of_collectives
        Additional time, relative, of a collective while a kernel runs (r).
    """

    of_kernels: float = 0.0
    of_collectives: float = 0.0

    def kernel_seconds(self, seconds: Array, remaining_seconds: Array) -> Array:
        """Return the duration of a kernel that starts while collectives run.

        The collectives have work left that takes `remaining_seconds` without the kernel, and
        1 + r times as long with it. Until they end, the kernel takes 1 + s seconds for each
        second of work.
        """
        extra = np.maximum(remaining_seconds, 0.0)
        extra *= (1.0 + self.of_collectives) * self.of_kernels / (1.0 + self.of_kernels)
        np.minimum(extra, seconds * self.of_kernels, out=extra)
        extra += seconds
        return extra

    def delay_seconds(self, kernel_seconds: Array, remaining_seconds: Array) -> Array:
        """Return the time by which a kernel of this duration delays the end of a collective."""
        delay = np.maximum(remaining_seconds, 0.0)
        delay *= self.of_collectives
        longest = kernel_seconds * (self.of_collectives / (1.0 + self.of_collectives))
        np.minimum(delay, longest, out=delay)
        return delay
