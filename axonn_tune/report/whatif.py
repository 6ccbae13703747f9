"""What ``whatif`` shows: the best configuration on a changed machine as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axonn_tune.report.phrases import (
    assumption_line,
    interval_text,
    model_on_gpus,
    percent,
)
from axonn_tune.report.records import SCHEMA_VERSION, assumptions, flat_record, record
from axonn_tune.report.table import fitted_table
from axonn_tune.report.trust import trust_lines
from axonn_tune.search.search import Search
from axonn_tune.step.prediction import Prediction
from axonn_tune.studies.parameters import parameters
from axonn_tune.studies.whatif import Influence, WhatIf
from axonn_tune.units import format_quantity, gib


def what_if_text(search: Search, settings: Sequence[str], result: WhatIf) -> str:
    """Compare the best before and after, and the former best on the changed machine."""
    named = {
        "as it is": result.before,
        "changed": result.after,
        "changed, layout kept": result.kept,
    }
    has_virtual = len({p.configuration.n_virtual for p in named.values()}) > 1
    rows = [_row(title, p, has_virtual) for title, p in named.items()]
    headers = ["machine", "layout", *(["virtual"] if has_virtual else []), "mbs", "recompute"]
    headers += ["step s", "90 % interval", "MFU %", "GiB"]
    return "\n".join(
        [
            f"{model_on_gpus(search.scenario)}, if {', '.join(settings)}",
            *_changed_lines(result),
            "",
            fitted_table(rows, headers, ("MFU %", "90 % interval")),
            "",
            _conclusion(result),
            *trust_lines(search),
            assumption_line(search),
        ]
    )


def _changed_lines(result: WhatIf) -> list[str]:
    """Return a line with each number of the machine that changes, before and after, if any does.

    Two GPUs differ in more than numbers of the same names.
    """
    before, after = (
        {p.name: p for p in parameters(each.scenario.machine, each.scenario.job.dtype)}
        for each in (result.before, result.after)
    )
    changes = [
        f"{name} {' becomes '.join(format_quantity(p.value, p.field) for p in (old, after[name]))}"
        for name, old in before.items()
        if name in after and after[name].value != old.value
    ]
    return [f"On {result.before.scenario.machine.name}: {', '.join(changes)}."] if changes else []


def _conclusion(result: WhatIf) -> str:
    before, after, kept = result.before, result.after, result.kept
    takes = f"The best step takes {_change(after, before)}"
    if before.configuration == after.configuration:
        return f"{takes}; the layout stays."
    is_same = before.configuration.ordered_layout == after.configuration.ordered_layout
    changes = f"{takes}; the {'configuration' if is_same else 'layout'} changes"
    if not kept.fits:
        return f"{changes}."
    return f"{changes}, and with the old one it would take {_change(kept, before)}."


def _change(prediction: Prediction, before: Prediction) -> str:
    """Return how much more or less time a step takes than the former best one."""
    change = prediction.step_seconds / before.step_seconds - 1.0
    if percent(abs(change)) == percent(0.0):
        return "as long"
    return f"{percent(abs(change))} % {'less' if change < 0.0 else 'more'} time"


def _row(title: str, best: Prediction, has_virtual: bool) -> list[Any]:
    memory = f"{gib(best.memory_bytes):.1f} of {gib(best.memory_capacity_bytes):.0f}"
    return [
        title,
        best.configuration.brief_layout,
        *([best.configuration.n_virtual] if has_virtual else []),
        best.configuration.micro_batch,
        best.configuration.recompute,
        f"{best.step_seconds:.3f}",
        interval_text(best),
        percent(best.mfu),
        memory if best.fits else f"{memory} OOM",
    ]


def influences_text(influences: Sequence[Influence], factor: float) -> str:
    """Return a row for each number of the machine: the step with less and with more of it."""
    base = influences[0].base
    rows = [
        [
            influence.parameter.name,
            format_quantity(influence.parameter.value, influence.parameter.field),
            influence.parameter.origin,
            *_moved(base, influence.less),
            *_moved(base, influence.more),
        ]
        for influence in influences
    ]
    headers = ["parameter", "value", "origin", f"/ {factor:g}: %", "layout"]
    headers += [f"x {factor:g}: %", "layout"]
    return "\n".join(
        [
            f"Change of the best step, {base.step_seconds:.3f} s, of a new search with each number "
            f"divided and multiplied by {factor:g}:",
            "",
            fitted_table(rows, headers, ("origin", "value")),
        ]
    )


def _moved(base: Prediction, best: Prediction | None) -> tuple[str, str]:
    if best is None:
        return "-", "nothing fits"
    change = 100.0 * (best.step_seconds / base.step_seconds - 1.0)
    if abs(change) < 0.005:
        change = 0.0  # not -0.00
    configuration = best.configuration
    if configuration == base.configuration:
        return f"{change:+.2f}", "same"
    stages = {configuration.n_virtual, base.configuration.n_virtual}
    virtual = f", virtual {configuration.n_virtual}" if len(stages) > 1 else ""
    return (
        f"{change:+.2f}",
        f"{configuration.brief_layout}{virtual}, mbs {configuration.micro_batch} "
        f"{configuration.recompute}",
    )


def what_if_document(
    search: Search,
    settings: Sequence[str],
    result: WhatIf | None,
    influences: Sequence[Influence],
    factor: float,
) -> dict[str, Any]:
    """Return what ``whatif --format json`` prints."""
    what_if = None
    if result is not None:
        what_if = {
            "before": record(result.before),
            "after": record(result.after),
            "kept": record(result.kept),
        }
    return {
        "schema_version": SCHEMA_VERSION,
        "assumptions": assumptions(search),
        "settings": list(settings),
        "what_if": what_if,
        "factor": factor,
        "influences": [
            {
                "parameter": influence.parameter.name,
                "field": influence.parameter.field,
                "value": influence.parameter.value,
                "origin": influence.parameter.origin,
                "less": None if influence.less is None else record(influence.less),
                "more": None if influence.more is None else record(influence.more),
            }
            for influence in influences
        ],
    }


def what_if_records(result: WhatIf) -> list[dict[str, Any]]:
    """Return one flat record for each of the three predictions."""
    named = {"as it is": result.before, "changed": result.after, "layout kept": result.kept}
    return [{"machine": name, **flat_record(best)} for name, best in named.items()]


def influence_records(influences: Sequence[Influence]) -> list[dict[str, Any]]:
    """Return one flat record for each number of the machine."""
    return [
        {
            "parameter": influence.parameter.name,
            "value": influence.parameter.value,
            "origin": influence.parameter.origin,
            **_changed_step("less", influence.base, influence.less),
            **_changed_step("more", influence.base, influence.more),
        }
        for influence in influences
    ]


def _changed_step(side: str, base: Prediction, best: Prediction | None) -> dict[str, Any]:
    seconds = None if best is None else best.step_seconds
    return {
        f"{side}_step_seconds": seconds,
        f"{side}_change_fraction": None if seconds is None else seconds / base.step_seconds - 1.0,
        f"{side}_layout": None if best is None else str(best.layout),
    }
