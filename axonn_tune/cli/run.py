"""``axonn-tune run``."""

from __future__ import annotations

from typing import Any

import click

from axonn_tune.cli.options import FilePath, format_option, output_option, run_options
from axonn_tune.cli.output import SHOWN_OPERATIONS


@click.command("run")
@click.option(
    "--grid", metavar="GRID", help="Grid G_x x G_y x G_z x G_data: 2x2x1x2; or shard=8 of zero3."
)
@click.option("--suggest", is_flag=True, help="Take the best grid, order and micro-batch.")
@run_options
@click.option(
    "--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Number of steps."
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    show_default=True,
    metavar="INTEGER",
    help="Seed of weights and text.",
)
@click.option("--goldfish", type=int, metavar="K", help="Leave one in K tokens out of the loss.")
@click.option("--trace", type=FilePath(dir_okay=False), help="Write the last step for Perfetto.")
@click.option("--record", type=FilePath(dir_okay=False), help="Write all that was measured.")
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help=f"Show every operation, not only the {SHOWN_OPERATIONS} longest.",
)
@format_option("table", "json")
@output_option
def command(
    grid: str | None,
    suggest: bool,
    gpus: int | None,
    model: str,
    machine: str | None,
    steps: int,
    device: str,
    seed: int,
    goldfish: int | None,
    timeout: float,
    trace: str | None,
    record: str | None,
    show_all: bool,
    quiet: bool,
    output_format: str,
    output: str | None,
    **options: Any,
) -> None:
    """Train a model on a grid for some steps; compare predicted and measured time.

    The command starts the ranks on this machine, or joins those that torchrun or srun has
    started, each of which needs the same command. The text is made up, and the first two steps
    are not timed.

    \b
    Examples:
      axonn-tune run --grid 2x2x1x2 --model tiny --steps 10
      axonn-tune run --suggest --model 5b --machine perlmutter
      axonn-tune run --strategy zero3 --engine deepspeed --grid shard=2 --model tiny
      srun -N 2 --ntasks-per-node 4 axonn-tune run --grid 1x2x4x1 --model 5b --machine perlmutter
      torchrun --nproc-per-node 4 -m axonn_tune.cli.main run --grid 1x2x2x1 --model tiny
    """
    from axonn_tune.api.running import configuration_to_run
    from axonn_tune.cli.output import as_json, check_folders, emit, emit_as
    from axonn_tune.report.run import run_document, run_text
    from axonn_tune.runtime.ranks.launch import is_speaker, launch, only_rank_0_speaks
    from axonn_tune.runtime.request import RunRequest
    from axonn_tune.runtime.run import execute
    from axonn_tune.step.explain import explain
    from axonn_tune.validation.measured import operation_times

    with only_rank_0_speaks():
        if is_speaker():
            check_folders(trace, record, output)
        _check_choice(grid, suggest, gpus, machine, options["recompute"])
        chosen = configuration_to_run(grid, model, gpus, machine, device, **options)
        scenario = chosen.scenario
        request = RunRequest(
            model=scenario.model,
            job=scenario.job,
            configuration=chosen.configuration,
            n_steps=steps,
            device=device,
            seed=seed,
            goldfish=goldfish,
            timeout_seconds=timeout,
            quiet=quiet,
            strategy=scenario.strategy.name,
            engine=scenario.strategy.engine,
        )
        measurement = launch(execute, request, chosen.layout.n_ranks, device)
    if measurement is None:
        return
    if record is not None:
        from axonn_tune.io.json_files import save_json

        save_json(record, measurement)
    if trace is not None:
        from axonn_tune.report.trace import trace_document
        from axonn_tune.step.timeline import step_timeline

        title = f"measured on rank 0: {scenario.model.name}, grid {chosen.layout}"
        waits_for = step_timeline(chosen, 1, 1).waits_for
        document = trace_document({title: measurement.last_step}, waits_for)
        emit(as_json(document, compact=True), trace)
    is_predicted = machine is not None
    explanation = explain(chosen) if is_predicted else None
    operations = operation_times(measurement, explanation)
    prediction = chosen if is_predicted else None
    limit = None if show_all else SHOWN_OPERATIONS
    emit_as(
        output_format,
        output,
        table=lambda: run_text(scenario, measurement, operations, prediction, limit),
        json=lambda: run_document(scenario, measurement, operations, prediction),
    )


def _check_choice(
    grid: str | None,
    suggest: bool,
    gpus: int | None,
    machine: str | None,
    recompute: str | None,
) -> None:
    """Raise InputError unless the options name a grid, or ask for the best one of a machine."""
    from axonn_tune.errors import InputError

    if (grid is not None) == suggest:
        raise InputError("give either --grid, such as 2x2x1x2, or --suggest")
    if suggest and machine is None:
        raise InputError("--suggest needs the profile of this machine: give --machine")
    if recompute == "auto" and machine is None:
        raise InputError("--recompute auto needs the profile of this machine: give --machine")
    if grid is not None and gpus is not None:
        raise InputError("--gpus goes with --suggest; --grid says how many ranks there are")
