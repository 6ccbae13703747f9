"""What ``learn`` and ``next`` show: what runs tell of a machine, and which layouts to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from textwrap import fill
from typing import Any

from axonn_tune.learning.choose import Proposals
from axonn_tune.learning.learn import LEAST_GAIN
from axonn_tune.learning.watch import Drift
from axonn_tune.report.phrases import percent, signed_percent
from axonn_tune.report.records import SCHEMA_VERSION
from axonn_tune.report.table import table
from axonn_tune.spec.learnable import learnable
from axonn_tune.spec.learned import Learned, LearnedRun
from axonn_tune.spec.machine import Machine
from axonn_tune.units import counted

_FACTOR_HEADERS = ("resource", "change %", "spread before %", "spread %")
_PROPOSAL_HEADERS = (
    "try",
    "layout",
    "virtual",
    "mbs",
    "recompute",
    "step s",
    "P(best) %",
    "gain %",
)
_RUN_HEADERS = ("run", "measured s", "before %", "after %", "")
_TRACED_HEADERS = ("part of a traced step", *_RUN_HEADERS[1:])


def learned_text(machine: Machine) -> str:
    """Return what a machine has learned: the factors, what no run tells, and every run."""
    learned = machine.learned
    assert learned is not None, "only machines that have learned are shown"
    runs = table([_run_row(run) for run in learned.runs], _RUN_HEADERS)
    parts = [factors_text(machine), runs]
    if learned.traced:
        parts.append(table([_run_row(run) for run in learned.traced], _TRACED_HEADERS))
    return "\n\n".join([*parts, fill(_errors_text(learned), 100)])


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
            signed_percent(factor.factor - 1.0),
            percent(factor.stated_spread),
            percent(factor.spread),
        ]
        for factor in told
    ]
    parts = [
        f"Learned from {counted(len(learned.runs), 'run')} of {learned.engine}, beginning with the "
        f"profile of {learned.base}:"
    ]
    if told:
        parts.append(table(rows, _FACTOR_HEADERS))
    if all(factor.factor == 1.0 for factor in learned.factors):
        parts.append("No number moves: no other values are better with a confidence of 95 %.")
    if untold:
        say = "This run says" if len(learned.runs) == 1 else "These runs say"
        parts.append(fill(f"{say} nothing of: {', '.join(untold)}.", 100))
    return "\n\n".join(parts)


def _run_row(run: LearnedRun) -> list[str]:
    return [
        run.name,
        f"{run.measured_seconds:.4g}",
        signed_percent(run.stated_error),
        signed_percent(run.learned_error),
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
        f"scatter by {percent(learned.scatter_fraction)} % around their predictions, or by more "
        "where the spreads above amount to more."
    )


def learned_document(machine: Machine) -> dict[str, Any]:
    """Return what ``learn --format json`` prints."""
    learned = machine.learned
    assert learned is not None, "only machines that have learned are shown"
    return {
        "schema_version": SCHEMA_VERSION,
        "base": learned.base,
        "engine": learned.engine,
        "scatter_fraction": learned.scatter_fraction,
        "factors": [
            {**asdict(factor), "is_told": factor.gain_fraction >= LEAST_GAIN}
            for factor in learned.factors
        ],
        "runs": [_run_document(run) for run in learned.runs],
        "traced": [_run_document(run) for run in learned.traced],
    }


def _run_document(run: LearnedRun) -> dict[str, Any]:
    """Return a run, or a part of a traced step, with its errors."""
    return {**asdict(run), "stated_error": run.stated_error, "learned_error": run.learned_error}


def proposals_text(proposed: Proposals, commands: Sequence[str]) -> str:
    """Return the layouts to try next, and the commands that write their job scripts."""
    rows = [
        [
            number,
            each.prediction.configuration.brief_layout,
            each.prediction.configuration.n_virtual,
            each.prediction.configuration.micro_batch,
            each.prediction.configuration.recompute,
            f"{each.expected_seconds:.4g}",
            percent(each.p_best),
            "-" if each.gain_fraction is None else percent(each.gain_fraction),
        ]
        for number, each in enumerate(proposed.proposals, start=1)
    ]
    return "\n\n".join(
        [
            fill(_so_far(proposed), 100),
            table(rows, _PROPOSAL_HEADERS),
            fill(_PROPOSALS_READING, 100),
            "\n".join(commands),
        ]
    )


_PROPOSALS_READING = (
    "P(best) is the probability that a layout is faster than all others and all runs. Gain is by "
    "how much a try is expected to reduce the best step, after the tries above it. Once they have "
    "run, add them to the table and ask again."
)


def _so_far(proposed: Proposals) -> str:
    """Return a sentence on the runs that there are."""
    if proposed.machine.learned is None:
        return "There are no runs to learn from: the first is the layout that is predicted best."
    learned = counted(len(proposed.machine.learned.runs), "run")
    are = "is" if proposed.n_runs == 1 else "are"
    best = proposed.best_measured_seconds
    fastest = "" if best is None else f"; the fastest step of this job took {best:.4g} s"
    return f"Learned from {learned}; {proposed.n_runs} {are} of this job{fastest}."


def drift_line(drift: Drift) -> str:
    """Return one line that says how steps changed since a baseline."""
    runs = counted(drift.n_runs, "run")
    predicted = f"predicted {signed_percent(drift.error_fraction)} %"
    mean = f"on average {signed_percent(drift.change_fraction)} %"
    changes = []
    if drift.is_slower:
        slower = f"slower by up to {percent(drift.slowest_fraction)} %"
        changes.append(f"{drift.n_slower} of {runs} {slower}")
        mean += f", most in {drift.slowest}"
    if drift.is_faster:
        faster = f"faster by up to {percent(-drift.fastest_fraction)} %"
        changes.append(f"{drift.n_faster} of {runs} {faster}")
    if not changes:
        return f"{runs} as in the baseline ({mean}; {predicted})"
    verdict = " and ".join(changes)
    reason = "; no change of one resource alone explains most of it"
    if drift.n_configurations == 1:
        reason = "; runs of one layout do not tell why"
    elif drift.culprit:
        factor = 1.0 + drift.culprit_fraction
        change = f"{max(factor, 1.0 / factor):.2f} times {'better' if factor > 1.0 else 'worse'}"
        reason = f", as if {drift.culprit} had become {change}"
    return f"{verdict} than the baseline{reason} ({mean}; {predicted})"


def proposals_document(proposed: Proposals, commands: Sequence[str]) -> dict[str, Any]:
    """Return what ``next --format json`` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "n_runs": proposed.n_runs,
        "best_measured_seconds": proposed.best_measured_seconds,
        "proposals": [
            {
                "layout": str(each.prediction.layout),
                "order": each.prediction.configuration.order,
                "micro_batch": each.prediction.configuration.micro_batch,
                "recompute": each.prediction.configuration.recompute,
                "virtual_stages": each.prediction.configuration.n_virtual,
                "expected_seconds": each.expected_seconds,
                "p_best": each.p_best,
                "gain_fraction": each.gain_fraction,
                "command": command,
            }
            for each, command in zip(proposed.proposals, commands, strict=True)
        ],
    }
