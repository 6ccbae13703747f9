"""``axonn-tune trace``."""

from __future__ import annotations

from typing import Any

import click

from axonn_tune.cli.options import LAYOUT_HELP, search_options

# Size of a trace for which nobody chose the micro-steps; Perfetto opens far larger ones.
MOST_OPERATIONS = 100_000


@click.command("trace")
@search_options
@click.option("--grid", metavar="LAYOUT", help=f"{LAYOUT_HELP}  [default: the best]")
@click.option(
    "--measured",
    type=click.Path(dir_okay=False),
    help="A record of `run` on this grid; show its step next to the predicted one.",
)
@click.option(
    "--microsteps",
    type=click.IntRange(min=1),
    help="Number of micro-steps to draw.  [default: all, or as many as have 100,000 operations]",
)
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    help="Largest number of equal layers in a row to draw.  [default: all]",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False),
    default="trace.json",
    show_default=True,
    help="The trace to write, as JSON.",
)
def command(
    grid: str | None,
    measured: str | None,
    microsteps: int | None,
    layers: int | None,
    output: str,
    **options: Any,
) -> None:
    """Write a step as a Chrome trace, which ui.perfetto.dev opens.

    The trace has one row for computation and one for each axis over which collectives run, with
    an arrow from each operation to those that waited for it. A pipeline has a row for the passes
    of every stage.

    \b
    Examples:
      axonn-tune trace --gpus 1024 --model 80b --grid 1x4x64x4 --output trace.json
      axonn-tune trace --gpus 1024 --model 80b --strategy megatron --layers 2 --output trace.json
      axonn-tune run --grid 2x2x1x1 --model tiny --record run.json
      axonn-tune trace --gpus 4 --model tiny --grid 2x2x1x1 --dtype fp32 --machine mycluster.yaml \\
        --global-batch 1 --measured run.json --output trace.json
    """
    from axonn_tune.api import build_search
    from axonn_tune.cli.output import as_json, emit
    from axonn_tune.report.trace import trace_document
    from axonn_tune.search.one_layout import best_of_layout
    from axonn_tune.search.rank import rank_candidates
    from axonn_tune.step.timeline import drawable_microsteps, step_timeline

    search = build_search(**options)
    chosen = rank_candidates(search).prediction(0) if grid is None else best_of_layout(search, grid)
    n_micro = microsteps or drawable_microsteps(chosen, MOST_OPERATIONS)
    predicted = step_timeline(chosen, layers, n_micro)
    steps = {f"predicted: {search.scenario.model.name}, {chosen.layout}": predicted.operations}
    if measured is not None:
        from axonn_tune.errors import InputError
        from axonn_tune.io.json_files import load_json
        from axonn_tune.spec.measurement import Measurement

        measurement = load_json(measured, Measurement)
        if measurement.layout != chosen.layout:
            raise InputError(
                f"--measured {measured} is of grid {measurement.layout}, "
                f"the trace of {chosen.layout}"
            )
        name = f"measured on rank 0: {measurement.layout} on {measurement.device_name}"
        steps[name] = list(measurement.last_step)
    emit(as_json(trace_document(steps, predicted.waits_for), compact=True), output)
    drawn = f"{min(n_micro, chosen.n_microsteps)} of {chosen.n_microsteps} micro-steps"
    click.echo(
        f"{output}: {drawn}, {len(predicted.operations)} operations, {predicted.seconds:.3f} s of "
        f"{chosen.step_seconds:.3f} s predicted; open it at https://ui.perfetto.dev",
        err=True,
    )
