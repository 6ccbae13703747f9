"""axonn-tune: which parallel layout trains a model fastest on a machine, how fast, and why.

The public API is loaded when it is used, so that ``import axonn_tune`` costs nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonn_tune.api import compare as compare
    from axonn_tune.api import explain as explain
    from axonn_tune.api import launch as launch
    from axonn_tune.api import plan as plan
    from axonn_tune.api import predict as predict
    from axonn_tune.api import scale as scale
    from axonn_tune.api import suggest as suggest
    from axonn_tune.api import whatif as whatif
    from axonn_tune.io.presets import load_machine as load_machine
    from axonn_tune.io.presets import load_model as load_model
    from axonn_tune.measuring import calibrate as calibrate
    from axonn_tune.measuring import validate as validate

__version__ = "0.1.0"

if "AXONN_TUNE_LAUNCHER" in os.environ:
    # A rank imports this module first, and then torch for seconds in which its launcher may die.
    from axonn_tune.runtime.ranks.parent import die_with_launcher

    die_with_launcher()

_API = ("compare", "explain", "launch", "plan", "predict", "scale", "suggest", "whatif")
_HOME = {
    **dict.fromkeys(_API, "axonn_tune.api"),
    "calibrate": "axonn_tune.measuring",
    "validate": "axonn_tune.measuring",
    "load_machine": "axonn_tune.io.presets",
    "load_model": "axonn_tune.io.presets",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
