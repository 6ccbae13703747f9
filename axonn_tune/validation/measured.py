"""Predicted and measured times of one step, operation by operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from axonn_tune.spec import names
from axonn_tune.spec.measurement import COMPUTATION, HOST, Measurement, Operation
from axonn_tune.spec.plan import COMPUTE
from axonn_tune.spec.validation import OperationTime
from axonn_tune.step.explain import Explanation, OperationCost
from axonn_tune.units import rounded


def operation_times(
    measurement: Measurement, explanation: Explanation | None
) -> list[OperationTime]:
    """Return every operation that was measured, with its prediction, the longest first.

    The last entry, `HOST`, is the time that the host took between operations.
    """
    predicted = {}
    if explanation is not None:
        predicted = {op.name: op for op in explanation.operations}
        predicted |= _collectives_over_axes(measurement, explanation)
        predicted |= _all_kernels(measurement, predicted, explanation)
    measured = measurement.operation_seconds
    exposed = measurement.exposed_seconds
    times = []
    for name, calls in _by_name(measurement.last_step).items():
        cost = predicted.get(name)
        is_collective = calls[0].stream != COMPUTE
        times.append(
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
    times.sort(key=lambda time: -time.measured_seconds)
    measured_host = _rounded(exposed.get(HOST, 0.0))
    predicted_host = None
    if explanation is not None:
        # Where kernels are measured as one, the host's time is part of them.
        predicted_host = 0.0 if COMPUTATION in measured else _rounded(explanation.host_seconds)
    host = OperationTime(HOST, HOST, "", 0, 0.0, 0.0, measured_host, 0.0, predicted_host)
    return [*times, host]


def _collectives_over_axes(
    measurement: Measurement, explanation: Explanation
) -> dict[str, OperationCost]:
    """Return the predicted time of all collectives of a kind over an axis that have no other name.

    Its name is that under which a collective is recorded whose part in the plan is not known.
    """
    recorded_names = {op.name for op in measurement.last_step}
    groups: dict[str, list[OperationCost]] = {}
    for op in explanation.operations:
        if op.axis and op.name not in recorded_names:
            groups.setdefault(names.over_axis(op.kind, op.axis), []).append(op)
    return {name: _sum(name, group) for name, group in groups.items()}


def _sum(name: str, operations: list[OperationCost]) -> OperationCost:
    return replace(
        operations[0],
        name=name,
        total_seconds=sum(op.total_seconds for op in operations),
        exposed_seconds=sum(op.exposed_seconds for op in operations),
    )


def _all_kernels(
    measurement: Measurement, predicted: Mapping[str, OperationCost], explanation: Explanation
) -> dict[str, OperationCost]:
    """Return the predicted time of all kernels, by name, if they were measured as one.

    It is the predicted step without the collectives that were recorded.
    """
    recorded_names = {op.name for op in measurement.last_step}
    if COMPUTATION not in recorded_names:
        return {}
    recorded = sum(predicted[name].exposed_seconds for name in recorded_names & set(predicted))
    seconds = explanation.prediction.step_seconds - recorded
    cost = OperationCost(COMPUTATION, COMPUTATION, "", 0.0, 1, seconds, seconds, 0.0, 0.0, "", "")
    return {COMPUTATION: cost}


def _rounded(seconds: float) -> float:
    """Return seconds in as many digits as a report needs."""
    return rounded(seconds, 6)


def _by_name(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
    groups: dict[str, list[Operation]] = {}
    for operation in operations:
        groups.setdefault(operation.name, []).append(operation)
    return groups
