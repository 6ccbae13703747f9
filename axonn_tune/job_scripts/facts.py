"""Facts of a configuration that every written module states."""

from __future__ import annotations

from typing import Any

from axonn_tune.step.prediction import Prediction


def facts(prediction: Prediction) -> dict[str, Any]:
    """Return the fields of the modules' templates that do not depend on the framework."""
    scenario = prediction.scenario
    configuration = prediction.configuration
    return {
        "model": scenario.model.name,
        "gpus": scenario.job.n_gpus,
        "micro_batch": configuration.micro_batch,
        "micro_steps": prediction.n_microsteps,
        "global_batch": scenario.job.global_batch,
        "recompute": configuration.recompute,
    }
