"""The prediction of one configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from axonn_tune.spec.grid import AnyGrid
from axonn_tune.spec.variant import Variant

# Standard deviations from the middle to the ends of an interval of 90 %.
NORMAL_90 = 1.645


@dataclass(frozen=True)
class Prediction:
    """One configuration with its predicted step.

    `tflops_per_gpu` and `mfu` count the model's FLOPs, `hardware_tflops_per_gpu` and `hfu`
    also those of recomputation; `mfu` and `hfu` are fractions of the advertised peak.
    `spread_fraction` is the standard deviation of the logarithm of the step time, `p_best` the
    probability that no other candidate is faster; both are known of the fastest rows only.
    """

    rank: int
    strategy: str
    grid: AnyGrid
    order: str
    micro_batch: int
    n_microsteps: int
    variant: Variant
    step_seconds: float
    compute_seconds: float
    exposed_communication_seconds: float
    bubble_seconds: float
    tflops_per_gpu: float
    hardware_tflops_per_gpu: float
    mfu: float
    hfu: float
    tokens_per_second_per_gpu: float
    memory_bytes: float
    memory_terms_bytes: Mapping[str, float]
    memory_capacity_bytes: float
    fits: bool
    paper_communication_seconds: float | None
    spread_fraction: float | None = None
    p_best: float | None = None

    @property
    def recompute(self) -> str:
        """What is recomputed in the backward pass."""
        return self.variant.recompute

    @property
    def step_seconds_interval(self) -> tuple[float, float] | None:
        """Ends of the interval that holds the step time with 90 % probability."""
        if self.spread_fraction is None:
            return None
        factor = math.exp(NORMAL_90 * self.spread_fraction)
        return self.step_seconds / factor, self.step_seconds * factor

    @property
    def exposed_communication_fraction(self) -> float:
        """Share of the step in which the compute stream stands still."""
        return self.exposed_communication_seconds / self.step_seconds

    @property
    def largest_memory_term(self) -> str:
        """The term that takes most memory."""
        return max(self.memory_terms_bytes, key=lambda term: self.memory_terms_bytes[term])
