"""What ``plan`` shows: a whole training run as text and as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from axonn_tune.report.memory import memory_lines, memory_text
from axonn_tune.report.phrases import assumption_line, percent
from axonn_tune.report.records import SCHEMA_VERSION, assumptions, flat_record, record
from axonn_tune.report.table import Column, fitted_table_of, key_values
from axonn_tune.report.trust import trust_lines
from axonn_tune.spec.model import Model
from axonn_tune.studies.limits import Limits
from axonn_tune.studies.run_plan import CHINCHILLA_TOKENS_PER_PARAMETER, RunPlan
from axonn_tune.studies.training_run import TrainingRun, checkpoint_bytes
from axonn_tune.units import (
    DAY_SECONDS,
    HOUR_SECONDS,
    counted,
    format_count,
    format_quantity,
    format_seconds,
    gib,
)

JOULES_PER_MWH = 3.6e9


# The columns of a run over given tokens; one that spends a budget takes given time instead.
_COLUMNS: tuple[Column[TrainingRun], ...] = (
    ("GPUs", lambda run: run.scenario.job.n_gpus),
    ("nodes", lambda run: run.scenario.n_nodes),
    ("batch", lambda run: run.scenario.job.global_batch),
    ("layout", lambda run: run.best.configuration.brief_layout),
    ("step s", lambda run: f"{run.best.step_seconds:.3f}"),
    ("MFU %", lambda run: percent(run.best.mfu)),
    ("useful %", lambda run: percent(run.useful_fraction)),
    ("days", lambda run: _days(run.wall_seconds)),
    ("90 % interval", lambda run: _range(run)),
    ("node-hours", lambda run: _few_or_whole(run.node_hours)),
    ("GPU-hours", lambda run: format_count(run.gpu_hours)),
    ("MWh", lambda run: _megawatt_hours(run)),
)
_TIME_INTERVAL = "90 % interval"
# Number of rows of the table: of larger counts than these the plan is far away.
_MOST_ROWS = 12


def training_text(plan: RunPlan) -> str:
    """Return a table row for each GPU count, and the last run, which is the plan, in full."""
    best = plan.best
    model = best.scenario.model
    parts = [f"{model.name} on {best.scenario.machine.gpu.name}: {_tokens_text(best)}"]
    parts += [*_bought_lines(plan), ""]
    shown = plan.runs[-_MOST_ROWS:]
    parts += [fitted_table_of(shown, _columns(plan), _droppable(plan.limits))]
    n_hidden = len(plan.runs) - len(shown)
    parts += (
        [f"Counts that are not shown: {n_hidden}; --format csv has them.", ""] if n_hidden else [""]
    )
    parts += [key_values(_plan_pairs(plan)), ""]
    parts += [*_choice_lines(plan), *_size_lines(plan)]
    parts += [*memory_lines([best.best]), *trust_lines(best.search), assumption_line(best.search)]
    return "\n".join(parts)


def _columns(plan: RunPlan) -> Sequence[Column[TrainingRun]]:
    """Return the columns of the table, with what the limits make of each row."""
    limits = plan.limits
    if plan.is_bought:
        tokens: tuple[Column[TrainingRun], ...] = (
            ("tokens", lambda run: format_count(run.tokens)),
            (_TIME_INTERVAL, lambda run: _tokens_range(run, limits)),
        )
        others = [column for column in _COLUMNS if column[0] != _TIME_INTERVAL]
        return *others[:4], *tokens, *others[4:]
    if not limits.are_given:
        return _COLUMNS
    chance: Column[TrainingRun] = (
        "chance %",
        lambda run: _chance(run, limits.seconds(run.scenario)),
    )
    return *_COLUMNS, chance


def _droppable(limits: Limits) -> Sequence[str]:
    """Return the columns that the table may leave out, the unit of the budget not among them."""
    hours = "GPU-hours" if limits.gpu_hours is None else "node-hours"
    return "MWh", hours, "useful %", "MFU %", "batch", "step s"


def _choice_lines(plan: RunPlan) -> list[str]:
    """Say by what a budget chose the GPUs, if another limit would choose other ones."""
    limits = plan.limits
    if not plan.finds_gpus or not limits.has_budget:
        return []
    if limits.deadline_seconds is None and plan.is_bought:
        return [
            "Few GPUs train most for a budget, however long it takes: with --deadline, such as "
            "60d, the plan trains most in that time."
        ]
    if limits.deadline_seconds is None:
        return [
            "These GPUs finish soonest within the budget: with --deadline, such as 60d, the plan "
            "takes the fewest node-hours in that time."
        ]
    if plan.is_bought:
        return []
    return [
        "These GPUs take the fewest node-hours within both limits; the rows above them are of more "
        "GPUs. Without --deadline the plan is the soonest within the budget."
    ]


def _size_lines(plan: RunPlan) -> list[str]:
    """Say that a budget may have chosen more GPUs than there are, if nobody knows how many."""
    machine = plan.best.scenario.machine
    if not plan.finds_gpus or not plan.limits.has_budget or machine.facility.n_nodes is not None:
        return []
    return [
        f"There may be fewer GPUs than the plan takes: the profile of {machine.name} has no "
        "facility.n_nodes. --gpus names yours."
    ]


def _bought_lines(plan: RunPlan) -> list[str]:
    """Say that no run trains what was asked for, if it is so."""
    if not plan.is_bought or plan.asked_tokens is None:
        return []
    return [
        f"No number of GPUs trains {format_count(plan.asked_tokens)} tokens within "
        f"{_limits_text(plan.limits)}; the last row trains most."
    ]


def _limits_text(limits: Limits) -> str:
    """Return the budget and the deadline in words."""
    words = [_budget_text(limits)] if limits.has_budget else []
    if limits.deadline_seconds is not None:
        words.append(_days_text(limits.deadline_seconds))
    return " and ".join(words)


def _budget_text(limits: Limits) -> str:
    if limits.node_hours is not None:
        return f"{_few_or_whole(limits.node_hours)} node-hours"
    return f"{format_count(limits.gpu_hours or 0.0)} GPU-hours"


def _tokens_range(run: TrainingRun, limits: Limits) -> str:
    """Return the tokens that the limits let a run train, for the ends of the step's interval."""
    return "-".join(map(format_count, run.tokens_within_range(limits.seconds(run.scenario))))


