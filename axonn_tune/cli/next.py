"""``axonn-tune next``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    OF_MANY_LAYOUTS,
    format_option,
    given_options,
    quiet_option,
    search_options,
    words_of,
)
from axonn_tune.cli.progress import Progress

if TYPE_CHECKING:
    from axonn_tune.spec.configuration import Configuration

# Options that the configuration of a proposal answers.
_ANSWERED = {*OF_MANY_LAYOUTS, "order", "micro_batch", "recompute", "virtual_stages"}


@click.command("next")
@search_options
@click.option("--runs", metavar="TABLE", help="Table of the runs so far, as `score` reads it.")
@click.option(
    "--budget",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Number of layouts to try.",
)
@quiet_option
@format_option("table", "json")
def command(runs: str | None, budget: int, quiet: bool, output_format: str, **options: Any) -> None:
    """Say which layouts to try next, given those that you have tried.

    The machine learns from the runs first. A layout is worth a try because it is likely to be the
    fastest, or because it may well be and its time is unknown: for each GPU-hour, those come first
    that are expected to reduce the best measured step most.

    \b
    Examples:
      axonn-tune next --gpus 64 --model llama3-8b --strategy megatron --machine dgx-h100
      axonn-tune next --gpus 64 --model llama3-8b --strategy megatron --machine dgx-h100 \\
          --global-batch 256 --runs runs.csv --budget 4
    """
    from axonn_tune.api.searching import build_search
    from axonn_tune.api.teaching import propose
    from axonn_tune.cli.output import emit_as
    from axonn_tune.report import learn as report

    proposed = propose(build_search(**options), runs, budget, Progress("Learning", quiet))
    given = given_options(options)
    commands = [
        _launch_command(given, proposal.prediction.configuration, f"trial-{number}")
        for number, proposal in enumerate(proposed.proposals, start=proposed.n_runs + 1)
    ]
    emit_as(
        output_format,
        None,
        table=lambda: report.proposals_text(proposed, commands),
        json=lambda: report.proposals_document(proposed, commands),
    )


def _launch_command(given: Mapping[str, Any], chosen: Configuration, output: str) -> str:
    """Return the command that writes the job script of a configuration."""
    kept = {name: value for name, value in given.items() if name not in _ANSWERED}
    kept |= {"micro_batch": chosen.micro_batch, "recompute": chosen.recompute}
    if chosen.n_virtual > 1:
        kept["virtual_stages"] = chosen.n_virtual
    if chosen.layout.is_grid:
        kept["order"] = chosen.order
    grid = ["--grid", str(chosen.layout), "--output", output]
    return shlex.join(["axonn-tune", "launch", *words_of(kept), *grid])
