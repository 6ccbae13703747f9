"""``axonn-tune machines``."""

from __future__ import annotations

import sys

import click

from axonn_tune.cli.options import NumberRange, format_option, output_option, plot_option


@click.group("machines")
def command() -> None:
    """List, show and compare hardware profiles.

    \b
    Examples:
      axonn-tune machines list
      axonn-tune machines show frontier
      axonn-tune machines template --output my-cluster.yaml
    """


@command.command("list")
def list_command() -> None:
    """List the presets and the machines in AXONN_TUNE_PATH.

    \b
    Example:
      axonn-tune machines list
    """
    from axonn_tune.cli.output import emit, in_width_of
    from axonn_tune.io.presets import as_found, list_machines, load_machine
    from axonn_tune.report.machines import machines_table

    found = as_found(load_machine, list_machines())
    emit(in_width_of(None, lambda: machines_table(found)), None)


@command.command("show")
@click.argument("name")
@plot_option
def show_command(name: str, plot: str | None) -> None:
    """Show what was measured, and every number of a profile with its origin and source.

    \b
    Examples:
      axonn-tune machines show perlmutter
      axonn-tune machines show ./mycluster.yaml --plot rates.png
    """
    from axonn_tune.cli.output import check_plot, emit, save_plot
    from axonn_tune.io.presets import load_machine
    from axonn_tune.report.calibrate import calibration_text
    from axonn_tune.report.machines import machine_figure, machine_text

    check_plot(plot)
    machine = load_machine(name)
    save_plot(plot, lambda: machine_figure(machine))
    parts = [calibration_text(machine), machine_text(machine)]
    emit("\n\n".join(part for part in parts if part), None)


@command.command("diff")
@click.argument("before")
@click.argument("after")
@click.option(
    "--least",
    type=NumberRange(0, 1),
    default=0.03,
    show_default=True,
    help="Smallest change to report, as a fraction.",
)
@click.option("--all", "show_all", is_flag=True, help="Show the numbers that did not change, too.")
@click.option("--fail", is_flag=True, help="Exit 1 if anything got significantly worse, for CI.")
@format_option("table", "json")
@output_option
def diff_command(
    before: str,
    after: str,
    least: float,
    show_all: bool,
    fail: bool,
    output_format: str,
    output: str | None,
) -> None:
    """Show what changed between two profiles: a slow node, a new driver.

    A change is significant if it is larger than the spreads of both profiles explain. That gives
    one false alarm in a hundred comparisons of unchanged machines. Numbers that state no spread,
    as in profiles written by hand, are shown wherever they differ, but --fail ignores them.

    \b
    Examples:
      axonn-tune machines diff monday.yaml tuesday.yaml
      axonn-tune machines diff old.yaml new.yaml --fail --format json
    """
    from axonn_tune.calibration.difference import difference
    from axonn_tune.cli.output import emit_as
    from axonn_tune.io.presets import load_machine
    from axonn_tune.report.machines import difference_document, difference_text

    old = load_machine(before)
    new = load_machine(after)
    changed = difference(old, new, least_change=least)
    emit_as(
        output_format,
        output,
        table=lambda: difference_text(old, new, changed, show_all),
        json=lambda: difference_document(old, new, changed),
    )
    if fail and (changed.slow_ranks or any(change.is_worse for change in changed.significant)):
        sys.exit(1)


@command.command("expect")
@click.argument("name")
@click.option("--kind", default="all_reduce", show_default=True, help="Kind of collective.")
@click.option(
    "--nodes", type=click.IntRange(min=1), default=2, show_default=True, help="Number of nodes."
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    help="Number of ranks per node.  [default: all of a node]",
)
@click.option("--least", default="1 KiB", show_default=True, help="Smallest buffer.")
@click.option("--most", default="1 GiB", show_default=True, help="Largest buffer.")
@format_option("table", "json")
@output_option
def expect_command(
    name: str,
    kind: str,
    nodes: int,
    ranks_per_node: int | None,
    least: str,
    most: str,
    output_format: str,
    output: str | None,
) -> None:
    """Show what nccl-tests should find: time, algbw and busbw over message size.

    The collective runs in one group of all ranks, or, with fewer ranks per node, in as many
    groups at once as fill the nodes. A measurement that the profile holds is shown, too.

    \b
    Examples:
      axonn-tune machines expect perlmutter --nodes 16
      axonn-tune machines expect mycluster.yaml --nodes 4 --ranks-per-node 1 --kind all_gather
    """
    from axonn_tune.calibration.expected import expected
    from axonn_tune.cli.output import emit_as
    from axonn_tune.errors import InputError
    from axonn_tune.io.presets import load_machine
    from axonn_tune.report.machines import expected_document, expected_text
    from axonn_tune.spec.checks import require_choice, require_count
    from axonn_tune.spec.plan import KINDS
    from axonn_tune.units import parse_size

    require_choice("machines expect", "--kind", kind, KINDS)
    require_count("machines expect", "--nodes", nodes)
    machine = load_machine(name)
    used = ranks_per_node or machine.ranks_per_node
    if machine.ranks_per_node % used:
        raise InputError(
            f"--ranks-per-node is {used}; allowed: a divisor of {machine.ranks_per_node}"
        )
    first = parse_size(least, "--least")
    last = parse_size(most, "--most")
    if not 0 < first <= last:
        raise InputError(f"--least {least}, --most {most}; allowed: 0 < least <= most")
    sizes = [first << i for i in range((last // first).bit_length())]
    entries = expected(machine, kind, machine.ranks_per_node // used, nodes * used, sizes)
    emit_as(
        output_format,
        output,
        table=lambda: expected_text(machine, entries),
        json=lambda: expected_document(machine, entries),
    )


@command.command("template")
@output_option
def template_command(output: str | None) -> None:
    """Print a commented file with which to begin a machine of your own.

    \b
    Examples:
      axonn-tune machines template
      axonn-tune machines template --output my-cluster.yaml
    """
    from axonn_tune.cli.output import emit
    from axonn_tune.io.package_data import template

    emit(template("machine"), output)
