"""``axonn-tune compare``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    comparison_options,
    format_option,
    job_options,
    output_option,
    quiet_option,
)
from axonn_tune.cli.progress import Progress

if TYPE_CHECKING:
    from axonn_tune.search.search import Search


@click.command("compare")
@job_options
@click.option(
    "--strategies",
    help="Names of the strategies, with commas: axonn,megatron.  [default: all that are released]",
)
@comparison_options
@quiet_option
@format_option("table", "json", "csv", "yaml")
@output_option
def command(
    strategies: str | None,
    machine: str | None,
    quiet: bool,
    output_format: str,
    output: str | None,
    **options: Any,
) -> None:
    """Rank the best configuration of every strategy in one table.

    \b
    Examples:
      axonn-tune compare --gpus 1024 --model 80b
      axonn-tune compare --gpus 384 --model 20b --machine frontier --strategies zero3,zeropp
    """
    from axonn_tune.api import build_search, names_of_all_strategies

    if strategies:
        names = [name.strip() for name in strategies.split(",")]
    else:
        names = names_of_all_strategies(**options)
    searches = [build_search(machine=machine, strategy=name, **options) for name in names]
    emit_comparison(searches, machine, output_format, output, quiet, is_of_all=not strategies)


def emit_comparison(
    searches: Sequence[Search],
    machine: str | None,
    output_format: str,
    output: str | None,
    quiet: bool,
    is_of_all: bool,
) -> None:
    """Compare the best answers to several searches, on the machine that the user named.

    Where they are of all strategies, those that are left out are named.
    """
    from axonn_tune.cli.output import emit_as, with_machine_remark
    from axonn_tune.report import compare as report
    from axonn_tune.studies.compare import compare

    contenders = compare(searches, Progress("Searching", quiet))
    left_out = left_out_of(searches) if is_of_all else []
    emit_as(
        output_format,
        output,
        table=lambda: with_machine_remark(report.comparison_text(contenders, left_out), machine),
        json=lambda: report.comparison_document(contenders, left_out),
        yaml=lambda: report.comparison_document(contenders, left_out),
        csv=lambda: report.comparison_records(contenders),
    )


def left_out_of(searches: Sequence[Search]) -> list[str]:
    """Return the names of the strategies that no search has."""
    from axonn_tune.strategies.named import STRATEGIES

    searched = {search.scenario.strategy.name for search in searches}
    return [name for name in STRATEGIES if name not in searched]
