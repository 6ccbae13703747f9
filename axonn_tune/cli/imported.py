"""``axonn-tune calibrate --import``: logs of other benchmarks become part of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from axonn_tune.errors import InputError

if TYPE_CHECKING:
    from axonn_tune.io.logs import LogOptions


@dataclass(frozen=True)
class Kept:
    """Which of the imported points the profile keeps.

    Parameters
    ----------
    thin_fraction : float, optional
        Collectives are left out if lines between other sizes predict them within this error.
    most_products : int, optional
        Largest number of products of each dtype.
    without_casts : bool
        Whether the casts of operands are taken out of products in low formats.
    """

    thin_fraction: float | None
    most_products: int | None
    without_casts: bool


def conditions(texts: Sequence[str]) -> dict[str, str]:
    """Return the values by column of texts such as ``system=h100_sxm``.

    Raises
    ------
    InputError
        A text has another form, or two name the same column.
    """
    values: dict[str, str] = {}
    for text in texts:
        column, _, value = (word.strip() for word in text.partition("="))
        if not column or not value:
            raise InputError(f"--where {text}: write COLUMN=VALUE, such as system=h100_sxm")
        if column.lower() in values:
            raise InputError(f"--where {text}: the column has a value already; allowed: one")
        values[column.lower()] = value
    return values


def import_logs(
    paths: Sequence[str],
    base_name: str | None,
    output: str,
    name: str,
    options: LogOptions,
    kept: Kept,
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

    Raises
    ------
    AxonnTuneError
        There is no base profile, or a log cannot be read.
    """
    from axonn_tune.calibration.expected import expected, groups_of
    from axonn_tune.calibration.fit.assemble import with_gemm_points, with_link_points
    from axonn_tune.calibration.fit.casts import without_casts
    from axonn_tune.calibration.fit.thin import spread_products, thinned_collectives
    from axonn_tune.cli.output import say_on_stderr
    from axonn_tune.io.logs import read_logs
    from axonn_tune.io.presets import load_machine
    from axonn_tune.io.yaml_files import save_yaml
    from axonn_tune.report.machines import expected_text

    if base_name is None:
        raise InputError("--import needs --machine: a profile for all that the logs do not tell")
    base = load_machine(base_name)
    imported = read_logs(paths, base, options)
    for warning in imported.warnings:
        say_on_stderr(warning)
    products = imported.gemm_points
    if kept.without_casts:
        products = without_casts(products, base)
    if kept.most_products is not None:
        products = spread_products(products, kept.most_products)
    machine = with_gemm_points(base, products)
    if imported.link_points:
        machine = with_link_points(machine, imported.link_points)
    if kept.thin_fraction is not None:
        few = thinned_collectives(machine.link_points, kept.thin_fraction)
        machine = replace(machine, link_points=few)
    description = f"{base.name} with what {', '.join(paths)} tell"
    machine = replace(machine, name=name, description=description)
    save_yaml(output, machine)
    for groups in groups_of(imported.link_points):
        click.echo(expected_text(machine, expected(machine, *groups, [])) + "\n")
    click.echo(
        f"{len(imported.link_points)} collectives and {len(imported.gemm_points)} products read; "
        f"{output} holds {len(machine.link_points)} and {len(machine.gemm.points)}."
    )
