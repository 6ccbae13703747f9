"""``axonn-tune emulate``."""

from __future__ import annotations

import shutil
import sys

import click


@click.command("emulate", context_settings={"ignore_unknown_options": True})
@click.option("--spec", help="Cluster: a ready one (see --list), or a YAML file.")
@click.option("--list", "list_ready", is_flag=True, help="List the ready clusters.")
@click.option("--clean", is_flag=True, help="Remove what killed clusters have left.")
@click.argument("arguments", nargs=-1, metavar="-- COMMAND", type=click.UNPROCESSED)
def command(spec: str | None, list_ready: bool, clean: bool, arguments: tuple[str, ...]) -> None:
    """Run a command on every rank of a cluster that is emulated on this machine.

    Each rank gets a network namespace; a tree of links joins them at the speeds that the spec
    gives. The variables of torchrun are set, so that every command that starts ranks joins these.
    The output of rank 0 is shown, and the exit code is that of the first rank that fails. This
    runs on Linux and needs root and iproute2.

    \b
    Examples:
      axonn-tune emulate --spec frontier-mini -- axonn-tune calibrate --quick --output mini.yaml
      axonn-tune emulate --spec ./mine.yaml -- axonn-tune run --grid 2x2x2x1 --model tiny
      axonn-tune emulate --clean
    """
    from axonn_tune.cli.output import emit
    from axonn_tune.emulate import stale
    from axonn_tune.emulate.cluster import EmulatedCluster, ended_by_signals
    from axonn_tune.emulate.network import check_ability
    from axonn_tune.errors import InputError
    from axonn_tune.io.presets import as_found, list_clusters, load_cluster
    from axonn_tune.report.emulate import clusters_table

    if list_ready:
        emit(clusters_table(as_found(load_cluster, list_clusters())), None)
    if clean:
        check_ability()
        removed = stale.clean()
        click.echo(f"removed {len(removed)} stale clusters")
    if list_ready or clean:
        return
    if spec is None or not arguments:
        raise InputError(
            "emulate what? Give --spec and, after --, a command: "
            "axonn-tune emulate --spec frontier-mini -- axonn-tune run --grid 2x2x2x1 --model tiny"
        )
    if shutil.which(arguments[0]) is None:
        raise InputError(
            f"{arguments[0]} is no program that can be started; allowed: one on PATH, or its path"
        )
    with ended_by_signals(), EmulatedCluster(load_cluster(spec)) as cluster:
        code = cluster.run(arguments)
    sys.exit(code)