def _limit_pairs(plan: RunPlan) -> list[tuple[str, str]]:
    """Return what the limits make of the plan, a sentence on each."""
    run, limits = plan.best, plan.limits
    pairs = []
    if plan.is_bought:
        trained = f"{format_count(run.tokens)} ({_tokens_range(run, limits)} with the 90 % interval"
        pairs.append(("tokens", f"{trained} of the step), within {_limits_text(limits)}"))
    if limits.deadline_seconds is not None:
        pairs.append(("deadline", _deadline_text(plan, limits.deadline_seconds)))
    if limits.has_budget:
        pairs.append(("budget", _use_of_budget_text(plan)))
    return pairs


def _deadline_text(plan: RunPlan, deadline_seconds: float) -> str:
    """Say by how much a deadline is met or missed, and how likely it is to be met."""
    left = deadline_seconds - plan.best.wall_seconds
    when = f"{_days_text(abs(left))} {'earlier' if left >= 0 else 'later'}"
    text = f"{_days_text(deadline_seconds)}: the run ends {when}"
    # A run that spends a budget ends with it, however fast the step is.
    if plan.is_bought:
        return text
    return f"{text}, and in time with a probability of {_chance(plan.best, deadline_seconds)} %"


def _use_of_budget_text(plan: RunPlan) -> str:
    """Say how much of a budget is used, how likely it is to suffice, and what it buys if not."""
    run = plan.best
    seconds = plan.limits.budget_seconds(run.scenario)
    used = run.wall_seconds / seconds
    text = f"{_budget_text(plan.limits)}: the run takes {percent(used)} % of it"
    if plan.is_bought:
        return text
    text += f"; it suffices with a probability of {_chance(run, seconds)} %"
    bought = format_count(run.tokens_within(seconds))
    return text if used <= 1.0 else f"{text}, and buys {bought} tokens on these GPUs"


def _chance(run: TrainingRun, seconds: float) -> str:
    """Return the probability in percent that a run ends within a time."""
    chance = run.chance_within(seconds)
    if chance is None:
        return "-"
    if chance > 0.995:
        return ">99"
    return "<1" if chance < 0.005 else percent(chance, 0)


def _megawatt_hours(run: TrainingRun) -> str:
    energy = run.energy_joules
    return "-" if energy is None else _few_or_whole(energy / JOULES_PER_MWH)


