"""``axonn-tune run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    FilePath,
    format_option,
    output_option,
    run_options,
)
from axonn_tune.cli.output import SHOWN_OPERATIONS

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from axonn_tune.options import SearchOptions
    from axonn_tune.search.search import Search
    from axonn_tune.step.prediction import Prediction


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
        search, chosen = _choose(grid, suggest, gpus, device, machine, **options)
        request = RunRequest(
            model=search.scenario.model,
            job=search.scenario.job,
            configuration=chosen.configuration,
            n_steps=steps,
            device=device,
            seed=seed,
            goldfish=goldfish,
            timeout_seconds=timeout,
            quiet=quiet,
            strategy=search.scenario.strategy.name,
            engine=search.scenario.strategy.engine,
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

        title = f"measured on rank 0: {search.scenario.model.name}, grid {chosen.layout}"
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
        table=lambda: run_text(search.scenario, measurement, operations, prediction, limit),
        json=lambda: run_document(search.scenario, measurement, operations, prediction),
    )


def _choose(
    grid: str | None,
    suggest: bool,
    gpus: int | None,
    device: str,
    machine: str | None,
    *,
    model: str,
    **options: Unpack[SearchOptions],
) -> tuple[Search, Prediction]:
    """Return the search and the grid that was asked for or is the best, with how to train on it."""
    from math import prod

    from axonn_tune.api.measuring import run_here
    from axonn_tune.api.searching import build_search, loaded
    from axonn_tune.errors import InputError
    from axonn_tune.runtime.ranks.launch import default_dtype, ranks_at_hand
    from axonn_tune.runtime.request import require_built
    from axonn_tune.search.one_layout import best_of_layout
    from axonn_tune.search.rank import rank_best
    from axonn_tune.spec.layout import parse_layout

    if (grid is not None) == suggest:
        raise InputError("give either --grid, such as 2x2x1x2, or --suggest")
    if suggest and machine is None:
        raise InputError("--suggest needs the profile of this machine: give --machine")
    if options["recompute"] == "auto" and machine is None:
        raise InputError("--recompute auto needs the profile of this machine: give --machine")
    if grid is not None and gpus is not None:
        raise InputError("--gpus goes with --suggest; --grid says how many ranks there are")
    strategy = options["strategy"]
    assert strategy is None or isinstance(strategy, str)
    runnable = run_here(strategy, options["engine"])
    require_built(loaded(model), options["seq_len"])
    options["strategy"], options["fix"] = runnable.strategy, runnable.fixed_axes
    options["dtype"] = options["dtype"] or default_dtype(device)
    if grid is None:
        n_ranks = gpus or ranks_at_hand(device)
        options["recompute"] = options["recompute"] or "auto"
        options["global_batch"] = options["global_batch"] or n_ranks
        search = runnable.search_of(build_search(model, n_ranks, machine, **options))
        return search, rank_best(search, 1).prediction(0)
    axes = runnable.axes
    wanted = parse_layout(grid, axes)
    options["recompute"] = options["recompute"] or "none"
    if machine is None or not options["global_batch"]:
        micro_batch = options["micro_batch"] or 1
        n_shares = prod(wanted.size(axis) for axis in axes.batch)
        options["micro_batch"] = micro_batch
        options["global_batch"] = options["global_batch"] or n_shares * micro_batch
    search = runnable.search_of(build_search(model, wanted.n_ranks, machine, **options))
    return search, best_of_layout(search, wanted)
