"""Predict published runs and put the numbers side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from axonn_tune.errors import NoCandidateError
from axonn_tune.reproduce.comparison import Comparison, ErrorSummary, grouped, summary_of
from axonn_tune.reproduce.loaders import Loaders, Row
from axonn_tune.reproduce.papers import Run, megatron_on_frontier, sharded_on_frontier
from axonn_tune.search.rank import Each, rank_candidates
from axonn_tune.step.prediction import Prediction

GIB, GB = 2.0**30, 1e9
_STATES = ("weights", "gradients", "optimizer_states")


def _mean_state_gib(prediction: Prediction, run: Run) -> float:
    """Weights, gradients and optimizer states, if all ranks of a replica had the same share."""
    terms, sizes = prediction.memory_terms_bytes, prediction.layout.sizes
    first_rank = sum(terms[term] for term in _STATES)
    if sizes.get("pipeline", 1) == 1:
        return first_rank / GIB
    # The first rank has the embedding besides; its bytes for each parameter hold for all.
    job = run.search.scenario.job
    each = job.element_bytes + 4.0 + (12.0 if job.element_bytes < 4.0 else 8.0)
    share = run.search.scenario.model.parameters / (sizes["tensor"] * sizes["pipeline"])
    return share * each / GIB


_METRICS: dict[str, Callable[[Prediction, Run], float]] = {
    "step_seconds": lambda p, _: p.step_seconds,
    "tflops_per_gpu": lambda p, _: p.tflops_per_gpu,
    "hardware_tflops_per_gpu": lambda p, _: p.hardware_tflops_per_gpu,
    "memory_gb": lambda p, _: p.memory_bytes / GB,
    "activation_gib": lambda p, _: p.memory_terms_bytes["activations"] / GIB,
    "mean_state_gib": _mean_state_gib,
    "fits": lambda p, _: float(p.fits),
}


def predict_run(run: Run) -> Prediction | None:
    """The best configuration that is as the run was, in what is known of it."""
    try:
        return rank_candidates(run.search).prediction(0)
    except NoCandidateError:
        return None


def compare_published(runs: Sequence[Run], each: Each = iter) -> list[Comparison]:
    """One comparison for each number of each run."""
    return [
        _comparison(run, metric, prediction)
        for run in each(runs)
        for prediction in [predict_run(run)]
        for metric in run.published
    ]


def _comparison(run: Run, metric: str, prediction: Prediction | None) -> Comparison:
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
    sizes = ", ".join(f"{axis} {size}" for axis, size in p.layout.sizes.items() if size > 1)
    virtual = (
        f", {p.configuration.n_virtual} virtual stages" if p.configuration.n_virtual > 1 else ""
    )
    return f"{sizes}{virtual}, micro-batch {p.configuration.micro_batch}, recompute {p.configuration.recompute}"


def compare_frontier(rows: Sequence[Row], loaders: Loaders) -> list[Comparison]:
    """Ratios of sharded strategies, and fractions of peak of Megatron-DeepSpeed."""
    tflops = {
        name: rank_candidates(search).prediction(0).tflops_per_gpu
        for name, search in sharded_on_frontier(loaders).items()
    }
    ratios = {
        "zero_topo_over_zeropp": ("zero_topo", "zeropp"),
        "zeropp_over_zero3": ("zeropp", "zero3"),
        "zero_topo_over_zero3": ("zero_topo", "zero3"),
    }
    comparisons = []
    for row in rows:
        system, predicted, setting = "ZeRO on Frontier", None, _UNKNOWN.get(row["system"], "")
        source = "Xu et al., arXiv 2501.04266"
        if row["system"] in ratios:
            a, b = ratios[row["system"]]
            predicted, setting = tflops[a] / tflops[b], "batch of 1536 assumed"
        elif row["system"] == "megatron_deepspeed":
            system, source = "Megatron-DeepSpeed", "Dash et al., arXiv 2312.12705"
            best = rank_candidates(megatron_on_frontier(row, loaders)).prediction(0)
            predicted, setting = best.hfu, f"layout and batch assumed: {_setting(best)}"
        comparisons.append(
            Comparison(
                machine="frontier",
                subject=f"{row['system']} {row['parameters_b']}B on {row['gcds'] or '?'}",
                metric=row["metric"],
                published=float(row["value"]),
                predicted=predicted,
                setting=setting,
                certainty="abstract",
                source=source,
                system=system,
            )
        )
    return comparisons


_UNKNOWN = {
    "zero_topo_scaling_efficiency": "not predicted: base and batch of the scaling are not known",
    "forge": "not predicted: model, layout and batch are not known",
}


@dataclass(frozen=True)
class Timed:
    """A measured step, the predicted one, and what the naive baseline says.

    naive_seconds: FLOPs at one fitted fraction of the peak, times the bubble of the pipeline.
    """

    run: Run
    comparison: Comparison
    naive_seconds: float

    @property
    def measured_seconds(self) -> float:
        """As published."""
        return self.comparison.published

    @property
    def predicted_seconds(self) -> float:
        """By this model."""
        assert self.comparison.predicted is not None
        return self.comparison.predicted

    @property
    def job(self) -> tuple[str, int, int]:
        """What was trained: layouts of one job are alternatives."""
        search = self.run.search
        return (
            search.scenario.model.name,
            search.scenario.job.n_gpus,
            search.scenario.job.global_batch,
        )


@dataclass(frozen=True)
class GroupError:
    """Errors of a group of measured steps, beside those of a naive baseline.

    spearman: rank correlation of predicted with measured times. regret: how much slower the
    layout predicted to be the fastest is than the fastest measured one, mean over jobs.
    """

    name: str
    model: ErrorSummary
    naive: ErrorSummary
    spearman: float
    regret: float


def time_runs(runs: Sequence[Run], each: Each = iter) -> list[Timed]:
    """Predict measured steps, and fit the naive baseline's one parameter to all of them."""
    comparisons, at_peak = [], []
    for run in each(runs):
        prediction = predict_run(run)
        assert prediction is not None, "searches of measured runs include what does not fit"
        comparisons.append(_comparison(run, "step_seconds", prediction))
        at_peak.append(_seconds_at_peak(run, prediction))
    hfu = _fitted_hfu(np.array(at_peak), np.array([c.published for c in comparisons]))
    return [
        Timed(run, comparison, seconds / hfu)
        for run, comparison, seconds in zip(runs, comparisons, at_peak, strict=True)
    ]


