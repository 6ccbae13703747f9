"""A new figure, and a figure as a file; matplotlib, which draws them, is an optional extra."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from axonn_tune.errors import InputError

FORMATS = ("png", "svg", "pdf")


def figure_format(path: str) -> str:
    """Return the format in which a path asks for a figure.

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


def figure_bytes(figure: Any, path: str) -> bytes:
    """Return the contents of the file that holds the figure in the format of the path.

    Raises
    ------
    InputError
        The path ends in none of `FORMATS`.
    """
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        # What has its text before the figure is drawn is no number: a $ in a name is no formula.
        text.set_parse_math(not text.get_text())
    buffer = io.BytesIO()
    figure.savefig(buffer, format=figure_format(path), bbox_inches="tight")
    return buffer.getvalue()


def draw_diagonal(axes: Any, ends: np.ndarray) -> None:
    """Draw where both coordinates are equal, and where they differ by less than 10 %."""
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, alpha=0.15, label="within 10 %")


def legend_below(axes: Any) -> None:
    """Put the legend below the axes, where it covers nothing that is drawn."""
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4)


def plain_log_scale(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers, several in each decade."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def new_figure(n_rows: int, n_columns: int) -> tuple[Any, Any]:
    """Return a figure and its axes, as matplotlib's ``subplots`` does."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0 * n_columns, 5.0 * n_rows), layout="constrained")
    return figure, figure.subplots(n_rows, n_columns)
