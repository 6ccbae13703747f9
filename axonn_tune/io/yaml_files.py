"""Read and write YAML files.

Plain words follow YAML 1.2: ``2e11`` is a number and ``no`` is text. Duplicate keys are
refused. A file is written beside the old one and then takes its place.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import Any, TypeVar

import yaml

from axonn_tune.errors import FileError
from axonn_tune.io.schema import (
    Problem,
    SchemaError,
    build,
    join_problems,
    one_line,
    to_dict,
)

try:
    from yaml import CSafeDumper as _SafeDumper
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # PyYAML was built without libyaml
    from yaml import SafeDumper as _SafeDumper  # type: ignore[assignment]
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

T = TypeVar("T")
FileName = str | os.PathLike[str]

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


def read_text(path: FileName) -> str:
    """The text of a UTF-8 file."""
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8-sig")
    except OSError as error:
        raise os_failure(path, "cannot be read", error) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise FileError(one_line(f"{os.fspath(path)}, line {line}: not UTF-8 text")) from None
    except ValueError as error:  # a zero byte in the name
        raise FileError(one_line(f"{os.fspath(path)!r}: {error}")) from None


def write_text(path: FileName, text: str) -> None:
    """Write a whole file or leave the old one as it was.

    Raises
    ------
    FileError
        The folder is missing or cannot be written, or the disk is full.
    """
    try:
        data = text.encode()
    except ValueError as error:  # a lone surrogate in the text
        raise FileError(one_line(f"{os.fspath(path)!r} cannot be written: {error}")) from None
    write_bytes(path, data)


def write_bytes(path: FileName, data: bytes) -> None:
    """As `write_text`."""
    try:
        mode = _mode(path)
        if mode is None or stat.S_ISREG(mode):
            _replace(os.path.realpath(path), data, mode)
        else:  # a pipe or a terminal, such as /dev/stdout
            with open(path, "wb") as file:
                file.write(data)
    except OSError as error:
        raise os_failure(path, "cannot be written", error) from None
    except ValueError as error:  # a zero byte in the name
        raise FileError(one_line(f"{os.fspath(path)!r} cannot be written: {error}")) from None


def _mode(path: FileName) -> int | None:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _replace(path: str, data: bytes, mode: int | None) -> None:
    if mode is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "the file is read-only")
    temporary = os.path.join(os.path.dirname(path), f".axonn-tune-{os.urandom(8).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(descriptor, stat.S_IMODE(mode))
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def os_failure(path: FileName, what: str, error: OSError) -> FileError:
    """One line that names the file and what the system says."""
    reason = error.strerror or str(error)
    return FileError(one_line(f"{os.fspath(path)} {what}: {reason[:1].lower()}{reason[1:]}"))


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
