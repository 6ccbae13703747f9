"""``axonn-tune calibrate --import``: logs of other benchmarks become part of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import click


def import_logs(
    paths: Sequence[str],
    base_name: str | None,
    output: str,
    name: str,
    kind: str | None,
    n_ranks: int | None,
    ranks_per_node: int | None,
) -> None:
    """Put the points of the logs into the base profile, fit it again, and write it.

    Parameters
    ----------
    paths : sequence of str
        The logs.
    base_name : str or None
        Preset or file of the base profile.
    output : str
        The profile to write.
    name : str
        Name of the new profile.
    kind, n_ranks, ranks_per_node : optional
        Kind of collective, ranks and ranks per node, for logs that do not state them.

    Raises
    ------
    AxonnTuneError
        There is no base profile, or a log cannot be read.
    """
    from axonn_tune.calibration.expected import expected, groups_of
    from axonn_tune.calibration.fit.assemble import with_gemm_points, with_link_points
    from axonn_tune.errors import InputError
    from axonn_tune.io.logs import read_logs
    from axonn_tune.io.presets import load_machine
    from axonn_tune.io.yaml_files import save_yaml
    from axonn_tune.report.machines import expected_text

    if base_name is None:
        raise InputError("--import needs --machine: a profile for all that the logs do not tell")
    base = load_machine(base_name)
    imported = read_logs(paths, base, kind, n_ranks, ranks_per_node)
    for warning in imported.warnings:
        click.echo(f"axonn-tune: {warning}", err=True)
    machine = with_gemm_points(base, imported.gemm_points)
    if imported.link_points:
        machine = with_link_points(machine, imported.link_points)
    description = f"{base.name} with what {', '.join(paths)} tell"
    machine = replace(machine, name=name, description=description)
    save_yaml(output, machine)
    for groups in groups_of(imported.link_points):
        click.echo(expected_text(machine, expected(machine, *groups, [])) + "\n")
    click.echo(
        f"{len(imported.link_points)} collectives and {len(imported.gemm_points)} products "
        f"written to {output}."
    )
