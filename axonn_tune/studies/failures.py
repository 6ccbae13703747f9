"""Work that failures interrupt: how often to checkpoint, and how long it takes in the end."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Failures:
    """How often a job is interrupted, and what a checkpoint and a restart cost it."""

    mtbf_seconds: float
    checkpoint_seconds: float
    restart_seconds: float

    @property
    def interval_seconds(self) -> float:
        """Best time between the end of a checkpoint and the start of the next.

        Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
        FGCS 22 (2006), eq. 37.
        """
        delta, mtbf = self.checkpoint_seconds, self.mtbf_seconds
        if delta >= 2.0 * mtbf:
            return mtbf
        share = delta / (2.0 * mtbf)
        return math.sqrt(2.0 * delta * mtbf) * (1.0 + math.sqrt(share) / 3.0 + share / 9.0) - delta

    def wall_seconds(self, work_seconds: float) -> float:
        """Expected time of so much work with checkpoints and failures at random (Daly, eq. 20)."""
        interval = min(self.interval_seconds, work_seconds)
        mtbf = self.mtbf_seconds
        cycle = (interval + self.checkpoint_seconds) / mtbf
        if cycle + self.restart_seconds / mtbf > math.log(1e6):
            return math.inf
        return (
            mtbf
            * math.exp(self.restart_seconds / mtbf)
            * math.expm1(cycle)
            * work_seconds
            / interval
        )
