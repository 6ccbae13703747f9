"""What every written module states of a configuration."""

from __future__ import annotations

from typing import Any

from axonn_tune.search.search import Search
from axonn_tune.step.prediction import Prediction


def facts(search: Search, prediction: Prediction) -> dict[str, Any]:
    """Fields of the modules' templates that do not depend on the framework."""
    return {
        "model": search.model.name,
        "gpus": search.job.n_gpus,
        "micro_batch": prediction.micro_batch,
        "micro_steps": prediction.n_microsteps,
        "global_batch": search.job.global_batch,
        "recompute": prediction.recompute,
    }
