"""Build frozen dataclasses from plain data, driven by their type hints, and turn them back.

The keys of a file are the names of the fields. The suffix of a field's name selects the unit
in which its value may be written. A dataclass with a method `check_possible` refuses there what
files must not say. All problems are collected before an error is raised. A
profile has thousands of measured points, so these may be written as a table: one text with a
header of names and then one line of comma-separated values for each point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import takewhile
from types import NoneType, UnionType
from typing import (
    Any,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from axonn_tune.errors import InputError, choices_hint
from axonn_tune.spec.checks import LARGEST_BYTES, LARGEST_COUNT
from axonn_tune.spec.layout import Layout
from axonn_tune.spec.quantity import ORIGINS, Quantity
from axonn_tune.units import format_quantity, parse_quantity, suffix_of

T = TypeVar("T")
KeyPath: TypeAlias = tuple[str | int, ...]

SHOWN_PROBLEMS = 20
MOST_PROBLEMS = 1000  # after which no more are looked for
_FAILED = object()


class Problem(NamedTuple):
    """A problem of the data and the path of its key; the text names the key, too."""

    path: KeyPath
    text: str


Reader: TypeAlias = Callable[[object, KeyPath, list[Problem]], Any]


class SchemaError(InputError):
    """Data does not fit its dataclass; the error holds every problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(join_problems([problem.text for problem in problems]))


def join_problems(texts: Sequence[str]) -> str:
    """Return all problems in one line; a very long list is cut and its rest is counted."""
    shown = list(texts[:SHOWN_PROBLEMS])
    if len(texts) > SHOWN_PROBLEMS:
        shown.append(f"and {len(texts) - SHOWN_PROBLEMS} more")
    return "; ".join(shown)


def dotted(path: KeyPath) -> str:
    """Return a path as text: ``("links", 1, "name")`` becomes ``links[1].name``."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


def build(cls: type[T], data: object) -> T:
    """Return an instance of the dataclass `cls` from nested dicts, lists, numbers and text.

    Raises
    ------
    SchemaError
        Keys are unknown or missing, values have the wrong type, or the dataclass refuses them.
    """
    problems: list[Problem] = []
    result = _reader(cast(Any, cls), "")(data, (), problems)
    if problems:
        raise SchemaError(problems)
    return cast(T, result)


def to_dict(instance: Any) -> dict[str, Any]:
    """Return plain data from which `build` makes an equal instance; defaults are left out."""
    return cast(dict[str, Any], _plain(instance, ""))


@cache
def _reader(hint: Any, name: str) -> Reader:
    """Return the reader of values of type `hint`; the field `name` fixes their unit."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, UnionType):
        inner = [argument for argument in arguments if argument is not NoneType]
        if len(inner) == 1 and len(arguments) == 2:
            return _optional(_reader(inner[0], name))
        if len(inner) == len(arguments) and all(is_dataclass(argument) for argument in inner):
            return _one_of([_reader(argument, name) for argument in inner])
    elif origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        list_reader = _sequence(_reader(arguments[0], name))
        return _table(list_reader, arguments[0]) if name.endswith("points") else list_reader
    elif origin is Mapping and arguments[0] is str:
        return _mapping(_reader(arguments[1], name))
    elif hint is Layout:
        return _layout
    elif is_dataclass(hint):
        return _record(cast(type[Any], hint), name)
    elif hint is float:
        return _number(name)
    elif hint is int:
        return _count_up_to(LARGEST_BYTES if name == "nbytes" else LARGEST_COUNT)
    elif hint in _SCALARS:
        return _SCALARS[hint]
    raise TypeError(f"schema: field '{name}' has a type that files cannot hold: {hint!r}")


