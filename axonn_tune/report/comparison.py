"""The best configurations of several strategies, as text and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axonn_tune.report.records import SCHEMA_VERSION, assumptions, record
from axonn_tune.report.text import assumption_line, interval_text, table
from axonn_tune.search.best import Best
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import format_count, gib

# What a strategy costs beside time, which a table of times does not show.
NOTES = {
    "zeropp": "zeropp quantises messages (INT8 weights, INT4 gradients): the loss may change, and "
    "DeepSpeed's kernels do not support every GPU (MI200: check).",
    "zero-topo": "zero-topo quantises messages (INT8 weights, INT4 gradients): the loss may "
    "change; no released implementation is known.",
}


def layout_text(prediction: Prediction) -> str:
    """Axes larger than one, with virtual stages."""
    sizes = [f"{axis}={size}" for axis, size in prediction.grid.sizes.items() if size > 1]
    if prediction.variant.n_virtual > 1:
        sizes.append(f"virtual={prediction.variant.n_virtual}")
    return " ".join(sizes) or "one rank"


def comparison_text(contenders: Sequence[Best], machine_was_given: bool) -> str:
    """One row per strategy, the fastest first."""
    search = contenders[0].search
    found = [c.best for c in contenders if c.best is not None]
    rows = [
        [
            p.strategy,
            layout_text(p),
            p.micro_batch,
            p.recompute,
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
    headers += [f"GiB of {gib(search.memory_capacity_bytes):.0f}"]
    without = [f"{c.search.strategy.name}: {c.reason}" for c in contenders if c.best is None]
    notes = [NOTES[p.strategy] for p in found if p.strategy in NOTES]
    return "\n".join(
        [
            f"{search.model.name} ({format_count(search.model.parameters)} parameters) on "
            f"{search.job.n_gpus} {search.machine.gpu.name}: the best of "
            f"{len(contenders)} strategies",
            "",
            *([table(rows, headers), ""] if rows else []),
            *without,
            *notes,
            assumption_line(search, machine_was_given),
        ]
    )


def comparison_document(contenders: Sequence[Best]) -> dict[str, Any]:
    """What ``compare --format json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "strategies": [
            {
                "strategy": c.search.strategy.name,
                "assumptions": assumptions(c.search),
                "best": None if c.best is None else record(c.best),
                "reason": c.reason or None,
            }
            for c in contenders
        ],
    }
