"""Read what this tool's own programs write: documents of ``run``, logs of ``launch``'s programs."""

from __future__ import annotations

import re
from math import prod

from axonn_tune.errors import FileError
from axonn_tune.io.json_files import parse_json
from axonn_tune.io.runs.logged_run import (
    NUMBER,
    LoggedRun,
    layout_text,
    logged_run,
    positive,
    stated,
)
from axonn_tune.spec.model import DENSE_SIZES

_STEP = re.compile(r"step (\d+): loss [\w.-]+, " + NUMBER + r" s")
_SETTINGS = re.compile(r"settings: (\{[^\n]*)")
_SETTINGS_FACTS = (
    "strategy",
    "engine",
    "global_batch",
    "micro_batch",
    "seq_len",
    "dtype",
    "attention",
    "recompute",
)


def is_program(text: str) -> bool:
    """Return whether a log was written by a training program of ``launch``."""
    return _SETTINGS.search(text) is not None


def parse_program(text: str) -> LoggedRun:
    """Return the run of a program that `launch` wrote.

    Raises
    ------
    FileError
        The settings were cut.
    """
    match = _SETTINGS.search(text)
    if match is None:
        raise FileError("no line of settings; allowed: a log of a program that `launch` wrote")
    settings = parse_json(match[1], "the line of settings")
    facts = {name: settings.get(name) for name in _SETTINGS_FACTS}
    layout = settings.get("layout")
    model = settings.get("model")
    if not isinstance(layout, dict) or not isinstance(model, dict):
        raise FileError("the line of settings has no layout or no model")
    facts |= {"gpus": prod(layout.values()), "layout": layout_text(layout)}
    sizes = {name: model[name] for name in DENSE_SIZES if name in model}
    sizes["seq_len"] = settings.get("seq_len")
    steps = {int(step): float(seconds) for step, seconds in _STEP.findall(text)}
    return logged_run(text, facts, steps, sizes=sizes)


def is_run_document(text: str) -> bool:
    """Return whether a text is what ``run --format json`` writes."""
    return text.lstrip().startswith("{") and '"median_step_seconds"' in text


def parse_run_document(text: str) -> LoggedRun:
    """Return the run of a document of ``run --format json``."""
    document = parse_json(text, "the document of a run")
    try:
        job = document["job"]
        facts = {
            "model": document["model"],
            "gpus": job["n_gpus"],
            "layout": layout_text(document["grid"]),
            "global_batch": job["global_batch"],
            "micro_batch": document["micro_batch"],
            "seq_len": job["seq_len"],
            "dtype": job["dtype"],
            "attention": job["attention"],
            "recompute": document["recompute"],
            "strategy": document["strategy"],
            "engine": document["engine"],
            "machine": document["machine"],
        }
        seconds = {number: float(step["seconds"]) for number, step in enumerate(document["steps"])}
        memory = 0.0 if document["memory_is_of_process"] else float(document["peak_memory_bytes"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"not a document that `run` writes: {error!r}") from None
    return LoggedRun(stated(facts), positive(seconds), memory_bytes=memory)