@cache
def _hints(cls: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass; there is a reader for each field's unit."""
    return get_type_hints(cls)


def _record(cls: type, name: str) -> Reader:
    names: dict[object, str] = {_file_key(cls, item.name): item.name for item in fields(cls)}
    required = [
        _file_key(cls, item.name)
        for item in fields(cls)
        if item.default is MISSING and item.default_factory is MISSING
    ]
    expected = "keys " + ", ".join(required or [str(key) for key in names])
    if cls is Quantity:
        expected = f"{{value: ..., origin: {' | '.join(ORIGINS)}, source: ...}}"

    @cache
    def reader_of(field: str) -> Reader:
        """Return the reader of a field; most files hold few of those that they may hold."""
        unit_name = name if cls is Quantity and field == "value" else field
        return _reader(_hints(cls)[field], unit_name)

    def read(value: object, path: KeyPath, problems: list[Problem]) -> Any:
        if not isinstance(value, dict):
            return _refuse(value, expected, path, problems)
        n_before = len(problems)
        arguments = {}
        for key, item in value.items():
            field = names.get(key)
            if field is None:
                unknown = (*path, str(key))
                # Nobody reads the hint of the millionth problem, which would take its time.
                is_shown = len(problems) < SHOWN_PROBLEMS
                hint = choices_hint(str(key), [str(known) for known in names]) if is_shown else ""
                problems.append(Problem(unknown, f"{dotted(unknown)}: unknown key{hint}"))
            else:
                arguments[field] = reader_of(field)(item, (*path, key), problems)
        missing = [dotted((*path, key)) for key in required if key not in value]
        if missing:
            problems.append(Problem(path, f"{', '.join(missing)}: missing"))
        if len(problems) > n_before:
            return _FAILED
        try:
            instance = cls(**arguments)
            if hasattr(instance, "check_possible"):
                instance.check_possible()
            return instance
        except InputError as error:
            problems.append(_failed_check(str(error), path, names))
            return _FAILED

    return read


def _file_key(cls: type[Any], field: str) -> str:
    """Return the key under which files hold a field: its name, unless `FILE_KEYS` says another."""
    keys: Mapping[str, str] = getattr(cls, "FILE_KEYS", {})
    return keys.get(field, field)


def _layout(value: object, path: KeyPath, problems: list[Problem]) -> Any:
    """Read a layout, which files hold as sizes by axis, or as ``{sizes: {axis: size}}``."""
    if isinstance(value, dict) and list(value) == ["sizes"]:
        value, path = value["sizes"], (*path, "sizes")
    n_before = len(problems)
    sizes = _mapping(_count_up_to(LARGEST_COUNT))(value, path, problems)
    return _FAILED if len(problems) > n_before else Layout(sizes)


def _failed_check(message: str, path: KeyPath, known: Container[object]) -> Problem:
    """Turn the message of a dataclass, ``owner: field is ...``, into a problem of its key."""
    field_path, _, rest = message.partition(": ")[2].partition(" ")
    keys = field_path.split(".")
    if rest and keys[0] in known:
        path = (*path, *keys)
        return Problem(path, f"{dotted(path)}: {rest}")
    return Problem(path, f"{dotted(path)}: {message}" if path else message)


def _optional(reader: Reader) -> Reader:
    def read(value: object, path: KeyPath, problems: list[Problem]) -> Any:
        return None if value is None else reader(value, path, problems)

    return read


def _one_of(readers: Sequence[Reader]) -> Reader:
    """Return a reader that tries several records in turn.

    If none of them accepts a value, the problems of the first one are reported.
    """

    def read(value: object, path: KeyPath, problems: list[Problem]) -> Any:
        for reader in readers:
            problems_here: list[Problem] = []
            result = reader(value, path, problems_here)
            if not problems_here:
                return result
        return readers[0](value, path, problems)

    return read


def _sequence(reader: Reader) -> Reader:
    def read(value: object, path: KeyPath, problems: list[Problem]) -> Any:
        if not isinstance(value, list):
            return _refuse(value, "a list", path, problems)
        items = enumerate(value)
        return tuple(reader(item, (*path, i), problems) for i, item in _bearable(items, problems))

    return read


def _bearable(entries: Iterable[T], problems: list[Problem]) -> Iterator[T]:
    """Yield entries until there are more problems than anybody reads."""
    return takewhile(lambda _: len(problems) < MOST_PROBLEMS, entries)


def _table(list_reader: Reader, cls: type) -> Reader:
    """Return a reader of a text with comma-separated rows below a header, or of a list."""

    def read(value: object, path: KeyPath, problems: list[Problem]) -> Any:
        if not isinstance(value, str):
            return list_reader(value, path, problems)
        hints = _hints(cls)
        header, *lines = value.strip().splitlines() or [""]
        names = [name.strip() for name in header.split(",")]
        rows = []
        for line in lines:
            cells = [cell.strip() for cell in line.split(",")]
            # A row may be too long or too short: the record's reader then names an unknown key
            # such as "column 7", or the missing one.
            extra_names = [f"column {i + 1}" for i in range(len(names), len(cells))]
            row = dict(zip([*names, *extra_names], cells, strict=False))
            rows.append({key: _cell(text, hints.get(key)) for key, text in row.items()})
        return list_reader(rows, path, problems)

    return read


def _cell(text: str, hint: Any) -> object:
    """Return a cell's value; one of the wrong type stays text, which its reader refuses."""
    if hint is bool:
        return {"true": True, "false": False}.get(text, text)
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            return text
    return text


def _mapping(reader: Reader) -> Reader:
    def read(value: object, path: KeyPath, problems: list[Problem]) -> Any:
        if not isinstance(value, dict):
            return _refuse(value, "a mapping", path, problems)
        for key in value:
            if not isinstance(key, str):
                _refuse(key, "a key of text, in quotes", (*path, str(key)), problems)
        return {
            key: reader(item, (*path, str(key)), problems)
            for key, item in _bearable(value.items(), problems)
        }

    return read


def _number(name: str) -> Reader:
    unit_name = "_" + name  # A field that is just named `seconds` has this suffix, too.

    def read(value: object, path: KeyPath, problems: list[Problem]) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return _refuse(value, "a number", path, problems)
        try:
            number = parse_quantity(value, unit_name)
        except InputError as error:
            complaint = str(error).removeprefix(f"{unit_name}: ")
            problems.append(Problem(path, f"{dotted(path)}: {complaint}"))
            return _FAILED
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            return _refuse(value, "a finite number", path, problems)
        return number

    return read


def _count_up_to(largest: int) -> Reader:
    def read(value: object, path: KeyPath, problems: list[Problem]) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            return _refuse(value, "a whole number", path, problems)
        if abs(value) > largest:
            return _refuse(value, f"a whole number up to {largest}", path, problems)
        return value

    return read


def _flag(value: object, path: KeyPath, problems: list[Problem]) -> Any:
    return value if isinstance(value, bool) else _refuse(value, "true or false", path, problems)


def _text(value: object, path: KeyPath, problems: list[Problem]) -> Any:
    return value if isinstance(value, str) else _refuse(value, "text, in quotes", path, problems)


_SCALARS: dict[Any, Reader] = {bool: _flag, str: _text}


def _refuse(value: object, allowed: str, path: KeyPath, problems: list[Problem]) -> object:
    where = f"{dotted(path)}: " if path else ""
    problems.append(Problem(path, f"{where}got {_shown(value)}; allowed: {allowed}"))
    return _FAILED


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict | list | tuple | set):
        return "a list" if isinstance(value, list) else "a mapping"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Layout):
        return dict(value.sizes) if value.is_grid else {"sizes": dict(value.sizes)}
    if is_dataclass(value) and not isinstance(value, type):
        result = {}
        always_written = getattr(value, "ALWAYS_WRITTEN", ())
        for item in fields(value):
            entry = getattr(value, item.name)
            if item.name not in always_written and _is_default(item, entry):
                continue
            if isinstance(value, Quantity) and item.name == "value":
                result[item.name] = _with_unit(entry, name)
            else:
                result[_file_key(type(value), item.name)] = _plain(entry, item.name)
        return result
    if isinstance(value, Mapping):
        return {key: _plain(item, name) for key, item in value.items()}
    if isinstance(value, tuple | list):
        if name.endswith("points"):
            return _table_text(value)
        return [_plain(item, name) for item in value]
    # A float64 of NumPy is a float, too, and becomes a plain one.
    return float(value) if isinstance(value, float) else value


def _table_text(points: Sequence[Any]) -> str:
    names = [item.name for item in fields(points[0])]
    rows = [",".join(_cell_text(getattr(point, name)) for name in names) for point in points]
    return "\n".join([",".join(names), *rows]) + "\n"


def _cell_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return repr(float(value)) if isinstance(value, float) else str(value)


def _is_default(item: Field[Any], value: Any) -> bool:
    if item.default_factory is not MISSING:
        return bool(value == item.default_factory())
    return item.default is not MISSING and bool(value == item.default)


def _with_unit(value: float, name: str) -> str | float:
    """Return the shortest text with a unit that reads back as exactly `value`, or the number."""
    unit_name = "_" + name
    if suffix_of(unit_name) not in (None, "_fraction"):
        for digits in (4, 6, 9, 12, 15, 17):
            text = format_quantity(value, unit_name, digits)
            if parse_quantity(text, unit_name) == value:
                return text
    return float(value)
