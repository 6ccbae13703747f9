"""How well the steps of a user's own runs are predicted: a table of runs becomes errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from axonn_tune.api.searching import MachineLike, build_search
from axonn_tune.errors import AxonnTuneError, InputError
from axonn_tune.io.files import FileName
from axonn_tune.io.presets import load_engine
from axonn_tune.io.tables import load_table
from axonn_tune.reproduce.runs import Run
from axonn_tune.reproduce.score import JudgedRun, Score, score_of
from axonn_tune.search.one_layout import best_of_layout, held_to
from axonn_tune.search.rank import Each
from axonn_tune.search.search import Search
from axonn_tune.spec.checks import require_choice, whole_number
from axonn_tune.spec.layout import Layout

REQUIRED_COLUMNS = ("model", "gpus", "layout", "global_batch", "step_seconds")
# Columns of whole numbers, and of texts, that are options of a search.
_COUNTS = ("gpus", "global_batch", "micro_batch", "seq_len", "virtual_stages")
_TEXTS = ("strategy", "engine", "dtype", "precision", "attention", "recompute")
# What a log told besides; it enters no prediction.
_REMARKS = ("spread_fraction", "n_steps", "source")
OPTIONAL_COLUMNS = (*_COUNTS[2:], *_TEXTS, "machine", "memory_gib", "status", "trace", *_REMARKS)
_STATUSES = ("ok", "oom")


def score(table: FileName, machine: str | None = None, each: Each = iter) -> Score:
    """Predict every run of a table, each at its own layout.

    Parameters
    ----------
    table : path
        A CSV file with the columns `REQUIRED_COLUMNS` and any of `OPTIONAL_COLUMNS`.
    machine : str or None
        The machine of the rows that name none.
    each : callable
        What passes the rows on while they are predicted, such as a bar of progress.

    Returns
    -------
    Score
        With ``mean_error``, ``timed`` (steps) and ``memory`` (verdicts).

    Raises
    ------
    AxonnTuneError
        The table, or a row of it, is wrong; the message names the row.
    """
    return score_of(judged_runs(table, machine, each))


def judged_runs(
    table: FileName, machine: MachineLike | None = None, each: Each = iter
) -> list[JudgedRun]:
    """Return every run of a table with its prediction; see `score`."""
    rows = load_table(table, REQUIRED_COLUMNS, OPTIONAL_COLUMNS)
    judged = []
    for number, row in each(list(enumerate(rows, start=1))):
        try:
            judged.append(_judged(table, row, machine))
        except AxonnTuneError as error:
            raise InputError(f"{table}: row {number}: {error}") from None
    return judged


def _judged(table: FileName, row: Mapping[str, str], machine: MachineLike | None) -> JudgedRun:
    """Return the run of a row with its prediction."""
    status = row.get("status", "ok")
    search, layout = _search(row, machine)
    require_choice("run", "status", status, _STATUSES)
    published = {"step_seconds": _positive("step_seconds", row["step_seconds"])}
    if "memory_gib" in row:
        published["memory_gib"] = _positive("memory_gib", row["memory_gib"])
    prediction = best_of_layout(search, layout)
    scenario = search.scenario
    engine = scenario.strategy.engine
    run = Run(
        system=engine.title or scenario.strategy.name,
        group=f"{engine.name or scenario.strategy.name} on {scenario.machine.name}",
        subject=f"{row['model']}, {row['layout']}, {row['gpus']} GPUs",
        search=search,
        published=published,
        certainty="table",
        source=str(table),
    )
    trace = str(Path(table).parent / row["trace"]) if "trace" in row else ""
    return JudgedRun(run, prediction, status == "oom", trace)


def _search(row: Mapping[str, str], machine: MachineLike | None) -> tuple[Search, Layout]:
    """Return the search that is held to all that a row states but its layout, and the layout."""
    options: dict[str, Any] = {name: row[name] for name in _TEXTS if name in row}
    options |= {name: _count(name, row[name]) for name in _COUNTS if name in row}
    if "engine" in options and "strategy" not in options:
        options["strategy"] = load_engine(options["engine"]).strategies[0]
    search = build_search(
        row["model"],
        cast(int, options.pop("gpus")),
        row.get("machine", machine),
        include_oom=True,
        **options,
    )
    search, layout = held_to(search, row["layout"])
    if layout.n_ranks != search.scenario.job.n_gpus:
        raise InputError(f"layout {layout} has {layout.n_ranks} ranks, not {row['gpus']}")
    return search, layout


def _count(name: str, text: str) -> int:
    """Return the whole number of a cell."""
    number = whole_number(text)
    if number is None:
        raise InputError(f"{name} is '{text[:40]}'; allowed: a whole number")
    return number


def _positive(name: str, text: str) -> float:
    """Return the number of a cell."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise InputError(f"{name} is '{text[:40]}'; allowed: a number above 0")
    return value
