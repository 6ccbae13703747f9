"""``axonn-tune validate``."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    NumberRange,
    launch_options,
    plot_option,
    validate_options,
)

if TYPE_CHECKING:
    from axonn_tune.runtime.run import TrainerFactory
    from axonn_tune.spec.validation import Validation


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
@click.pass_obj
def command(factory: TrainerFactory | None, /, **options: Any) -> None:
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
        validation = _run(options, factory)
    if validation is not None:
        _conclude(validation, baseline, options)


def _checked(options: Mapping[str, Any]) -> Validation | None:
    """Return the baseline; whatever would fail after a long run fails now."""
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


def _run(options: Mapping[str, Any], factory: TrainerFactory | None) -> Validation | None:
    """Run what was chosen; return None on a rank that does not speak."""
    from axonn_tune.cli.interrupts import resumable
    from axonn_tune.io.journal import Journal, MeasurementJournal
    from axonn_tune.measuring import run_validation, validation_campaign

    searched = {name: options[name] for name in _SEARCHED}
    campaign = validation_campaign(
        choice=options["grids"],
        grids=options["explicit"],
        steps=options["steps"],
        device=options["device"],
        **searched,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = options["output"] or str(Path(folder) / "report.json")
        keeper = MeasurementJournal(Journal(path + ".partial", "validation"))
        with resumable(keeper.journal) if options["output"] else nullcontext():
            validation = run_validation(
                campaign,
                keeper,
                resume=options["resume"],
                device=options["device"],
                timeout=options["timeout"],
                quiet=options["quiet"],
                command_line=shlex.join(["axonn-tune", *sys.argv[1:]]),
                factory=factory,
            )
        if validation is None:
            return None
        if options["output"] is not None:
            from axonn_tune.io.json_files import save_json

            save_json(options["output"], validation)
        if options["trace"] is not None:
            from axonn_tune.cli.output import as_json, emit
            from axonn_tune.report.trace import trace_document

            document = trace_document(*campaign.steps(keeper.ended()))
            emit(as_json(document, compact=True), options["trace"])
        keeper.journal.remove()
        return validation


# Options that describe the search.
_SEARCHED = (
    "model",
    "gpus",
    "machine",
    "global_batch",
    "micro_batch",
    "dtype",
    "recompute",
    "seq_len",
    "attention",
    "overlap",
    "oar",
    "ors",
    "oag",
    "kernel_tuning",
    "keep_gathered_weights",
    "order",
    "max_tp",
    "strategy",
)


def _conclude(
    validation: Validation, baseline: Validation | None, options: Mapping[str, Any]
) -> None:
    """Report, and exit 1 if a limit is broken."""
    from axonn_tune.cli.output import as_csv, emit, save_plot
    from axonn_tune.report import validate as report
    from axonn_tune.validation.agreement import agreement
    from axonn_tune.validation.limits import check_limits
    from axonn_tune.validation.regression import check_regressions

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
