"""``axonn-tune compare``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    comparison_options,
    format_option,
    job_options,
    output_option,
    quiet_option,
)
from axonn_tune.cli.progress import Progress

if TYPE_CHECKING:
    from axonn_tune.api.comparing import BestOfContenders


@click.command("compare")
@job_options
@click.option(
    "--strategies",
    help="Names of the strategies, with commas: axonn,megatron.  [default: all that are released]",
)
@comparison_options
@click.option(
    "--grid",
    "grids",
    multiple=True,
    metavar="STRATEGY:GRID",
    help="Compare this layout instead: 8x4x4x8, or with a strategy or an engine in front, "
    "megatron:tensor=8,data=16 or nanotron:tensor=8,data=16; may be given again. Without either, "
    "it is a layout of the strategy that suggest takes.",
)
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME=COUNTS",
    help="Repeat it for several values of batch, seq_len or micro_batch: batch=512,1024.",
)
@quiet_option
@format_option("table", "json", "csv", "yaml")
@output_option
def command(
    strategies: str | None,
    grids: tuple[str, ...],
    vary: tuple[str, ...],
    machine: str | None,
    quiet: bool,
    output_format: str,
    output: str | None,
    **options: Any,
) -> None:
    """Rank the best configuration of every strategy, engine, or given layout, in one table.

    A strategy or an engine that cannot do the job is left out with the reason, as long as another
    one can.

    \b
    Examples:
      axonn-tune compare --gpus 1024 --model 80b
      axonn-tune compare --gpus 384 --model 20b --machine frontier --strategies zero3,zeropp
      axonn-tune compare --gpus 64 --model llama3-8b --machine dgx-h100 --vary batch=512,1024,2048
      axonn-tune compare --gpus 128 --model llama3-70b --machine dgx-h100 \\
        --grid 1x1x128x1 --grid megatron:tensor=8,data=16
      axonn-tune compare --gpus 64 --model llama3-8b --machine dgx-h100 \\
        --engine megatron-core,nanotron,fsdp2,fsdp2-eager,deepspeed
    """
    from axonn_tune.api.comparing import comparison
    from axonn_tune.cli.output import detail_shown

    names = [name.strip() for name in strategies.split(",")] if strategies else None
    compared = comparison(
        machine=machine,
        strategies=names,
        grids=grids,
        vary=vary,
        each=Progress("Searching", quiet),
        detail=detail_shown(output_format),
        **options,
    )
    emit_comparison(compared, machine, output_format, output)


def emit_comparison(
    compared: BestOfContenders, machine: str | None, output_format: str, output: str | None
) -> None:
    """Show the best answers to several searches, on the machine that the user named.

    Raises
    ------
    NoCandidateError
        None has a layout; their reasons were shown before.
    """
    from axonn_tune.cli.output import emit_as, with_machine_remark
    from axonn_tune.errors import NoCandidateError
    from axonn_tune.report import compare as report

    best, left_out = compared.best, compared.left_out
    emit_as(
        output_format,
        output,
        table=lambda: with_machine_remark(report.comparison_text(best, left_out), machine),
        json=lambda: report.comparison_document(best, left_out),
        yaml=lambda: report.comparison_document(best, left_out),
        csv=lambda: report.comparison_records(best),
    )
    if all(one.prediction is None for one in best):
        raise NoCandidateError("nothing to compare has a layout; --format table says why")
