"""What a changed machine does to the best configuration, as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axonn_tune.report.records import SCHEMA_VERSION, assumptions, flat_record, record
from axonn_tune.report.text import assumption_line, interval_text, table
from axonn_tune.search.search import Search
from axonn_tune.step.prediction import Prediction
from axonn_tune.studies.whatif import Influence, WhatIf
from axonn_tune.units import format_quantity, gib


def what_if_text(
    search: Search, settings: Sequence[str], found: WhatIf, machine_was_given: bool
) -> str:
    """The best before and after, and the former best on the changed machine."""
    rows = [
        _row("as it is", found.before),
        _row("changed", found.after),
        _row("changed, layout kept", found.kept),
    ]
    headers = ["machine", "layout", "mbs", "recompute", "step s", "90 % interval", "MFU %", "GiB"]
    change = found.after.step_seconds / found.before.step_seconds - 1.0
    is_same = found.before.configuration == found.after.configuration
    layout = "the layout stays" if is_same else "the layout changes"
    by_layout = ""
    if not is_same and found.kept.fits:
        gain = 1.0 - found.after.step_seconds / found.kept.step_seconds
        by_layout = f"; of that the new layout brings {100 * gain:.1f} %"
    return "\n".join(
        [
            f"{search.scenario.model.name} on {search.scenario.job.n_gpus} {search.scenario.machine.gpu.name}, if "
            + ", ".join(settings),
            "",
            table(rows, headers),
            "",
            f"The best step takes {100 * change:+.1f} %; {layout}{by_layout}.",
            assumption_line(search.scenario, machine_was_given),
        ]
    )


def _row(title: str, best: Prediction) -> list[Any]:
    memory = f"{gib(best.memory_bytes):.1f} of {gib(best.memory_capacity_bytes):.0f}"
    return [
        title,
        best.configuration.ordered_layout,
        best.configuration.micro_batch,
        best.configuration.recompute,
        f"{best.step_seconds:.3f}",
        interval_text(best),
        f"{100 * best.mfu:.1f}",
        memory if best.fits else f"{memory} OOM",
    ]


def influences_text(base: Prediction, found: Sequence[Influence], factor: float) -> str:
    """A line for each number of the machine: the step with less and with more of it."""
    rows = [
        [
            influence.parameter.name,
            format_quantity(influence.parameter.value, influence.parameter.field),
            influence.parameter.origin,
            *_moved(base, influence.less),
            *_moved(base, influence.more),
        ]
        for influence in found
    ]
    headers = ["parameter", "value", "origin", f"/ {factor:g}: step %", "layout"]
    headers += [f"x {factor:g}: step %", "layout"]
    return "\n".join(
        [
            f"Best step of a new search with each number divided and multiplied by {factor:g} "
            f"(as it is {base.step_seconds:.3f} s):",
            "",
            table(rows, headers),
        ]
    )


def _moved(base: Prediction, best: Prediction | None) -> tuple[str, str]:
    if best is None:
        return "-", "nothing fits"
    change = 100.0 * (best.step_seconds / base.step_seconds - 1.0)
    same = base.configuration == best.configuration
    text = f"{best.configuration.ordered_layout}, mbs {best.configuration.micro_batch}, {best.configuration.recompute}"
    return f"{0.0 if abs(change) < 0.005 else change:+.2f}", "same" if same else text


def what_if_document(
    search: Search,
    settings: Sequence[str],
    found: WhatIf | None,
    table_of: Sequence[Influence],
    factor: float,
) -> dict[str, Any]:
    """What ``whatif --format json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "assumptions": assumptions(search),
        "settings": list(settings),
        "what_if": None
        if found is None
        else {
            "before": record(found.before),
            "after": record(found.after),
            "kept": record(found.kept),
        },
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
            for influence in table_of
        ],
    }


def what_if_records(found: WhatIf) -> list[dict[str, Any]]:
    """One flat record for each of the three."""
    named = {"as it is": found.before, "changed": found.after, "layout kept": found.kept}
    return [{"machine": name, **flat_record(best)} for name, best in named.items()]


def influence_records(base: Prediction, found: Sequence[Influence]) -> list[dict[str, Any]]:
    """One flat record per number of the machine."""
    return [
        {
            "parameter": influence.parameter.name,
            "value": influence.parameter.value,
            "origin": influence.parameter.origin,
            **{
                f"{side}_{key}": value
                for side, best in (("less", influence.less), ("more", influence.more))
                for key, value in _short(base, best).items()
            },
        }
        for influence in found
    ]


def _short(base: Prediction, best: Prediction | None) -> dict[str, Any]:
    if best is None:
        return {"step_seconds": None, "change_fraction": None, "layout": None}
    return {
        "step_seconds": best.step_seconds,
        "change_fraction": best.step_seconds / base.step_seconds - 1.0,
        "layout": str(best.layout),
    }
