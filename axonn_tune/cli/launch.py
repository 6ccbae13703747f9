"""``axonn-tune launch``."""

from __future__ import annotations

from typing import Any

import click

from axonn_tune.cli.options import LAYOUT_HELP, search_options


@click.command("launch")
@search_options
@click.option("--grid", metavar="LAYOUT", help=f"{LAYOUT_HELP}  [default: the best]")
@click.option(
    "--framework", help="Framework: axonn, megatron, fsdp2 or deepspeed.  [default: the strategy's]"
)
@click.option("--train", metavar="SCRIPT", help="Training script.  [default: train.py]")
@click.option(
    "--sbatch",
    multiple=True,
    metavar="OPTION",
    help="Option of sbatch, such as --account=abc; may be given again.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False),
    default="launch",
    show_default=True,
    help="Directory to write the files to.",
)
def command(
    grid: str | None,
    framework: str | None,
    train: str | None,
    sbatch: tuple[str, ...],
    output: str,
    **options: Any,
) -> None:
    """Write a job script and what AxoNN, Megatron-LM, DeepSpeed or FSDP2 need.

    \b
    Examples:
      axonn-tune launch --gpus 1024 --model 80b --sbatch=--account=m1234
      axonn-tune launch --gpus 512 --model llama3-70b --strategy megatron --output run
      axonn-tune launch --gpus 384 --model 20b --machine frontier --strategy zeropp
    """
    from axonn_tune.api import launch_search
    from axonn_tune.io.files import write_files
    from axonn_tune.job_scripts.script import launch_files, memory_warning
    from axonn_tune.search.one_layout import best_of_layout
    from axonn_tune.search.rank import rank_candidates

    search = launch_search(**options)
    chosen = rank_candidates(search).prediction(0) if grid is None else best_of_layout(search, grid)
    files = launch_files(chosen, framework, train, sbatch)
    for path in write_files(output, files):
        click.echo(path)
    for line in memory_warning(chosen):
        click.echo(line.removeprefix("# "), err=True)
