"""``axonn-tune scale``."""

from __future__ import annotations

from typing import Any

import click

from axonn_tune.cli.options import (
    format_option,
    output_option,
    plot_option,
    quiet_option,
    scale_options,
)
from axonn_tune.cli.progress import Progress


@click.command("scale")
@click.option(
    "--gpus",
    required=True,
    metavar="COUNTS",
    help="GPU counts: 128..16384 (doublings), or 96,384,1536.",
)
@click.option("--model", help="Model of every count: a preset, YAML file, or config.json.")
@scale_options
@click.option(
    "--weak", metavar="MODELS", help="Scale weakly, with one model for each count: 5b,10b,20b,40b."
)
@click.option(
    "--batch-per-gpu",
    type=click.IntRange(min=1),
    help="Scale weakly, with this number of sequences per GPU in the global batch.",
)
@plot_option
@quiet_option
@format_option("table", "json", "csv")
@output_option
def command(
    gpus: str,
    model: str | None,
    weak: str | None,
    batch_per_gpu: int | None,
    plot: str | None,
    quiet: bool,
    output_format: str,
    output: str | None,
    **options: Any,
) -> None:
    """Show the best layout at each GPU count, and how efficient each is against the first.

    The scaling is strong, with one model and one global batch, unless --weak or --batch-per-gpu
    is given.

    \b
    Examples:
      axonn-tune scale --model 80b --gpus 128..16384
      axonn-tune scale --weak 5b,10b,20b,40b --gpus 512..4096
      axonn-tune scale --weak 5b,10b,20b,40b,80b,160b,320b --gpus 512..32768 --machine frontier
      axonn-tune scale --model llama3-8b --gpus 8..512 --batch-per-gpu 2 --machine alps --plot s.svg
    """
    from axonn_tune.api.answers import scaling_searches
    from axonn_tune.cli.output import (
        check_plot,
        detail_shown,
        emit_as,
        save_plot,
        with_machine_remark,
    )
    from axonn_tune.report import scale as report
    from axonn_tune.studies.scaling import parse_counts, scale

    check_plot(plot)
    searches = scaling_searches(
        _models(model, weak), parse_counts(gpus), batch_per_gpu=batch_per_gpu, **options
    )
    points = scale(searches, Progress("Searching", quiet), detail_shown(output_format))
    save_plot(plot, lambda: report.scaling_figure(points))
    emit_as(
        output_format,
        output,
        table=lambda: with_machine_remark(report.scaling_text(points), options["machine"]),
        json=lambda: report.scaling_document(points),
        csv=lambda: report.scaling_records(points),
    )


def _models(model: str | None, weak: str | None) -> str | list[str]:
    """Return the one model, or for weak scaling one for each count."""
    from axonn_tune.errors import InputError

    if (model is None) == (weak is None):
        raise InputError("give either --model, or --weak with a model for each count")
    return str(model) if weak is None else [name.strip() for name in weak.split(",")]
