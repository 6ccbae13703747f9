"""The result of a validation: the predicted and the measured step of each configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from axonn_tune.errors import InputError
from axonn_tune.spec.configuration import Configuration

# The version grows when the file's fields change their meaning.
VALIDATION_VERSION = 1


@dataclass(frozen=True)
class OperationTime:
    """The times of one operation, summed over a step.

    name
        Name of the operation in the step plan.
    kind
        Kind of kernel or collective.
    axis
        Axis of a collective; empty for kernels.
    n_calls
        Number of calls in a step.
    nbytes, flops
        Sums over all calls.
    measured_seconds, predicted_seconds
        Time of all calls; None where nothing was predicted.
    measured_exposed_seconds, predicted_exposed_seconds
        Time for which the compute stream stood still for a collective.
    """

    name: str
    kind: str
    axis: str
    n_calls: int
    nbytes: float
    flops: float
    measured_seconds: float
    measured_exposed_seconds: float
    predicted_seconds: float | None = None
    predicted_exposed_seconds: float | None = None

    @property
    def predicted_over_measured(self) -> float | None:
        """The ratio of predicted to measured time, above one where the prediction is too slow."""
        if self.predicted_seconds is None or not self.measured_seconds:
            return None
        return self.predicted_seconds / self.measured_seconds

    @property
    def excess_seconds(self) -> float:
        """The time by which this operation makes the predicted step longer than the measured one.

        For a collective the exposed time counts. The sum over all operations is the error.
        """
        if self.axis:
            return (self.predicted_exposed_seconds or 0.0) - self.measured_exposed_seconds
        return (self.predicted_seconds or 0.0) - self.measured_seconds


@dataclass(frozen=True)
class Predicted:
    """The prediction of a configuration.

    rank
        Place in the ranking of predictions.
    step_seconds
        Time of a step.
    memory_bytes
        Peak memory of a rank, with fragmentation and what the system reserves.
    low_seconds, high_seconds
        Ends of the interval that holds the step time with 90 % probability.
    allocated_bytes
        Peak memory of a rank's tensors; None in old files.
    allocator_bytes
        The same with fragmentation; None in old files.
    """

    rank: int
    step_seconds: float
    memory_bytes: float
    low_seconds: float | None = None
    high_seconds: float | None = None
    allocated_bytes: float | None = None
    allocator_bytes: float | None = None


@dataclass(frozen=True)
class Outcome:
    """One configuration, predicted and measured.

    configuration
        The configuration.
    predicted
        Its prediction.
    step_seconds
        Time of every timed step; empty where the run failed.
    peak_memory_bytes
        Peak memory of a rank's tensors; None where the device does not count it.
    operations
        Times of its operations.
    failure
        Reason why the run failed; empty where it succeeded.
    held_memory_bytes
        Most memory that torch's allocator held; None where the device does not count it.
    """

    configuration: Configuration
    predicted: Predicted
    step_seconds: tuple[float, ...] = ()
    peak_memory_bytes: float | None = None
    operations: tuple[OperationTime, ...] = ()
    failure: str = ""
    held_memory_bytes: float | None = None

    def __post_init__(self) -> None:
        if bool(self.step_seconds) == bool(self.failure):
            raise InputError(
                f"outcome of {self.configuration}: give either step_seconds or a failure"
            )

    @property
    def memory_error_fraction(self) -> float | None:
        """The predicted over the measured peak of the tensors less one; None if not counted."""
        if self.peak_memory_bytes is None:
            return None
        predicted = self.predicted.allocated_bytes or self.predicted.memory_bytes
        return predicted / self.peak_memory_bytes - 1.0

    @property
    def measured_seconds(self) -> float:
        """The median of the timed steps; NaN where there are none."""
        return median(self.step_seconds) if self.step_seconds else math.nan

    @property
    def error_fraction(self) -> float:
        """The ratio of predicted to measured step time, less one."""
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
    """Holds the predicted and measured configurations of one job on one machine.

    model, machine, strategy, engine
        Names of the model, the machine, the strategy and the released engine that ran; the last
        one is empty where the runtime of this package or torch itself ran.
    n_ranks, global_batch, seq_len, dtype, attention, overlap
        The job; see `Job`.
    device
        Name of the GPU.
    backend
        Name of the communication backend.
    date
        Day and time in UTC, ISO 8601.
    command_line
        Command that made the validation.
    n_ranked
        Number of ranked configurations, some of which were chosen to run.
    outcomes
        Results of the chosen configurations, which ran or failed.
    software
        Versions by name.
    environment
        Environment variables that change what was measured.
    validation_version
        Version of the file format.
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
    engine: str = ""
    validation_version: int = VALIDATION_VERSION

    def __post_init__(self) -> None:
        if not self.outcomes:
            raise InputError("validation: outcomes is empty; give at least one")

    @property
    def measured(self) -> tuple[Outcome, ...]:
        """The outcomes that ran."""
        return tuple(outcome for outcome in self.outcomes if not outcome.failure)

    @property
    def suggested(self) -> Outcome:
        """The outcome that was predicted to be the fastest."""
        return min(self.outcomes, key=lambda outcome: outcome.predicted.rank)
