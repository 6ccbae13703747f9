"""``axonn-tune suggest``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    OF_MANY_LAYOUTS,
    FilePath,
    comparison_options,
    format_option,
    given_options,
    output_option,
    plot_option,
    quiet_option,
    ranking_options,
    refuse,
    strategies_options,
    with_batch,
    words_of,
)
from axonn_tune.options import ComparisonOptions, RankingOptions, declared

if TYPE_CHECKING:
    from axonn_tune.search.rank import Ranking
    from axonn_tune.search.search import Search

# Options that `explain` does not have, or that its layout answers.
_LEFT_OUT = {*declared(RankingOptions, ComparisonOptions), *OF_MANY_LAYOUTS}


@click.command("suggest")
@strategies_options
@ranking_options
@comparison_options
@click.option(
    "--why-not",
    metavar="LAYOUT",
    help="Say why this layout is not suggested: 8x4x4x8; tensor=8,data=16 for other strategies.",
)
@click.option(
    "--top-n",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Number of rows to show.",
)
@click.option("--verbose", is_flag=True, help="Say how many grids were rejected, and why.")
@plot_option
@click.option("--html", type=FilePath(dir_okay=False), help="Write the page of `report`, too.")
@quiet_option
@format_option("table", "json", "csv", "yaml")
@output_option
def command(
    why_not: str | None,
    top_n: int,
    verbose: bool,
    plot: str | None,
    html: str | None,
    quiet: bool,
    output_format: str,
    output: str | None,
    **options: Any,
) -> None:
    """Rank the grids on which to train a model.

    \b
    Examples:
      axonn-tune suggest --gpus 1024 --model 80b
      axonn-tune suggest --gpus 512 --model llama3-70b --machine frontier --order all
      axonn-tune suggest --gpus 1024 --model 80b --why-not 8x4x4x8
      axonn-tune suggest --gpus 1024 --model 80b --strategy megatron --fix tensor=4
      axonn-tune suggest --gpus 1024 --model 80b --plot ranking.png --html report.html
      axonn-tune suggest --gpus 64 --model ./config.json --format json --output ranking.json
    """
    from axonn_tune.api.searching import build_search
    from axonn_tune.cli.output import check_plot, emit

    check_plot(plot)
    is_of_all = options["strategy"] == "all"
    if is_of_all:
        of_one = {"plot": plot, "why_not": why_not, "top_n": top_n, "verbose": verbose}
        refuse(
            of_one, "is of one strategy; allowed with --strategy all: --html, --format, --output"
        )
    if html is not None:
        from axonn_tune.cli.report import common_words, page_searches, write_report

        words = common_words(given_options(options))
        write_report(page_searches(**options), words, html, quiet, is_of_all=is_of_all)
    if is_of_all:
        _compare(quiet, output_format, output, options)
        return
    search = build_search(**options)
    if why_not is not None:
        from axonn_tune.search.one_layout import why_not as reason_of

        refuse({"output_format": output_format}, "is of a ranking; --why-not answers in words")
        emit(reason_of(search, why_not), output)
        return
    _rank(search, top_n, verbose, plot, output_format, output, options)


def _compare(
    quiet: bool, output_format: str, output: str | None, options: Mapping[str, Any]
) -> None:
    """Show the best configuration of every strategy."""
    from axonn_tune.api.comparing import comparison
    from axonn_tune.cli.compare import emit_comparison
    from axonn_tune.cli.output import detail_shown
    from axonn_tune.cli.progress import Progress

    compared = comparison(
        each=Progress("Searching", quiet), detail=detail_shown(output_format), **options
    )
    emit_comparison(compared, options["machine"], output_format, output)


def _rank(
    search: Search,
    top_n: int,
    verbose: bool,
    plot: str | None,
    output_format: str,
    output: str | None,
    options: Mapping[str, Any],
) -> None:
    """Show the best configurations of a search, and in a table the command that explains one."""
    from axonn_tune.cli.output import emit_as, save_plot, with_machine_remark
    from axonn_tune.report import suggest as report
    from axonn_tune.report.records import flat_record
    from axonn_tune.search.rank import rank_best

    shows_all = plot is not None or output_format in ("json", "yaml")
    ranking = rank_best(search, None if shows_all else top_n)
    save_plot(plot, lambda: report.ranking_figure(ranking, top_n))

    def table() -> str:
        parts = [with_machine_remark(report.ranking_text(ranking, top_n), options["machine"])]
        if verbose:
            parts.append(report.rejected_text(ranking.rejected))
        return "\n".join([*parts, f"Next: {_next_command(ranking, given_options(options))}"])

    emit_as(
        output_format,
        output,
        table=table,
        json=lambda: report.ranking_document(ranking, top_n),
        yaml=lambda: report.ranking_document(ranking, top_n),
        csv=lambda: [flat_record(prediction) for prediction in ranking.top(top_n)],
    )


def _next_command(ranking: Ranking, given: Mapping[str, Any]) -> str:
    """Return the command that explains the best layout, with the options that the user typed."""
    best = ranking.prediction(0).configuration
    kept = {name: value for name, value in given.items() if name not in _LEFT_OUT}
    if ranking.search.compares_batches:
        kept = with_batch(kept, ranking.search.scenario.job.global_batch)
    if "order" in kept:
        kept["order"] = best.order
    return shlex.join(["axonn-tune", "explain", *words_of(kept), "--grid", str(best.layout)])
