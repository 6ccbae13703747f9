"""``axonn-tune compare``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
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
    help="Names of the strategies, with commas: axonn,megatron.  [default: all of them]",
)
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
    from axonn_tune.api import build_search

    searches = [
        build_search(machine=machine, strategy=name, **options) for name in _names(strategies)
    ]
    emit_comparison(searches, machine, output_format, output, quiet)


def _names(strategies: str | None) -> list[str]:
    """Return the names in a text with commas, or without a text those of all strategies."""
    from axonn_tune.strategies.named import STRATEGIES

    return [name.strip() for name in strategies.split(",")] if strategies else list(STRATEGIES)


def emit_comparison(
    searches: Sequence[Search],
    machine: str | None,
    output_format: str,
    output: str | None,
    quiet: bool,
) -> None:
    """Compare the best answers to several searches, on the machine that the user named."""
    from axonn_tune.cli.output import emit_as, with_machine_remark
    from axonn_tune.report import compare as report
    from axonn_tune.studies.compare import compare

    contenders = compare(searches, Progress("Searching", quiet))
    emit_as(
        output_format,
        output,
        table=lambda: with_machine_remark(report.comparison_text(contenders), machine),
        json=lambda: report.comparison_document(contenders),
        yaml=lambda: report.comparison_document(contenders),
        csv=lambda: report.comparison_records(contenders),
    )
