"""Read files that ship inside the package: page, published tables, notes, programs, templates."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from axonn_tune.io.files import read_text
from axonn_tune.io.tables import csv_reader
from axonn_tune.spec.track_record import TrackRecord, TrackRecords

_PACKAGE = Path(__file__).resolve().parent.parent
_PAGE_FOLDER = _PACKAGE / "report" / "web"
_PROGRAM_FOLDER = _PACKAGE / "job_scripts" / "programs"
_TEMPLATE_FOLDER = _PACKAGE / "io" / "templates"
_TABLE_FOLDER = _PACKAGE / "reproduce" / "published"
_NOTE_FOLDER = _PACKAGE / "reproduce" / "notes"
_TRACK_RECORDS = _PACKAGE / "reproduce" / "track_records.csv"
# The page loads the plotting libraries in this order.
_PLOTTING_LIBRARIES = ("d3.min.js", "plot.umd.min.js")


def page_parts(name: str = "page") -> dict[str, str]:
    """Return the parts of a page: template, styles, script and plotting libraries.

    The template names the other parts by the keys of this dict. The page of candidates is
    ``page``, and that of a score ``score``.
    """
    vendor = [read_text(_PAGE_FOLDER / "vendor" / name) for name in _PLOTTING_LIBRARIES]
    return {
        "template": read_text(_PAGE_FOLDER / f"{name}.html"),
        "styles": read_text(_PAGE_FOLDER / "page.css"),
        "script": "\n".join(read_text(_PAGE_FOLDER / f"{part}.js") for part in ("common", name)),
        "vendor": "\n".join(vendor),
    }


def template(noun: str) -> str:
    """Return the commented file with which a user begins a model or a machine."""
    return read_text(_TEMPLATE_FOLDER / f"{noun}.yaml")


def load_published(name: str) -> list[dict[str, str]]:
    """Return the rows of a table of published results; lines that start with # are comments."""
    return list(csv_reader(_TABLE_FOLDER / f"{name}.csv"))


def note_on_validation(name: str) -> str:
    """Return the prose that docs/validation.md has below a heading."""
    return read_text(_NOTE_FOLDER / f"{name}.md").rstrip()


def training_program(name: str) -> str:
    """Return the text of a training program, or of a module that such a program imports."""
    return read_text(_PROGRAM_FOLDER / name)


@cache
def load_track_records() -> TrackRecords:
    """Return how predictions have fared, as `axonn-tune reproduce` last wrote it."""
    return TrackRecords(
        tuple(
            TrackRecord(
                row["strategy"],
                row["engine"],
                row["gpu"],
                int(row["n_runs"]),
                int(row["n_far"]),
                float(row["mean_error_fraction"]),
                float(row["spread"]),
                row["kind"],
            )
            for row in csv_reader(_TRACK_RECORDS)
        )
    )
