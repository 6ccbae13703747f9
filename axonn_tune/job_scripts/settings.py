"""The settings of a training program: what it trains, and on which layout."""

from __future__ import annotations

import json
from typing import Any

from axonn_tune.spec.model import DENSE_SIZES, Model
from axonn_tune.step.prediction import Prediction

NAME = "settings.json"
# The probability that Megatron-LM and GPT-2 use.
DROPOUT = 0.1


def settings_text(prediction: Prediction, engine: str, axes: tuple[str, ...]) -> str:
    """Return the file of settings; JSON holds every name and text, so that none is ever code.

    Parameters
    ----------
    engine : str
        Name of the engine that the program runs, whichever was predicted; empty if none has facts.
    axes : tuple of str
        The axes of the layout that the program reads, also those of size 1.
    """
    configuration = prediction.configuration
    job = prediction.scenario.job
    model = prediction.scenario.model
    document = {
        "model": _model_sizes(model),
        "strategy": prediction.scenario.strategy.name,
        "engine": engine or None,
        "layout": {axis: prediction.layout.size(axis) for axis in axes},
        "seq_len": job.seq_len,
        "n_positions": max(job.seq_len, model.seq_len),
        "global_batch": job.global_batch,
        "micro_batch": configuration.micro_batch,
        "dtype": job.dtype,
        "recompute": configuration.recompute,
        "attention": job.attention,
        "dropout": DROPOUT if job.dropout else 0.0,
        "overlap": {"oar": job.overlap.oar, "ors": job.overlap.ors, "oag": job.overlap.oag},
        "offload": job.offload,
        "reduces_once": prediction.scenario.strategy.engine.zero.reduces_once,
        "predicted_step_seconds": prediction.step_seconds,
    }
    return json.dumps(document, indent=2) + "\n"


def _model_sizes(model: Model) -> dict[str, Any]:
    return {name: getattr(model, name) for name in ("name", "padded_vocab_size", *DENSE_SIZES)}
