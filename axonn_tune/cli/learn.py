"""``axonn-tune learn``."""

from __future__ import annotations

from pathlib import Path

import click

from axonn_tune.cli.options import FilePath, format_option, quiet_option
from axonn_tune.cli.progress import Progress


@click.command("learn")
@click.argument("runs")
@click.option("--machine", help="Profile to start from.  [default: perlmutter]")
@click.option(
    "--output", type=FilePath(dir_okay=False), help="Profile to write with what was learned."
)
@quiet_option
@format_option("table", "json")
def command(
    runs: str, machine: str | None, output: str | None, quiet: bool, output_format: str
) -> None:
    """Learn a machine's numbers from a table of your own runs.

    RUNS is a table as `score` reads it (docs/score.md), with runs of one engine on one machine.
    Each number starts from the profile and moves as far as the runs tell; the report says which
    did not move, and which run contradicts all others. The column `trace` names traces of torch's
    profiler, which tell kernels and collectives apart. Use the profile that is written with the
    engine of these runs.

    \b
    Examples:
      axonn-tune learn runs.csv --machine dgx-h100 --output mine.yaml
      axonn-tune machines diff dgx-h100 mine.yaml
      axonn-tune suggest --gpus 64 --model llama3-8b --strategy megatron --machine mine.yaml
    """
    from dataclasses import replace

    from axonn_tune.api.teaching import PROFILE_HEADER, learn_from
    from axonn_tune.cli.output import emit_as, say_on_stderr, say_profile_is_written
    from axonn_tune.io.yaml_files import save_yaml
    from axonn_tune.report import learn as report

    learnt = learn_from(runs, machine, Progress("Learning", quiet), say_on_stderr)
    if output is not None:
        save_yaml(output, replace(learnt, name=Path(output).stem), PROFILE_HEADER)
    emit_as(
        output_format,
        None,
        table=lambda: report.learned_text(learnt),
        json=lambda: report.learned_document(learnt),
    )
    if output is not None and output_format == "table":
        say_profile_is_written(output)
