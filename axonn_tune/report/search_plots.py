"""Figures of what a search finds: rankings, one configuration, scaling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from axonn_tune.report.figure import check_plot, new_figure, saved
from axonn_tune.report.parts import step_parts
from axonn_tune.search.pareto import pareto_front
from axonn_tune.search.rank import Best, Ranking
from axonn_tune.spec.plan import COMPUTE
from axonn_tune.step.explain import Explanation, explain
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.timeline import step_timeline
from axonn_tune.studies.scaling import efficiencies
from axonn_tune.units import gib

# Equal layers in a row, and micro-batches of a pipeline, that a timeline draws.
DRAWN_LAYERS, DRAWN_MICROBATCHES = 3, 8
# Candidates whose steps are drawn as bars.
MOST_BARS = 30


def ranking_figure(ranking: Ranking, top_n: int, path: str) -> bytes:
    """Parts of the step of the best candidates, and time against memory of all.

    Raises
    ------
    InputError
        matplotlib is not installed, or the path ends in no format that it can write.
    """
    ending = check_plot(path)
    figure, (left, right) = new_figure(1, 2)
    predictions = ranking.top(min(top_n, MOST_BARS))
    _draw_parts(left, predictions)
    _draw_tradeoff(right, ranking)
    search = ranking.search
    figure.suptitle(
        f"{search.scenario.model.name} on {search.scenario.job.n_gpus} {search.scenario.machine.gpu.name}"
    )
    return saved(figure, ending)


def explanation_figure(explanation: Explanation, path: str) -> bytes:
    """A micro-step's timeline, the parts of the step, and the terms of the memory.

    Raises
    ------
    InputError
        matplotlib is not installed, or the path ends in no format that it can write.
    """
    ending = check_plot(path)
    figure, axes = new_figure(2, 2)
    for each in axes[0]:
        each.remove()
    _draw_timeline(figure.add_subplot(axes[0, 0].get_gridspec()[0, :]), explanation)
    p = explanation.prediction
    _draw_terms(axes[1, 0], step_parts(explanation), "s", "Step")
    memory = {term: gib(size) for term, size in p.memory_terms_bytes.items() if size}
    _draw_terms(axes[1, 1], memory, "GiB", "Memory of one GPU")
    axes[1, 1].axvline(gib(p.memory_capacity_bytes), color="black", linestyle="--")
    scenario, c = p.scenario, p.configuration
    figure.suptitle(
        f"{scenario.model.name} on {scenario.job.n_gpus} {scenario.machine.gpu.name}: {c.layout}, "
        f"micro-batch {c.micro_batch}, recompute {c.recompute}, {p.step_seconds:.3f} s a step"
    )
    return saved(figure, ending)


def scaling_figure(points: Sequence[Best], path: str) -> bytes:
    """Step time with its interval, and efficiency, over the GPU count.

    Raises
    ------
    InputError
        matplotlib is not installed, or the path ends in no format that it can write.
    """
    ending = check_plot(path)
    figure, (left, right) = new_figure(1, 2)
    found = [
        (
            point.search.scenario.job.n_gpus,
            point.prediction,
            efficiency,
            point.search.scenario.model.name,
        )
        for point, efficiency in zip(points, efficiencies(points), strict=True)
        if point.prediction is not None and efficiency is not None
    ]
    counts = [count for count, *_ in found]
    steps = np.array([best.step_seconds for _, best, *_ in found])
    ends = np.array(
        [best.step_seconds_interval or (best.step_seconds,) * 2 for _, best, *_ in found]
    )
    left.errorbar(counts, steps, yerr=np.abs(ends.T - steps), fmt="o-", capsize=3)
    if (
        len(
            {
                (point.search.scenario.model.name, point.search.scenario.job.global_batch)
                for point in points
            }
        )
        == 1
    ):
        ideal = steps[0] * counts[0] / np.array(counts)
        left.plot(counts, ideal, color="black", linewidth=0.8, linestyle="--", label="ideal")
        left.legend(fontsize="small")
    left.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="step, s (90 % interval)")
    right.plot(
        counts, [100.0 * efficiency for _, _, efficiency, _ in found], "o-", label="efficiency"
    )
    right.plot(counts, [100.0 * best.mfu for _, best, *_ in found], "s-", label="MFU")
    right.set(xscale="log", xlabel="GPUs", ylabel="%", ylim=(0, None))
    right.legend(fontsize="small")
    labels = [f"{count}\n{name}" for count, *_, name in found]
    for axes in (left, right):
        axes.set_xticks(counts, labels, fontsize="small")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    search = points[0].search
    figure.suptitle(
        f"Best {search.scenario.strategy.name} layouts on {search.scenario.machine.gpu.name}"
    )
    return saved(figure, ending)


def _draw_parts(axes: Any, predictions: Sequence[Prediction]) -> None:
    parts = [step_parts(explain(p, with_sensitivities=False)) for p in predictions]
    names = list(dict.fromkeys(name for each in parts for name in each))
    names.sort(key=lambda name: (name.startswith("exposed"), name == "bubble"))
    left = np.zeros(len(predictions))
    for name in names:
        seconds = np.array([each.get(name, 0.0) for each in parts])
        axes.barh(range(len(predictions)), seconds, left=left, label=name)
        left += seconds
    ends = np.array([p.step_seconds_interval or (p.step_seconds,) * 2 for p in predictions])
    axes.errorbar(
        left, range(len(predictions)), xerr=np.abs(ends.T - left), fmt="none", color="black", lw=0.8
    )
    labels = [
        f"{p.layout} mbs {p.configuration.micro_batch} {p.configuration.recompute}"
        for p in predictions
    ]
    axes.set_yticks(range(len(predictions)), labels, fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="step, s (90 % interval)", title="What a step is made of")
    axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3, axis="x")


def _draw_tradeoff(axes: Any, ranking: Ranking) -> None:
    memory, seconds = ranking.memory_bytes / 2.0**30, ranking.step_seconds
    for fits, color, label in ((True, "C0", "fits"), (False, "C3", "out of memory")):
        rows = ranking.fits == fits
        if rows.any():
            axes.plot(memory[rows], seconds[rows], ".", color=color, alpha=0.6, label=label)
    front = pareto_front(list(seconds), list(memory), list(ranking.fits))
    axes.step(
        memory[front], seconds[front], where="post", color="black", lw=0.8, label="Pareto front"
    )
    capacity = gib(ranking.search.scenario.memory_capacity_bytes)
    axes.axvline(capacity, color="black", linestyle="--", linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="GiB of one GPU",
        ylabel="step, s",
        title="Time and memory",
    )
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3, which="both")


def _draw_timeline(axes: Any, explanation: Explanation) -> None:
    p = explanation.prediction
    n_micro = DRAWN_MICROBATCHES if p.layout.n_stages > 1 else 1
    operations = step_timeline(p, DRAWN_LAYERS, n_micro).operations
    streams = sorted(
        {op.stream for op in operations}, key=lambda stream: (stream != COMPUTE, stream)
    )
    kinds = sorted({op.kind for op in operations})
    for color, kind in enumerate(kinds):
        for row, stream in enumerate(streams):
            bars = [
                (op.start_seconds, op.seconds)
                for op in operations
                if (op.kind, op.stream) == (kind, stream)
            ]
            axes.broken_barh(
                bars, (row - 0.4, 0.8), color=f"C{color}", label=kind if bars else None
            )
    handles, labels = axes.get_legend_handles_labels()
    of_kind = dict(zip(labels, handles, strict=True))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12)}
    axes.legend(of_kind.values(), of_kind.keys(), fontsize="small", ncols=len(of_kind), **below)
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    axes.set(
        xlabel="s",
        title=f"A micro-step with {DRAWN_LAYERS} of the equal layers in a row, and the step's end",
    )


def _draw_terms(axes: Any, terms: dict[str, float], unit: str, title: str) -> None:
    """Bars that continue one another."""
    sizes = np.array(list(terms.values()))
    axes.barh(range(len(terms)), sizes, left=np.cumsum(sizes) - sizes)
    axes.set_yticks(range(len(terms)), list(terms), fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel=unit, title=title)
    axes.grid(alpha=0.3, axis="x")
