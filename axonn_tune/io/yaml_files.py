"""Read and write YAML files.

Plain words follow YAML 1.2: ``2e11`` is a number and ``no`` is text. Duplicate keys are
refused. A file is written beside the old one and then takes its place.
"""

from __future__ import annotations

import os
import re
from typing import Any, TypeVar

import yaml

from axonn_tune.errors import FileError, one_line
from axonn_tune.io.files import FileName, read_text, write_text
from axonn_tune.io.schema import (
    Problem,
    SchemaError,
    build,
    join_problems,
    to_dict,
)

try:
    from yaml import CSafeDumper as _SafeDumper
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # PyYAML was built without libyaml
    from yaml import SafeDumper as _SafeDumper  # type: ignore[assignment]
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

T = TypeVar("T")

_TAG = "tag:yaml.org,2002:"
_DEEPEST = 500
_BRACKET = re.compile(r"[\[{\]}]")
_DEEP_BLOCK = re.compile(rf"(?:[-?:][ \t]+){{{_DEEPEST}}}|^ {{{_DEEPEST}}}", re.MULTILINE)
_FLOAT = (
    r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|[0-9]+[eE][-+]?[0-9]+|\.inf)|\.nan"
)
_PLAIN = (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", tuple("-+0123456789")),
    ("float", _FLOAT, tuple("-+.0123456789")),
    ("merge", r"<<", ("<",)),
)


class _Loader(_SafeLoader):
    """A safe loader with YAML 1.2's plain words that refuses duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key '{key.value}' appears twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        result: dict[Any, Any] = super().construct_mapping(node, deep)
        return result


class _Dumper(_SafeDumper):
    """A safe dumper that quotes text which either version of YAML reads as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent(self, data: Any) -> None:
        """The outermost collection in a block; the innermost ones stay on one line."""
        node = self.represent_data(data)
        if isinstance(node, yaml.CollectionNode):
            node.flow_style = False
        self.serialize(node)


def _text(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar(_TAG + "str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
_Loader.yaml_implicit_resolvers = {}
for _name, _pattern, _first in _PLAIN:
    _regex = re.compile(rf"(?:{_pattern})\Z")
    _Loader.add_implicit_resolver(_TAG + _name, _regex, list(_first))
    _Dumper.add_implicit_resolver(_TAG + _name, _regex, list(_first))


def load_yaml(path: FileName, cls: type[T], version_key: str = "", newest: int = 0) -> T:
    """The dataclass `cls` from a YAML file.

    Raises
    ------
    FileError
        Missing, malformed, or not fitting the dataclass: all problems, with their lines; or
        its `version_key` says that it was written for a version after `newest`.
    """
    text = read_text(path)
    data = parse_yaml(text, path)
    version = data.get(version_key) if isinstance(data, dict) else None
    if isinstance(version, int) and version > newest:
        raise FileError(
            f"{os.fspath(path)}: {version_key} {version} is newer than this axonn-tune, which "
            f"reads up to {newest}; upgrade it"
        )
    try:
        return build(cls, data)
    except SchemaError as error:
        raise FileError(_located(path, text, error)) from None


def save_yaml(path: FileName, instance: Any, comment: str = "") -> None:
    """Write a dataclass so that `load_yaml` reads an equal one; `comment` heads the file."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    write_text(path, head + dump_yaml(to_dict(instance)))


def dump_yaml(data: Any) -> str:
    """Plain data as YAML text, keys in their order."""
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 100}
    return str(yaml.dump(data, Dumper=_Dumper, default_flow_style=None, **options))


def parse_yaml(text: str, origin: FileName) -> Any:
    """Plain data from YAML text; `origin` names it in errors."""
    try:
        _refuse_deep_nesting(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{os.fspath(origin)}, line {mark.line + 1}" if mark else os.fspath(origin)
        problem = error.problem or error.context or "malformed YAML"
        hint = ""
        if problem.startswith("mapping values are not allowed"):
            hint = "; text that contains ': ' needs quotes"
        elif "cannot start any token" in problem:
            hint = "; indent with spaces, and quote text that begins with a special sign"
        raise FileError(one_line(f"{where}: {problem}{hint}")) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = str(error) or "malformed YAML"
        raise FileError(one_line(f"{os.fspath(origin)}: {what}")) from None


def _refuse_deep_nesting(text: str) -> None:
    """Refuse what would overflow the C stack in libyaml's composer, which recurses."""
    depth = deepest = 0
    for bracket in _BRACKET.findall(text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > _DEEPEST or _DEEP_BLOCK.search(text):
        raise ValueError(f"nested deeper than {_DEEPEST} levels")


def _located(path: FileName, text: str, error: SchemaError) -> str:
    """The message with a line for every problem, found by composing the text once more."""
    root = yaml.compose(text, Loader=_Loader)
    places = [(_line(root, problem), problem.text) for problem in error.problems]
    (first_line, first_what), *others = places
    head = os.fspath(path) + (f", line {first_line}" if first_line else "")
    rest = [f"line {line}: {what}" if line else what for line, what in others]
    return join_problems([f"{head}: {first_what}", *rest])


def _line(root: Any, problem: Problem) -> int | None:
    """The line of the problem's key, or of the nearest key around it."""
    node, mark = root, None
    for step in problem.path:
        found = _child(node, step)
        if found is None:
            break
        mark, node = found
    return mark.line + 1 if mark else None


def _child(node: Any, step: str | int) -> tuple[Any, Any] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == step:
                return key.start_mark, value
    elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
        return node.value[step].start_mark, node.value[step]
    return None
