"""``axonn-tune calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import FilePath, NumberRange, calibrate_options, typed_command_line

if TYPE_CHECKING:
    from axonn_tune.calibration.selection import Extent


@click.command("calibrate")
@click.option("--output", required=True, type=FilePath(dir_okay=False), help="Profile to write.")
@click.option(
    "--import",
    "imports",
    multiple=True,
    type=FilePath(dir_okay=False),
    help="Read logs of nccl-tests, rccl-tests or OSU, or tables (CSV) of collectives or products, "
    "and measure nothing.",
)
@click.option("--kind", help="Kind of collective in the logs, if they do not say it.")
@click.option("--log-ranks", type=click.IntRange(min=2), help="Number of ranks of an OSU log.")
@click.option(
    "--log-ranks-per-node", type=click.IntRange(min=1), help="Ranks per node of an OSU log."
)
@click.option(
    "--where",
    multiple=True,
    metavar="COLUMN=VALUE",
    help="Rows of imported tables to read, such as system=h100_sxm; may be given again.",
)
@click.option(
    "--thin",
    "thin_percent",
    type=NumberRange(min=0),
    help="Leave out imported collectives that the sizes around them predict up to this error in %.",
)
@click.option(
    "--without-casts",
    is_flag=True,
    help="Imported times of products in 8 or 4 bits include the cast of an operand, as those of "
    "serving libraries do; take it out of them.",
)
@calibrate_options
@click.pass_obj
def command(
    extent: Extent | None,  # None, unless a test gives one
    /,
    output: str,
    name: str | None,
    resume: bool,
    imports: tuple[str, ...],
    kind: str | None,
    log_ranks: int | None,
    log_ranks_per_node: int | None,
    where: tuple[str, ...],
    thin_percent: float | None,
    without_casts: bool,
    **options: Any,
) -> None:
    """Measure this machine, or the nodes of a job, and write a hardware profile.

    The command starts a rank for each GPU of this node, or joins the ranks that torchrun or srun
    has started, each of which needs the same command. Every result is on disk at once; after an
    interrupt, --resume goes on.

    \b
    Examples:
      axonn-tune calibrate --output mycluster.yaml
      axonn-tune calibrate --output mycluster.yaml --quick --model 80b --gpus 1024
      srun -N 4 --ntasks-per-node 4 axonn-tune calibrate --output mycluster.yaml
      axonn-tune calibrate --import all_reduce.log --machine perlmutter --output mycluster.yaml
      axonn-tune suggest --gpus 1024 --model 80b --machine mycluster.yaml
    """
    name = name or Path(output).stem
    if imports:
        from axonn_tune.cli.imported import Kept, conditions, import_logs
        from axonn_tune.io.logs import LogOptions

        log_options = LogOptions(kind, log_ranks, log_ranks_per_node, conditions(where))
        thin_fraction = None if thin_percent is None else 0.01 * thin_percent
        kept = Kept(thin_fraction, options["most_shapes"], without_casts)
        import_logs(imports, options["machine"], output, name, log_options, kept)
        return
    from axonn_tune.api.measuring import calibration_campaign, run_calibration
    from axonn_tune.cli.interrupts import resumable
    from axonn_tune.cli.output import emit, say_profile_is_written
    from axonn_tune.io.journal import Journal
    from axonn_tune.report.calibrate import calibration_text
    from axonn_tune.runtime.ranks.launch import only_rank_0_speaks

    journal = Journal.beside(output)
    with only_rank_0_speaks():
        campaign = calibration_campaign(extent, **options)
        request = campaign.request(journal, resume)
    with resumable(journal):
        profile = run_calibration(campaign, request, journal, output, name, typed_command_line())
    if profile is None:
        return
    emit(calibration_text(profile), None)
    say_profile_is_written(output)
