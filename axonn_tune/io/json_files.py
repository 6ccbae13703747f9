"""Dataclasses as JSON files."""

from __future__ import annotations

import json
import os
from typing import Any, TypeVar

from axonn_tune.errors import FileError
from axonn_tune.io.files import FileName, read_text, write_text
from axonn_tune.io.schema import SchemaError, build, to_dict

T = TypeVar("T")


def load_json(path: FileName, cls: type[T]) -> T:
    """The dataclass `cls` from a JSON file.

    Raises
    ------
    FileError
        Missing, malformed, or not fitting the dataclass.
    """
    text = read_text(path)
    try:
        return build(cls, json.loads(text))
    except json.JSONDecodeError as error:
        where = f"{os.fspath(path)}, line {error.lineno}"
        raise FileError(f"{where}: malformed JSON: {error.msg}") from None
    except SchemaError as error:
        raise FileError(f"{os.fspath(path)}: {error}") from None


def save_json(path: FileName, instance: Any) -> None:
    """Write a dataclass so that `load_json` reads an equal one; its lists a line per entry."""
    write_text(path, _laid_out(to_dict(instance), 0) + "\n")


def _laid_out(value: Any, depth: int) -> str:
    """Two levels deep in lines, as people read and version control compares them."""
    if depth == 4 or not isinstance(value, dict | list) or not value:
        return json.dumps(value, allow_nan=False)
    pad, close = "  " * (depth + 1), "  " * depth
    if isinstance(value, list):
        if not any(isinstance(item, dict | list) for item in value):
            return json.dumps(value, allow_nan=False)
        entries = [_laid_out(item, depth + 1) for item in value]
        opening, closing = "[", "]"
    else:
        entries = [f"{json.dumps(k)}: {_laid_out(v, depth + 1)}" for k, v in value.items()]
        opening, closing = "{", "}"
    body = ",\n".join(pad + entry for entry in entries)
    return f"{opening}\n{body}\n{close}{closing}"
