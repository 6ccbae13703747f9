"""What a row of the page shows when it is opened: its operations, and timelines as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from axonn_tune.processes import mapped
from axonn_tune.report.explain import (
    DIGITS,
    DRAWN_LAYERS,
    longest_first,
    operation_rate,
    operation_size,
    step_parts,
)
from axonn_tune.search.rank import Each
from axonn_tune.spec.plan import COMPUTE
from axonn_tune.step.explain import explain_played
from axonn_tune.step.player import Player, players_of
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.timeline import StepTimeline, drawn_passes, sequential_timeline
from axonn_tune.units import rounded

# Number of passes of a pipeline that a timeline draws.
DRAWN_PASSES = 512
# Number of candidates whose operations are priced together, by one of several processes.
PRICED_TOGETHER = 16


def details_of(opened: Mapping[int, Prediction], each: Each) -> dict[str, dict[str, Any]]:
    """Return the parts, the operations and the timelines of some rows, by their numbers."""
    predictions = list(opened.values())
    batches = [
        predictions[i : i + PRICED_TOGETHER] for i in range(0, len(predictions), PRICED_TOGETHER)
    ]
    details = chain.from_iterable(mapped(_details, batches, each=each))
    return dict(zip(map(str, opened), details, strict=True))


def _details(predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
    return [_detail(player) for player in players_of(predictions)]


def _detail(player: Player) -> dict[str, Any]:
    explanation = explain_played(player)
    return {
        "parts": {name: short(part) for name, part in step_parts(explanation).items()},
        "operations": [
            [
                op.name,
                op.kind,
                op.axis,
                operation_size(op),
                op.n_calls,
                short(op.total_seconds),
                short(op.exposed_seconds) if op.axis else None,
                operation_rate(op),
                op.bound_by,
            ]
            for op in longest_first(explanation.operations)
        ],
        "timeline": _packed(sequential_timeline(player.shortened(DRAWN_LAYERS), 1)),
        "passes": _passes(player),
    }


def _passes(player: Player) -> dict[str, Any] | None:
    """Return the passes of a pipeline, if there is one and it is not too deep to draw."""
    drawn = drawn_passes(player, DRAWN_PASSES)
    if drawn is None:
        return None
    timeline, n_micro = drawn
    return {**_packed(timeline), "n_microbatches": n_micro}


def _packed(played: StepTimeline) -> dict[str, Any]:
    """Return operations as numbers: stream, name, kind, idle time before, and duration."""
    operations = played.operations
    tick = played.seconds / 1e6 or 1.0
    used_streams = dict.fromkeys(op.stream for op in operations)
    streams = _numbered(sorted(used_streams, key=lambda stream: stream != COMPUTE))
    names = _numbered(op.name for op in operations)
    kinds = _numbered(op.kind for op in operations)
    packed = []
    free_from = [0] * len(streams)
    for op in operations:
        stream = streams[op.stream]
        start = round(op.start_seconds / tick)
        end = round(op.end_seconds / tick)
        idle = start - free_from[stream]
        packed.append([stream, names[op.name], kinds[op.kind], idle, end - start])
        free_from[stream] = end
    return {
        "tick": tick,
        "streams": list(streams),
        "names": list(names),
        "kinds": list(kinds),
        "operations": packed,
    }


def _numbered(texts: Iterable[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}


def short(value: float | None) -> float | None:
    """Return a number in as many digits as people read."""
    return None if value is None else rounded(value, DIGITS)
