"""``axonn-tune launch``."""

from __future__ import annotations

from typing import Any

import click

from axonn_tune.cli.options import LAYOUT_HELP, FilePath, search_options


@click.command("launch")
@search_options
@click.option("--grid", metavar="LAYOUT", help=f"{LAYOUT_HELP}  [default: the best]")
@click.option(
    "--framework",
    help="Framework: axonn, megatron, fsdp2, torchtitan, deepspeed or megatron-fsdp.  "
    "[default: the engine's, or the strategy's]",
)
@click.option(
    "--train",
    metavar="SCRIPT",
    help="Training script, or the path of pretrain_gpt.py.  [default: the one that is written]",
)
@click.option(
    "--sbatch",
    multiple=True,
    metavar="OPTION",
    help="Option of sbatch, such as --account=abc; may be given again.",
)
@click.option(
    "--output",
    type=FilePath(file_okay=False),
    default="launch",
    show_default=True,
    help="Directory to write the files to.",
)
@click.option("--force", is_flag=True, help="Replace files that stand there with another text.")
def command(
    grid: str | None,
    framework: str | None,
    train: str | None,
    sbatch: tuple[str, ...],
    output: str,
    force: bool,
    **options: Any,
) -> None:
    """Write a job script for Slurm, with the program that AxoNN, DeepSpeed or FSDP2 trains.

    Megatron-LM brings its own program. The header of the script says what is to be filled in.

    \b
    Examples:
      axonn-tune launch --gpus 1024 --model 80b --sbatch=--account=m1234
      axonn-tune launch --gpus 512 --model llama3-70b --strategy megatron --output run
      axonn-tune launch --gpus 384 --model 20b --machine frontier --strategy zeropp --output zeropp
    """
    from axonn_tune.api.launching import configuration_to_launch
    from axonn_tune.errors import InputError
    from axonn_tune.io.files import changed_files, write_files
    from axonn_tune.job_scripts.sbatch import memory_warning
    from axonn_tune.job_scripts.script import engine_warning, launch_files, model_warning

    has_engine = options["engine"] is not None
    chosen = configuration_to_launch(grid, framework, **options)
    files = launch_files(chosen, framework, train, sbatch)
    changed = [] if force else changed_files(output, files)
    if changed:
        raise InputError(
            f"{changed[0]} exists with another text; allowed: --force, which replaces it, or "
            "another --output"
        )
    for path in write_files(output, files):
        click.echo(path)
    warnings = engine_warning(chosen, framework) if has_engine else []
    warnings += model_warning(chosen, framework, train)
    for line in (*warnings, *memory_warning(chosen)):
        click.echo(line, err=True)
