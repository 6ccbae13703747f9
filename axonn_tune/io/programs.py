"""Python programs of users."""

from __future__ import annotations

from types import CodeType

from axonn_tune.errors import FileError
from axonn_tune.io.files import FileName, read_text


def load_program(path: FileName) -> CodeType:
    """Return the code of a Python file.

    Raises
    ------
    FileError
        The file cannot be read, or is not a Python program; the message names the line.
    """
    try:
        return compile(read_text(path), str(path), "exec")
    except SyntaxError as error:
        raise FileError(f"{path}: line {error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise FileError(f"{path}: it is not a Python program: {error}") from error
