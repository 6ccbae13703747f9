"""What ``compare`` shows: the best configuration of each strategy as text and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axonn_tune.report.memory import memory_lines, memory_text
from axonn_tune.report.phrases import (
    assumption_line,
    interval_text,
    model_on_gpus,
    percent,
    tokens_per_second_text,
)
from axonn_tune.report.records import SCHEMA_VERSION, assumptions, flat_record, record
from axonn_tune.report.table import Column, fitted_table_of
from axonn_tune.report.trust import left_out_lines, marked_name, trust_lines
from axonn_tune.search.rank import Best
from axonn_tune.search.search import Search
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.prediction import Prediction
from axonn_tune.studies.compare import without_twins
from axonn_tune.units import gib

# Columns that a table may leave out for want of room, the least important first.
_DROPPABLE = ("tokens/s", "TFLOP/s", "bubble", "exposed", "MFU %")


def comparison_text(contenders: Sequence[Best], left_out: Mapping[str, Sequence[str]]) -> str:
    """Return a table with one row per strategy or layout, and what was assumed.

    Strategies that were left out are named by reason, and so are rows that repeat others.
    """
    searches = [contender.search for contender in contenders]
    predictions = without_twins(_predictions(contenders))
    lines = [
        f"{model_on_gpus(searches[0].scenario, with_parameters=True)}: {_what_is_shown(searches)}",
        "",
    ]
    if predictions:
        lines += [fitted_table_of(predictions, _columns(predictions), _DROPPABLE), ""]
    for contender in contenders:
        if contender.prediction is None:
            lines.append(f"{_contender_name(contender, searches)}: {contender.reason}")
    lines += _twin_lines(contenders, predictions)
    lines += memory_lines(predictions)
    lines += [*trust_lines(*searches), *left_out_lines(left_out)]
    lines.append(assumption_line(*searches))
    return "\n".join(lines)


def _what_is_shown(searches: Sequence[Search]) -> str:
    names = [search.scenario.strategy.name for search in searches]
    if len(names) == 1:
        return f"the best layout of {names[0]}"
    if len(set(names)) == len(names):
        return f"the best of {len(names)} strategies"
    return f"{len(names)} strategies, engines, layouts or jobs side by side"


def _contender_name(contender: Best, searches: Sequence[Search]) -> str:
    """Return the strategy of a contender, and its engine, batch and sequence if they differ."""
    job = contender.search.scenario.job
    jobs = [search.scenario.job for search in searches]
    strategy = contender.search.scenario.strategy
    name = strategy.name
    if _engines_differ([search.scenario for search in searches]):
        name += f" of {strategy.engine.name}"
    if len({job.global_batch for job in jobs}) > 1:
        name += f", batch {job.global_batch}"
    if len({job.seq_len for job in jobs}) > 1:
        name += f", sequence length {job.seq_len}"
    return name


def _engines_differ(scenarios: Sequence[Scenario]) -> bool:
    """Return whether several engines carry out the same strategy."""
    pairs = {(scenario.strategy.name, scenario.strategy.engine.name) for scenario in scenarios}
    return len(pairs) > len({strategy for strategy, _ in pairs})


def _twin_lines(contenders: Sequence[Best], shown: Sequence[Prediction]) -> list[str]:
    """Return a line that names the strategies whose rows would repeat others."""
    hidden = [p for p in _predictions(contenders) if not any(p is row for row in shown)]
    names = dict.fromkeys(p.scenario.strategy.name for p in hidden)
    return [f"{name} has no row: its best layout is one of those above." for name in names]


def _predictions(contenders: Sequence[Best]) -> list[Prediction]:
    return [c.prediction for c in contenders if c.prediction is not None]


def _columns(predictions: Sequence[Prediction]) -> list[Column[Prediction]]:
    best_seconds = _seconds_to_beat(predictions)
    of_jobs: list[Column[Prediction]] = [
        ("batch", lambda p: p.scenario.job.global_batch),
        ("sequence", lambda p: p.scenario.job.seq_len),
    ]
    differing = [
        (title, value) for title, value in of_jobs if len({value(p) for p in predictions}) > 1
    ]
    if _engines_differ([p.scenario for p in predictions]):
        differing.insert(0, ("engine", lambda p: p.scenario.strategy.engine.name))
    return [
        ("strategy", lambda p: marked_name(p.scenario.strategy)),
        *differing,
        ("layout", lambda p: p.layout.brief),
        ("mbs", lambda p: p.configuration.micro_batch),
        ("recompute", lambda p: p.configuration.recompute),
        ("step s", lambda p: f"{p.step_seconds:.3f}"),
        ("90 % interval", interval_text),
        ("times", lambda p: f"{p.seconds_per_token / best_seconds:.3f}"),
        ("TFLOP/s", lambda p: f"{p.tflops_per_gpu:.1f}"),
        ("MFU %", lambda p: percent(p.mfu)),
        ("tokens/s", tokens_per_second_text),
        ("exposed", lambda p: f"{percent(p.exposed_communication_fraction)} %"),
        ("bubble", lambda p: f"{percent(p.bubble_seconds / p.step_seconds)} %"),
        (f"GiB of {gib(predictions[0].memory_capacity_bytes):.0f}", memory_text),
    ]


def _seconds_to_beat(predictions: Sequence[Prediction]) -> float:
    """Return the least time for each token of what fits and has no caveat, if there is any."""
    usual = [p for p in predictions if p.fits and not p.scenario.strategy.caveat]
    return min(p.seconds_per_token for p in usual or predictions)


def comparison_document(
    contenders: Sequence[Best], left_out: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return what ``compare --format json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "left_out": [name for names in left_out.values() for name in names],
        "strategies": [
            {
                "strategy": c.search.scenario.strategy.name,
                "engine": c.search.scenario.strategy.engine.name,
                "assumptions": assumptions(c.search),
                "best": None if c.prediction is None else record(c.prediction),
                "reason": c.reason or None,
            }
            for c in contenders
        ],
    }


def comparison_records(contenders: Sequence[Best]) -> list[dict[str, Any]]:
    """Return one flat record for each strategy that has a candidate."""
    return [flat_record(prediction) for prediction in _predictions(contenders)]
