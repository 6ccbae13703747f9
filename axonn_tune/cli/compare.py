"""``axonn-tune compare``."""

from __future__ import annotations

from typing import Any

import click

from axonn_tune.cli.options import (
    format_option,
    job_options,
    output_option,
)
from axonn_tune.cli.progress import Progress, quiet_option


@click.command("compare")
@job_options
@click.option(
    "--strategies",
    help="Comma-separated: axonn,megatron.  [default: all of them]",
)
@quiet_option
@format_option("table", "json", "csv", "yaml")
@output_option
def command(
    strategies: str | None, quiet: bool, output_format: str, output: str | None, **options: Any
) -> None:
    """Rank the best configuration of every strategy in one table.

    \b
    Examples:
      axonn-tune compare --gpus 1024 --model 80b
      axonn-tune compare --gpus 384 --model 20b --machine frontier --strategies zero3,zeropp
    """
    emit_comparison(options, output_format, output, strategies, quiet)


def emit_comparison(
    options: dict[str, Any],
    output_format: str,
    output: str | None,
    strategies: str | None = None,
    quiet: bool = False,
) -> None:
    """Compare strategies, all of them unless some are named, with options of a search."""
    from axonn_tune.api import build_search
    from axonn_tune.cli.output import emit_as, with_machine_remark
    from axonn_tune.report import compare as report
    from axonn_tune.strategies.named import STRATEGIES
    from axonn_tune.studies.compare import compare

    names = strategies.split(",") if strategies else list(STRATEGIES)
    contenders = compare(
        [build_search(**{**options, "strategy": name.strip()}) for name in names],
        Progress("Searching", quiet),
    )
    emit_as(
        output_format,
        output,
        table=lambda: with_machine_remark(report.comparison_text(contenders), options["machine"]),
        json=lambda: report.comparison_document(contenders),
        yaml=lambda: report.comparison_document(contenders),
        csv=lambda: report.comparison_records(contenders),
    )
