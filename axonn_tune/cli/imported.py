"""``axonn-tune calibrate --import``: logs of other benchmarks become part of a profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from axonn_tune.spec.machine import Machine


def import_logs(options: dict[str, Any], base: Machine | None) -> None:
    """Put the points of the logs into the base profile, fit it anew, and write it.

    Raises
    ------
    AxonnTuneError
        No base, or a log that cannot be read.
    """
    from axonn_tune.calibrate.expected import expected, groups_of
    from axonn_tune.calibrate.fit.assemble import with_gemm_points, with_link_points
    from axonn_tune.errors import InputError
    from axonn_tune.io.logs import read_logs
    from axonn_tune.io.yaml_files import save_yaml
    from axonn_tune.report.machines import expected_text

    if base is None:
        raise InputError("--import needs --machine: a profile for all that the logs do not tell")
    imported = read_logs(
        options["imports"],
        base,
        options["kind"],
        options["log_ranks"],
        options["log_ranks_per_node"],
    )
    for warning in imported.warnings:
        click.echo(f"axonn-tune: {warning}", err=True)
    machine = with_gemm_points(base, imported.gemm_points)
    if imported.link_points:
        machine = with_link_points(machine, imported.link_points)
    output = options["output"]
    names = ", ".join(options["imports"])
    machine = replace(
        machine,
        name=options["name"] or Path(output).stem,
        description=f"{base.name} with what {names} tell",
    )
    save_yaml(output, machine)
    for groups in groups_of(imported.link_points):
        click.echo(expected_text(machine, expected(machine, *groups, [])) + "\n")
    click.echo(
        f"{len(imported.link_points)} collectives and {len(imported.gemm_points)} products "
        f"written to {output}."
    )
