"""``axonn-tune report``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    given_options,
    search_options,
    words_of,
)
from axonn_tune.cli.progress import Progress, quiet_option

if TYPE_CHECKING:
    from axonn_tune.search.search import Search

# Number of rows of a page, and of those that can be opened.
N_CANDIDATES = 5000
N_DETAILS = 200
# What a page says of a candidate itself, and what does not describe a search.
_OF_CANDIDATES = (
    *("strategy", "order", "gx", "gy", "gz", "gdata", "fix", "micro_batch", "recompute"),
    *("virtual_stages", "max_tp", "cost_model", "include_oom", "every_configuration"),
)


@click.command("report")
@search_options
@click.option(
    "--every-configuration",
    is_flag=True,
    help="Every micro-batch and recomputation of a grid, not its best only.",
)
@click.option(
    "--validation",
    type=click.Path(dir_okay=False),
    help="What `validate --output` wrote: measured beside predicted steps.",
)
@click.option(
    "--candidates",
    type=click.IntRange(min=1),
    default=N_CANDIDATES,
    show_default=True,
    help="Rows at most, the fastest.",
)
@click.option(
    "--details",
    type=click.IntRange(min=1),
    default=N_DETAILS,
    show_default=True,
    help="Candidates that can be opened; those of the Pareto front besides.",
)
@quiet_option
@click.option("--output", type=click.Path(dir_okay=False), default="report.html", show_default=True)
def command(
    validation: str | None,
    candidates: int,
    details: int,
    quiet: bool,
    output: str,
    **options: Any,
) -> None:
    """Write an interactive page of all candidates, to look at and to show.

    One file that needs no network: a table to sort and filter, time against memory, what each
    step is made of, and for each candidate its timeline, memory, operations and commands.

    \b
    Examples:
      axonn-tune report --gpus 1024 --model 80b --output report.html
      axonn-tune report --gpus 1024 --model 80b --strategy all --output strategies.html
      axonn-tune report --gpus 4 --model tiny --machine mycluster.yaml --global-batch 4 \\
        --dtype fp32 --validation validation.json
    """
    write_report(options, output, candidates, details, validation, quiet)


def write_report(
    options: dict[str, Any],
    output: str,
    n_candidates: int = N_CANDIDATES,
    n_details: int = N_DETAILS,
    validation: str | None = None,
    quiet: bool = False,
) -> None:
    """Search with options of `search_options` and write the page."""
    from datetime import datetime

    from axonn_tune import __version__
    from axonn_tune.cli.output import emit
    from axonn_tune.io.json_files import load_json
    from axonn_tune.io.package_data import page_parts
    from axonn_tune.job_scripts.script import FRAMEWORKS
    from axonn_tune.report.report import page_document, page_html
    from axonn_tune.spec.validation import Validation
    from axonn_tune.studies.compare import rankings

    measured = None if validation is None else load_json(validation, Validation)
    document = page_document(
        rankings(_searches(options), Progress("Searching", quiet)),
        _common_options(options),
        [name for name, frameworks in FRAMEWORKS.items() if frameworks],
        f"Written by axonn-tune {__version__} on {datetime.now():%Y-%m-%d}.",
        n_candidates,
        n_details,
        measured,
        Progress("Playing candidates", quiet),
    )
    emit(page_html(document, page_parts()), output)
    n_rows, n_all = len(document["rows"]["layout"]), document["n_candidates"]
    click.echo(f"{output}: {n_rows} of {n_all} candidates", err=True)


def _searches(options: dict[str, Any]) -> list[Search]:
    """Of the strategy, or of every one."""
    from axonn_tune.api import build_search
    from axonn_tune.strategies.named import STRATEGIES

    arguments = {**options, "include_oom": True}
    names = list(STRATEGIES) if options["strategy"] == "all" else [options["strategy"]]
    return [build_search(**{**arguments, "strategy": name}) for name in names]


def _common_options(options: dict[str, Any]) -> str:
    """What the user typed of the job, as the page's commands repeat it."""
    given = given_options(options)
    return shlex.join(words_of({n: v for n, v in given.items() if n not in _OF_CANDIDATES}))
