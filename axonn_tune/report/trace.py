"""Steps as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

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
    """Trace events in the JSON object format.

    Parameters
    ----------
    steps : mapping of str to sequence of Operation
        Operations with their start and end, in the order of issue, under the title of their
        group of rows: one row for computation and one for each other stream.
    waits_for : mapping of str to sequence of str
        By name of an operation, those whose results it needs: drawn as flows, each from the
        latest one of that name before it.
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
            for phase, end in (("s", source), ("f", target)):
                bound = {"bp": "e"} if phase == "f" else {}
                at = {"tid": rows[end.stream], "ts": end.start_seconds * MICROSECONDS}
                events.append({"ph": phase, **flow, **at, **bound})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rows(operations: Sequence[Operation]) -> dict[str, int]:
    """Number of each stream, computation first."""
    streams = dict.fromkeys(operation.stream for operation in operations)
    return {stream: row for row, stream in enumerate(sorted(streams, key=lambda s: s != COMPUTE))}


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
        "tid": rows[operation.stream],
        "ts": operation.start_seconds * MICROSECONDS,
        "dur": operation.seconds * MICROSECONDS,
        "args": {name: amount for name, amount in amounts.items() if amount},
    }


def _flows(
    operations: Sequence[Operation], waits_for: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Operation, Operation]]:
    """From what was needed to what needed it, where they are of different streams."""
    by_start = sorted(operations, key=lambda operation: operation.start_seconds)
    latest: dict[str, Operation] = {}
    for operation in by_start:
        for name in waits_for.get(operation.name, ()):
            source = latest.get(name)
            if source is not None and source.stream != operation.stream:
                yield source, operation
        latest[operation.name] = operation
