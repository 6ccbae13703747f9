"""What ``trace`` writes: steps as a Chrome trace.

Perfetto (ui.perfetto.dev) and chrome://tracing open it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from axonn_tune.spec.measurement import Operation
from axonn_tune.spec.plan import COMPUTE

MICROSECONDS = 1e6


def trace_document(
    steps: Mapping[str, Sequence[Operation]],
    waits_for: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return trace events in the JSON object format.

    Parameters
    ----------
    steps : mapping of str to sequence of Operation
        Operations with their start and end, in the order of issue, under the title of their
        group of rows: one row for computation and one for each other stream.
    waits_for : mapping of str to sequence of str
        Names of the operations whose results an operation needs, by its name. Each is drawn as
        a flow from the latest operation of that name.
    """
    events: list[dict[str, Any]] = []
    flow_ids = count(1)
    for number, (title, operations) in enumerate(steps.items()):
        rows = _rows(operations)
        events += _names(number, title, rows)
        events += (_slice(number, rows, operation) for operation in operations)
        for source, target in _flows(operations, waits_for or {}):
            flow = {"name": "needs", "cat": "dependency", "pid": number, "id": next(flow_ids)}
            # A flow belongs to the slice that is under way when it begins or ends.
            events.append({"ph": "s", **flow, **_start(rows, source)})
            events.append({"ph": "f", **flow, **_start(rows, target), "bp": "e"})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rows(operations: Sequence[Operation]) -> dict[str, int]:
    """Return the row of each stream, computation first."""
    streams = dict.fromkeys(operation.stream for operation in operations)
    ordered = sorted(streams, key=lambda stream: stream != COMPUTE)
    return {stream: row for row, stream in enumerate(ordered)}


def _start(rows: Mapping[str, int], operation: Operation) -> dict[str, Any]:
    return {"tid": rows[operation.stream], "ts": operation.start_seconds * MICROSECONDS}


def _names(number: int, title: str, rows: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}}
    for stream, row in rows.items():
        is_axis = stream != COMPUTE and " " not in stream
        name = f"communication over {stream}" if is_axis else stream
        common = {"ph": "M", "pid": number, "tid": row}
        yield {**common, "name": "thread_name", "args": {"name": name}}
        yield {**common, "name": "thread_sort_index", "args": {"sort_index": row}}


def _slice(number: int, rows: Mapping[str, int], operation: Operation) -> dict[str, Any]:
    amounts = {"nbytes": operation.nbytes, "flops": operation.flops}
    return {
        "ph": "X",
        "name": operation.name,
        "cat": operation.kind,
        "pid": number,
        **_start(rows, operation),
        "dur": operation.seconds * MICROSECONDS,
        "args": {name: amount for name, amount in amounts.items() if amount},
    }


def _flows(
    operations: Sequence[Operation], waits_for: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Operation, Operation]]:
    """Yield what was needed and what needed it, where their streams differ."""
    by_start = sorted(operations, key=lambda operation: operation.start_seconds)
    latest: dict[str, Operation] = {}
    for operation in by_start:
        for name in waits_for.get(operation.name, ()):
            source = latest.get(name)
            if source is not None and source.stream != operation.stream:
                yield source, operation
        latest[operation.name] = operation
