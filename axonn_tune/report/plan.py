"""What ``plan`` shows: a whole training run as text and as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from axonn_tune.report.memory import memory_lines, memory_text
from axonn_tune.report.phrases import assumption_line, percent
from axonn_tune.report.records import SCHEMA_VERSION, assumptions, flat_record, record
from axonn_tune.report.table import fitted_table, key_values
from axonn_tune.report.trust import trust_lines
from axonn_tune.studies.training_run import (
    CHINCHILLA_TOKENS_PER_PARAMETER,
    TrainingRun,
    checkpoint_bytes,
)
from axonn_tune.units import DAY_SECONDS, format_count, format_quantity, format_seconds, gib

JOULES_PER_MWH = 3.6e9


_HEADERS = (
    "GPUs",
    "nodes",
    "batch",
    "layout",
    "step s",
    "MFU %",
    "useful %",
    "days",
    "90 % interval",
    "node-hours",
    "GPU-hours",
    "MWh",
)
_DROPPABLE = ("MWh", "GPU-hours", "useful %", "MFU %")


def training_text(runs: Sequence[TrainingRun]) -> str:
    """Return a table row for each GPU count, and the last run, which is the plan, in full."""
    plan = runs[-1]
    model = plan.scenario.model
    parts = [f"{model.name} on {plan.scenario.machine.gpu.name}: {_tokens_text(plan)}", ""]
    parts += [fitted_table([_row(run) for run in runs], _HEADERS, _DROPPABLE), ""]
    parts += [key_values(_plan_pairs(plan)), ""]
    parts += [*memory_lines([plan.best]), *trust_lines(plan.search), assumption_line(plan.search)]
    return "\n".join(parts)


def _row(run: TrainingRun) -> list[Any]:
    energy = run.energy_joules
    return [
        run.scenario.job.n_gpus,
        run.scenario.n_nodes,
        run.scenario.job.global_batch,
        run.best.configuration.brief_layout,
        f"{run.best.step_seconds:.3f}",
        percent(run.best.mfu),
        percent(run.useful_fraction),
        _days(run.wall_seconds),
        _range(run),
        f"{run.node_hours:.0f}",
        format_count(run.gpu_hours),
        "-" if energy is None else f"{energy / JOULES_PER_MWH:.0f}",
    ]


def _tokens_text(run: TrainingRun) -> str:
    parameters = run.scenario.model.parameters
    optimum = CHINCHILLA_TOKENS_PER_PARAMETER
    return (
        f"{format_count(run.tokens)} tokens, {run.tokens / parameters:.3g} for each parameter "
        f"(compute-optimal, after Chinchilla: about {optimum:g}, "
        f"{format_count(optimum * parameters)}), {run.n_steps} steps, "
        f"{run.model_flops:.3g} FLOPs of the model"
    )


def _plan_pairs(run: TrainingRun) -> list[tuple[str, str]]:
    """Return what a plan consists of, and a sentence on each."""
    scenario = run.scenario
    best = run.best
    configuration = run.best.configuration
    failures = run.failures
    facility = scenario.machine.facility
    return [
        (
            "GPUs",
            f"{scenario.job.n_gpus} on {scenario.n_nodes} nodes of {scenario.machine.name}",
        ),
        (
            "layout",
            f"{best.layout}, order {configuration.order}, "
            f"micro-batch {configuration.micro_batch}, recompute {configuration.recompute}: "
            f"{best.step_seconds:.3f} s a step, {best.tflops_per_gpu:.1f} TFLOP/s per GPU",
        ),
        ("memory", f"{memory_text(best)} of {gib(best.memory_capacity_bytes):.0f} GiB"),
        (
            "time",
            f"{_days(run.wall_seconds)} days ({_range(run)} with the 90 % interval of the step); "
            f"{_days(run.work_seconds)} without failures and checkpoints",
        ),
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
        ("node-hours", f"{run.node_hours:.0f} ({format_count(run.gpu_hours)} GPU-hours)"),
        ("energy", _energy_text(run)),
        ("money", _money_text(run)),
    ]


def _energy_text(run: TrainingRun) -> str:
    energy = run.energy_joules
    power = run.scenario.machine.facility.node_power_watts
    if energy is None or power is None:
        return "not known: the profile has no facility.node_power_watts; give --node-power"
    return (
        f"{energy / JOULES_PER_MWH:.0f} MWh, without cooling: "
        f"{format_quantity(power.value, '_watts')} a node ({power.origin}: {power.source})"
    )


def _money_text(run: TrainingRun) -> str:
    if run.cost is None:
        return "not known: the profile has no facility.node_hour_price; give --node-hour-price"
    return f"{run.cost:,.0f} {run.scenario.machine.facility.currency}"


def _range(run: TrainingRun) -> str:
    return "-".join(_days(seconds) for seconds in run.wall_seconds_range)


def _days(seconds: float) -> str:
    days = seconds / DAY_SECONDS
    if math.isinf(days):
        return "never"
    return f"{days:.1f}" if days >= 1 else f"{days:.2g}"


def training_document(runs: Sequence[TrainingRun]) -> dict[str, Any]:
    """Return what ``plan --format json`` prints; the last run is the plan."""
    return {
        "schema_version": SCHEMA_VERSION,
        "assumptions": assumptions(runs[-1].search),
        "runs": [training_record(run) for run in runs],
    }


def training_record(run: TrainingRun) -> dict[str, Any]:
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


def training_flat_records(runs: Sequence[TrainingRun]) -> list[dict[str, Any]]:
    """Return one record for each GPU count, with the columns of its prediction."""
    records = [training_record(run) for run in runs]
    for flat, run in zip(records, runs, strict=True):
        del flat["prediction"]
        flat |= flat_record(run.best)
    return records


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value
