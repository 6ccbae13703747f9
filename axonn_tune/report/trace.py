"""A step as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axonn_tune.spec.grid import AXES
from axonn_tune.spec.measurement import Operation
from axonn_tune.spec.plan import COMPUTE

MICROSECONDS = 1e6


def trace_document(steps: Mapping[str, Sequence[Operation]]) -> dict[str, Any]:
    """Trace events in the JSON object format.

    Parameters
    ----------
    steps : mapping of str to sequence of Operation
        Operations with their start and end, under the title of their group of rows: one row for
        computation and one for each axis.
    """
    events = [
        event
        for number, (title, operations) in enumerate(steps.items())
        for event in _events(number, title, operations)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(number: int, title: str, operations: Sequence[Operation]) -> list[dict[str, Any]]:
    rows = {stream: row for row, stream in enumerate((COMPUTE, *AXES))}
    used = {operation.stream for operation in operations}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}}
    ]
    for stream, row in rows.items():
        if stream in used:
            name = stream if stream == COMPUTE else f"communication over {stream}"
            common = {"ph": "M", "pid": number, "tid": row}
            events.append({**common, "name": "thread_name", "args": {"name": name}})
            events.append({**common, "name": "thread_sort_index", "args": {"sort_index": row}})
    return events + [
        {
            "ph": "X",
            "name": operation.name,
            "cat": operation.kind,
            "pid": number,
            "tid": rows[operation.stream],
            "ts": operation.start_seconds * MICROSECONDS,
            "dur": operation.seconds * MICROSECONDS,
            "args": {"nbytes": operation.nbytes, "flops": operation.flops},
        }
        for operation in operations
    ]
