"""Join what was predicted of a configuration and what was measured."""

from __future__ import annotations

from axonn_tune.spec.measurement import Measurement
from axonn_tune.spec.validation import Outcome, Predicted
from axonn_tune.step.explain import explain
from axonn_tune.step.prediction import Prediction
from axonn_tune.validation.measured import operation_times


def outcome_of(prediction: Prediction, result: Measurement | str) -> Outcome:
    """Return the outcome of one configuration from what was measured, or why it failed."""
    configuration = prediction.configuration
    low, high = prediction.step_seconds_interval or (None, None)
    predicted = Predicted(
        prediction.place,
        prediction.step_seconds,
        prediction.memory_bytes,
        low,
        high,
        prediction.allocated_bytes,
        prediction.allocator_bytes,
    )
    if isinstance(result, str):
        return Outcome(configuration, predicted, failure=result)
    counts_memory = not result.memory_is_of_process
    return Outcome(
        configuration,
        predicted,
        step_seconds=tuple(step.seconds for step in result.timed_steps),
        peak_memory_bytes=result.peak_memory_bytes if counts_memory else None,
        operations=tuple(operation_times(result, explain(prediction))),
        held_memory_bytes=result.held_memory_bytes,
    )
