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
    data = parse_json(read_text(path), path)
    try:
        return build(cls, data)
    except SchemaError as error:
        raise FileError(f"{os.fspath(path)}: {error}") from None


def parse_json(text: str, origin: FileName) -> Any:
    """Return plain data from JSON text, in which NaN and infinity are no numbers.

    Parameters
    ----------
    origin : str or path
        The file that holds the text, as error messages call it.

    Raises
    ------
    FileError
        The text is not JSON.
    """
    name = os.fspath(origin)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        problem = f"{name}, line {error.lineno}: malformed JSON: {error.msg}"
    except UnrealNumberError as error:
        problem = f"{name}: malformed JSON: {error} is no number"
    except ValueError:
        problem = f"{name}: malformed JSON: a number is too long"
    except RecursionError:
        problem = f"{name}: malformed JSON: nested too deeply"
    raise FileError(problem)


class UnrealNumberError(ValueError):
    """JSON text has NaN or Infinity where a number should be."""


def _refuse_constant(name: str) -> None:
    raise UnrealNumberError(name)


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
