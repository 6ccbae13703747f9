"""``axonn-tune trace``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import LAYOUT_HELP, FilePath, search_options
from axonn_tune.spec.layout import PAPER_ORDER

if TYPE_CHECKING:
    from axonn_tune.spec.measurement import Measurement
    from axonn_tune.step.prediction import Prediction

# Size of a trace for which nobody chose the micro-steps; Perfetto opens far larger ones.
MOST_OPERATIONS = 100_000
# Bytes of the execution traces that are written unless the user chooses the ranks.
MOST_BYTES = 4e9
# Execution traces are called step.0.et, step.1.et, ...; the groups of their ranks stand beside.
TRACE_NAME = "step"
GROUPS_NAME = "groups.json"


@click.command("trace")
@search_options
@click.option("--grid", metavar="LAYOUT", help=f"{LAYOUT_HELP}  [default: the best]")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["chrome", "chakra"]),
    default="chrome",
    show_default=True,
    help="One trace to look at, or an execution trace of every rank for network simulators.",
)
@click.option(
    "--measured",
    type=FilePath(dir_okay=False),
    help="A record of `run`; show its step next to the predicted one. Options of the configuration "
    "that are not given are as in the record.",
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
    "--ranks",
    metavar="RANKS",
    help="Ranks whose execution traces are written, such as 0-63,128, or all.  "
    "[default: all, if they have at most 4 GB]",
)
@click.option(
    "--output",
    type=FilePath(),
    help="The trace to write, as JSON, or the directory for execution traces.  "
    "[default: trace.json, or chakra]",
)
def command(
    grid: str | None,
    output_format: str,
    measured: str | None,
    microsteps: int | None,
    layers: int | None,
    ranks: str | None,
    output: str | None,
    **options: Any,
) -> None:
    """Write a step as a Chrome trace, or as execution traces of MLCommons Chakra.

    ui.perfetto.dev opens a Chrome trace. It has one row for computation and one for each axis over
    which collectives run, with an arrow from each operation to those that waited for it. A
    pipeline has a row for the passes of every stage.

    Network simulators such as ASTRA-sim play execution traces. There is one for each rank.

    \b
    Examples:
      axonn-tune trace --gpus 1024 --model 80b --grid 1x4x64x4 --output trace.json
      axonn-tune trace --gpus 1024 --model 80b --strategy megatron --layers 2 --output trace.json
      axonn-tune run --grid 2x2x1x1 --model tiny --record run.json
      axonn-tune trace --gpus 4 --model tiny --grid 2x2x1x1 --dtype fp32 --machine mycluster.yaml \\
        --global-batch 1 --measured run.json --output trace.json
      axonn-tune trace --format chakra --gpus 64 --model 5b --grid 1x4x8x2 --layers 2 --output et
    """
    from axonn_tune.api.searching import build_search
    from axonn_tune.errors import InputError
    from axonn_tune.search.one_layout import layout_or_best
    from axonn_tune.step.timeline import drawable_microsteps

    if output_format == "chakra" and measured is not None:
        raise InputError("--measured: a record is of one rank; allowed: --format chrome")
    if output_format == "chrome" and ranks is not None:
        raise InputError("--ranks: a Chrome trace is of one rank; allowed: --format chakra")
    measurement = None if measured is None else _measurement(measured)
    if measurement is not None:
        grid = grid or str(measurement.layout)
        options |= {
            name: getattr(measurement, name)
            for name, default in (
                ("micro_batch", None),
                ("recompute", "auto"),
                ("order", PAPER_ORDER),
            )
            if options[name] == default
        }
    chosen = layout_or_best(build_search(**options), grid)
    n_micro = min(microsteps or drawable_microsteps(chosen, MOST_OPERATIONS), chosen.n_microsteps)
    if output_format == "chakra":
        said = _write_execution_traces(chosen, layers, n_micro, ranks, output or "chakra")
    else:
        said = _write_chrome_trace(chosen, layers, n_micro, measurement, output or "trace.json")
    click.echo(said, err=True)


def _measurement(path: str) -> Measurement:
    """Return the record of a run."""
    from axonn_tune.io.json_files import load_json
    from axonn_tune.spec.measurement import Measurement

    return load_json(path, Measurement)


def _write_chrome_trace(
    chosen: Prediction,
    layers: int | None,
    n_micro: int,
    measurement: Measurement | None,
    output: str,
) -> str:
    """Write the predicted step, and the measured one if there is one; return what to say."""
    from axonn_tune.cli.output import as_json, emit
    from axonn_tune.report.trace import trace_document
    from axonn_tune.step.timeline import step_timeline
    from axonn_tune.units import counted

    predicted = step_timeline(chosen, layers, n_micro)
    model = chosen.scenario.model.name
    steps = {f"predicted: {model}, {chosen.layout}": predicted.operations}
    if measurement is not None:
        from axonn_tune.errors import InputError

        configuration = chosen.configuration
        for field in ("layout", "order", "micro_batch", "recompute"):
            ran, wanted = getattr(measurement, field), getattr(configuration, field)
            if ran != wanted:
                raise InputError(
                    f"--measured: its {field} is {ran}, and that of the trace {wanted}; allowed: a "
                    "record of the configuration that is traced"
                )
        name = f"measured on rank 0: {measurement.layout} on {measurement.device_name}"
        steps[name] = list(measurement.last_step)
    emit(as_json(trace_document(steps, predicted.waits_for), compact=True), output)
    return (
        f"{output}: {n_micro} of {counted(chosen.n_microsteps, 'micro-step')}, "
        f"{len(predicted.operations)} operations, {predicted.seconds:.3f} s of "
        f"{chosen.step_seconds:.3f} s predicted; open it at https://ui.perfetto.dev"
    )


def _write_execution_traces(
    chosen: Prediction, layers: int | None, n_micro: int, ranks: str | None, output: str
) -> str:
    """Write an execution trace of each rank and the groups of all ranks; return what to say."""
    import json
    from itertools import chain

    from axonn_tune.errors import InputError
    from axonn_tune.io.files import write_byte_files
    from axonn_tune.report.chakra import ExecutionTraces
    from axonn_tune.step.rank_graphs import StepGraphs
    from axonn_tune.units import counted, format_quantity

    n_ranks = chosen.layout.n_ranks
    written = range(n_ranks) if ranks in (None, "all") else _parsed_ranks(ranks, n_ranks)
    graphs = StepGraphs(chosen, layers, n_micro)
    traces = ExecutionTraces(graphs)
    _, data = next(traces.files(written[:1]))
    if ranks is None and n_ranks * len(data) > MOST_BYTES:
        raise InputError(
            f"{n_ranks} execution traces with {graphs.n_microsteps} micro-steps would have "
            f"{format_quantity(n_ranks * len(data), 'trace_bytes', 2)}; allowed: at most "
            f"{format_quantity(MOST_BYTES, 'trace_bytes', 2)} (choose fewer --microsteps, --layers "
            "or --ranks), or any size with --ranks all"
        )
    _refuse_others(output, n_ranks)
    files = ((f"{TRACE_NAME}.{rank}.et", data) for rank, data in traces.files(written))
    groups = json.dumps(traces.group_document()).encode()
    nbytes = write_byte_files(output, chain([(GROUPS_NAME, groups)], files))
    return (
        f"{output}: execution traces of {len(written)} of {counted(n_ranks, 'rank')}, "
        f"{format_quantity(nbytes, 'trace_bytes', 3)}; {graphs.n_microsteps} of "
        f"{counted(chosen.n_microsteps, 'micro-step')}; ASTRA-sim reads them with "
        f"--workload-configuration={output}/{TRACE_NAME} "
        f"--comm-group-configuration={output}/{GROUPS_NAME}"
    )


def _refuse_others(output: str, n_ranks: int) -> None:
    """Raise InputError if a folder holds traces of ranks that a job does not have."""
    from axonn_tune.errors import InputError

    own = {f"{TRACE_NAME}.{rank}.et" for rank in range(n_ranks)}
    others = sorted({path.name for path in Path(output).glob(f"{TRACE_NAME}.*.et")} - own)
    if others:
        raise InputError(
            f"{output} holds {others[0]} of another job; allowed: an --output without such files"
        )


def _parsed_ranks(text: str, n_ranks: int) -> list[int]:
    """Return the ranks that a text such as ``0-63,128`` names, each once and in rising order."""
    from axonn_tune.errors import InputError

    ranks: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < n_ranks:
            raise InputError(
                f"--ranks {text}: '{part}' names no ranks; allowed: numbers and ranges from 0 to "
                f"{n_ranks - 1}, such as 0-{n_ranks - 1}, or all"
            )
        ranks.update(range(first, last + 1))
    return sorted(ranks)
