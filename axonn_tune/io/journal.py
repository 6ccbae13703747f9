"""Keep results on disk as soon as they are known, one line each, so that nothing is lost."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from typing import Any

from axonn_tune.errors import FileError
from axonn_tune.io.files import os_failure, read_text


@dataclass(frozen=True)
class Journal:
    """A file of results by key under a first line that says whose they are.

    what: is interrupted where there is such a file.
    """

    path: str
    what: str = "calibration"

    def exists(self) -> bool:
        """Whether there is something to go on with."""
        return os.path.exists(self.path)

    def begin(self, owner: dict[str, Any]) -> None:
        """Start an empty journal.

        Raises
        ------
        FileError
            There is one already, or it cannot be written.
        """
        if self.exists():
            raise FileError(
                f"{self.path} holds an interrupted {self.what}; go on with --resume, or delete it"
            )
        self._append({"owner": owner}, "x")

    def read(self, owner: dict[str, Any]) -> dict[str, Any]:
        """The results so far, if this is the journal of `owner`.

        Raises
        ------
        FileError
            Not a journal, or one of another owner: the message names the first difference.
        """
        if not self.exists():
            raise FileError(f"there is nothing to resume: {self.path} does not exist")
        lines = read_text(self.path).splitlines()
        try:
            records = [json.loads(line) for line in lines[:1]]
            known = records[0]["owner"]
        except (ValueError, LookupError, TypeError):
            raise FileError(f"{self.path}: not the journal of an interrupted {self.what}") from None
        for key, value in owner.items():
            if known.get(key) != value:
                raise FileError(
                    f"{self.path} was begun with {key} {known.get(key)!r}; here it is {value!r}; "
                    "delete the file to begin anew"
                )
        return self.results()

    def results(self) -> dict[str, Any]:
        """The results so far; a last line that was cut short is dropped.

        Raises
        ------
        FileError
            A line that is none of a journal.
        """
        lines = read_text(self.path).splitlines()
        results = {}
        for number, line in enumerate(lines[1:], 2):
            try:
                record = json.loads(line)
                results[record["key"]] = record["result"]
            except (ValueError, LookupError, TypeError):
                if number < len(lines):
                    raise FileError(f"{self.path}, line {number}: malformed") from None
                self._drop_last_line()
        return results

    def add(self, key: str, result: Any) -> None:
        """Append a result and have it on disk.

        Raises
        ------
        FileError
            The disk is full, or the file cannot be written.
        """
        self._append({"key": key, "result": result}, "a")

    def remove(self) -> None:
        """Delete the file."""
        os.unlink(self.path)

    def _append(self, record: dict[str, Any], mode: str) -> None:
        line = json.dumps(record).encode() + b"\n"
        try:
            with open(self.path, mode + "b", buffering=0) as file:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
        except OSError as error:
            raise os_failure(self.path, "cannot be written", error) from None

    def _drop_last_line(self) -> None:
        """A line that was cut short would swallow the next one."""
        with open(self.path, "rb+") as file:
            data = file.read()
            file.truncate(data.rstrip(b"\n").rfind(b"\n") + 1)
