"""What ``learn`` shows: what runs tell of a machine, what they do not, and which is strange."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from textwrap import fill
from typing import Any

from axonn_tune.learning.learn import LEAST_GAIN
from axonn_tune.report.phrases import percent
from axonn_tune.report.table import table
from axonn_tune.spec.learnable import learnable
from axonn_tune.spec.learned import Learned, LearnedRun
from axonn_tune.spec.machine import Machine

_FACTOR_HEADERS = ("resource", "change %", "spread before %", "spread %")
_RUN_HEADERS = ("run", "measured s", "before %", "after %", "")


def learned_text(machine: Machine) -> str:
    """Return what a machine has learned: the factors, what no run tells, and every run."""
    learned = machine.learned
    assert learned is not None, "only machines that have learned are shown"
    runs = table([_run_row(run) for run in learned.runs], _RUN_HEADERS)
    return "\n\n".join([factors_text(machine), runs, fill(_errors_text(learned), 100)])


def factors_text(machine: Machine) -> str:
    """Return what a machine has learned of each resource, and of which it has learned nothing."""
    learned = machine.learned
    assert learned is not None, "only machines that have learned are shown"
    names = {resource.key: resource.name for resource in learnable(machine)}
    told = [factor for factor in learned.factors if factor.gain_fraction >= LEAST_GAIN]
    untold = [names[factor.key] for factor in learned.factors if factor not in told]
    rows = [
        [
            names[factor.key],
            f"{100.0 * (factor.factor - 1.0):+.1f}",
            percent(factor.stated_spread),
            percent(factor.spread),
        ]
        for factor in told
    ]
    parts = [
        f"Learned from {len(learned.runs)} runs of {learned.engine}, beginning with the "
        f"profile of {learned.base}:"
    ]
    if told:
        parts.append(table(rows, _FACTOR_HEADERS))
    if all(factor.factor == 1.0 for factor in learned.factors):
        parts.append("No number moves: each run is predicted best by what the profile states.")
    if untold:
        parts.append(fill(f"These runs say nothing of: {', '.join(untold)}.", 100))
    return "\n\n".join(parts)


def _run_row(run: LearnedRun) -> list[str]:
    return [
        run.name,
        f"{run.measured_seconds:.4g}",
        f"{100.0 * run.stated_error:+.1f}",
        f"{100.0 * run.learned_error:+.1f}",
        "set aside: all others contradict it" if run.is_set_aside else "",
    ]


def _errors_text(learned: Learned) -> str:
    """Return sentences on the errors before and after, and on what they mean."""
    used = [run for run in learned.runs if not run.is_set_aside]
    before = percent(fmean(abs(run.stated_error) for run in used))
    after = percent(fmean(abs(run.learned_error) for run in used))
    return (
        f"Mean error of the runs that were used: {before} % before, {after} % after. Errors are "
        "predicted over measured time, minus one. A change is that of the speed or, of latency, "
        "interference, jitter and the host's time, of its inverse. Other layouts are expected to "
        f"scatter by {percent(learned.scatter_fraction)} % around their predictions, besides the "
        "spreads above."
    )


def learned_document(machine: Machine) -> dict[str, Any]:
    """Return what ``learn --format json`` prints."""
    learned = machine.learned
    assert learned is not None, "only machines that have learned are shown"
    return {
        "base": learned.base,
        "engine": learned.engine,
        "scatter_fraction": learned.scatter_fraction,
        "factors": [
            {**asdict(factor), "is_told": factor.gain_fraction >= LEAST_GAIN}
            for factor in learned.factors
        ],
        "runs": [
            {**asdict(run), "stated_error": run.stated_error, "learned_error": run.learned_error}
            for run in learned.runs
        ],
    }
