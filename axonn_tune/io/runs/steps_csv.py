"""Read runs from any CSV file: rows that state the same facts are the steps of one run."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.runs.logged_run import LoggedRun, layout_text, stated
from axonn_tune.spec.checks import positive_number
from axonn_tune.units import GIB_BYTES

# The columns of a table of runs by what other tables call them.
_NAMES = {
    "model": ("model", "model_name"),
    "gpus": ("gpus", "n_gpus", "num_gpus", "world_size", "ngpus"),
    "layout": ("layout", "grid"),
    "global_batch": ("global_batch", "global_batch_size", "gbs", "train_batch_size"),
    "micro_batch": ("micro_batch", "micro_batch_size", "mbs", "mbz"),
    "seq_len": ("seq_len", "seq_length", "sequence_length", "seq"),
    "dtype": ("dtype",),
    "precision": ("precision",),
    "attention": ("attention",),
    "engine": ("engine",),
    "strategy": ("strategy",),
    "recompute": ("recompute",),
    "virtual_stages": ("virtual_stages", "vpp"),
    "machine": ("machine",),
    "status": ("status",),
    "tensor": ("tensor", "tp"),
    "context": ("context", "cp"),
    "data": ("data", "dp"),
    "pipeline": ("pipeline", "pp"),
    "expert": ("expert", "ep"),
    "shard": ("shard", "fsdp"),
    "step_seconds": ("step_seconds", "step_time", "step_time_s", "iteration_time", "seconds"),
    "memory_gib": ("memory_gib", "max_memory_gib", "peak_memory_gib"),
}
_MILLISECONDS = ("step_time_ms", "iteration_time_ms", "time_per_iteration_ms", "step_ms")
_AXES = ("tensor", "context", "data", "pipeline", "expert", "shard")
_MEASURED = ("step_seconds", "memory_gib", "status", "layout", *_AXES)
_STATUSES = ("", "ok", "oom")
# The unit at the end of a column's name.
_IN_MILLISECONDS = re.compile(r"(?:\b|_)\(?ms\)?$")


def parse_csv(text: str, path: str, columns: Mapping[str, str]) -> list[LoggedRun]:
    """Return the runs of a CSV file in the order in which they begin.

    Parameters
    ----------
    columns : mapping of str to str
        The columns of the file that the user names, by the column of a table of runs.

    Raises
    ------
    FileError
        The file has no column of step times, or a number is none.
    """
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    try:
        reader = csv.DictReader(io.StringIO(lines))
        found = _columns(path, list(reader.fieldnames or []), columns)
        runs: dict[tuple[tuple[str, str], ...], _Measured] = {}
        for number, row in enumerate(reader, start=1):
            cells = {name: (row.get(column) or "").strip() for name, column in found.items()}
            where = f"{path}: row {number}"
            measured = runs.setdefault(tuple(_facts(cells, where).items()), _Measured())
            if _is_out_of_memory(cells, where):
                measured.out_of_memory = True
                continue
            seconds = _amount(where, "step time", cells["step_seconds"]) * _unit(found)
            measured.step_seconds.append(seconds)
            if cells.get("memory_gib"):
                measured.memory_gib.append(_amount(where, "memory", cells["memory_gib"]))
    except csv.Error as error:
        raise FileError(f"{path}: malformed CSV: {error}") from None
    return [
        LoggedRun(
            dict(facts),
            tuple(measured.step_seconds),
            memory_bytes=max(measured.memory_gib, default=0.0) * GIB_BYTES,
            out_of_memory=measured.out_of_memory,
        )
        for facts, measured in runs.items()
    ]


@dataclass
class _Measured:
    """What the rows of one run measured."""

    step_seconds: list[float] = field(default_factory=list)
    memory_gib: list[float] = field(default_factory=list)
    out_of_memory: bool = False


def _columns(path: str, present: list[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the file's column of each column of a table of runs."""
    for name, column in given.items():
        if name not in _NAMES:
            raise InputError(f"--column {name}={column}: allowed before =: {', '.join(_NAMES)}")
        if column not in present:
            raise FileError(f"{path}: no column '{column}'; it has {', '.join(present)[:200]}")
    lowered = {column.strip().lower(): column for column in present}
    found = {
        name: lowered[alias]
        for name, aliases in (*_NAMES.items(), ("step_seconds", _MILLISECONDS))
        for alias in aliases
        if alias in lowered
    }
    found |= given
    if "step_seconds" not in found:
        raise FileError(f"{path}: no column of step times; name it with --column step_seconds=NAME")
    return found


def _facts(cells: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the facts that a row states; sizes of axes become a layout."""
    axes = {axis: cells[axis] for axis in _AXES if cells.get(axis)}
    for axis, size in axes.items():
        if not size.isdecimal():
            raise FileError(f"{where}: {axis} is '{size[:40]}'; allowed: a whole number")
    layout = layout_text({axis: int(size) for axis, size in axes.items()}) if axes else None
    facts = {name: cell for name, cell in cells.items() if name not in _MEASURED}
    return stated({**facts, "layout": cells.get("layout") or layout})


def _is_out_of_memory(cells: Mapping[str, str], where: str) -> bool:
    """Return whether a row says that its run ran out of memory; its time then says nothing."""
    status = cells.get("status", "").lower()
    if status not in _STATUSES:
        raise FileError(f"{where}: status is '{status[:40]}'; allowed: ok, oom")
    return status == "oom"


def _amount(where: str, name: str, text: str) -> float:
    """Return a number above 0."""
    value = positive_number(text)
    if value is None:
        raise FileError(f"{where}: the {name} is '{text[:40]}'; allowed: a number above 0")
    return value


def _unit(found: Mapping[str, str]) -> float:
    """Return how many seconds one unit of the column of step times is, as its name says."""
    return 1e-3 if _IN_MILLISECONDS.search(found["step_seconds"].lower()) else 1.0
