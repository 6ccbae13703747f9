"""The parts of a step that a trace tells apart: kinds of kernels, and each collective."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.spec.traced import KERNELS, PRODUCT, Trace
from axonn_tune.step.explain import Explanation
from axonn_tune.step.traced import MeasuredLine, beside_trace

# A receive that waits for its sender tells nothing of the link, however short it is.
_WAITING = "send_recv"


@dataclass(frozen=True)
class PartSeconds:
    """Sets the predicted time of a part in one step beside the traced time."""

    predicted_seconds: float = 0.0
    traced_seconds: float = 0.0


def parts_of(explanation: Explanation, trace: Trace) -> dict[str, PartSeconds]:
    """Return the parts that a plan and a trace have in common, by name and in its order.

    Products of the same sizes are compared call by call, and all products are one part. The other
    kinds of kernels are sums, since compilers fuse them differently. A collective counts with its
    shortest call, in which it hardly waited for other ranks; one whose sizes differ from those of
    the plan is left out.
    """
    parts: dict[str, PartSeconds] = {}
    for line in beside_trace(explanation, trace):
        seconds = _traced_seconds(line)
        if not line.is_on_both_sides or not min(seconds, line.predicted_seconds) > 0.0:
            continue
        name = line.kind if line.kind in KERNELS else f"{line.kind}, {line.size}"
        before = parts.get(name, PartSeconds())
        parts[name] = PartSeconds(
            before.predicted_seconds + line.predicted_seconds, before.traced_seconds + seconds
        )
    return dict(sorted(parts.items()))


def _traced_seconds(line: MeasuredLine) -> float:
    """Return the time that a line's predicted calls take by the trace; 0 if it does not tell."""
    if line.kind == PRODUCT and line.is_of_one_size and line.traced_calls:
        return line.predicted_calls * line.traced_seconds / line.traced_calls
    if line.kind in KERNELS:
        return line.traced_seconds
    is_told = line.is_of_one_size and line.kind != _WAITING
    return line.predicted_calls * line.shortest_traced_seconds if is_told else 0.0
