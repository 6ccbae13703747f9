"""The slowdown of kernels and collectives that run at the same time.

While both run, a kernel needs 1 + s seconds and a collective 1 + r seconds for a second of work.
Messages from one rank to another slow no kernel. NCCL gives one to another node about a channel for
each 14 GB/s of a NIC, and so four of 132 multiprocessors of H100 (NVIDIA/nccl 5067397,
src/graph/paths.cc, ncclTopoGetNchannels). Within a node it may take as many as a collective; that
kernels are not slowed there either is assumed, as for the messages between stages of a pipeline.
Times are measured from the start of the kernel; they are arrays of shape (C,) or numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from axonn_tune.spec.plan import Array, Size


@dataclass(frozen=True, eq=False)
class Interference:
    """The slowdowns of kernels and collectives, numbers or arrays of shape (C,).

    kernel_slowdown
        Additional time, relative, of a kernel while a collective runs (s).
    collective_slowdown
        Additional time, relative, of a collective while a kernel runs (r).
    """

    kernel_slowdown: Size = 0.0
    collective_slowdown: Size = 0.0

    @classmethod
    def of_machines(cls, slowdowns: Sequence[tuple[float, float]], n: int) -> Interference:
        """Return the slowdowns of n candidates on each of several machines in turn.

        `slowdowns` are those of kernels and of collectives on each machine.
        """
        if len(set(slowdowns)) == 1:
            return cls(*slowdowns[0])
        return cls(*np.repeat(np.array(slowdowns).T, n, axis=1))

    @cached_property
    def slows_kernels(self) -> bool:
        """Whether collectives slow the kernels of any candidate."""
        return bool(np.any(self.kernel_slowdown))

    @cached_property
    def slows_collectives(self) -> bool:
        """Whether kernels slow the collectives of any candidate."""
        return bool(np.any(self.collective_slowdown))

    def rows(self, rows: np.ndarray) -> Interference:
        """Return the slowdowns of some candidates."""
        slowdowns = (self.kernel_slowdown, self.collective_slowdown)
        return Interference(
            *(each[rows] if isinstance(each, np.ndarray) else each for each in slowdowns)
        )

    def kernel_seconds(self, seconds: Array, remaining_seconds: Array) -> Array:
        """Return the duration of a kernel that starts while collectives run.

        The collectives have work left that takes `remaining_seconds` without the kernel, and
        1 + r times as long with it. Until they end, the kernel takes 1 + s seconds for each
        second of work.
        """
        extra = np.maximum(remaining_seconds, 0.0)
        extra *= (
            (1.0 + self.collective_slowdown) * self.kernel_slowdown / (1.0 + self.kernel_slowdown)
        )
        np.minimum(extra, seconds * self.kernel_slowdown, out=extra)
        extra += seconds
        return extra

    def delay_seconds(self, kernel_seconds: Array, remaining_seconds: Array) -> Array:
        """Return the time by which a kernel of this duration delays the end of a collective."""
        delay = np.maximum(remaining_seconds, 0.0)
        delay *= self.collective_slowdown
        longest = kernel_seconds * (self.collective_slowdown / (1.0 + self.collective_slowdown))
        np.minimum(delay, longest, out=delay)
        return delay
