"""What a step's seconds are made of."""

from __future__ import annotations

from axonn_tune.step.explain import Explanation

OPTIMIZER = "optimizer.step"


def step_parts(explanation: Explanation) -> dict[str, float]:
    """Seconds by part, which sum up to the step; parts that take nothing are left out."""
    p = explanation.prediction
    optimizer = sum(op.total_seconds for op in explanation.operations if op.name == OPTIMIZER)
    exposed = explanation.exposed_seconds_by_axis
    parts = {
        "compute": p.compute_seconds - optimizer - explanation.host_seconds,
        "optimizer": optimizer,
        "host": explanation.host_seconds,
        **{f"exposed, {axis}": seconds for axis, seconds in exposed.items()},
        # In a pipeline the rank that is explained waits for others that synchronise.
        "exposed, other ranks": p.exposed_communication_seconds - sum(exposed.values()),
        "bubble": p.bubble_seconds,
    }
    least = 1e-9 * p.step_seconds
    return {name: seconds for name, seconds in parts.items() if seconds > least}
