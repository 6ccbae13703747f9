"""Recognise the log of a training run by its content, and read it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from axonn_tune.errors import FileError, choices_hint
from axonn_tune.io.files import FileName, read_text
from axonn_tune.io.runs.bundled import (
    is_program,
    is_run_document,
    parse_program,
    parse_run_document,
)
from axonn_tune.io.runs.composer import is_composer, parse_composer
from axonn_tune.io.runs.deepspeed import is_deepspeed, parse_deepspeed
from axonn_tune.io.runs.litgpt import is_litgpt, parse_litgpt
from axonn_tune.io.runs.logged_run import LoggedRun, without_colors
from axonn_tune.io.runs.megatron import is_megatron, parse_megatron
from axonn_tune.io.runs.nanotron import is_nanotron, parse_nanotron
from axonn_tune.io.runs.nemo import is_nemo, parse_nemo
from axonn_tune.io.runs.steps_csv import parse_csv
from axonn_tune.io.runs.torchtitan import is_torchtitan, parse_torchtitan

Recognise = Callable[[str], bool]
Parse = Callable[[str], LoggedRun]

# The readers are tried in this order, since Megatron-DeepSpeed prints what both its parts print.
_READERS: dict[str, tuple[Recognise, Parse]] = {
    "run": (is_run_document, parse_run_document),
    "launch": (is_program, parse_program),
    "megatron": (is_megatron, parse_megatron),
    "nemo": (is_nemo, parse_nemo),
    "torchtitan": (is_torchtitan, parse_torchtitan),
    "nanotron": (is_nanotron, parse_nanotron),
    "litgpt": (is_litgpt, parse_litgpt),
    "llm-foundry": (is_composer, parse_composer),
    "deepspeed": (is_deepspeed, parse_deepspeed),
}
CSV = "csv"
FORMATS = (*_READERS, CSV)
# Logs of many ranks that print every step.
LARGEST_LOG_BYTES = 2**28
# The longest line that makes sense is a document of `run` without line ends. In a line of 200 MB,
# such as the zeros that a crash may leave of a file, a reader searches for up to 17 seconds.
LONGEST_LINE_BYTES = 2**24


def read_runs(
    path: FileName, log_format: str | None = None, columns: Mapping[str, str] | None = None
) -> list[LoggedRun]:
    """Return the runs that a log tells of: one, or those of the rows of a CSV file.

    Parameters
    ----------
    log_format : str or None
        One of `FORMATS`; None recognises the format by the content.
    columns : mapping of str to str
        The columns of a CSV file by the column of a table of runs.

    Raises
    ------
    FileError
        The file cannot be read or recognised, or has a line that no log has.
    """
    name = os.fspath(path)
    text = without_colors(read_text(path, LARGEST_LOG_BYTES, LONGEST_LINE_BYTES))
    chosen = log_format or _recognised(text, name)
    if chosen == CSV:
        return parse_csv(text, name, columns or {})
    if chosen not in _READERS:
        raise FileError(f"no log is of the format '{chosen}'{choices_hint(chosen, FORMATS)}")
    try:
        return [_READERS[chosen][1](text)]
    except FileError as error:
        raise FileError(f"{name}: {error}") from None
    except (ValueError, OverflowError, TypeError) as error:
        raise FileError(f"{name}: a number in the log is not possible: {error}") from None


def _recognised(text: str, name: str) -> str:
    """Return the format of a log."""
    for log_format, (recognise, _) in _READERS.items():
        if recognise(text):
            return log_format
    if name.lower().endswith(".csv"):
        return CSV
    raise FileError(f"{name}: not a log of a known format; give --log-format: {', '.join(FORMATS)}")
