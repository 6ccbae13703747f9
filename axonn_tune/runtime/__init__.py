"""Train with AxoNN's 4D algorithm in torch; every operation runs under its name in the step plan.

The runtime needs torch (``pip install axonn-tune[runtime]``, or the cluster's own build). A public
name is imported when it is first used, so that a rank imports no more than it runs.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

# What fails is reported in one line; torch's own logs, with the frames of its code, are for those
# who ask for them. It reads the variable when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

# The module that defines each public name.
_HOME = {
    "Block": "runtime.axonn.gpt",
    "Engine": "runtime.axonn.engine",
    "GPT": "runtime.axonn.gpt",
    "grid_layout": "spec.layout",
    "parse_layout": "spec.layout",
    "Linear4D": "runtime.axonn.linear",
    "Mesh": "runtime.axonn.mesh",
    "Norm": "runtime.axonn.norm",
    "Optimizer": "runtime.axonn.optimizer",
    "Overlap": "spec.job",
    "RandomTokens": "runtime.axonn.trainer",
    "Trainer": "runtime.axonn.trainer",
    "cross_entropy": "runtime.axonn.loss",
    "goldfish_targets": "runtime.axonn.loss",
    "joined": "runtime.ranks.session",
    "load": "runtime.axonn.checkpoint",
    "pick_device": "runtime.ranks.session",
    "place_in_job": "runtime.ranks.place",
    "save": "runtime.axonn.checkpoint",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"axonn_tune.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
