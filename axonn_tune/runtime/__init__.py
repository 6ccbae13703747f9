"""Train with AxoNN's 4D algorithm in torch; every operation runs under its name in the step plan.

The runtime needs torch (``pip install axonn-tune[runtime]``, or the cluster's own build). A public
name is imported when it is first used, so that a rank imports no more than it runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

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
    "place_in_job": "runtime.ranks.session",
    "save": "runtime.axonn.checkpoint",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"axonn_tune.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