def _seconds_at_peak(run: Run, p: Prediction) -> float:
    search, job = run.search, run.search.scenario.job
    flops = search.scenario.model.hardware_flops(job.tokens, job.seq_len, p.configuration.recompute)
    at_peak = flops / (job.n_gpus * search.scenario.machine.peak_flops_per_s(job.dtype))
    return at_peak * (1.0 + (p.layout.sizes["pipeline"] - 1) / p.n_microsteps)


def _fitted_hfu(at_peak: np.ndarray, measured: np.ndarray) -> float:
    """The one fraction of peak with the least mean error over all rows."""
    fractions = np.linspace(0.05, 0.95, 901)
    errors = [np.abs(at_peak / fraction / measured - 1.0).mean() for fraction in fractions]
    return float(fractions[int(np.argmin(errors))])


def group_errors(timed: Sequence[Timed]) -> list[GroupError]:
    """Over all, and per group of rows."""
    groups = {"all": list(timed), **grouped(timed, lambda t: t.run.group)}
    return [_group_error(name, group) for name, group in groups.items()]


def _group_error(name: str, timed: Sequence[Timed]) -> GroupError:
    from scipy.stats import spearmanr

    predicted = np.array([t.predicted_seconds for t in timed])
    measured = np.array([t.measured_seconds for t in timed])
    naive = np.array([t.naive_seconds for t in timed])
    own, baseline = (summary_of(list(values / measured - 1.0)) for values in (predicted, naive))
    assert own is not None and baseline is not None
    correlation = float(spearmanr(predicted, measured).statistic)
    return GroupError(name, own, baseline, correlation, _regret(timed))


def _regret(timed: Sequence[Timed]) -> float:
    losses = []
    for layouts in grouped(timed, lambda t: t.job).values():
        if len(layouts) > 1:
            chosen = min(layouts, key=lambda t: t.predicted_seconds)
            fastest = min(t.measured_seconds for t in layouts)
            losses.append(chosen.measured_seconds / fastest - 1.0)
    return float(np.mean(losses)) if losses else 0.0
