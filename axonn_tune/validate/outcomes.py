"""Join what was predicted and what was measured."""

from __future__ import annotations

from axonn_tune.search.search import Search
from axonn_tune.spec.measurement import Measurement
from axonn_tune.spec.validation import Configuration, Outcome, Predicted
from axonn_tune.step.explain import explain
from axonn_tune.step.prediction import Prediction
from axonn_tune.validate.measured import compare


def configuration_of(prediction: Prediction) -> Configuration:
    """The grid, and how it is trained on."""
    p = prediction
    return Configuration(p.grid, p.order, p.micro_batch, p.recompute)


def outcome_of(search: Search, prediction: Prediction, result: Measurement | str) -> Outcome:
    """One configuration; `result` is what was measured, or why it failed."""
    low, high = prediction.step_seconds_interval or (None, None)
    configuration = configuration_of(prediction)
    predicted = Predicted(
        prediction.rank, prediction.step_seconds, prediction.memory_bytes, low, high
    )
    if isinstance(result, str):
        return Outcome(configuration, predicted, failure=result)
    counts_memory = not result.memory_is_of_process
    return Outcome(
        configuration,
        predicted,
        step_seconds=tuple(step.seconds for step in result.timed_steps),
        peak_memory_bytes=result.peak_memory_bytes if counts_memory else None,
        operations=tuple(compare(result, explain(search, prediction))),
    )
