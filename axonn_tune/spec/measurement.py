"""What the runtime records, in the names of the step plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median

from axonn_tune.spec.grid import Grid

WARM_UP_STEPS = 2  # the papers time the last eight of ten


@dataclass(frozen=True)
class Operation:
    """One operation as it ran on one rank.

    stream: ``"compute"``, or the grid axis of a collective. kind: gemm, attention,
    memory_bound, or the kind of collective. Seconds count from the start of the step.
    """

    name: str
    stream: str
    kind: str
    nbytes: float
    flops: float
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class Step:
    """One training step."""

    seconds: float
    loss: float
    gradient_norm: float
    operation_seconds: Mapping[str, float]  # by name, summed over the step


@dataclass(frozen=True)
class Measurement:
    """A run of some training steps on one grid.

    Attributes
    ----------
    steps : every step, the warm-up first
    last_step : the operations of the last step in the order of issue, on rank 0
    peak_memory_bytes : of the rank that used most
    memory_is_of_process : True where no device counts memory and the whole process does
    gemm_modes : mode that kernel tuning chose, by product
    software : versions by name
    """

    grid: Grid
    order: str
    micro_batch: int
    recompute: str
    steps: tuple[Step, ...]
    last_step: tuple[Operation, ...]
    peak_memory_bytes: float
    memory_is_of_process: bool
    gemm_modes: Mapping[str, str]
    device_name: str
    backend: str
    software: Mapping[str, str]

    @property
    def timed_steps(self) -> tuple[Step, ...]:
        """All but the warm-up; all of a run that is no longer than it."""
        return self.steps[WARM_UP_STEPS:] or self.steps

    @property
    def mean_step_seconds(self) -> float:
        """Mean of the timed steps."""
        return fmean(step.seconds for step in self.timed_steps)

    @property
    def median_step_seconds(self) -> float:
        """Median of the timed steps."""
        return median(step.seconds for step in self.timed_steps)

    @property
    def operation_seconds(self) -> dict[str, float]:
        """Median over the timed steps of each operation's seconds in a step."""
        return {
            name: median(step.operation_seconds[name] for step in self.timed_steps)
            for name in self.timed_steps[0].operation_seconds
        }
