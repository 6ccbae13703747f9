"""axonn-tune: which parallel layout trains a model fastest on a machine, how fast, and why.

The public API is loaded when it is used, so that ``import axonn_tune`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonn_tune.api import (
        compare,
        explain,
        launch,
        plan,
        predict,
        scale,
        suggest,
        whatif,
    )
    from axonn_tune.io.presets import load_machine, load_model

__version__ = "0.1.0"

_API = ("compare", "explain", "launch", "plan", "predict", "scale", "suggest", "whatif")
_HOME = {
    **dict.fromkeys(_API, "axonn_tune.api"),
    "load_machine": "axonn_tune.io.presets",
    "load_model": "axonn_tune.io.presets",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
