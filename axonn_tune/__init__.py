"""axonn-tune: which parallel layout trains a model fastest on a machine, how fast, and why.

The public API is loaded when it is used, so that ``import axonn_tune`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonn_tune.api import compare, predict, suggest
    from axonn_tune.io.presets import load_machine, load_model

__version__ = "0.1.0"

__all__ = ["__version__", "compare", "load_machine", "load_model", "predict", "suggest"]

_HOME = {
    "suggest": "axonn_tune.api",
    "compare": "axonn_tune.api",
    "predict": "axonn_tune.api",
    "load_model": "axonn_tune.io.presets",
    "load_machine": "axonn_tune.io.presets",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
