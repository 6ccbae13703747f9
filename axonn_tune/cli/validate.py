"""``axonn-tune validate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    NumberRange,
    launch_options,
    plot_option,
    validate_options,
)

if TYPE_CHECKING:
    from axonn_tune.io.journal import Journal, MeasurementJournal
    from axonn_tune.runtime.ranks.series import Series
    from axonn_tune.search.rank import Ranking
    from axonn_tune.search.search import Search
    from axonn_tune.spec.validation import Validation
    from axonn_tune.step.prediction import Prediction


@click.command("validate")
@click.option(
    "--output", type=click.Path(dir_okay=False), help="The report, as JSON; with it, --resume."
)
@click.option("--resume", is_flag=True, help="Go on with a validation that was interrupted.")
@click.option(
    "--grids",
    default="all",
    show_default=True,
    help="Which to run: all, top:N, or spread:N, evenly over the ranking.",
)
@click.option("--grid", "explicit", multiple=True, metavar="GRID", help="Run this one; repeatable.")
@click.option(
    "--steps", type=click.IntRange(min=3), default=10, show_default=True, help="Steps of each."
)
@validate_options
@click.option(
    "--from", "source", type=click.Path(dir_okay=False), help="Run nothing: read this report."
)
@click.option("--max-error", type=NumberRange(min=0), help="Exit 1 if the MAPE is above, 0.2.")
@click.option("--max-regret", type=NumberRange(min=0), help="Exit 1 if regret is above, 0.1.")
@click.option(
    "--baseline",
    type=click.Path(dir_okay=False),
    help="Exit 1 if anything is significantly worse than in this report.",
)
@click.option(
    "--least-change",
    type=NumberRange(min=0),
    default=0.05,
    show_default=True,
    help="Smaller changes against the baseline are none.",
)
@click.option("--csv", type=click.Path(dir_okay=False), help="Write a line per configuration.")
@click.option("--junit", type=click.Path(dir_okay=False), help="Write JUnit XML for CI.")
@plot_option
@click.option("--trace", type=click.Path(dir_okay=False), help="Write both steps for Perfetto.")
@launch_options
def command(**options: Any) -> None:
    """Run many grids of a model; compare each predicted with its measured step.

    Starts the ranks on this machine, or joins those that torchrun, srun or emulate has
    started. Reports the error of each grid with its cause, MAPE, rank correlation, and regret:
    how much slower the suggested grid is than the best one measured.

    \b
    Examples:
      axonn-tune validate --model tiny --machine mycluster.yaml --gpus 4 --output report.json
      srun -N 2 axonn-tune validate --model 5b --machine mycluster.yaml --grids spread:8
      axonn-tune validate --model tiny --machine m.yaml --max-error 0.2 --baseline last.json
      axonn-tune validate --from report.json --plot report.png
    """
    from axonn_tune.io.json_files import load_json
    from axonn_tune.spec.validation import Validation

    if options["source"] is not None:
        baseline = _checked(options)
        _conclude(load_json(options["source"], Validation), baseline, options)
        return

    from axonn_tune.runtime.ranks.launch import only_rank_0_speaks

    with only_rank_0_speaks():
        baseline = _checked(options)
        validation = _run(options)
    if validation is not None:
        _conclude(validation, baseline, options)


def _checked(options: dict[str, Any]) -> Validation | None:
    """The baseline; whatever would fail after a long run fails now."""
    from axonn_tune.cli.output import check_plot
    from axonn_tune.errors import InputError
    from axonn_tune.io.json_files import load_json
    from axonn_tune.spec.validation import Validation

    check_plot(options["plot"])
    if options["source"] is not None and options["trace"] is not None:
        raise InputError("--trace needs a run: a report does not hold every operation")
    for name in ("model", "machine"):
        if options["source"] is None and options[name] is None:
            raise InputError(f"give --{name}, or --from with a report")
    return None if options["baseline"] is None else load_json(options["baseline"], Validation)


def _run(options: dict[str, Any]) -> Validation | None:
    """Run what was chosen; None on a rank that does not speak."""
    import tempfile
    from contextlib import nullcontext
    from pathlib import Path

    from axonn_tune.cli.interrupts import resumable
    from axonn_tune.io.journal import Journal, MeasurementJournal
    from axonn_tune.runtime.ranks.launch import is_speaker

    with tempfile.TemporaryDirectory() as folder:
        path = options["output"] or str(Path(folder) / "report.json")
        keeper = MeasurementJournal(Journal(path + ".partial", "validation"))
        search, ranking, chosen = _choose(options)
        if is_speaker():
            _open(keeper.journal, search, options)
        with resumable(keeper.journal) if options["output"] else nullcontext():
            _measure(search, chosen, keeper, options)
        if not is_speaker():
            return None
        validation = _validation(search, ranking, chosen, keeper)
        if options["output"] is not None:
            from axonn_tune.io.json_files import save_json

            save_json(options["output"], validation)
        if options["trace"] is not None:
            _write_trace(search, chosen, keeper, options["trace"])
        keeper.journal.remove()
        return validation


def _choose(options: dict[str, Any]) -> tuple[Search, Ranking, list[Prediction]]:
    from axonn_tune.api import build_search
    from axonn_tune.runtime.ranks.launch import default_dtype, ranks_at_hand
    from axonn_tune.search.rank import rank_candidates
    from axonn_tune.validate.choice import choose, choose_grids

    arguments = {name: options[name] for name in _SEARCHED}
    arguments["gpus"] = arguments["gpus"] or ranks_at_hand(options["device"])
    arguments["dtype"] = arguments["dtype"] or default_dtype(options["device"])
    arguments["global_batch"] = arguments["global_batch"] or arguments["gpus"]
    search = build_search(**{**arguments, **_strategy(options)})
    ranking = rank_candidates(search)
    if options["explicit"]:
        return search, ranking, choose_grids(ranking, options["explicit"])
    return search, ranking, choose(ranking, options["grids"])


def _strategy(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the search for a strategy that torch executes."""
    from axonn_tune.errors import InputError
    from axonn_tune.strategies.megatron3d import Megatron3D
    from axonn_tune.strategies.zero import zero3

    name = options["strategy"]
    if name == "axonn":
        return {}
    if name not in _THROUGH_TORCH:
        allowed = ", ".join(["axonn", *_THROUGH_TORCH])
        raise InputError(f"--strategy {name} cannot be run here; allowed: {allowed}")
    strategy, fixed = _THROUGH_TORCH[name]
    if strategy == "zero3":
        return {"strategy": zero3(), "fix": fixed}
    return {"strategy": Megatron3D(False, False, False, False, n_virtual=(1,)), "fix": fixed}


