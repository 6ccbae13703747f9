"""How far to trust a strategy's rows: how its predictions have fared, and its caveats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from axonn_tune.report.phrases import percent
from axonn_tune.search.search import Search
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.strategy import Strategy
from axonn_tune.spec.track_record import FAR_FRACTION
from axonn_tune.units import counted

_OFFLOAD = (
    "Of steps with offload only DeepSpeed's of an 8B model on H100 were measured: its host took 4 "
    "to 8 s longer than predicted (docs/validation.md)."
)
# The mark of a strategy that has a caveat.
MARK = " *"


def marked_name(strategy: Strategy) -> str:
    """Return the name of a strategy, with a mark if it has a caveat."""
    return strategy.name + (MARK if strategy.caveat else "")


def trust_lines(*searches: Search) -> list[str]:
    """Return a line on each strategy's track record, one on each caveat, and one on offload."""
    scenarios = _one_of_each(search.scenario for search in searches)
    caveats = [scenario.strategy.caveat for scenario in scenarios if scenario.strategy.caveat]
    lines = [*map(track_record_line, scenarios), *(f"* {caveat}" for caveat in caveats)]
    if any(scenario.job.offloads_optimizer for scenario in scenarios):
        lines.append(_OFFLOAD)
    return lines


def _one_of_each(scenarios: Iterable[Scenario]) -> list[Scenario]:
    """Return one scenario for each strategy on each family of GPUs."""
    kinds = {
        (s.strategy.name, s.strategy.engine.record_title, s.machine.gpu.family): s
        for s in scenarios
    }
    return list(kinds.values())


def track_record_line(scenario: Scenario) -> str:
    """Say in one line how predictions of this kind have fared."""
    strategy = scenario.strategy
    record = scenario.track_record
    if record is None:
        return f"Track record of {strategy.name}: never compared with a measured step."
    gpu = scenario.machine.gpu.family
    remarks = []
    if strategy.engine.record_title not in ("", record.engine):
        remarks.append(f"of other engines, too; {strategy.engine.record_title} has too few")
    place = f"on {record.gpu}" if record.gpu else "on all machines"
    if record.gpu != gpu:
        place += f", since {gpu} has too few"
    engine = f" ({record.engine})" if record.engine else ""
    if record.kind:
        remarks.append(record.kind)
    elif scenario.kind:
        remarks.append(f"of all kinds of training, since there are too few of {scenario.kind}")
    remark = f" ({'; '.join(remarks)})" if remarks else ""
    return (
        f"Track record of {strategy.name}{engine} {place}: "
        f"{counted(record.n_runs, 'published run')}{remark}, mean error "
        f"{percent(record.mean_error_fraction, 0)} %, {record.n_far} of {record.n_runs} "
        f"off by more than {percent(FAR_FRACTION, 0)} %."
    )


def track_record_document(scenario: Scenario) -> dict[str, Any] | None:
    """Return how predictions of this kind have fared as plain data; None if too few were compared.

    Names are null where the runs differ in them.
    """
    record = scenario.track_record
    if record is None:
        return None
    return {
        "engine": record.engine or None,
        "gpu": record.gpu or None,
        "kind": record.kind or None,
        "runs": record.n_runs,
        "mean_error_fraction": record.mean_error_fraction,
        "runs_far_off": record.n_far,
        "far_off_fraction": FAR_FRACTION,
        "spread": record.spread,
    }


def left_out_lines(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line for each reason why strategies are not compared."""
    return [f"Left out: {', '.join(names)}, {reason}." for reason, names in left_out.items()]
