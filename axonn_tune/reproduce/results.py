"""Published end results of other systems, each with its prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from axonn_tune.processes import mapped
from axonn_tune.reproduce.comparison import Comparison
from axonn_tune.reproduce.runs import Run
from axonn_tune.search.rank import Each, best_of, only_configuration
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import first_stage_bytes, predict_each
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import gib

GB = 1e9
# Fewer searches, or scenarios, are predicted sooner by one process than by several.
LEAST_SHARED = 8
_STATES = ("weights", "gradients", "optimizer_states")


def _mean_state_gib(prediction: Prediction, run: Run) -> float:
    """Return weights, gradients and optimizer states of a rank, the mean over all ranks."""
    layout = prediction.layout
    if layout.n_stages == 1:
        return gib(sum(prediction.memory_terms_bytes[term] for term in _STATES))
    # The first stage, which is predicted, also holds the embedding.
    scenario = run.search.scenario
    bytes_per_element = scenario.job.element_bytes
    optimizer_bytes = 12.0 if bytes_per_element < 4.0 else 8.0
    parameters_per_rank = scenario.model.parameters / (layout.size("tensor") * layout.n_stages)
    return gib(parameters_per_rank * (bytes_per_element + 4.0 + optimizer_bytes))


_METRICS: dict[str, Callable[[Prediction, Run], float]] = {
    "step_seconds": lambda p, _: p.step_seconds,
    "tflops_per_gpu": lambda p, _: p.tflops_per_gpu,
    "tokens_per_second_per_gpu": lambda p, _: p.tokens_per_second_per_gpu,
    "fraction_of_peak": lambda p, _: p.hfu,
    "hardware_tflops_per_gpu": lambda p, _: p.hardware_tflops_per_gpu,
    "memory_gb": lambda p, _: p.memory_bytes / GB,
    "memory_gib": lambda p, _: gib(p.allocator_bytes),
    "allocated_gib": lambda p, _: gib(p.allocator_bytes - p.memory_terms_bytes["fragmentation"]),
    "first_stage_gib": lambda p, _: gib(first_stage_bytes(p)),
    "activation_gib": lambda p, _: gib(p.memory_terms_bytes["activations"]),
    "mean_state_gib": _mean_state_gib,
    "fits": lambda p, _: float(p.fits),
}


def predict_runs(runs: Sequence[Run], each: Each = iter) -> list[Prediction | None]:
    """Return for each run the best configuration that agrees with what is known; None if none fits.

    Runs of one scenario of which the whole configuration is known are predicted together.
    """

    def predicted(alike: list[int]) -> list[Prediction | None]:
        searches = [runs[i].search for i in alike]
        configurations = [only_configuration(search) for search in searches]
        known = [each for each in configurations if each is not None]
        together = iter(predict_each(searches[0].scenario, known) if known else ())
        return [
            next(together) if configuration else best_of(search, detail="time").prediction
            for search, configuration in zip(searches, configurations, strict=True)
        ]

    of_scenarios = _by_scenario(runs)
    scenarios = [run.search.scenario for run in runs]
    found = mapped(predicted, of_scenarios, LEAST_SHARED, each, scenarios)
    predictions: dict[int, Prediction | None] = {}
    for alike, together in zip(of_scenarios, found, strict=True):
        predictions |= zip(alike, together, strict=True)
    return [predictions[i] for i in range(len(runs))]


def _by_scenario(runs: Sequence[Run]) -> list[list[int]]:
    """Return the indices of the runs of each scenario."""
    of_jobs: dict[tuple[Model, Job], list[tuple[Scenario, list[int]]]] = {}
    for i, run in enumerate(runs):
        scenario = run.search.scenario
        of_job = of_jobs.setdefault((scenario.model, scenario.job), [])
        alike = next((indices for other, indices in of_job if other == scenario), None)
        if alike is None:
            of_job.append((scenario, [i]))
        else:
            alike.append(i)
    return [alike for of_job in of_jobs.values() for _, alike in of_job]


def compare_published(
    runs: Sequence[Run], predictions: Sequence[Prediction | None]
) -> list[Comparison]:
    """Return one comparison for each number of each run."""
    return [
        compare_number(run, metric, prediction)
        for run, prediction in zip(runs, predictions, strict=True)
        for metric in run.published
    ]


def relative_error(run: Run, metric: str, prediction: Prediction) -> float:
    """Return the predicted over the published number, minus one."""
    return _METRICS[metric](prediction, run) / run.published[metric] - 1.0


def compare_number(run: Run, metric: str, prediction: Prediction | None) -> Comparison:
    """Compare one published number of a run with its prediction."""
    setting = "no layout of the model fits" if prediction is None else _setting(prediction)
    scenario = run.search.scenario
    return Comparison(
        machine=scenario.machine.name,
        subject=run.subject,
        metric=metric,
        published=run.published[metric],
        predicted=None if prediction is None else _METRICS[metric](prediction, run),
        setting=setting,
        certainty=run.certainty,
        source=run.source,
        system=run.system,
        group=run.group,
        assumed=run.assumed,
        strategy=scenario.strategy.name,
        engine=scenario.strategy.engine.record_title,
        gpu=scenario.machine.gpu.family,
        kind=scenario.kind,
        is_fitted=run.is_fitted,
    )


def _setting(p: Prediction) -> str:
    configuration = p.configuration
    sizes = ", ".join(f"{axis} {size}" for axis, size in p.layout.sizes.items() if size > 1)
    n_virtual = configuration.n_virtual
    virtual = f", {n_virtual} virtual stages" if n_virtual > 1 else ""
    return (
        f"{sizes}{virtual}, micro-batch {configuration.micro_batch}, "
        f"recompute {configuration.recompute}"
    )
