"""``axonn-tune calibrate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    pass

_PARTS = ("gemm", "memory", "links")


@click.command("calibrate")
@click.option(
    "--output", required=True, type=click.Path(dir_okay=False), help="The profile to write."
)
@click.option("--quick", is_flag=True, help="About a minute, instead of a thorough calibration.")
@click.option(
    "--only",
    type=click.Choice(_PARTS),
    multiple=True,
    help="Measure this part; may be given several times. The rest is taken from --machine.",
)
@click.option("--resume", is_flag=True, help="Go on with a calibration that was interrupted.")
@click.option("--machine", help="A profile that says what is not measured (preset or YAML file).")
@click.option("--name", help="Name of the machine.  [default: that of the file]")
@click.option("--model", help="Measure the products and the attention of this model's search, too.")
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs of that search.")
@click.option("--micro-batch", type=click.IntRange(min=1), help="Micro-batch of that search.")
@click.option("--seq-len", type=click.IntRange(min=1), help="Sequence length of that search.")
@click.option(
    "--most-shapes",
    type=click.IntRange(min=1),
    default=600,
    show_default=True,
    help="Products of that search to measure, those of the likeliest grids first.",
)
@click.option("--dtype", "dtypes", multiple=True, help="bf16, fp16 or fp32; may be given again.")
@click.option("--levels", metavar="2,8", help="Ranks of the units of each link level.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Ranks to start here.  [default: the GPUs, else the cores]",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda (AMD too).")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1.0),
    default=300.0,
    show_default=True,
    help="Seconds after which a collective counts as hung.",
)
@click.option("--quiet", is_flag=True, help="No progress.")
def command(**options: Any) -> None:
    """Measure this machine, or the nodes of a job, and write a hardware profile.

    Starts a rank for each GPU of this node, or joins those that torchrun or srun has started:
    give each of them the same command. What is measured is on disk at once; after an interrupt,
    --resume goes on.

    \b
    Examples:
      axonn-tune calibrate --output mycluster.yaml
      axonn-tune calibrate --output mycluster.yaml --quick --model 80b --gpus 1024
      srun -N 4 --ntasks-per-node 4 axonn-tune calibrate --output mycluster.yaml
      axonn-tune suggest --gpus 1024 --model 80b --machine mycluster.yaml
    """
    from axonn_tune.calibrate.run import measure
    from axonn_tune.io.journal import Journal
    from axonn_tune.runtime.launch import launch, only_rank_0_speaks, ranks_or_cores

    journal = Journal(options["output"] + ".partial")
    with only_rank_0_speaks():
        base = _base(options["machine"])
        request = _request(options, base, journal)
        n_ranks = ranks_or_cores(options["device"], options["ranks"])
    try:
        measured = launch(measure, request, n_ranks, options["device"])
    except KeyboardInterrupt:
        _say_what_is_kept(journal, options["output"])
        raise
    if measured is None:
        return
    _finish(options, measured, base, journal)
