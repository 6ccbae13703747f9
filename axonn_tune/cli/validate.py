"""``axonn-tune validate``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    FilePath,
    NumberRange,
    plot_option,
    refuse,
    typed_command_line,
    validate_options,
)

if TYPE_CHECKING:
    from axonn_tune.io.journal import MeasurementJournal
    from axonn_tune.runtime.run import TrainerFactory
    from axonn_tune.spec.validation import Validation
    from axonn_tune.validation.campaign import ValidationCampaign


@click.command("validate")
@click.option(
    "--output", type=FilePath(dir_okay=False), help="Write the report as JSON; --resume needs it."
)
@click.option("--resume", is_flag=True, help="Go on with a validation that was interrupted.")
@validate_options
@click.option(
    "--from", "source", type=FilePath(dir_okay=False), help="Read this report and run nothing."
)
@click.option(
    "--max-error", type=NumberRange(min=0), help="Exit 1 if the MAPE is above this, such as 0.2."
)
@click.option(
    "--max-regret", type=NumberRange(min=0), help="Exit 1 if the regret is above this, such as 0.1."
)
@click.option(
    "--baseline",
    type=FilePath(dir_okay=False),
    help="Exit 1 if anything is significantly worse than in this report.",
)
@click.option(
    "--least-change",
    type=NumberRange(min=0),
    default=0.05,
    show_default=True,
    help="Smallest change against the baseline that counts.",
)
@click.option("--csv", type=FilePath(dir_okay=False), help="Write a line per configuration.")
@click.option("--junit", type=FilePath(dir_okay=False), help="Write JUnit XML for CI.")
@plot_option
@click.option(
    "--trace",
    type=FilePath(dir_okay=False),
    help="Write predicted and measured steps for Perfetto.",
)
@click.pass_obj
def command(
    factory: TrainerFactory | None,  # None, unless a test gives one
    /,
    output: str | None,
    resume: bool,
    source: str | None,
    max_error: float | None,
    max_regret: float | None,
    baseline: str | None,
    least_change: float,
    csv: str | None,
    junit: str | None,
    plot: str | None,
    trace: str | None,
    **options: Any,
) -> None:
    """Run many grids of a model; compare each predicted with its measured step.

    The command starts the ranks on this machine, or joins those that torchrun, srun or emulate
    has started. It reports the error of each grid with its cause, the MAPE, the rank correlation,
    and the regret: how much slower the suggested grid is than the best one measured.

    \b
    Examples:
      axonn-tune validate --model tiny --machine mycluster.yaml --gpus 4 --output report.json
      srun -N 2 axonn-tune validate --model 5b --machine mycluster.yaml --grids spread:8
      axonn-tune validate --model tiny --machine m.yaml --max-error 0.2 --baseline last.json
      axonn-tune validate --from report.json --plot report.png
    """
    from axonn_tune.cli.output import as_csv, check_folders, check_plot, emit, save_plot
    from axonn_tune.errors import InputError
    from axonn_tune.io.json_files import load_json
    from axonn_tune.report import validate as report
    from axonn_tune.spec.validation import Validation
    from axonn_tune.validation.agreement import agreement
    from axonn_tune.validation.limits import check_limits
    from axonn_tune.validation.regression import check_regressions

    def load_baseline() -> Validation | None:
        return None if baseline is None else load_json(baseline, Validation)

    validation: Validation | None
    if source is not None:
        check_plot(plot)
        if trace is not None:
            raise InputError("--trace needs a run: a report does not hold every operation")
        of_a_run = {"output": output, "resume": resume, **options}
        refuse(of_a_run, "is of a run; allowed with --from: limits, --baseline and reports")
        earlier = load_baseline()
        validation = load_json(source, Validation)
    else:
        from axonn_tune.api.measuring import validation_campaign
        from axonn_tune.runtime.ranks.launch import is_speaker, only_rank_0_speaks

        with only_rank_0_speaks():
            # What would fail after a long run fails before it.
            check_plot(plot)
            if is_speaker():
                check_folders(csv, junit, plot, trace)
            if resume and output is None:
                raise InputError("--resume needs --output with the report of that validation")
            for name in ("model", "machine"):
                if options[name] is None:
                    raise InputError(f"give --{name}, or --from with a report")
            earlier = load_baseline()
            campaign = validation_campaign(**options)
            validation = _run(campaign, factory, output, resume, trace)
    if validation is None:
        return

    errors = agreement(validation)
    checks = check_limits(errors, max_error, max_regret)
    if earlier is not None:
        checks += check_regressions(earlier, validation, least_change)
    save_plot(plot, lambda: report.validation_figure(validation))
    if csv is not None:
        emit(as_csv(report.outcome_records(validation)), csv)
    if junit is not None:
        emit(report.junit_text(validation, checks), junit)
    emit(report.agreement_text(validation, errors, checks), None)
    if errors is None or not all(check.holds for check in checks):
        sys.exit(1)


def _run(
    campaign: ValidationCampaign,
    factory: TrainerFactory | None,
    output: str | None,
    resume: bool,
    trace: str | None,
) -> Validation | None:
    """Run the campaign and write its report and its trace; return None on ranks other than 0."""
    from axonn_tune.api.measuring import run_validation
    from axonn_tune.cli.interrupts import resumable
    from axonn_tune.cli.output import as_json, emit
    from axonn_tune.io.json_files import save_json
    from axonn_tune.report.trace import trace_document

    with _journal_next_to(output) as keeper:
        with resumable(keeper.journal) if output else nullcontext():
            validation = run_validation(
                campaign,
                keeper,
                resume=resume,
                command_line=typed_command_line(),
                factory=factory,
            )
        if validation is None:
            return None
        if output is not None:
            save_json(output, validation)
        if trace is not None:
            document = trace_document(*campaign.steps(keeper.ended()))
            emit(as_json(document, compact=True), trace)
        keeper.journal.remove()
    return validation


@contextmanager
def _journal_next_to(output: str | None) -> Iterator[MeasurementJournal]:
    """Keep the journal of a run next to its report, or in a temporary folder if it has none."""
    import tempfile

    from axonn_tune.io.journal import Journal, MeasurementJournal

    with tempfile.TemporaryDirectory() as folder:
        path = output or f"{folder}/report.json"
        yield MeasurementJournal(Journal.beside(path, "validation"))
