"""Train with AxoNN's 4D algorithm in torch; every operation runs under its name in the step plan.

Needs torch (``pip install axonn-tune[runtime]``, or the cluster's own). Names are loaded
when they are used, so that a rank imports no more than it runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonn_tune.runtime.axonn.checkpoint import load, save
    from axonn_tune.runtime.axonn.engine import Engine
    from axonn_tune.runtime.axonn.gpt import GPT, Block
    from axonn_tune.runtime.axonn.linear import Linear4D
    from axonn_tune.runtime.axonn.loss import cross_entropy, goldfish_targets
    from axonn_tune.runtime.axonn.mesh import Mesh
    from axonn_tune.runtime.axonn.norm import Norm
    from axonn_tune.runtime.axonn.optimizer import Optimizer
    from axonn_tune.runtime.axonn.trainer import RandomTokens, Trainer
    from axonn_tune.runtime.ranks.session import joined, pick_device, place_in_job
    from axonn_tune.spec.grid import Grid
    from axonn_tune.spec.job import Overlap

_HOME = {
    "load": "runtime.axonn.checkpoint",
    "save": "runtime.axonn.checkpoint",
    "Engine": "runtime.axonn.engine",
    "GPT": "runtime.axonn.gpt",
    "Block": "runtime.axonn.gpt",
    "Linear4D": "runtime.axonn.linear",
    "cross_entropy": "runtime.axonn.loss",
    "goldfish_targets": "runtime.axonn.loss",
    "Mesh": "runtime.axonn.mesh",
    "Norm": "runtime.axonn.norm",
    "Optimizer": "runtime.axonn.optimizer",
    "joined": "runtime.ranks.session",
    "pick_device": "runtime.ranks.session",
    "place_in_job": "runtime.ranks.session",
    "RandomTokens": "runtime.axonn.trainer",
    "Trainer": "runtime.axonn.trainer",
    "Grid": "spec.grid",
    "Overlap": "spec.job",
}

__all__ = [
    "GPT",
    "Block",
    "Engine",
    "Grid",
    "Linear4D",
    "Mesh",
    "Norm",
    "Optimizer",
    "Overlap",
    "RandomTokens",
    "Trainer",
    "cross_entropy",
    "goldfish_targets",
    "joined",
    "load",
    "pick_device",
    "place_in_job",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"axonn_tune.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
