"""What ``report`` writes: rankings as one self-contained, interactive HTML page.

The page's data are plain columns, packed with gzip: the browser unpacks them and draws the
rest, so that thousands of candidates fit.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from axonn_tune.errors import InputError
from axonn_tune.report.explain import DRAWN_LAYERS
from axonn_tune.report.memory import memory_lines, memory_mark
from axonn_tune.report.page_details import details_of, short
from axonn_tune.report.phrases import (
    assumption_line,
    batches_text,
    grid_form,
    model_on_gpus,
    types_text,
)
from axonn_tune.report.suggest import tie_lines
from axonn_tune.report.trust import left_out_lines, marked_name, trust_lines
from axonn_tune.search.pareto import pareto_front
from axonn_tune.search.rank import Each, Ranking
from axonn_tune.search.search import Search
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.validation import Validation
from axonn_tune.step.prediction import Prediction
from axonn_tune.studies.compare import without_twins
from axonn_tune.units import format_count, gib

# Level of gzip's compression; the highest takes three times as long for a page 2 % smaller.
PACKING = 6


@dataclass(frozen=True)
class Candidate:
    """A row of the page, and the search that it comes from."""

    search: Search
    prediction: Prediction


def candidates_of(rankings: Sequence[Ranking], most: int) -> tuple[list[Candidate], int]:
    """Return at most `most` rows of all rankings, and how many there are.

    The fastest come first, and what does not fit comes last. Rows that run an earlier one by
    another name are left out.
    """
    rows = [
        Candidate(ranking.search, prediction)
        for ranking in rankings
        for prediction in ranking.top(most)
    ]
    rows.sort(key=_rank_key)
    kept = {id(prediction) for prediction in without_twins([row.prediction for row in rows])}
    n_candidates = sum(len(ranking) for ranking in rankings) - (len(rows) - len(kept))
    return [row for row in rows if id(row.prediction) in kept][:most], n_candidates


def _rank_key(candidate: Candidate) -> tuple[bool, float]:
    prediction = candidate.prediction
    if prediction.fits:
        return False, prediction.seconds_per_token
    return True, prediction.memory_bytes


def page_document(
    rankings: Sequence[Ranking],
    options: str,
    launched: Sequence[str],
    written: str,
    most_candidates: int,
    most_details: int,
    validation: Validation | None = None,
    each: Each = iter,
    left_out: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return everything that the page shows, as plain data.

    Parameters
    ----------
    rankings : sequence of Ranking
        One ranking for each strategy.
    options : str
        Options that all commands on the page share, such as ``--gpus 8``.
    launched : sequence of str
        Strategies whose job scripts `launch` can write.
    written : str
        A sentence that says what wrote the page, and when.
    most_candidates : int
        Number of rows at most.
    most_details : int
        Number of the fastest rows that can be opened; those on the Pareto front of time and
        memory can be opened, too.
    validation : Validation or None
        Measurements to show next to the predictions.
    each : callable
        Wraps the loop that takes long, to show progress.
    left_out : mapping of str to sequence of str, or None
        Strategies that are not compared, by reason.

    Raises
    ------
    InputError
        The validation holds none of the candidates.
    """
    rows, n_candidates = candidates_of(rankings, most_candidates)
    scenario = rows[0].search.scenario
    front = pareto_front(
        [row.prediction.seconds_per_token for row in rows],
        [row.prediction.memory_bytes for row in rows],
        [row.prediction.fits for row in rows],
    )
    detailed = sorted({*range(min(most_details, len(rows))), *front})
    searches = [ranking.search for ranking in rankings]
    strategies = [search.scenario.strategy for search in searches]
    names = [strategy.name for strategy in strategies]
    return {
        "title": model_on_gpus(scenario),
        "subtitle": _subtitle(scenario, searches),
        "remarks": [
            *memory_lines([row.prediction for row in rows]),
            *_tie_lines(rankings),
            *trust_lines(*searches),
            *left_out_lines(left_out or {}),
        ],
        "assumptions": assumption_line(*searches),
        "evaluated": sum(ranking.n_evaluated for ranking in rankings),
        "n_candidates": n_candidates,
        "drawn_layers": DRAWN_LAYERS,
        "capacity_gib": gib(scenario.memory_capacity_bytes),
        "options": options,
        "names_batch": rows[0].search.compares_batches,
        "launched": list(launched),
        "strategies": names,
        "marked": [marked_name(strategy) for strategy in strategies],
        "rows": _columns(rows, names),
        "front": front,
        "measured": {} if validation is None else _measured(rows, validation),
        "details": details_of({row: rows[row].prediction for row in detailed}, each),
        "rejected": {
            ranking.search.scenario.strategy.name: dict(ranking.rejected) for ranking in rankings
        },
        "written": written,
    }


