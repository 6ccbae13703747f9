"""Read and write dataclasses as JSON files."""

from __future__ import annotations

import json
import os
from typing import Any, TypeVar

from axonn_tune.errors import FileError
from axonn_tune.io.files import FileName, read_text, write_text
from axonn_tune.io.schema import SchemaError, build, to_dict

T = TypeVar("T")


def load_json(path: FileName, cls: type[T]) -> T:
    """Return the dataclass `cls` that a JSON file holds.

    Raises
    ------
    FileError
        The file is missing or malformed, or it does not fit the dataclass.
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
    """Write a dataclass as a JSON file that `load_json` reads as an equal one."""
    write_text(path, _laid_out(to_dict(instance)) + "\n")


def _laid_out(value: Any, depth: int = 0) -> str:
    """Return the JSON text of a value, laid out in lines that people read and git compares.

    A list or mapping of plain values stands on one line. Any other has a line for each entry,
    down to the third level; what lies deeper stands on one line. So an outcome of a validation
    takes a line for its configuration, its prediction, its steps and all its operations.
    """
    entries = list(value.values()) if isinstance(value, dict) else value
    is_nested = isinstance(entries, list) and any(isinstance(e, dict | list) for e in entries)
    if depth == 3 or not is_nested:
        return json.dumps(value, allow_nan=False)
    lines = [_laid_out(entry, depth + 1) for entry in entries]
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {line}" for key, line in zip(value, lines, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    indent = "\n" + "  " * depth
    return opening + ",".join(f"{indent}  {line}" for line in lines) + indent + closing
