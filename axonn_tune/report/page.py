"""Rankings as one self-contained, interactive HTML page.

The page's data are plain columns, packed with gzip: the browser unpacks them and draws the
rest, so that thousands of candidates fit.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from axonn_tune.errors import InputError
from axonn_tune.report.parts import step_parts
from axonn_tune.report.text import assumption_line, operation_rate, operation_size
from axonn_tune.search.pareto import pareto_front
from axonn_tune.search.rank import Each, Ranking
from axonn_tune.search.search import Search
from axonn_tune.spec.plan import COMPUTE
from axonn_tune.spec.validation import Validation
from axonn_tune.step.explain import explain
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.timeline import StepTimeline, microstep_timeline, pass_timeline
from axonn_tune.units import format_count, gib

# Equal layers in a row that a timeline draws, and passes of a pipeline.
DRAWN_LAYERS, DRAWN_PASSES = 3, 512
DIGITS = 5


@dataclass(frozen=True)
class Candidate:
    """A row of the page, and the search that it comes from."""

    search: Search
    prediction: Prediction


def candidates_of(rankings: Sequence[Ranking], most: int) -> list[Candidate]:
    """Rows of all rankings, the fastest first and what does not fit last, no more than `most`."""
    rows = [
        Candidate(ranking.search, prediction)
        for ranking in rankings
        for prediction in ranking.top(most)
    ]
    rows.sort(key=lambda c: (not c.prediction.fits, _rank_key(c.prediction)))
    return rows[:most]


def _rank_key(prediction: Prediction) -> float:
    return prediction.step_seconds if prediction.fits else prediction.memory_bytes


def page_document(
    rankings: Sequence[Ranking],
    options: str,
    launched: Sequence[str],
    written: str,
    most_candidates: int,
    most_details: int,
    validation: Validation | None = None,
    each: Each = iter,
) -> dict[str, Any]:
    """Everything that the page shows, as plain data.

    Parameters
    ----------
    rankings : one for each strategy
    options : what the commands that the page shows have in common, such as ``--gpus 8``
    launched : strategies for which `launch` writes a job script
    written : by what and when
    most_candidates, most_details : rows, and those that can be opened: the fastest, and the
        Pareto front of time and memory
    validation : measurements to show beside the predictions
    each : wraps what takes long, to show progress

    Raises
    ------
    InputError
        The validation holds none of the candidates.
    """
    rows = candidates_of(rankings, most_candidates)
    search = rows[0].search
    model, job, machine = search.scenario.model, search.scenario.job, search.scenario.machine
    front = pareto_front(
        [row.prediction.step_seconds for row in rows],
        [row.prediction.memory_bytes for row in rows],
        [row.prediction.fits for row in rows],
    )
    detailed = sorted({*range(min(most_details, len(rows))), *front})
    strategies = [ranking.search.scenario.strategy.name for ranking in rankings]
    return {
        "title": f"{model.name} on {job.n_gpus} {machine.gpu.name}",
        "subtitle": f"{format_count(model.parameters)} parameters, machine {machine.name}",
        "assumptions": assumption_line(search.scenario),
        "evaluated": sum(ranking.n_evaluated for ranking in rankings),
        "n_candidates": sum(len(ranking) for ranking in rankings),
        "drawn_layers": DRAWN_LAYERS,
        "capacity_gib": gib(search.scenario.memory_capacity_bytes),
        "options": options,
        "launched": list(launched),
        "strategies": strategies,
        "rows": _columns(rows, strategies),
        "front": front,
        "measured": {} if validation is None else _measured(rows, validation),
        "details": {str(row): _detail(rows[row].prediction) for row in each(detailed)},
        "rejected": {
            ranking.search.scenario.strategy.name: dict(ranking.rejected) for ranking in rankings
        },
        "written": written,
    }


def page_html(document: Mapping[str, Any], parts: Mapping[str, str]) -> str:
    """The page.

    Parameters
    ----------
    document : of `page_document`
    parts : texts by name: template, styles, script, vendor
    """
    packed = gzip.compress(json.dumps(document, allow_nan=False).encode(), mtime=0)
    return Template(parts["template"]).substitute(
        title=html.escape(document["title"]),
        styles=parts["styles"],
        vendor=parts["vendor"],
        script=parts["script"],
        data=base64.b64encode(packed).decode(),
    )


def _columns(rows: Sequence[Candidate], strategies: Sequence[str]) -> dict[str, Any]:
    predictions = [row.prediction for row in rows]
    axes = list(
        dict.fromkeys(axis for row in rows for axis in row.search.scenario.strategy.axes.names)
    )
    terms = list(dict.fromkeys(term for p in predictions for term in p.memory_terms_bytes))
    intervals = [p.step_seconds_interval or (None, None) for p in predictions]
    return {
        "strategy": [strategies.index(p.scenario.strategy.name) for p in predictions],
        "layout": [str(p.layout) for p in predictions],
        "axes": {axis: [p.layout.sizes.get(axis) for p in predictions] for axis in axes},
        "order": [p.configuration.order for p in predictions],
        "micro_batch": [p.configuration.micro_batch for p in predictions],
        "n_microsteps": [p.n_microsteps for p in predictions],
        "n_virtual": [p.configuration.n_virtual for p in predictions],
        "recompute": [p.configuration.recompute for p in predictions],
        "step": [_short(p.step_seconds) for p in predictions],
        "low": [_short(low) for low, _ in intervals],
        "high": [_short(high) for _, high in intervals],
        "p_best": [_short(p.p_best) for p in predictions],
        "compute": [_short(p.compute_seconds) for p in predictions],
        "exposed": [_short(p.exposed_communication_seconds) for p in predictions],
        "bubble": [_short(p.bubble_seconds) for p in predictions],
        "tflops": [_short(p.tflops_per_gpu) for p in predictions],
        "mfu": [_short(p.mfu) for p in predictions],
        "hfu": [_short(p.hfu) for p in predictions],
        "memory": [_short(gib(p.memory_bytes)) for p in predictions],
        "fits": [int(p.fits) for p in predictions],
        "memory_terms": {
            term: [_short(gib(p.memory_terms_bytes.get(term, 0.0))) for p in predictions]
            for term in terms
        },
    }


def _short(value: float | None) -> float | None:
    """A number with as many digits as people read."""
    return None if value is None else float(f"{value:.{DIGITS}g}")


def _detail(prediction: Prediction) -> dict[str, Any]:
    explanation = explain(prediction, with_sensitivities=False)
    return {
        "parts": {name: _short(part) for name, part in step_parts(explanation).items()},
        "operations": [
            [
                op.name,
                op.kind,
                op.axis,
                operation_size(op),
                op.n_calls,
                _short(op.total_seconds),
                _short(op.exposed_seconds) if op.axis else None,
                operation_rate(op),
                op.bound_by,
            ]
            for op in sorted(explanation.operations, key=lambda op: -op.total_seconds)
        ],
        "timeline": _packed(microstep_timeline(prediction, DRAWN_LAYERS)),
        "passes": _passes(prediction),
    }


def _passes(prediction: Prediction) -> dict[str, Any] | None:
    """The passes of a pipeline, if there is one and it is not too deep to draw."""
    found = pass_timeline(prediction, DRAWN_PASSES)
    if found is None:
        return None
    timeline, n_micro = found
    return {**_packed(timeline), "n_microbatches": n_micro}


def _packed(played: StepTimeline) -> dict[str, Any]:
    """Operations as numbers: stream, name, kind, idle time of the stream before, and duration."""
    operations = played.operations
    tick = played.seconds / 1e6 or 1.0
    used = dict.fromkeys(op.stream for op in operations)
    streams = _numbered(sorted(used, key=lambda stream: stream != COMPUTE))
    names = _numbered(op.name for op in operations)
    kinds = _numbered(op.kind for op in operations)
    packed, free = [], [0] * len(streams)
    for op in operations:
        stream = streams[op.stream]
        start, end = round(op.start_seconds / tick), round(op.end_seconds / tick)
        packed.append([stream, names[op.name], kinds[op.kind], start - free[stream], end - start])
        free[stream] = end
    return {
        "tick": tick,
        "streams": list(streams),
        "names": list(names),
        "kinds": list(kinds),
        "operations": packed,
    }


def _numbered(texts: Iterable[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}


def _measured(rows: Sequence[Candidate], validation: Validation) -> dict[str, Any]:
    """By row what was measured of it."""
    outcomes = {str(outcome.configuration): outcome for outcome in validation.measured}
    found = {}
    for number, row in enumerate(rows):
        outcome = outcomes.get(str(row.prediction.configuration))
        if outcome is not None:
            found[str(number)] = {
                "step": _short(outcome.measured_seconds),
                "low": _short(min(outcome.step_seconds)),
                "high": _short(max(outcome.step_seconds)),
                "predicted": _short(outcome.predicted.step_seconds),
            }
    if not found:
        raise InputError(
            f"the validation of {validation.model} on {validation.n_ranks} ranks holds none of "
            "the candidates; validate and report with the same options"
        )
    return found
