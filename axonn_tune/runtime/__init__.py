"""Train with AxoNN's 4D algorithm in torch; every operation runs under its name in the step plan.

Needs torch (``pip install axonn-tune[runtime]``, or the cluster's own). Names are loaded
when they are used, so that a rank imports no more than it runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from axonn_tune.runtime.checkpoint import load, save
    from axonn_tune.runtime.engine import Engine
    from axonn_tune.runtime.gpt import GPT, Block
    from axonn_tune.runtime.linear import Linear4D
    from axonn_tune.runtime.loss import cross_entropy, goldfish_targets
    from axonn_tune.runtime.mesh import Mesh
    from axonn_tune.runtime.norm import Norm
    from axonn_tune.runtime.optimizer import Optimizer
    from axonn_tune.runtime.session import joined, pick_device, place_in_job
    from axonn_tune.runtime.trainer import RandomTokens, Trainer
    from axonn_tune.spec.grid import Grid
    from axonn_tune.spec.job import Overlap

_HOME = {
    "load": "runtime.checkpoint",
    "save": "runtime.checkpoint",
    "Engine": "runtime.engine",
    "GPT": "runtime.gpt",
    "Block": "runtime.gpt",
    "Linear4D": "runtime.linear",
    "cross_entropy": "runtime.loss",
    "goldfish_targets": "runtime.loss",
    "Mesh": "runtime.mesh",
    "Norm": "runtime.norm",
    "Optimizer": "runtime.optimizer",
    "joined": "runtime.session",
    "pick_device": "runtime.session",
    "place_in_job": "runtime.session",
    "RandomTokens": "runtime.trainer",
    "Trainer": "runtime.trainer",
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
