"""A row of a table of runs becomes a search that is held to all that the row states."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from axonn_tune.api.searching import MachineLike, ModelLike, build_search
from axonn_tune.errors import InputError
from axonn_tune.io.files import FileName
from axonn_tune.io.presets import load_engine
from axonn_tune.io.schema import SchemaError, build
from axonn_tune.io.tables import load_table
from axonn_tune.options import JobOptions, LayoutOptions, declared
from axonn_tune.search.one_layout import held_to
from axonn_tune.search.search import Search
from axonn_tune.spec.checks import positive_number, whole_number
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.model import Model
from axonn_tune.strategies.named import names_of_axes

_REQUIRED = ("gpus", "global_batch", "step_seconds")
_ONE_LAYOUT = "allowed: either a layout, or sizes of axes in columns of their names"
# The options that say which configurations are searched; a row states its own.
_OF_MANY = ("global_batch_tokens", "within", "max_tp", "gx", "gy", "gz", "gdata", "fix")
_OPTIONS = declared(JobOptions, LayoutOptions, without=_OF_MANY)
# The fields of a model that hold one value each and that predictions read.
_UNREAD = ("name", "source", "seq_len_key", "not_modelled", "mtp_modules", "activation")
_SIZES = {
    field.name: hint
    for field, hint in zip(fields(Model), get_type_hints(Model).values(), strict=True)
    if {hint, *get_args(hint)} & {int, bool, str} and field.name not in _UNREAD
}
OPTION_COLUMNS = tuple(_OPTIONS)
SIZE_COLUMNS = tuple(_SIZES)
_WHOLE = re.compile(r"^(\d+)\.0+$")
_MEASURED = ("step_seconds", "memory_gib", "status", "trace")
# What a log told besides; it enters no prediction.
_REMARKS = ("spread_fraction", "n_steps", "source")


def load_runs(table: FileName) -> list[dict[str, str]]:
    """Return the rows of a table of runs by name of their column.

    Raises
    ------
    FileError
        A column is unknown or missing, or a row leaves a required one empty.
    """
    known = (
        *("model", "gpus", "machine", "layout"),
        *OPTION_COLUMNS,
        *names_of_axes(),
        *SIZE_COLUMNS,
    )
    optional = dict.fromkeys((*known, *_MEASURED, *_REMARKS))
    rows = load_table(table, _REQUIRED, [name for name in optional if name not in _REQUIRED])
    return [{name: _without_zeros(name, text) for name, text in row.items()} for row in rows]


def search_of(row: Mapping[str, str], machine: MachineLike | None) -> tuple[Search, Layout]:
    """Return the search that is held to all that a row states but its layout, and the layout.

    Raises
    ------
    InputError
        A cell is wrong, or the layout has another number of ranks than the row.
    """
    options: dict[str, Any] = {
        name: _value(name, hint, row[name]) for name, (hint, _) in _OPTIONS.items() if name in row
    }
    if "engine" in options and "strategy" not in options:
        options["strategy"] = load_engine(options["engine"]).strategies[0]
    gpus = _count("gpus", row["gpus"])
    search = build_search(
        _model(row), gpus, row.get("machine", machine), include_oom=True, **options
    )
    search, layout = held_to(search, layout_of(row))
    if layout.n_ranks != gpus:
        raise InputError(
            f"layout {layout} has {layout.n_ranks} ranks, not {gpus}; allowed: as many as gpus"
        )
    return search, layout


def layout_of(row: Mapping[str, str]) -> str:
    """Return the text of a row's layout, which may have a column for each axis.

    Raises
    ------
    InputError
        The row has no layout, or has it twice.
    """
    sizes = {axis: _count(axis, row[axis]) for axis in names_of_axes() if axis in row}
    if "layout" in row and sizes:
        raise InputError(
            f"the layout is given twice, as '{row['layout'][:40]}' and by the size of "
            f"{', '.join(sizes)}; {_ONE_LAYOUT}"
        )
    if "layout" in row:
        return row["layout"]
    if not sizes:
        raise InputError(f"there is no layout; {_ONE_LAYOUT}")
    # A table of several strategies has a column for each of their axes.
    split = {axis: size for axis, size in sizes.items() if size != 1} or sizes
    return ",".join(f"{axis}={size}" for axis, size in split.items())


def model_name(row: Mapping[str, str]) -> str:
    """Return what a row calls its model, or what its sizes say."""
    unnamed = f"{row.get('n_layers')} layers of {row.get('hidden_size')}"
    return row.get("model", unnamed)


def _model(row: Mapping[str, str]) -> ModelLike:
    """Return what a row calls its model, or the model of its sizes."""
    stated = {name: _value(name, hint, row[name]) for name, hint in _SIZES.items() if name in row}
    if not stated.keys() - {"seq_len"}:
        if "model" not in row:
            raise InputError("there is no model; allowed: a model, or its sizes such as n_layers")
        return row["model"]
    try:
        return build(Model, {"name": model_name(row), **stated})
    except SchemaError as error:
        raise InputError(f"the model's sizes: {error}") from None


def _without_zeros(name: str, text: str) -> str:
    """Return a cell in which 8.0 is 8: pandas writes whole numbers so where cells are empty."""
    return text if name == "model" else _WHOLE.sub(r"\1", text)


def _value(name: str, hint: Any, text: str) -> Any:
    """Return the value of a cell in the type of its column."""
    kinds = get_args(hint) or (hint,)
    if bool in kinds:
        values = {"true": True, "yes": True, "false": False, "no": False}
        if text.lower() not in values:
            raise InputError(f"{name} is '{text[:40]}'; allowed: {', '.join(values)}")
        return values[text.lower()]
    if str in kinds:
        return text
    return _count(name, text) if int in kinds else positive(name, text)


def _count(name: str, text: str) -> int:
    """Return the whole number of a cell."""
    number = whole_number(text)
    if number is None:
        raise InputError(f"{name} is '{text[:40]}'; allowed: a whole number")
    return number


def positive(name: str, text: str) -> float:
    """Return the number of a cell."""
    value = positive_number(text)
    if value is None:
        raise InputError(f"{name} is '{text[:40]}'; allowed: a number above 0")
    return value
