"""Several files in one directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from axonn_tune.io.yaml_files import os_failure, write_text


def write_files(directory: str, files: Mapping[str, str]) -> list[str]:
    """Write texts by name, each at once, into a directory that is made if need be; their paths.

    Raises
    ------
    FileError
        The directory or a file cannot be written.
    """
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise os_failure(directory, "cannot be made", error) from None
    paths = []
    for name, text in files.items():
        write_text(folder / name, text)
        paths.append(str(folder / name))
    return paths
