"""What collectives a profile implies, in the terms of nccl-tests, beside what was measured.

algbw is the full buffer over the time, busbw what each link carries over it (NVIDIA/nccl-tests,
doc/PERFORMANCE.md); both are those of every group of an axis, while all of its groups communicate.
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

# Measured bus bandwidth below this share of what the fitted levels imply is worth a look.
SICK_FRACTION = 0.7


@dataclass(frozen=True)
class Expected:
    """One collective of one size; measured_seconds is None where it was not measured."""

    kind: str
    stride: int
    size: int
    nbytes: int
    seconds: float
    measured_seconds: float | None

    @property
    def algbw_bytes_per_s(self) -> float:
        """Full buffer over time."""
        return self.nbytes / self.seconds

    @property
    def busbw_bytes_per_s(self) -> float:
        """What each link of a ring carries, over time."""
        return self.algbw_bytes_per_s * float(moved_fraction(self.kind, self.size))

    @property
    def measured_busbw_bytes_per_s(self) -> float | None:
        """As measured."""
        if self.measured_seconds is None:
            return None
        return self.busbw_bytes_per_s * self.seconds / self.measured_seconds

    @property
    def is_sick(self) -> bool:
        """Much slower than the levels of the profile imply."""
        return self.measured_seconds is not None and (
            self.seconds < SICK_FRACTION * self.measured_seconds
        )


def expected(
    machine: Machine, kind: str, stride: int, size: int, sizes_bytes: Sequence[int]
) -> list[Expected]:
    """Times that latency and bandwidth of the levels imply, and those measured.

    Parameters
    ----------
    stride, size : int
        Of the groups, as in `LinkPoint`.
    """
    if size < 2:
        raise InputError(f"a group of {size} has nothing to send; allowed: 2 ranks or more")
    measured = {
        p.nbytes: p.seconds
        for p in machine.link_points
        if (p.kind, p.stride, p.size) == (kind, stride, size) and p.is_of_whole_axis
    }
    # From the levels alone, or a sick fabric would be expected to be sick.
    law = replace(machine, link_points=())
    wanted = sorted({*sizes_bytes, *measured})
    seconds = group_seconds(law, kind, stride, size, np.array(wanted, dtype=np.float64))
    return [
        Expected(kind, stride, size, nbytes, float(t), measured.get(nbytes))
        for nbytes, t in zip(wanted, seconds, strict=True)
    ]


def groups_of(points: Sequence[LinkPoint]) -> list[tuple[str, int, int]]:
    """Kind, stride and size of every whole axis that was measured, in their order."""
    whole = ((p.kind, p.stride, p.size) for p in points if p.is_of_whole_axis)
    return list(dict.fromkeys(whole))
