"""Predicted against measured, operation by operation."""

from __future__ import annotations

from collections.abc import Iterable

from axonn_tune.spec.measurement import COMPUTATION, HOST, Measurement, Operation
from axonn_tune.spec.plan import COMPUTE
from axonn_tune.spec.validation import OperationTime
from axonn_tune.step.explain import Explanation, OperationCost


def compare(measurement: Measurement, explanation: Explanation | None) -> list[OperationTime]:
    """Every operation that was measured, with its prediction, longest first.

    The last row, `HOST`, is what the host took between operations.
    """
    predicted = {}
    if explanation is not None:
        predicted = {op.name: op for op in explanation.operations}
        predicted |= _not_told_apart(measurement, explanation)
    measured, exposed = measurement.operation_seconds, measurement.exposed_seconds
    rows = []
    for name, calls in _by_name(measurement.last_step).items():
        cost = predicted.get(name)
        is_collective = calls[0].stream != COMPUTE
        rows.append(
            OperationTime(
                name=name,
                kind=calls[0].kind,
                axis=calls[0].stream if is_collective else "",
                n_calls=len(calls),
                nbytes=sum(call.nbytes for call in calls),
                flops=sum(call.flops for call in calls),
                measured_seconds=_rounded(measured[name]),
                measured_exposed_seconds=_rounded(exposed.get(name, 0.0)),
                predicted_seconds=_rounded(cost.total_seconds) if cost else None,
                predicted_exposed_seconds=_rounded(cost.exposed_seconds) if cost else None,
            )
        )
    rows.sort(key=lambda row: -row.measured_seconds)
    host = _rounded(exposed.get(HOST, 0.0))
    known = _rounded(explanation.host_seconds) if explanation else None
    if COMPUTATION in measured:
        known = 0.0 if explanation else None
    return [*rows, OperationTime(HOST, HOST, "", 0, 0.0, 0.0, host, 0.0, known)]


def _not_told_apart(measurement: Measurement, explanation: Explanation) -> dict[str, OperationCost]:
    """Where kernels are measured as one: all of the predicted step but recorded collectives."""
    names = {op.name for op in measurement.last_step}
    if COMPUTATION not in names:
        return {}
    recorded = sum(op.exposed_seconds for op in explanation.operations if op.name in names)
    seconds = explanation.prediction.step_seconds - recorded
    cost = OperationCost(COMPUTATION, COMPUTATION, "", 0.0, 1, seconds, seconds, 0.0, 0.0, "", "")
    return {COMPUTATION: cost}


def _rounded(seconds: float) -> float:
    """In as many digits as a report needs."""
    return float(f"{seconds:.6g}")


def _by_name(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
    groups: dict[str, list[Operation]] = {}
    for operation in operations:
        groups.setdefault(operation.name, []).append(operation)
    return groups
