"""axonn-tune: which parallel layout trains a model fastest on a machine, how fast, and why.

The public API is loaded when it is used, so that ``import axonn_tune`` costs nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonn_tune.api.answers import compare as compare
    from axonn_tune.api.answers import explain as explain
    from axonn_tune.api.answers import launch as launch
    from axonn_tune.api.answers import plan as plan
    from axonn_tune.api.answers import predict as predict
    from axonn_tune.api.answers import scale as scale
    from axonn_tune.api.answers import suggest as suggest
    from axonn_tune.api.answers import whatif as whatif
    from axonn_tune.api.measuring import calibrate as calibrate
    from axonn_tune.api.measuring import validate as validate
    from axonn_tune.api.scoring import score as score
    from axonn_tune.io.presets import load_machine as load_machine
    from axonn_tune.io.presets import load_model as load_model

__version__ = "0.1.0"

if "AXONN_TUNE_LAUNCHER" in os.environ:
    # A rank imports this module first, and then torch for seconds in which its launcher may die.
    from axonn_tune.runtime.ranks.parent import die_with_launcher

    die_with_launcher()

_ANSWERS = ("compare", "explain", "launch", "plan", "predict", "scale", "suggest", "whatif")
_HOME = {
    **dict.fromkeys(_ANSWERS, "axonn_tune.api.answers"),
    "calibrate": "axonn_tune.api.measuring",
    "validate": "axonn_tune.api.measuring",
    "score": "axonn_tune.api.scoring",
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
