"""``axonn-tune rehearse``."""

from __future__ import annotations

import sys
from typing import Any

import click

from axonn_tune.cli.options import (
    LAYOUT_HELP,
    NumberRange,
    format_option,
    given_options,
    output_option,
    rehearse_options,
)
from axonn_tune.cli.output import SHOWN_OPERATIONS

# The options of a script's rehearsal that a layout's has, too.
_OF_SCRIPT = ("machine",)
_WHOLE_STEP_HELP = "Rehearse every micro-step, not only two, or one for each stage of a pipeline."


@click.command("rehearse")
@click.argument("arguments", nargs=-1, metavar="[-- ARGUMENTS]", type=click.UNPROCESSED)
@rehearse_options
@click.option("--grid", metavar="LAYOUT", help=LAYOUT_HELP)
@click.option("--whole-step", is_flag=True, help=_WHOLE_STEP_HELP)
@click.option(
    "--stage",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Rehearse a rank of this stage of Megatron-Core's pipeline, counted from 0.",
)
@click.option(
    "--max-memory-error",
    type=NumberRange(min=0),
    default=0.02,
    show_default=True,
    help="Exit with 1 if the planned peak memory is off by more than this fraction.",
)
@click.option(
    "--script", metavar="FILE", help="Rehearse this training script and price it on --machine."
)
@click.option("--ranks", type=click.IntRange(min=1), help="Number of ranks of --script.")
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help=f"Show every operation of --script, not only the {SHOWN_OPERATIONS} longest.",
)
@format_option("table", "json")
@output_option
def command(
    arguments: tuple[str, ...],
    gpus: int | None,
    model: str | None,
    grid: str | None,
    whole_step: bool,
    stage: int,
    max_memory_error: float,
    script: str | None,
    ranks: int | None,
    show_all: bool,
    output_format: str,
    output: str | None,
    **options: Any,
) -> None:
    """Run one rank's real program without a GPU; hold it against the plan.

    The tensors are fake (they have sizes and no numbers) and so are the other ranks, so that a
    step on a thousand GPUs takes seconds on a laptop. Every product, attention and collective is
    compared with the step plan, and the peak memory with the memory model. The command exits with
    1 if one of them differs.

    With --script the program is your own: what it does is priced on a machine. What follows -- are
    the arguments of the script.

    \b
    Examples:
      axonn-tune rehearse --gpus 1024 --model 80b --grid 1x4x64x4
      axonn-tune rehearse --gpus 64 --model 5b --engine fsdp2 --grid shard=64
      axonn-tune rehearse --gpus 64 --model mixtral-8x7b --engine megatron-core \\
        --grid tp=2,dp=32,ep=8 --attention unfused --seq-len 4096 \\
        --global-batch 64 --micro-batch 1 --max-memory-error 0.05
      axonn-tune rehearse --gpus 16 --model llama2-7b --engine megatron-core \\
        --grid tp=2,dp=2,pp=4 --stage 1 --attention unfused --seq-len 512 \\
        --global-batch 64 --micro-batch 1 --max-memory-error 0.1
      axonn-tune rehearse --script train_step.py --ranks 64 --machine perlmutter
      axonn-tune rehearse --script train_step.py --ranks 8 -- --layers 32
    """
    from axonn_tune.api.rehearsing import rehearse, rehearse_script
    from axonn_tune.cli.output import emit_as
    from axonn_tune.errors import InputError
    from axonn_tune.report import rehearse as report

    if script is not None:
        layout = {"gpus": gpus, "model": model, "grid": grid} | given_options(options)
        foreign = [n for n, value in layout.items() if value is not None and n not in _OF_SCRIPT]
        foreign += [name for name, given in (("whole_step", whole_step), ("stage", stage)) if given]
        if foreign:
            name = foreign[0].replace("_", "-")
            raise InputError(
                f"--{name} does not go with --script; allowed with it: --ranks and --machine"
            )
        if ranks is None:
            raise InputError("rehearse: --script needs --ranks, the number of ranks of the job")
        priced = rehearse_script(script, ranks, options["machine"], arguments)
        limit = None if show_all else SHOWN_OPERATIONS
        emit_as(
            output_format,
            output,
            table=lambda: report.price_text(script, priced, limit),
            json=lambda: report.price_document(script, priced),
        )
        return
    if arguments:
        raise InputError(f"rehearse: '{arguments[0]}' goes with --script only")
    if gpus is None or model is None or grid is None or ranks is not None:
        raise InputError("rehearse: give --gpus, --model and --grid, or --script with --ranks")
    search, comparison = rehearse(model, gpus, grid, whole_step, stage, **options)
    emit_as(
        output_format,
        output,
        table=lambda: report.comparison_text(search, comparison, max_memory_error),
        json=lambda: report.comparison_document(search, comparison, max_memory_error),
    )
    if comparison.differing or abs(comparison.memory_error) > max_memory_error:
        sys.exit(1)