def _tokens_text(run: TrainingRun) -> str:
    model = run.scenario.model
    optimum = f" ({_optimum_text(model)})" if run.scenario.job.trains_all_weights else ""
    of_active = (
        ""
        if model.is_dense
        else f", {run.tokens / model.active_parameters:.3g} for each active one"
    )
    return (
        f"{format_count(run.tokens)} tokens, {run.tokens / model.parameters:.3g} for each parameter"
        f"{of_active}{optimum}, {counted(run.n_steps, 'step')}, "
        f"{run.model_flops:.3g} FLOPs of the model"
    )


def _optimum_text(model: Model) -> str:
    """Say which number of tokens is compute-optimal, or of which parameters it would be."""
    optimum = CHINCHILLA_TOKENS_PER_PARAMETER
    of_all = format_count(optimum * model.parameters)
    if model.is_dense:
        return f"compute-optimal, after Chinchilla: about {optimum:g}, {of_all}"
    of_active = format_count(optimum * model.active_parameters)
    return (
        f"Chinchilla's {optimum:g} are of dense models: {of_all} by all parameters, {of_active} by "
        "the active ones"
    )


def _plan_pairs(plan: RunPlan) -> list[tuple[str, str]]:
    """Return what a plan consists of, and a sentence on each."""
    run = plan.best
    scenario = run.scenario
    best = run.best
    failures = run.failures
    facility = scenario.machine.facility
    return [
        (
            "GPUs",
            f"{scenario.job.n_gpus} on {counted(scenario.n_nodes, 'node')} of "
            f"{scenario.machine.name}",
        ),
        (
            "layout",
            f"{best.configuration.in_words}: {best.step_seconds:.3f} s a step, "
            f"{best.tflops_per_gpu:.1f} TFLOP/s per GPU",
        ),
        ("memory", f"{memory_text(best)} of {gib(best.memory_capacity_bytes):.0f} GiB"),
        (
            "time",
            f"{_with_noun(_days(run.wall_seconds))}{_range_remark(plan)}; "
            f"{_days(run.work_seconds)} without failures and checkpoints",
        ),
        *_limit_pairs(plan),
        (
            "failures",
            f"one every {format_seconds(failures.mtbf_seconds, 3)}, about "
            f"{run.n_interruptions:.0f} in all ({facility.gpu_mtbf_seconds.origin}: "
            f"{facility.gpu_mtbf_seconds.source})",
        ),
        (
            "checkpoints",
            f"{format_quantity(checkpoint_bytes(scenario.model, scenario.job), '_bytes')} in "
            f"{format_seconds(failures.checkpoint_seconds, 3)}, best every "
            f"{failures.interval_seconds / 60:.0f} min ("
            f"{failures.interval_seconds / best.step_seconds:.0f} steps); a restart takes "
            f"{failures.restart_seconds / 60:.0f} min",
        ),
        (
            "node-hours",
            f"{_few_or_whole(run.node_hours)} ({format_count(run.gpu_hours)} GPU-hours)",
        ),
        ("energy", _energy_text(run)),
        ("money", _money_text(run)),
    ]


def _energy_text(run: TrainingRun) -> str:
    energy = run.energy_joules
    power = run.scenario.machine.facility.node_power_watts
    if energy is None or power is None:
        return "not known: the profile has no facility.node_power_watts; give --node-power"
    return (
        f"{_few_or_whole(energy / JOULES_PER_MWH)} MWh, without cooling: "
        f"{format_quantity(power.value, '_watts')} a node ({power.origin}: {power.source})"
    )


def _money_text(run: TrainingRun) -> str:
    if run.cost is None:
        return "not known: the profile has no facility.node_hour_price; give --node-hour-price"
    return f"{run.cost:,.0f} {run.scenario.machine.facility.currency}"


def _range_remark(plan: RunPlan) -> str:
    """Say how long the run may take, unless it is as long as its budget lasts."""
    return "" if plan.is_bought else f" ({_range(plan.best)} with the 90 % interval of the step)"


def _range(run: TrainingRun) -> str:
    """Return the ends of a run's time in days, or in hours if both are below a day."""
    low, high = run.wall_seconds_range
    if high < DAY_SECONDS:
        return f"{_digits(low / HOUR_SECONDS)}-{_days(high)}"
    return f"{_digits(low / DAY_SECONDS)}-{_days(high)}"


