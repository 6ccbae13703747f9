"""Keep results on disk as soon as they are known, so that an interrupted command can resume."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from typing import Any

from axonn_tune.errors import FileError
from axonn_tune.io.files import is_replaced, os_failure, read_text
from axonn_tune.io.json_files import parse_json
from axonn_tune.io.schema import SchemaError, build, to_dict
from axonn_tune.spec.measurement import Measurement

# A configuration that began this often and never ended is taken to be what ends the job.
MOST_ATTEMPTS = 2
# A measured step of a large model has megabytes of operations, and a journal keeps each.
LARGEST_JOURNAL_BYTES = 2**30

# A file that cannot be gone on with, or not with these options.
_TO_BEGIN_ANEW = "delete it and leave --resume out to begin anew"


@dataclass(frozen=True)
class Journal:
    """A file of results by key, one line each, below a first line that names their owner.

    Parameters
    ----------
    path : str
        The file, which exists only while the work is unfinished.
    activity : str
        The work whose results the journal keeps, as error messages call it.
    """

    path: str
    activity: str = "calibration"

    @classmethod
    def beside(cls, output: str, activity: str = "calibration") -> Journal:
        """Return the journal of a result that is to be written to a file.

        Raises
        ------
        FileError
            The path names a folder, a device or a pipe, beside which nothing can be kept.
        """
        if not is_replaced(output):
            raise FileError(
                f"{output} is not an ordinary file; allowed: one, beside which a {activity} keeps "
                "its results"
            )
        return cls(f"{output}.partial", activity)

    def exists(self) -> bool:
        """Return whether there is something to resume."""
        return os.path.exists(self.path)

    def begin(self, owner: dict[str, Any]) -> None:
        """Start an empty journal.

        Parameters
        ----------
        owner : dict
            What the results belong to, such as the machine and the settings of the work.

        Raises
        ------
        FileError
            The file exists already or cannot be written.
        """
        self.require_none()
        self._append({"owner": owner}, "x")

    def require_none(self) -> None:
        """Raise FileError if the file exists already."""
        if self.exists():
            raise FileError(
                f"{self.path} holds an interrupted {self.activity}; "
                "go on with --resume, or delete it"
            )

    def read(self, owner: dict[str, Any]) -> dict[str, Any]:
        """Return the results so far after checking that the journal belongs to `owner`.

        Parameters
        ----------
        owner : dict
            What the results must belong to, or the part of it that is known.

        Raises
        ------
        FileError
            The file is missing, is not a journal, or belongs to another owner. In the last case
            the message names the first difference.
        """
        if not self.exists():
            raise FileError(f"there is nothing to resume: {self.path} does not exist")
        head = _record(next(iter(self._lines()), ""))
        kept_owner = None if head is None else head.get("owner")
        if not isinstance(kept_owner, dict) or not kept_owner.keys() >= owner.keys():
            raise FileError(
                f"{self.path}: not the journal of an interrupted {self.activity}; {_TO_BEGIN_ANEW}"
            )
        for key, value in owner.items():
            if kept_owner.get(key) != value:
                raise FileError(
                    f"{self.path} was begun with {key} {kept_owner.get(key)!r}; here it is "
                    f"{value!r}; {_TO_BEGIN_ANEW}"
                )
        return self.results()

    def results(self) -> dict[str, Any]:
        """Return the results so far and remove a last line that was cut short.

        A key that was added several times has its last result.

        Raises
        ------
        FileError
            A line before the last one is malformed.
        """
        lines = self._lines()
        results = {}
        for number, line in enumerate(lines[1:], 2):
            record = _record(line)
            if record is not None and isinstance(record.get("key"), str) and "result" in record:
                results[record["key"]] = record["result"]
            elif number < len(lines):
                raise FileError(f"{self.path}, line {number}: malformed; {_TO_BEGIN_ANEW}")
            else:
                self._drop_last_line()
        return results

    def add(self, key: str, result: Any) -> None:
        """Append a result and wait until it is on disk.

        Raises
        ------
        FileError
            The disk is full, or the file cannot be written.
        """
        self._append({"key": key, "result": result}, "a")

    def remove(self) -> None:
        """Delete the file."""
        os.unlink(self.path)

    def _lines(self) -> list[str]:
        try:
            return read_text(self.path, LARGEST_JOURNAL_BYTES).splitlines()
        except FileError as error:
            raise FileError(f"{error}; {_TO_BEGIN_ANEW}") from None

    def _append(self, record: dict[str, Any], mode: str) -> None:
        line = json.dumps(record).encode() + b"\n"
        try:
            with open(self.path, mode + "b", buffering=0) as file:
                size_before = file.tell()
                try:
                    if file.write(line) < len(line):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(size_before)  # The next record must not continue half a line.
                    raise
        except OSError as error:
            raise os_failure(self.path, "cannot be written", error) from None

    def _drop_last_line(self) -> None:
        """Remove a last line that was cut short; the next record would be appended to it."""
        with open(self.path, "rb+") as file:
            data = file.read()
            file.truncate(data.rstrip(b"\n").rfind(b"\n") + 1)


@dataclass(frozen=True)
class MeasurementJournal:
    """A journal of runs, each of which begins and then ends with a measurement or a failure."""

    journal: Journal

    def begin(self, key: str) -> None:
        """Record that a run begins."""
        attempts = _attempts(self._entries().get(key, {}))
        self.journal.add(key, {"attempts": attempts + 1})

    def keep(self, key: str, measurement: Measurement) -> None:
        """Record what a run measured."""
        self.journal.add(key, {"measurement": to_dict(measurement)})

    def keep_failure(self, key: str, reason: str) -> None:
        """Record why a run failed."""
        self.journal.add(key, {"failure": reason})

    def ended(self) -> dict[str, Measurement | str]:
        """Return the measurement, or the reason of the failure, of every run that ended.

        A run that began `MOST_ATTEMPTS` times and never ended counts as failed. A run that is
        still to be tried, or to be tried again, is left out.

        Raises
        ------
        FileError
            The journal holds what is no measurement.
        """
        results: dict[str, Measurement | str] = {}
        for key, entry in self._entries().items():
            if "measurement" in entry:
                try:
                    results[key] = build(Measurement, entry["measurement"])
                except SchemaError as error:
                    raise FileError(f"{self.journal.path}, '{key}': {error}") from None
            elif "failure" in entry:
                results[key] = str(entry["failure"])
            elif _attempts(entry) >= MOST_ATTEMPTS:
                results[key] = f"the job ended {_attempts(entry)} times while it ran"
        return results

    def under_way(self) -> list[str]:
        """Return the keys of runs that began and have not ended."""
        return [key for key, entry in self._entries().items() if "attempts" in entry]

    def _entries(self) -> dict[str, dict[str, Any]]:
        """Return what is known of each run, or raise FileError where this is no mapping."""
        entries = self.journal.results()
        for key, entry in entries.items():
            if not isinstance(entry, dict) or not isinstance(_attempts(entry), int):
                raise FileError(
                    f"{self.journal.path}, '{key}': malformed; delete the file to begin anew"
                )
        return entries


def _attempts(entry: dict[str, Any]) -> Any:
    return entry.get("attempts", 0)


def _record(line: str) -> dict[str, Any] | None:
    """Return the mapping that a line holds, or None where it was cut short or damaged."""
    try:
        record = parse_json(line, "")
    except FileError:
        return None
    return record if isinstance(record, dict) else None
