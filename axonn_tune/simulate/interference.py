"""How kernels and collectives that run at the same time slow each other down.

While both run, a kernel needs 1 + s seconds and a collective 1 + r seconds for a second of
work. Times are measured from the start of the kernel; arrays of shape (C,) or numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.plan import Array


@dataclass(frozen=True)
class Interference:
    """Slowdowns: `of_kernels` beside a collective (s), `of_collectives` beside a kernel (r)."""

    of_kernels: float = 0.0
    of_collectives: float = 0.0

    def kernel_seconds(self, seconds: Array, remaining_seconds: Array) -> Array:
        """Duration of a kernel beside which collectives have work for `remaining_seconds` left.

        Until these end, 1 + r times later than alone, it takes 1 + s seconds for each second of
        work.
        """
        extra = np.maximum(remaining_seconds, 0.0)
        extra *= (1.0 + self.of_collectives) * self.of_kernels / (1.0 + self.of_kernels)
        np.minimum(extra, seconds * self.of_kernels, out=extra)
        extra += seconds
        return extra

    def delay_seconds(self, kernel_seconds: Array, remaining_seconds: Array) -> Array:
        """How much later than alone a collective ends beside a kernel of that duration."""
        delay = np.maximum(remaining_seconds, 0.0)
        delay *= self.of_collectives
        at_most = kernel_seconds * (self.of_collectives / (1.0 + self.of_collectives))
        np.minimum(delay, at_most, out=delay)
        return delay
