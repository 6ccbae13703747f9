"""Phrases that the texts of several commands share."""

from __future__ import annotations

from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import format_count


def assumption_line(scenario: Scenario) -> str:
    """Say in one line what was assumed."""
    job = scenario.job
    dropout = ", dropout" if job.dropout else ""
    tuning = "on" if job.kernel_tuning else "off"
    engine = scenario.strategy.engine_name
    engine_text = f", engine {engine}" if engine else ""
    return (
        f"Assumed: machine {scenario.machine.name}, global batch {job.global_batch} "
        f"sequences ({format_count(job.tokens)} tokens), sequence length {job.seq_len}, "
        f"{job.dtype}, {job.attention} attention{dropout}, overlap {job.overlap}, "
        f"kernel tuning {tuning}{engine_text}."
    )


def model_on_gpus(scenario: Scenario, with_parameters: bool = False) -> str:
    """Name the model, on request its number of parameters, and the GPUs that train it."""
    model = scenario.model
    job = scenario.job
    parameters = f" ({format_count(model.parameters)} parameters)" if with_parameters else ""
    return f"{model.name}{parameters} on {job.n_gpus} {scenario.machine.gpu.name}"


def interval_text(prediction: Prediction) -> str:
    """Return the ends of the 90 % interval, or a dash where it is not known."""
    interval = prediction.step_seconds_interval
    return "-" if interval is None else f"{interval[0]:.3f}-{interval[1]:.3f}"


def percent(fraction: float, digits: int = 1) -> str:
    """Return a fraction in percent, without the sign."""
    return f"{100 * fraction:.{digits}f}"