def _days(seconds: float) -> str:
    """Return a time as a number of days, or in hours with their unit if it is below a day."""
    if math.isinf(seconds):
        return "never"
    if seconds < DAY_SECONDS:
        return f"{_digits(seconds / HOUR_SECONDS)} h"
    return _digits(seconds / DAY_SECONDS)


def _digits(number: float) -> str:
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def _few_or_whole(amount: float) -> str:
    """Return a whole number of hours or MWh, or three digits of few."""
    return f"{amount:.0f}" if amount >= 10 else f"{amount:.3g}"


def _with_noun(days: str) -> str:
    """Return what `_days` writes, with the noun of a number of days."""
    return days if days.endswith("h") else f"{days} days"


def _days_text(seconds: float) -> str:
    """Return a time as a number of days with its noun, or of hours if it is below a day."""
    unit, noun = (HOUR_SECONDS, "hour") if seconds < DAY_SECONDS else (DAY_SECONDS, "day")
    number = f"{seconds / unit:.3g}"
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"


def training_document(plan: RunPlan) -> dict[str, Any]:
    """Return what ``plan --format json`` prints; the last run is the plan."""
    return {
        "schema_version": SCHEMA_VERSION,
        "assumptions": assumptions(plan.best.search),
        "asked_tokens": plan.asked_tokens,
        "deadline_seconds": plan.limits.deadline_seconds,
        "budget_node_hours": plan.limits.node_hours,
        "budget_gpu_hours": plan.limits.gpu_hours,
        "runs": [training_record(run, plan.limits) for run in plan.runs],
    }


def training_record(run: TrainingRun, limits: Limits) -> dict[str, Any]:
    """Return the run on one GPU count as plain data."""
    low, high = run.wall_seconds_range
    return {
        "gpus": run.scenario.job.n_gpus,
        "nodes": run.scenario.n_nodes,
        "global_batch": run.scenario.job.global_batch,
        "tokens": run.tokens,
        "steps": run.n_steps,
        "work_seconds": run.work_seconds,
        "wall_seconds": _finite(run.wall_seconds),
        "wall_seconds_low": _finite(low),
        "wall_seconds_high": _finite(high),
        **_limit_record(run, limits),
        "useful_fraction": run.useful_fraction,
        "mtbf_seconds": run.failures.mtbf_seconds,
        "interruptions": _finite(run.n_interruptions),
        "checkpoint_bytes": checkpoint_bytes(run.scenario.model, run.scenario.job),
        "checkpoint_seconds": run.failures.checkpoint_seconds,
        "checkpoint_interval_seconds": run.failures.interval_seconds,
        "restart_seconds": run.failures.restart_seconds,
        "node_hours": _finite(run.node_hours),
        "gpu_hours": _finite(run.gpu_hours),
        "energy_joules": _finite(run.energy_joules),
        "cost": _finite(run.cost),
        "currency": run.scenario.machine.facility.currency or None,
        "model_flops": run.model_flops,
        "prediction": record(run.best),
    }


def _limit_record(run: TrainingRun, limits: Limits) -> dict[str, Any]:
    """Return what the limits make of a run; None where there is no such limit."""
    deadline, budget = limits.deadline_seconds, limits.budget_seconds(run.scenario)
    seconds = limits.seconds(run.scenario)
    few, many = run.tokens_within_range(seconds) if limits.are_given else (None, None)
    return {
        "deadline_spare_seconds": None
        if deadline is None
        else _finite(deadline - run.wall_seconds),
        "deadline_probability": None if deadline is None else run.chance_within(deadline),
        "budget_used_fraction": _finite(run.wall_seconds / budget) if limits.has_budget else None,
        "budget_probability": run.chance_within(budget) if limits.has_budget else None,
        "tokens_within_limits": run.tokens_within(seconds) if limits.are_given else None,
        "tokens_within_limits_low": few,
        "tokens_within_limits_high": many,
    }


def training_flat_records(plan: RunPlan) -> list[dict[str, Any]]:
    """Return one record for each GPU count, with the columns of its prediction."""
    records = [training_record(run, plan.limits) for run in plan.runs]
    for flat, run in zip(records, plan.runs, strict=True):
        del flat["prediction"]
        flat |= flat_record(run.best)
    return records


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value
