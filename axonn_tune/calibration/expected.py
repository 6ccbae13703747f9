"""Compare collectives that a profile implies with measured ones, in the terms of nccl-tests.

algbw is the full buffer over the time, busbw the bytes that each link carries over the time
(NVIDIA/nccl-tests, doc/PERFORMANCE.md). Both hold for every group of an axis, while all groups of
the axis communicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from axonn_tune.cost.collectives import moved_fraction
from axonn_tune.cost.prices import group_seconds
from axonn_tune.errors import InputError
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.points import LinkPoint

# A fabric counts as sick if its bus bandwidth is below this share of what the levels imply.
SICK_FRACTION = 0.7


@dataclass(frozen=True)
class Expected:
    """One collective of one size.

    Parameters
    ----------
    seconds : float
        Time that latency and bandwidth of the levels imply. [s]
    measured_seconds : float or None
        Measured time; None where there is no measurement. [s]
    """

    kind: str
    stride: int
    size: int
    nbytes: int
    seconds: float
    measured_seconds: float | None

    @property
    def algbw_bytes_per_s(self) -> float:
        """The bytes of the full buffer over the implied time, in bytes/s."""
        return self.nbytes / self.seconds

    @property
    def busbw_bytes_per_s(self) -> float:
        """The bytes that each link of a ring carries, over the implied time, in bytes/s."""
        return self.algbw_bytes_per_s * float(moved_fraction(self.kind, self.size))

    @property
    def measured_busbw_bytes_per_s(self) -> float | None:
        """The bytes that each link of a ring carries, over the measured time, in bytes/s."""
        if self.measured_seconds is None:
            return None
        return self.busbw_bytes_per_s * self.seconds / self.measured_seconds

    @property
    def is_sick(self) -> bool:
        """Whether it was much slower than the levels of the profile imply."""
        return self.measured_seconds is not None and (
            self.seconds < SICK_FRACTION * self.measured_seconds
        )


def expected(
    machine: Machine, kind: str, stride: int, size: int, sizes_bytes: Sequence[int]
) -> list[Expected]:
    """Return the times that latency and bandwidth of the levels imply, next to measured ones.

    Parameters
    ----------
    stride, size : int
        Stride and size of the groups, as in `LinkPoint`.
    sizes_bytes : sequence of int
        Sizes of full buffers; those that were measured are added. [bytes]

    Raises
    ------
    InputError
        A group has one rank only.
    """
    if size < 2:
        raise InputError(f"a group of {size} has nothing to send; allowed: 2 ranks or more")
    measured = {
        p.nbytes: p.seconds
        for p in machine.link_points
        if (p.kind, p.stride, p.size) == (kind, stride, size) and p.is_of_whole_axis
    }
    # Measured points are left out, or a sick fabric would be expected to be sick.
    only_levels = replace(machine, link_points=())
    all_sizes = sorted({*sizes_bytes, *measured})
    seconds = group_seconds(only_levels, kind, stride, size, np.array(all_sizes, dtype=np.float64))
    return [
        Expected(kind, stride, size, nbytes, float(implied), measured.get(nbytes))
        for nbytes, implied in zip(all_sizes, seconds, strict=True)
    ]


def groups_of(points: Sequence[LinkPoint]) -> list[tuple[str, int, int]]:
    """Return kind, stride and size of every whole axis that was measured, in their order."""
    whole = ((p.kind, p.stride, p.size) for p in points if p.is_of_whole_axis)
    return list(dict.fromkeys(whole))
