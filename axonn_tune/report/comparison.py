"""The best configurations of several strategies, as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axonn_tune.report.records import SCHEMA_VERSION, assumptions, record
from axonn_tune.report.text import assumption_line, interval_text, table
from axonn_tune.search.rank import Best
from axonn_tune.units import format_count, gib

# What a strategy costs beside time, which a table of times does not show.
NOTES = {
    "zeropp": "zeropp quantises messages (INT8 weights, INT4 gradients): the loss may change, and "
    "DeepSpeed's kernels do not support every GPU (MI200: check).",
    "zero-topo": "zero-topo quantises messages (INT8 weights, INT4 gradients): the loss may "
    "change; no released implementation is known.",
}


def comparison_text(contenders: Sequence[Best], machine_was_given: bool) -> str:
    """One row per strategy, the fastest first."""
    search = contenders[0].search
    found = [c.prediction for c in contenders if c.prediction is not None]
    rows = [
        [
            p.scenario.strategy.name,
            p.layout.brief,
            p.configuration.micro_batch,
            p.configuration.recompute,
            f"{p.step_seconds:.3f}",
            interval_text(p),
            f"{p.step_seconds / found[0].step_seconds:.3f}",
            f"{p.tflops_per_gpu:.1f}",
            f"{100 * p.mfu:.1f}",
            f"{100 * p.exposed_communication_fraction:.1f}",
            f"{100 * p.bubble_seconds / p.step_seconds:.1f}",
            f"{gib(p.memory_bytes):.1f}",
        ]
        for p in found
    ]
    headers = ["strategy", "layout", "mbs", "recompute", "step s", "90 % interval", "times best"]
    headers += ["TFLOP/s/GPU", "MFU %", "exposed %", "bubble %"]
    headers += [f"GiB of {gib(search.scenario.memory_capacity_bytes):.0f}"]
    without = [
        f"{c.search.scenario.strategy.name}: {c.reason}" for c in contenders if c.prediction is None
    ]
    notes = [NOTES[p.scenario.strategy.name] for p in found if p.scenario.strategy.name in NOTES]
    return "\n".join(
        [
            f"{search.scenario.model.name} ({format_count(search.scenario.model.parameters)} parameters) on "
            f"{search.scenario.job.n_gpus} {search.scenario.machine.gpu.name}: the best of "
            f"{len(contenders)} strategies",
            "",
            *([table(rows, headers), ""] if rows else []),
            *without,
            *notes,
            assumption_line(search.scenario, machine_was_given),
        ]
    )


def comparison_document(contenders: Sequence[Best]) -> dict[str, Any]:
    """What ``compare --format json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "strategies": [
            {
                "strategy": c.search.scenario.strategy.name,
                "assumptions": assumptions(c.search),
                "best": None if c.prediction is None else record(c.prediction),
                "reason": c.reason or None,
            }
            for c in contenders
        ],
    }
