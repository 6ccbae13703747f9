"""Published end results of other systems, each with its prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from axonn_tune.errors import NoCandidateError
from axonn_tune.reproduce.comparison import Comparison
from axonn_tune.reproduce.runs import (
    Loaders,
    Row,
    Run,
    megatron_on_frontier,
    sharded_on_frontier,
)
from axonn_tune.search.rank import Each, rank_candidates
from axonn_tune.step.prediction import Prediction
from axonn_tune.units import gib

GB = 1e9
_STATES = ("weights", "gradients", "optimizer_states")
_ZERO_PAPER = "Xu et al., arXiv 2501.04266"
_MEGATRON_PAPER = "Dash et al., arXiv 2312.12705"
# Numerator and denominator of each published ratio of sharded strategies on Frontier.
_RATIOS = {
    "zero_topo_over_zeropp": ("zero_topo", "zeropp"),
    "zeropp_over_zero3": ("zeropp", "zero3"),
    "zero_topo_over_zero3": ("zero_topo", "zero3"),
}
# Published numbers of Frontier that say too little to be predicted, and what is missing.
_NOT_PREDICTED = {
    "zero_topo_scaling_efficiency": "not predicted: base and batch of the scaling are not known",
    "forge": "not predicted: model, layout and batch are not known",
}


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
    "hardware_tflops_per_gpu": lambda p, _: p.hardware_tflops_per_gpu,
    "memory_gb": lambda p, _: p.memory_bytes / GB,
    "activation_gib": lambda p, _: gib(p.memory_terms_bytes["activations"]),
    "mean_state_gib": _mean_state_gib,
    "fits": lambda p, _: float(p.fits),
}


def predict_run(run: Run) -> Prediction | None:
    """Return the best configuration that agrees with what is known of a run; None if none fits."""
    try:
        return rank_candidates(run.search).prediction(0)
    except NoCandidateError:
        return None


def compare_published(runs: Sequence[Run], each: Each = iter) -> list[Comparison]:
    """Return one comparison for each number of each run."""
    comparisons = []
    for run in each(runs):
        prediction = predict_run(run)
        comparisons += [compare_number(run, metric, prediction) for metric in run.published]
    return comparisons


def compare_number(run: Run, metric: str, prediction: Prediction | None) -> Comparison:
    """Compare one published number of a run with its prediction."""
    setting = "no layout of the model fits" if prediction is None else _setting(prediction)
    return Comparison(
        machine=run.search.scenario.machine.name,
        subject=run.subject,
        metric=metric,
        published=run.published[metric],
        predicted=None if prediction is None else _METRICS[metric](prediction, run),
        setting=setting,
        certainty=run.certainty,
        source=run.source,
        system=run.system,
        group=run.group,
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


def compare_frontier(rows: Sequence[Row], loaders: Loaders) -> list[Comparison]:
    """Compare ratios of sharded strategies, and fractions of peak of Megatron-DeepSpeed."""
    tflops = {
        name: rank_candidates(search).prediction(0).tflops_per_gpu
        for name, search in sharded_on_frontier(loaders).items()
    }
    return [_compare_on_frontier(row, tflops, loaders) for row in rows]


def _compare_on_frontier(row: Row, tflops: Mapping[str, float], loaders: Loaders) -> Comparison:
    """Compare a row; `tflops` holds the predicted TFLOP/s per GPU of each sharded strategy."""
    name = row["system"]
    is_megatron = name == "megatron_deepspeed"
    predicted = None
    if is_megatron:
        best = rank_candidates(megatron_on_frontier(row, loaders)).prediction(0)
        predicted = best.hfu
        setting = f"layout and batch assumed: {_setting(best)}"
    elif name in _RATIOS:
        numerator, denominator = _RATIOS[name]
        predicted = tflops[numerator] / tflops[denominator]
        setting = "batch of 1536 assumed"
    else:
        setting = _NOT_PREDICTED.get(name, "")
    return Comparison(
        machine="frontier-2024",
        subject=f"{name} {row['parameters_b']}B on {row['gcds'] or '?'}",
        metric=row["metric"],
        published=float(row["value"]),
        predicted=predicted,
        setting=setting,
        certainty="abstract",
        source=_MEGATRON_PAPER if is_megatron else _ZERO_PAPER,
        system="Megatron-DeepSpeed" if is_megatron else "ZeRO on Frontier",
    )