def _subtitle(scenario: Scenario, searches: Sequence[Search]) -> str:
    """Name the machine and the job, and how grids of the best candidate's strategy are written."""
    job = scenario.job
    axes = scenario.strategy.axes
    written = f". A grid is written {grid_form(axes)}" if axes.is_grid else ""
    return (
        f"{format_count(scenario.model.parameters)} parameters, machine {scenario.machine.name}, "
        f"{batches_text(searches)}, sequences of {job.seq_len} tokens, "
        f"{types_text(job)}{written}."
    )


def _tie_lines(rankings: Sequence[Ranking]) -> list[str]:
    """Return a line for each ranking that has no clear winner, which names one of several."""
    several = len(rankings) > 1
    return [
        f"{ranking.search.scenario.strategy.name}: {line}" if several else line
        for ranking in rankings
        for line in tie_lines(ranking)
    ]


def page_html(document: Mapping[str, Any], parts: Mapping[str, str]) -> str:
    """Return the page.

    Parameters
    ----------
    document : mapping
        What the page shows, with its title.
    parts : mapping of str to str
        Texts by name: template, styles, script, vendor.
    """
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    packed = gzip.compress(text.encode(), PACKING, mtime=0)
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
        dict.fromkeys(axis for row in rows for axis in row.search.scenario.strategy.axes.sized)
    )
    terms = list(dict.fromkeys(term for p in predictions for term in p.memory_terms_bytes))
    intervals = [p.step_seconds_interval or (None, None) for p in predictions]
    return {
        "strategy": [strategies.index(p.scenario.strategy.name) for p in predictions],
        "layout": [str(p.layout) for p in predictions],
        "axes": {axis: [p.layout.sizes.get(axis) for p in predictions] for axis in axes},
        "order": [p.configuration.order for p in predictions],
        "global_batch": [p.scenario.job.global_batch for p in predictions],
        "micro_batch": [p.configuration.micro_batch for p in predictions],
        "n_microsteps": [p.n_microsteps for p in predictions],
        "n_virtual": [p.configuration.n_virtual for p in predictions],
        "recompute": [p.configuration.recompute for p in predictions],
        "step": [short(p.step_seconds) for p in predictions],
        "low": [short(low) for low, _ in intervals],
        "high": [short(high) for _, high in intervals],
        "p_best": [short(p.p_best) for p in predictions],
        "compute": [short(p.compute_seconds) for p in predictions],
        "exposed": [short(p.exposed_communication_seconds) for p in predictions],
        "bubble": [short(p.bubble_seconds) for p in predictions],
        "tflops": [short(p.tflops_per_gpu) for p in predictions],
        "mfu": [short(p.mfu) for p in predictions],
        "hfu": [short(p.hfu) for p in predictions],
        "memory": [short(gib(p.memory_bytes)) for p in predictions],
        "memory_low": [short(gib(p.memory_bytes_interval[0])) for p in predictions],
        "memory_high": [short(gib(p.memory_bytes_interval[1])) for p in predictions],
        "memory_mark": [memory_mark(p) for p in predictions],
        "fits": [int(p.fits) for p in predictions],
        "memory_terms": {
            term: [short(gib(p.memory_terms_bytes.get(term, 0.0))) for p in predictions]
            for term in terms
        },
    }


def _measured(rows: Sequence[Candidate], validation: Validation) -> dict[str, Any]:
    """Return what was measured, by the number of its row.

    Raises
    ------
    InputError
        The validation is of another job, or of none of the candidates.
    """
    scenario = rows[0].prediction.scenario
    job = scenario.job
    for name, measured_value, value in (
        ("model", validation.model, scenario.model.name),
        ("ranks", validation.n_ranks, job.n_gpus),
        ("global batch", validation.global_batch, job.global_batch),
        ("sequence length", validation.seq_len, job.seq_len),
        ("dtype", validation.dtype, job.dtype),
    ):
        if measured_value != value:
            raise InputError(
                f"the validation has {name} {measured_value}, and the report {value}; validate and "
                "report with the same options"
            )
    outcomes = {str(outcome.configuration): outcome for outcome in validation.measured}
    measured = {}
    for number, row in enumerate(rows):
        outcome = outcomes.get(str(row.prediction.configuration))
        if outcome is not None:
            measured[str(number)] = {
                "step": short(outcome.measured_seconds),
                "low": short(min(outcome.step_seconds)),
                "high": short(max(outcome.step_seconds)),
                "predicted": short(outcome.predicted.step_seconds),
            }
    if not measured:
        raise InputError(
            f"the validation of {validation.model} on {validation.n_ranks} ranks holds none of "
            "the candidates; validate and report with the same options"
        )
    return measured
