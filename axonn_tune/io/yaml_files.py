"""Read and write YAML.

Words without quotes follow YAML 1.2: ``2e11`` is a number and ``no`` is text. A mapping with
duplicate keys is refused, and so are tags, deep nesting, and a text that is small but becomes huge
once its aliases are written out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import yaml

from axonn_tune.errors import FileError, InputError
from axonn_tune.io.bases import BASE, on_base
from axonn_tune.io.files import FileName, read_text, write_text
from axonn_tune.io.schema import (
    SHOWN_PROBLEMS,
    Problem,
    SchemaError,
    build,
    join_problems,
    to_dict,
)

try:
    from yaml import CSafeDumper as _SafeDumper
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # PyYAML was built without libyaml.
    from yaml import SafeDumper as _SafeDumper  # type: ignore[assignment]
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

T = TypeVar("T")
# Returns the file that a file names as its base.
FindBase: TypeAlias = Callable[[str, FileName], FileName]

_TAG = "tag:yaml.org,2002:"
# Bounds of a text, once its aliases are written out. Nothing that is read is nested deeper than
# ten levels, and half a million values take three seconds.
_MAX_DEPTH = 100
_TOO_DEEP = f"nested deeper than {_MAX_DEPTH} levels"
_MAX_CHARACTERS = 2**24
_CHARACTERS_PER_VALUE = 32
_FLOAT = (
    r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|[0-9]+[eE][-+]?[0-9]+|\.inf)|\.nan"
)
# Each word without quotes that is not text: its tag, its pattern and the characters with which
# it may begin.
_PLAIN_WORDS = (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", tuple("-+0123456789")),
    ("float", _FLOAT, tuple("-+.0123456789")),
    ("merge", r"<<", ("<",)),
)


class _Loader(_SafeLoader):
    """A safe loader that reads the words of YAML 1.2 and refuses duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key '{key.value}' appears twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(_SafeDumper):
    """A safe dumper that quotes text which YAML 1.1 or 1.2 would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent(self, data: Any) -> None:
        """Write the outermost collection as a block; the innermost ones stay on one line."""
        node = self.represent_data(data)
        if isinstance(node, yaml.CollectionNode):
            node.flow_style = False
        self.serialize(node)


def _represent_text(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar(_TAG + "str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first_characters in _PLAIN_WORDS:
    _regex = re.compile(rf"(?:{_pattern})\Z")
    _Loader.add_implicit_resolver(_TAG + _tag, _regex, list(_first_characters))
    _Dumper.add_implicit_resolver(_TAG + _tag, _regex, list(_first_characters))


def load_yaml(
    path: FileName,
    cls: type[T],
    version_key: str = "",
    newest: int = 0,
    find_base: FindBase | None = None,
    settle: Callable[[T, T], T] | None = None,
) -> T:
    """Return an instance of the dataclass `cls` from a YAML file.

    Parameters
    ----------
    version_key : str
        The key that holds the version of the file's format, if it has one.
    newest : int
        The newest version of the format that can be read.
    find_base : callable or None
        The function that finds the base which a file names (see `bases.on_base`); without one
        files have none.
    settle : callable or None
        What changes an instance that has a base, given both, and then given the base's own base:
        what it takes from these may not hold for it.

    Raises
    ------
    FileError
        The file or its base is missing or malformed, has a newer version, or does not fit the
        dataclass. In the last case the message has all problems with their lines.
    """
    text, data, base = _read(path, version_key, newest, find_base)
    try:
        instance = build(cls, data)
    except SchemaError as error:
        if base is not None:
            # If the base is the one at fault, this raises its own error.
            load_yaml(base, cls, version_key, newest, find_base)
        raise FileError(_with_lines(path, text, error)) from None
    while base is not None and settle is not None:
        _, data, next_base = _read(base, version_key, newest, find_base)
        with suppress(SchemaError):  # A base may lack what the files on it state.
            instance = settle(instance, build(cls, data))
        base = next_base
    return instance


def _read(
    path: FileName,
    version_key: str,
    newest: int,
    find_base: FindBase | None,
    derived: tuple[FileName, ...] = (),
) -> tuple[str, Any, FileName | None]:
    """Return the text of a file, its data on top of that of its base, and the base if it has one.

    `derived` are the files of which this one is the base, directly or through others.
    """
    text = read_text(path)
    data = _parsed_once(text, os.fspath(path))
    version = data.get(version_key) if isinstance(data, dict) else None
    if isinstance(version, int) and version > newest:
        raise FileError(
            f"{os.fspath(path)}: {version_key} {version} is newer than this axonn-tune, which "
            f"reads up to {newest}; upgrade it"
        )
    if find_base is None or not isinstance(data, dict) or BASE not in data:
        return text, data, None
    named = data[BASE]
    where = f"{os.fspath(path)}: {BASE} is {named!r}"
    if not isinstance(named, str):
        raise FileError(f"{where}; allowed: a name, or the path of a file")
    try:
        base = find_base(named, path)
    except InputError as error:
        raise FileError(f"{where}: {error}") from None
    files = (path, *derived)
    if any(os.path.realpath(base) == os.path.realpath(file) for file in files):
        raise FileError(f"{where}, which has this file as its own base")
    _, base_data, _ = _read(base, version_key, newest, find_base, files)
    if not isinstance(base_data, dict):
        raise FileError(f"{where}, which holds no keys")
    return text, on_base(base_data, data), base


def save_yaml(path: FileName, instance: Any, comment: str = "") -> None:
    """Write a dataclass so that `load_yaml` reads an equal one, below a comment if one is given."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    write_text(path, head + dump_yaml(to_dict(instance)))


