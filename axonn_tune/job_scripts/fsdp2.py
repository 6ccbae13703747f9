"""FSDP2: a training program that shards a model over torch's device mesh."""

from __future__ import annotations

from axonn_tune.job_scripts.framework import Program, Start, training_start
from axonn_tune.step.prediction import Prediction

PROGRAM = Program("train_fsdp2.py", ("gpt.py", "layers.py", "training.py"), "fsdp2-eager")


def start(prediction: Prediction, train: str | None) -> Start:
    """Return how FSDP2 is started."""
    return training_start(prediction, PROGRAM, tuple(prediction.layout.sizes), train)
