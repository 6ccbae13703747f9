"""A step as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axonn_tune.spec.grid import AXES
from axonn_tune.spec.measurement import Operation
from axonn_tune.spec.plan import COMPUTE

MICROSECONDS = 1e6


def trace_document(operations: Sequence[Operation], process: str) -> dict[str, Any]:
    """Trace events in the JSON object format: one row for computation and one for each axis.

    Parameters
    ----------
    operations : sequence of Operation
        With their start and end.
    process : str
        Title of the group of rows.
    """
    rows = {stream: row for row, stream in enumerate((COMPUTE, *AXES))}
    used = {operation.stream for operation in operations}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": process}}
    ]
    for stream, row in rows.items():
        if stream in used:
            title = stream if stream == COMPUTE else f"communication over {stream}"
            common = {"ph": "M", "pid": 0, "tid": row}
            events.append({**common, "name": "thread_name", "args": {"name": title}})
            events.append({**common, "name": "thread_sort_index", "args": {"sort_index": row}})
    events += [
        {
            "ph": "X",
            "name": operation.name,
            "cat": operation.kind,
            "pid": 0,
            "tid": rows[operation.stream],
            "ts": operation.start_seconds * MICROSECONDS,
            "dur": operation.seconds * MICROSECONDS,
            "args": {"nbytes": operation.nbytes, "flops": operation.flops},
        }
        for operation in operations
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
