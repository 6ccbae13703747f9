"""What a validation found: for each configuration the predicted and the measured step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from axonn_tune.errors import InputError
from axonn_tune.spec.configuration import Configuration

# Raised when the file's fields change their meaning.
VALIDATION_VERSION = 1


@dataclass(frozen=True)
class OperationTime:
    """One operation, summed over a step.

    nbytes, flops: of all its calls. predicted_seconds: None where nothing was predicted.
    exposed: how long the compute stream stood still for a collective.
    """

    name: str
    kind: str
    axis: str  # empty for kernels
    n_calls: int
    nbytes: float
    flops: float
    measured_seconds: float
    measured_exposed_seconds: float
    predicted_seconds: float | None = None
    predicted_exposed_seconds: float | None = None

    @property
    def predicted_over_measured(self) -> float | None:
        """Above one where the prediction is too slow."""
        if self.predicted_seconds is None or not self.measured_seconds:
            return None
        return self.predicted_seconds / self.measured_seconds

    @property
    def excess_seconds(self) -> float:
        """How much longer the predicted step is by this operation than the measured one.

        Of a collective what is exposed counts; over all operations these sum up to the error.
        """
        if self.axis:
            return (self.predicted_exposed_seconds or 0.0) - self.measured_exposed_seconds
        return (self.predicted_seconds or 0.0) - self.measured_seconds


@dataclass(frozen=True)
class Predicted:
    """What the model said of a configuration; low and high are the ends of its 90 % interval."""

    rank: int
    step_seconds: float
    memory_bytes: float
    low_seconds: float | None = None
    high_seconds: float | None = None


@dataclass(frozen=True)
class Outcome:
    """One configuration, predicted and measured.

    step_seconds: of every timed step; empty where the run failed, and `failure` says why.
    peak_memory_bytes: None where the backend does not count it.
    """

    configuration: Configuration
    predicted: Predicted
    step_seconds: tuple[float, ...] = ()
    peak_memory_bytes: float | None = None
    operations: tuple[OperationTime, ...] = ()
    failure: str = ""

    def __post_init__(self) -> None:
        if bool(self.step_seconds) == bool(self.failure):
            raise InputError(
                f"outcome of {self.configuration}: give either step_seconds or a failure"
            )

    @property
    def measured_seconds(self) -> float:
        """Median of the timed steps; NaN where there are none."""
        return median(self.step_seconds) if self.step_seconds else math.nan

    @property
    def error_fraction(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.step_seconds / self.measured_seconds - 1.0

    @property
    def cause(self) -> OperationTime | None:
        """The operation that adds most to the error, in the error's direction."""
        if not self.operations or self.failure:
            return None
        sign = math.copysign(1.0, self.error_fraction)
        return max(self.operations, key=lambda op: sign * op.excess_seconds)


@dataclass(frozen=True)
class Validation:
    """A set of configurations of one job on one machine.

    n_ranked: configurations from which those that were run were taken. date: day and time in
    UTC, ISO 8601.
    """

    model: str
    machine: str
    n_ranks: int
    global_batch: int
    seq_len: int
    dtype: str
    attention: str
    overlap: str
    device: str
    backend: str
    date: str
    command_line: str
    n_ranked: int
    outcomes: tuple[Outcome, ...]
    software: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    strategy: str = "axonn"
    validation_version: int = VALIDATION_VERSION

    def __post_init__(self) -> None:
        if not self.outcomes:
            raise InputError("validation: outcomes is empty; give at least one")

    @property
    def measured(self) -> tuple[Outcome, ...]:
        """Those that ran."""
        return tuple(outcome for outcome in self.outcomes if not outcome.failure)

    @property
    def suggested(self) -> Outcome:
        """The one that was predicted to be the fastest."""
        return min(self.outcomes, key=lambda outcome: outcome.predicted.rank)
