"""Measurements of several configurations, kept on disk one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from axonn_tune.io.journal import Journal
from axonn_tune.io.schema import build, to_dict
from axonn_tune.spec.measurement import Measurement

# A configuration that was begun so often and never ended is taken to end the job itself.
MOST_ATTEMPTS = 2


@dataclass(frozen=True)
class MeasurementJournal:
    """A journal of runs that begin, and end well or fail."""

    journal: Journal

    def begin(self, key: str) -> None:
        """Note that a run starts."""
        attempts = _attempts(self.journal.results().get(key))
        self.journal.add(key, {"attempts": attempts + 1})

    def keep(self, key: str, measurement: Measurement) -> None:
        """Note what a run measured."""
        self.journal.add(key, {"measurement": to_dict(measurement)})

    def keep_failure(self, key: str, reason: str) -> None:
        """Note why a run failed."""
        self.journal.add(key, {"failure": reason})

    def ended(self) -> dict[str, Measurement | str]:
        """By key what was measured, or why that failed; not those to be tried (again)."""
        results: dict[str, Measurement | str] = {}
        for key, entry in self.journal.results().items():
            if "measurement" in entry:
                results[key] = build(Measurement, entry["measurement"])
            elif "failure" in entry:
                results[key] = str(entry["failure"])
            elif _attempts(entry) >= MOST_ATTEMPTS:
                results[key] = f"the job ended {_attempts(entry)} times while it ran"
        return results

    def under_way(self) -> list[str]:
        """Keys of runs that began and have not ended."""
        entries = self.journal.results()
        return [key for key, entry in entries.items() if "attempts" in entry]


def _attempts(entry: dict[str, Any] | None) -> int:
    return int(entry.get("attempts", 0)) if entry else 0
