"""FSDP2: a training program that shards a model over torch's device mesh."""

from __future__ import annotations

from axonn_tune.job_scripts.framework import Start, training_start
from axonn_tune.step.prediction import Prediction

PROGRAM = "train_fsdp2.py"
_MODULES = ("gpt.py", "layers.py", "training.py")


def start(prediction: Prediction, train: str | None) -> Start:
    """Return how FSDP2 is started."""
    axes = tuple(prediction.layout.sizes)
    return training_start(prediction, PROGRAM, _MODULES, axes, "", train)
