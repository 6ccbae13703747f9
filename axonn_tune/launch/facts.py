"""What every written module states of a configuration."""

from __future__ import annotations

from typing import Any

from axonn_tune.step.prediction import Prediction


def facts(prediction: Prediction) -> dict[str, Any]:
    """Fields of the modules' templates that do not depend on the framework."""
    return {
        "model": prediction.scenario.model.name,
        "gpus": prediction.scenario.job.n_gpus,
        "micro_batch": prediction.configuration.micro_batch,
        "micro_steps": prediction.n_microsteps,
        "global_batch": prediction.scenario.job.global_batch,
        "recompute": prediction.configuration.recompute,
    }
