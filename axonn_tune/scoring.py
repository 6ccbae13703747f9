"""How well the steps of a user's own runs are predicted: a table of runs becomes errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from axonn_tune.api import build_search
from axonn_tune.errors import AxonnTuneError, InputError
from axonn_tune.io.files import FileName
from axonn_tune.io.presets import load_engine
from axonn_tune.io.tables import load_table
from axonn_tune.reproduce.runs import Run
from axonn_tune.reproduce.score import Score, score_runs
from axonn_tune.search.one_layout import held_to
from axonn_tune.search.rank import Each
from axonn_tune.search.search import Search
from axonn_tune.spec.checks import require_choice

REQUIRED_COLUMNS = ("model", "gpus", "layout", "global_batch", "step_seconds")
# Columns of whole numbers, and of texts, that are options of a search.
_COUNTS = ("gpus", "global_batch", "micro_batch", "seq_len", "virtual_stages")
_TEXTS = ("strategy", "engine", "dtype", "attention", "recompute")
OPTIONAL_COLUMNS = (*_COUNTS[2:], *_TEXTS, "machine", "memory_gib", "status")
_STATUSES = ("ok", "oom")


def score(table: FileName, machine: str | None = None, each: Each = iter) -> Score:
    """Predict every run of a table, each at its own layout.

    Parameters
    ----------
    table : path
        A CSV file with the columns `REQUIRED_COLUMNS` and any of `OPTIONAL_COLUMNS`.
    machine : str or None
        The machine of the rows that name none.

    Raises
    ------
    AxonnTuneError
        The table, or a row of it, is wrong; the message names the row.
    """
    rows = load_table(table, REQUIRED_COLUMNS, OPTIONAL_COLUMNS)
    runs = [_run(table, number, row, machine) for number, row in enumerate(rows, start=1)]
    ran_out = [row.get("status") == "oom" for row in rows]
    return score_runs(runs, ran_out, each)


def _run(table: FileName, number: int, row: Mapping[str, str], machine: str | None) -> Run:
    """Return the run of a row."""
    try:
        search = _search(row, machine)
        require_choice("run", "status", row.get("status", "ok"), _STATUSES)
        published = {"step_seconds": _positive("step_seconds", row["step_seconds"])}
        if "memory_gib" in row:
            published["memory_gib"] = _positive("memory_gib", row["memory_gib"])
    except AxonnTuneError as error:
        raise InputError(f"{table}: row {number}: {error}") from None
    scenario = search.scenario
    engine = scenario.strategy.engine
    return Run(
        system=engine.title or scenario.strategy.name,
        group=f"{engine.name or scenario.strategy.name} on {scenario.machine.name}",
        subject=f"{row['model']}, {row['layout']}, {row['gpus']} GPUs",
        search=search,
        published=published,
        certainty="table",
        source=str(table),
    )


def _search(row: Mapping[str, str], machine: str | None) -> Search:
    """Return the search that is held to the layout of a row, and to all else that it states."""
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
    return search.of_layout(layout)


def _count(name: str, text: str) -> int:
    """Return the whole number of a cell."""
    if not text.isascii() or not text.isdigit():
        raise InputError(f"{name} is '{text}'; allowed: a whole number")
    return int(text)


def _positive(name: str, text: str) -> float:
    """Return the number of a cell."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise InputError(f"{name} is '{text}'; allowed: a number above 0")
    return value
