"""``axonn-tune rehearse``."""

from __future__ import annotations

import sys
from typing import Any

import click

from axonn_tune.cli.options import (
    LAYOUT_HELP,
    NumberRange,
    format_option,
    output_option,
    rehearse_options,
)


@click.command("rehearse")
@rehearse_options
@click.option("--grid", metavar="LAYOUT", help=LAYOUT_HELP)
@click.option("--whole-step", is_flag=True, help="Rehearse every micro-step, not only two.")
@click.option(
    "--max-memory-error",
    type=NumberRange(min=0),
    default=0.02,
    show_default=True,
    help="Exit with 1 if the planned peak memory is off by more than this fraction.",
)
@format_option("table", "json")
@output_option
def command(
    gpus: int | None,
    model: str | None,
    grid: str | None,
    whole_step: bool,
    max_memory_error: float,
    output_format: str,
    output: str | None,
    **options: Any,
) -> None:
    """Run one rank's real program without a GPU; hold it against the plan.

    The tensors are fake (they have sizes and no numbers) and so are the other ranks, so that a
    step on a thousand GPUs takes seconds on a laptop. Every product, attention and collective is
    compared with the step plan, and the peak memory with the memory model. The command exits with
    1 if one of them differs.

    \b
    Examples:
      axonn-tune rehearse --gpus 1024 --model 80b --grid 1x4x64x4
      axonn-tune rehearse --gpus 64 --model 5b --engine fsdp2 --grid shard=64
    """
    from axonn_tune.cli.output import emit_as
    from axonn_tune.errors import InputError
    from axonn_tune.rehearsing import rehearse
    from axonn_tune.report import rehearse as report

    if gpus is None or model is None or grid is None:
        raise InputError("rehearse: give --gpus, --model and --grid")
    search, comparison = rehearse(model, gpus, grid, whole_step, **options)
    emit_as(
        output_format,
        output,
        table=lambda: report.comparison_text(search, comparison, max_memory_error),
        json=lambda: report.comparison_document(search, comparison, max_memory_error),
    )
    if comparison.differing or abs(comparison.memory_error) > max_memory_error:
        sys.exit(1)
