"""Facts of a configuration that every written module states."""

from __future__ import annotations

from typing import Any

from axonn_tune.errors import InputError
from axonn_tune.spec.recomputation import is_partial
from axonn_tune.step.prediction import Prediction


def facts(prediction: Prediction) -> dict[str, Any]:
    """Return the fields of the modules' templates that do not depend on the framework.

    Raises
    ------
    InputError
        A part of the layers is recomputed, which no template does.
    """
    scenario = prediction.scenario
    configuration = prediction.configuration
    if is_partial(configuration.recompute):
        raise InputError(
            f"recompute is {configuration.recompute}; allowed where a script is written for this "
            "framework: none, selective, full"
        )
    return {
        "model": scenario.model.name,
        "gpus": scenario.job.n_gpus,
        "micro_batch": configuration.micro_batch,
        "micro_steps": prediction.n_microsteps,
        "global_batch": scenario.job.global_batch,
        "recompute": configuration.recompute,
    }
