"""Published measurements that ship with the package."""

from __future__ import annotations

import csv
from pathlib import Path

from axonn_tune.io.yaml_files import read_text


def load_published(name: str) -> list[dict[str, str]]:
    """The rows of one table of published results; lines that start with # are comments."""
    path = Path(__file__).parents[1] / "reproduce" / "published" / f"{name}.csv"
    lines = [line for line in read_text(path).splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))
