"""How well the steps of a user's own runs are predicted: a table of runs becomes errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from axonn_tune.api.run_labels import run_labels
from axonn_tune.api.searching import DEFAULT_MACHINE, MachineLike, loaded_machine
from axonn_tune.api.table_rows import load_runs, positive, search_of
from axonn_tune.errors import AxonnTuneError, InputError
from axonn_tune.io.files import FileName
from axonn_tune.reproduce.runs import Run
from axonn_tune.reproduce.score import JudgedRun, Score, score_of
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.search.rank import Each
from axonn_tune.spec.checks import require_choice
from axonn_tune.spec.machine import Machine
from axonn_tune.units import counted, gib

_STATUSES = ("ok", "oom")
# What passes on a remark, such as which machine was taken.
Say: TypeAlias = Callable[[str], object]


def unsaid(remark: str) -> None:
    """Drop a remark, as calls from Python do by default."""


def score(
    table: FileName, machine: str | None = None, each: Each = iter, say: Say = unsaid
) -> Score:
    """Predict every run of a table, each at its own layout.

    Parameters
    ----------
    table : path
        A CSV file with a run in each row; docs/score.md says which columns it can have.
    machine : str or None
        The machine of the rows that name none; None stands for Perlmutter.
    each : callable
        What passes the rows on while they are predicted, such as a bar of progress.
    say : callable
        What passes a remark on: that the machine of some rows is the default one.

    Returns
    -------
    Score
        Holds the mean error (``mean_error``), the error of each step (``timed``), and whether each
        run fits in memory as predicted (``memory``).

    Raises
    ------
    AxonnTuneError
        The table, or a row of it, is wrong; the message names the row.
    """
    return score_of(judged_runs(table, machine, each, say))


def judged_runs(
    table: FileName,
    machine: MachineLike | None = None,
    each: Each = iter,
    say: Say = unsaid,
) -> list[JudgedRun]:
    """Return every run of a table with its prediction; see `score`."""
    rows = load_runs(table)
    given = loaded_machine(machine)
    judged = []
    for number, row in each(list(enumerate(rows, start=1))):
        try:
            judged.append(_judged(table, row, given))
        except AxonnTuneError as error:
            raise InputError(f"{table}: row {number}: {error}") from None
    if machine is None:
        _say_default(table, rows, say)
    labels = run_labels(rows, [one.prediction.configuration for one in judged])
    return [
        replace(one, run=replace(one.run, subject=label))
        for one, label in zip(judged, labels, strict=True)
    ]


def _say_default(table: FileName, rows: Sequence[Mapping[str, str]], say: Say) -> None:
    """Say how many rows name no machine, so that they are predicted on the default one."""
    n_unnamed = sum("machine" not in row for row in rows)
    if n_unnamed:
        say(
            f"{table}: {n_unnamed} of {counted(len(rows), 'run')} without a machine: predicted on "
            f"{DEFAULT_MACHINE} (the default; choose with --machine)"
        )


def _judged(table: FileName, row: Mapping[str, str], machine: Machine) -> JudgedRun:
    """Return the run of a row with its prediction; only the whole table tells its name."""
    status = row.get("status", "ok")
    search, layout = search_of(row, machine)
    require_choice("run", "status", status, _STATUSES)
    published = {"step_seconds": positive("step_seconds", row["step_seconds"])}
    if "memory_gib" in row:
        published["memory_gib"] = _memory_gib(row["memory_gib"], search.scenario.machine)
    prediction = best_of_layout(search, layout)
    scenario = search.scenario
    engine = scenario.strategy.engine
    run = Run(
        system=engine.title or scenario.strategy.name,
        group=f"{engine.name or scenario.strategy.name} on {scenario.machine.name}",
        subject="",
        search=search,
        published=published,
        certainty="table",
        source=str(table),
    )
    trace = str(Path(table).parent / row["trace"]) if "trace" in row else ""
    return JudgedRun(run, prediction, status == "oom", trace)


def _memory_gib(text: str, machine: Machine) -> float:
    """Return the measured memory in a cell.

    A GPU of the run may have more than that of the profile: some H100 have 96 GB. Above twice the
    memory of the profile's GPU, the number must have another unit.
    """
    held = positive("memory_gib", text)
    largest = 2.0 * gib(machine.gpu.memory_bytes.value)
    if held > largest:
        raise InputError(
            f"memory_gib is '{text[:40]}'; allowed: up to {largest:.4g} GiB, twice the memory of a "
            f"GPU of {machine.name}"
        )
    return held