# Options that describe the search.
_SEARCHED = (
    *("model", "machine", "gpus", "global_batch", "micro_batch", "dtype", "recompute", "seq_len"),
    *("attention", "overlap", "oar", "ors", "oag", "kernel_tuning", "keep_gathered_weights"),
    *("order", "max_tp"),
)
# Strategies that the runtime runs through torch: the model's name, axes that are fixed, and
# whether collectives run beside computation (FSDP2 waits for its reduce-scatter on a CPU).
_THROUGH_TORCH = {
    "zero3": ("zero3", {"replica": 1}),
    "hsdp": ("zero3", {}),
    "megatron-tp": ("megatron", {"context": 1, "pipeline": 1}),
}


def _open(journal: Journal, search: Search, options: dict[str, Any]) -> None:
    """Begin a journal, or check that the one that is there is of this validation."""
    from dataclasses import asdict

    owner = {
        "model": search.scenario.model.name,
        "machine": search.scenario.machine.name,
        "job": asdict(search.scenario.job),
        "steps": options["steps"],
    }
    if options["resume"]:
        journal.read(owner)
    else:
        journal.begin(owner)


def _measure(
    search: Search,
    chosen: list[Prediction],
    keeper: MeasurementJournal,
    options: dict[str, Any],
) -> None:
    """Run everything that is left.

    A rank that is started here and dies takes the configuration with it, and one that hangs
    is replaced; of another launcher it takes the job, which can be resumed.
    """
    from axonn_tune.errors import AxonnTuneError, InputError
    from axonn_tune.runtime.ranks.launch import in_job, launch
    from axonn_tune.runtime.ranks.series import execute_series

    series = _series(search, chosen, keeper, options)
    n_ranks, device = search.scenario.job.n_gpus, options["device"]
    if in_job():
        launch(execute_series, series, n_ranks, device)
        return
    while n_left := sum(key not in keeper.ended() for key, _ in series.runs):
        try:
            launch(execute_series, series, n_ranks, device)
        except InputError:
            raise
        except AxonnTuneError as error:
            begun = keeper.under_way()
            if begun:
                keeper.keep_failure(begun[-1], str(error))
            elif n_left == sum(key not in keeper.ended() for key, _ in series.runs):
                raise


