"""What all figures share; matplotlib, which draws them, is an optional extra."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from axonn_tune.errors import InputError

FORMATS = ("png", "svg", "pdf")


def check_plot(path: str) -> str:
    """The format in which a path asks for a figure.

    Raises
    ------
    InputError
        The path ends in none of `FORMATS`, or matplotlib is not installed.
    """
    ending = Path(path).suffix.lstrip(".").lower()
    if ending not in FORMATS:
        raise InputError(f"--plot {path}: allowed endings: .{', .'.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise InputError("--plot needs matplotlib: pip install 'axonn-tune[plot]'") from None
    return ending


def saved(figure: Any, ending: str) -> bytes:
    """The figure as a file of that format."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=ending, bbox_inches="tight")
    return buffer.getvalue()


def new_figure(n_rows: int, n_columns: int) -> tuple[Any, Any]:
    """A figure and its axes, as matplotlib's ``subplots`` returns them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0 * n_columns, 5.0 * n_rows), layout="constrained")
    return figure, figure.subplots(n_rows, n_columns)
