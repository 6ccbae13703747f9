"""``axonn-tune report``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    BATCH_NAMES,
    FilePath,
    given_options,
    options_of,
    quiet_option,
    strategies_options,
    words_of,
)
from axonn_tune.cli.progress import Progress
from axonn_tune.options import ComparisonOptions, LayoutOptions, RankingOptions, declared

if TYPE_CHECKING:
    from axonn_tune.search.search import Search

# How many rows a page has by default, and how many of them can be opened.
N_CANDIDATES = 5000
N_DETAILS = 200
# Options that differ between the candidates of a page, or that only say what to list.
_NOT_COMMON = {
    *declared(LayoutOptions, RankingOptions, ComparisonOptions),
    "micro_batch",
    "recompute",
    "virtual_stages",
    "max_tp",
}


@click.command("report")
@strategies_options
@options_of(declared(RankingOptions, ComparisonOptions, without=("cost_model", "include_oom")))
@click.option(
    "--validation",
    type=FilePath(dir_okay=False),
    help="A report of `validate`; show its measured steps next to predicted ones.",
)
@click.option(
    "--candidates",
    type=click.IntRange(min=1),
    default=N_CANDIDATES,
    show_default=True,
    help="Largest number of rows; the page keeps the fastest.",
)
@click.option(
    "--details",
    type=click.IntRange(min=1),
    default=N_DETAILS,
    show_default=True,
    help="Number of rows that can be opened, besides those of the Pareto front.",
)
@quiet_option
@click.option(
    "--output",
    type=FilePath(dir_okay=False),
    default="report.html",
    show_default=True,
    help="The page to write.",
)
def command(
    validation: str | None,
    candidates: int,
    details: int,
    quiet: bool,
    output: str,
    **options: Any,
) -> None:
    """Write an interactive page of all candidates, to look at and to show.

    The page is one file that needs no network. It holds a table to sort and filter, time against
    memory, the parts of each step, and for each candidate its timeline, memory, operations and
    commands.

    \b
    Examples:
      axonn-tune report --gpus 1024 --model 80b --output report.html
      axonn-tune report --gpus 1024 --model 80b --strategy all --output strategies.html
      axonn-tune report --gpus 4 --model tiny --machine mycluster.yaml --global-batch 4 \\
        --dtype fp32 --validation validation.json
    """
    words = common_words(given_options(options))
    write_report(
        page_searches(**options),
        words,
        output,
        quiet,
        candidates,
        details,
        validation,
        options["strategy"] == "all",
    )


def page_searches(strategy: str, **options: Any) -> list[Search]:
    """Return the search of a strategy, or of each strategy for the name ``all``."""
    from axonn_tune.api.searching import (
        build_search,
        loaded,
        loaded_machine,
        names_of_all_strategies,
        options_of_each,
    )

    own = {strategy: options}
    if strategy == "all":
        # All searches share what is read once.
        options |= {
            "model": loaded(options["model"]),
            "machine": loaded_machine(options.get("machine")),
        }
        own = options_of_each(names_of_all_strategies(**options), options)
    return [
        build_search(strategy=name, **of_strategy | {"include_oom": True})
        for name, of_strategy in own.items()
    ]


def common_words(given: Mapping[str, Any]) -> str:
    """Return the options that every command on the page repeats, among those that were given.

    A page whose rows differ in the global batch names it in the commands of each row.
    """
    left_out = _NOT_COMMON | (set(BATCH_NAMES) if "within" in given else set())
    return shlex.join(words_of({n: v for n, v in given.items() if n not in left_out}))


def write_report(
    searches: Sequence[Search],
    common_options: str,
    output: str,
    quiet: bool,
    n_candidates: int = N_CANDIDATES,
    n_details: int = N_DETAILS,
    validation: str | None = None,
    is_of_all: bool = False,
) -> None:
    """Rank the candidates of the searches and write the page.

    Parameters
    ----------
    common_options : str
        Options that every command on the page repeats.
    output : str
        The file to write.
    n_candidates : int
        Largest number of rows.
    n_details : int
        Number of rows that can be opened, besides those of the Pareto front.
    validation : str or None
        A report of `validate`, whose measured steps the page shows next to predicted ones.
    is_of_all : bool
        Whether the searches are those of all strategies, so that those left out are named.
    """
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
        rankings(searches, Progress("Searching", quiet)),
        common_options,
        [name for name, frameworks in FRAMEWORKS.items() if frameworks],
        f"Written by axonn-tune {__version__} on {datetime.now():%Y-%m-%d}.",
        n_candidates,
        n_details,
        measured,
        Progress("Playing candidates", quiet),
        _left_out_of(searches) if is_of_all else {},
    )
    emit(page_html(document, page_parts()), output)
    n_rows = len(document["rows"]["layout"])
    click.echo(
        f"{output}: {n_rows} of {document['n_candidates']} candidates, with those that do not fit",
        err=True,
    )


def _left_out_of(searches: Sequence[Search]) -> dict[str, list[str]]:
    """Return by reason the strategies of which there is no search."""
    from axonn_tune.api.contenders import Contender, left_out_of
    from axonn_tune.strategies.named import STRATEGIES

    searched = {search.scenario.strategy.name for search in searches}
    everything = [Contender(name, None) for name in STRATEGIES]
    return left_out_of(searches[0].scenario, searched, everything)
