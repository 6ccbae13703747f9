"""``axonn-tune whatif``."""

from __future__ import annotations

from typing import Any

import click

from axonn_tune.cli.options import (
    NumberRange,
    format_option,
    output_option,
    quiet_option,
    search_options,
)
from axonn_tune.cli.progress import Progress


@click.command("whatif")
@search_options
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Change the machine: inter_node.bandwidth=2x, jitter=-50%, gpu=h200; may be given again.",
)
@click.option(
    "--by",
    type=NumberRange(min=1.0, max=100.0, min_open=True),
    default=1.1,
    show_default=True,
    help="Factor by which the table of sensitivities changes each number.",
)
@click.option(
    "--sensitivities/--no-sensitivities",
    default=None,
    help="Show the table of sensitivities.  [default: only without --set]",
)
@quiet_option
@format_option("table", "json", "csv")
@output_option
def command(
    settings: tuple[str, ...],
    by: float,
    sensitivities: bool | None,
    quiet: bool,
    output_format: str,
    output: str | None,
    **options: Any,
) -> None:
    """Show how the best layout and its time change on another machine.

    A setting gives one of the names in the table of sensitivities a number with its unit, a
    factor, or a change in percent; intra_node and inter_node name the links on both sides of the
    node's boundary. Measured points change alike. gpu=NAME takes the GPU of a profile.
    CSV holds the machines with --set, and the table of sensitivities without.

    \b
    Examples:
      axonn-tune whatif --gpus 1024 --model 80b --set inter_node.bandwidth=2x
      axonn-tune whatif --gpus 1024 --model 80b --set gpu=h200 --set inter_node.latency=-50%
      axonn-tune whatif --gpus 1024 --model 80b --set "gpu.memory=80 GiB" --sensitivities
      axonn-tune whatif --gpus 512 --model 40b --machine frontier --by 2 --format csv
    """
    from axonn_tune.api.answers import changed_machine
    from axonn_tune.api.searching import build_search
    from axonn_tune.cli.output import detail_shown, emit_as, with_machine_remark
    from axonn_tune.report import whatif as report
    from axonn_tune.search.rank import with_best_batch
    from axonn_tune.studies.whatif import influences, what_if

    search = with_best_batch(build_search(**options))
    result = None
    if settings:
        result = what_if(search, changed_machine(search, settings), detail_shown(output_format))
    is_listed = not settings if sensitivities is None else sensitivities
    listed = influences(search, by, Progress("Searching", quiet)) if is_listed else []

    def table() -> str:
        parts = []
        if result is not None:
            parts.append(report.what_if_text(search, settings, result))
        if listed:
            parts.append(report.influences_text(listed, by))
        return with_machine_remark("\n\n".join(parts), options["machine"])

    def records() -> list[dict[str, Any]]:
        if result is not None:
            return report.what_if_records(result)
        return report.influence_records(listed)

    emit_as(
        output_format,
        output,
        table=table,
        json=lambda: report.what_if_document(search, settings, result, listed, by),
        csv=records,
    )
