"""Predicted against measured, operation by operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from axonn_tune.search.explain import Explanation
from axonn_tune.spec.measurement import Measurement, Operation


@dataclass(frozen=True)
class Compared:
    """One operation, summed over a step.

    nbytes, flops: of all its calls. predicted_seconds is None without a hardware profile.
    """

    name: str
    kind: str
    axis: str  # empty for kernels
    n_calls: int
    nbytes: float
    flops: float
    measured_seconds: float
    predicted_seconds: float | None

    @property
    def predicted_over_measured(self) -> float | None:
        """Above one where the prediction is too slow."""
        if self.predicted_seconds is None or not self.measured_seconds:
            return None
        return self.predicted_seconds / self.measured_seconds


def compare(measurement: Measurement, explanation: Explanation | None) -> list[Compared]:
    """Every operation that was measured, with its prediction, longest first."""
    predicted = {}
    if explanation is not None:
        predicted = {op.name: op.total_seconds for op in explanation.operations}
    measured = measurement.operation_seconds
    rows = [
        Compared(
            name=name,
            kind=calls[0].kind,
            axis="" if calls[0].stream == "compute" else calls[0].stream,
            n_calls=len(calls),
            nbytes=sum(call.nbytes for call in calls),
            flops=sum(call.flops for call in calls),
            measured_seconds=measured[name],
            predicted_seconds=predicted.get(name),
        )
        for name, calls in _by_name(measurement.last_step).items()
    ]
    return sorted(rows, key=lambda row: -row.measured_seconds)


def _by_name(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
    groups: dict[str, list[Operation]] = {}
    for operation in operations:
        groups.setdefault(operation.name, []).append(operation)
    return groups