def _series(
    search: Search,
    chosen: list[Prediction],
    keeper: MeasurementJournal,
    options: dict[str, Any],
) -> Series:
    from axonn_tune.runtime.ranks.series import Series
    from axonn_tune.runtime.run import Run

    runs = [
        (
            str(prediction.configuration),
            Run(
                model=search.scenario.model,
                job=search.scenario.job,
                grid=prediction.layout,
                order=prediction.configuration.order,
                micro_batch=prediction.configuration.micro_batch,
                recompute=prediction.configuration.recompute,
                n_steps=options["steps"],
                device=options["device"],
                timeout_seconds=options["timeout"],
                quiet=True,
                strategy=search.scenario.strategy.name,
            ),
        )
        for prediction in chosen
    ]
    return Series(runs, keeper, options["device"], options["timeout"], options["quiet"])


def _validation(
    search: Search,
    ranking: Ranking,
    chosen: list[Prediction],
    keeper: MeasurementJournal,
) -> Validation:
    import shlex
    from datetime import datetime, timezone

    from axonn_tune.io.operating_system import drivers, relevant_variables
    from axonn_tune.spec.measurement import Measurement
    from axonn_tune.spec.validation import Validation
    from axonn_tune.validate.outcomes import outcome_of

    results = keeper.ended()
    ran = [result for result in results.values() if isinstance(result, Measurement)]
    job = search.scenario.job
    return Validation(
        model=search.scenario.model.name,
        machine=search.scenario.machine.name,
        n_ranks=job.n_gpus,
        global_batch=job.global_batch,
        seq_len=job.seq_len,
        dtype=job.dtype,
        attention=job.attention,
        overlap=str(job.overlap),
        strategy=search.scenario.strategy.name,
        device=ran[0].device_name if ran else "unknown device",
        backend=ran[0].backend if ran else "unknown backend",
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command_line=shlex.join(["axonn-tune", *sys.argv[1:]]),
        n_ranked=len(ranking),
        outcomes=tuple(
            outcome_of(prediction, results[str(prediction.configuration)]) for prediction in chosen
        ),
        software={**drivers(), **(ran[0].software if ran else {})},
        environment=relevant_variables(),
    )


def _write_trace(
    search: Search, chosen: list[Prediction], keeper: MeasurementJournal, path: str
) -> None:
    from axonn_tune.cli.output import as_json, emit
    from axonn_tune.report.trace import trace_document
    from axonn_tune.spec.measurement import Measurement, Operation
    from axonn_tune.step.timeline import step_timeline

    results = keeper.ended()
    steps: dict[str, Sequence[Operation]] = {}
    waits_for: dict[str, tuple[str, ...]] = {}
    for prediction in chosen:
        name = str(prediction.configuration)
        predicted = step_timeline(prediction)
        steps[f"{name}: predicted"] = predicted.operations
        waits_for |= predicted.waits_for
        if isinstance(result := results[name], Measurement):
            steps[f"{name}: measured on rank 0"] = result.last_step
    emit(as_json(trace_document(steps, waits_for), compact=True), path)


def _conclude(validation: Validation, baseline: Validation | None, options: dict[str, Any]) -> None:
    """Report, and exit 1 if a limit is broken."""
    from axonn_tune.cli.output import as_csv, emit, save_plot
    from axonn_tune.report import validate as report
    from axonn_tune.validate.agreement import agreement
    from axonn_tune.validate.limits import check_limits
    from axonn_tune.validate.regression import check_regressions

    errors = agreement(validation)
    checks = check_limits(errors, options["max_error"], options["max_regret"])
    if baseline is not None:
        checks += check_regressions(baseline, validation, options["least_change"])
    save_plot(options["plot"], lambda: report.validation_figure(validation))
    if options["csv"] is not None:
        emit(as_csv(report.outcome_records(validation)), options["csv"])
    if options["junit"] is not None:
        emit(report.junit_text(validation, checks), options["junit"])
    click.echo(report.agreement_text(validation, errors, checks))
    if errors is None or not all(check.holds for check in checks):
        sys.exit(1)