def dump_yaml(data: Any) -> str:
    """Return plain data as YAML text; mappings keep the order of their keys."""
    return yaml.dump(
        data,
        Dumper=_Dumper,
        default_flow_style=None,
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )


def parse_yaml(text: str, origin: FileName) -> Any:
    """Return plain data from YAML text.

    Parameters
    ----------
    origin : str or path
        The file that holds the text, as error messages call it.

    Raises
    ------
    FileError
        The text is not YAML.
    """
    try:
        _refuse_what_is_not_plain(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{os.fspath(origin)}, line {mark.line + 1}" if mark else os.fspath(origin)
        problem = error.problem or error.context or "malformed YAML"
        hint = ""
        if "nesting depth" in problem:  # libyaml of PyYAML 6.0.4 has a limit of its own, of 1,000
            problem = _TOO_DEEP
        elif problem.startswith("mapping values are not allowed"):
            hint = "; text that contains ': ' needs quotes"
        elif "cannot start any token" in problem:
            hint = "; indent with spaces, and quote text that begins with a special sign"
        raise FileError(f"{where}: {problem}{hint}") from None
    except UnicodeError:
        raise FileError(f"{os.fspath(origin)}: not UTF-8 text") from None
    except ValueError:
        raise FileError(f"{os.fspath(origin)}: a number is too long") from None
    except yaml.YAMLError as error:
        raise FileError(f"{os.fspath(origin)}: {error}") from None


# The same as `parse_yaml`, for texts that are read again and again, such as the profile of a
# machine in many searches. All callers get the same data, which they may not change.
_parsed_once = lru_cache(maxsize=32)(parse_yaml)


def _refuse_what_is_not_plain(text: str) -> None:
    """Refuse tags, deep nesting and a huge text, before libyaml's composer recurses over it."""
    collections: list[tuple[str | None, int]] = []  # the anchor of each, and the size before it
    size = 0
    size_of: dict[str, int] = {}
    for event in yaml.parse(text, Loader=_Loader):
        size += _CHARACTERS_PER_VALUE
        tag = getattr(event, "tag", None)
        if tag not in (None, "!"):
            raise _problem(event, f"the tag '{tag}' is not allowed; write the plain value")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in dict(collections):
                raise _problem(event, f"the alias '{event.anchor}' names what it is part of")
            size += size_of.get(event.anchor or "", 0)
        elif isinstance(event, yaml.ScalarEvent):
            size += len(event.value)
            if event.anchor:
                size_of[event.anchor] = len(event.value)
        elif isinstance(event, yaml.CollectionStartEvent):
            collections.append((event.anchor, size))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size_before = collections.pop()
            if anchor:
                size_of[anchor] = size - size_before
        if len(collections) > _MAX_DEPTH:
            raise _problem(event, _TOO_DEEP)
        if size > _MAX_CHARACTERS:
            raise _problem(event, "too many values, also counted again for each alias")


def _problem(event: Any, text: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=event.start_mark)


def _with_lines(path: FileName, text: str, error: SchemaError) -> str:
    """Return the error's message with the line of every problem.

    The text is composed once more, because plain data does not know its lines.
    """
    root = yaml.compose(text, Loader=_Loader)
    (first_line, first_problem), *others = [
        (_line(root, problem) if number < SHOWN_PROBLEMS else None, problem.text)
        for number, problem in enumerate(error.problems)
    ]
    start = os.fspath(path) + (f", line {first_line}" if first_line else "")
    rest = [f"line {line}: {problem}" if line else problem for line, problem in others]
    return join_problems([f"{start}: {first_problem}", *rest])


def _line(root: Any, problem: Problem) -> int | None:
    """Return the line of the problem's key, or of the nearest key around it."""
    node = root
    mark = None
    for step in problem.path:
        child = _child(node, step)
        if child is None:
            break
        mark, node = child
    return mark.line + 1 if mark else None


def _child(node: Any, step: str | int) -> tuple[Any, Any] | None:
    """Return where a node's entry starts, and the node of its value."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return key.start_mark, value
    elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
        return node.value[step].start_mark, node.value[step]
    return None
