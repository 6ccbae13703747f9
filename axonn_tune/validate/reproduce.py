"""Predict what AxoNN's papers report, from the presets alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

import numpy as np

from axonn_tune.cost.links import axis_links
from axonn_tune.search.candidates import Constraints
from axonn_tune.search.prediction import Prediction
from axonn_tune.search.problem import Search
from axonn_tune.search.rank import run
from axonn_tune.spec.grid import AXES, Grid
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model

Row = Mapping[str, str]
GIB = 2.0**30
NOT_MODELLED = {"speedup_over_megatron_lm": "needs the Megatron-LM strategy, not modelled yet"}


@dataclass(frozen=True)
class Comparison:
    """One published number with its prediction; None where it is not predicted."""

    machine: str
    subject: str
    metric: str
    published: float
    predicted: float | None
    setting: str
    certainty: str
    source: str

    @property
    def error_fraction(self) -> float | None:
        """Signed relative error of the prediction."""
        return None if self.predicted is None else self.predicted / self.published - 1.0


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of a set of comparisons, as fractions."""

    n: int
    bias: float
    mape: float
    median: float
    p90: float
    max_error: float


@dataclass(frozen=True)
class Loaders:
    """How to find presets by name; validation itself touches no files."""

    model: Callable[[str], Model]
    machine: Callable[[str], Machine]


def compare_runs(rows: Sequence[Row], loaders: Loaders) -> list[Comparison]:
    """Predict each row of the table of end results."""
    return [_compare_run(row, loaders) for row in rows]


def _compare_run(row: Row, loaders: Loaders) -> Comparison:
    predicted, setting = None, NOT_MODELLED.get(row["metric"], "")
    if not setting:
        predicted, setting = _METRICS[row["metric"]](row, loaders)
    return Comparison(
        machine=row["machine"],
        subject=f"{row['model']} on {row['gpus']} GPUs",
        metric=row["metric"],
        published=float(row["value"]),
        predicted=predicted,
        setting=setting,
        certainty=row["certainty"],
        source=row["source"],
    )


def _search(row: Row, loaders: Loaders, gpus: str, model: str) -> Search:
    axes: dict[str, int] = {}
    if row["grid"]:
        grid = Grid.parse(row["grid"])
        axes = dict(zip(AXES, (grid.x, grid.y, grid.z, grid.data), strict=True))
    micro_batch = int(row["micro_batch"]) if row["micro_batch"] else None
    return Search(
        model=loaders.model(model),
        job=Job(int(gpus), int(row["global_batch"]), int(row["seq_len"])),
        machine=loaders.machine(row["machine"]),
        constraints=Constraints(axes=axes, micro_batch=micro_batch),
        recomputes=("full",),
    )


def _setting(prediction: Prediction) -> str:
    return f"grid {prediction.grid}, micro-batch {prediction.micro_batch}"


def _best(row: Row, loaders: Loaders) -> Prediction:
    return run(_search(row, loaders, row["gpus"], row["model"])).prediction(0)


def _fraction_of_peak(row: Row, loaders: Loaders) -> tuple[float, str]:
    best = _best(row, loaders)
    return best.hfu, _setting(best)


def _pflops(row: Row, loaders: Loaders) -> tuple[float, str]:
    best = _best(row, loaders)
    return best.hardware_tflops_per_gpu * float(row["gpus"]) * 1e-3, _setting(best)


def _step_seconds(row: Row, loaders: Loaders) -> tuple[float, str]:
    best = _best(row, loaders)
    return best.step_seconds, _setting(best)


def _weak_scaling_efficiency(row: Row, loaders: Loaders) -> tuple[float, str]:
    best = _best(row, loaders)
    base = run(_search(row, loaders, row["base_gpus"], row["base_model"])).prediction(0)
    efficiency = best.hardware_tflops_per_gpu / base.hardware_tflops_per_gpu
    return efficiency, f"{_setting(best)}; base {base.grid}, micro-batch {base.micro_batch}"


def _improvement_from_overlap(row: Row, loaders: Loaders) -> tuple[float, str]:
    """How much faster the grid that is best without overlap becomes with it.

    The setting also tells the largest improvement of any configuration that fits.
    """
    search = _search(row, loaders, row["gpus"], row["model"])
    search = replace(search, every_configuration=True)
    without = run(replace(search, job=replace(search.job, overlap=Overlap(False, False, False))))
    overlapped = {_key(p): p.step_seconds for p in run(search).top()}
    improvements = [p.step_seconds / overlapped[_key(p)] - 1.0 for p in without.top()]
    best = without.prediction(0)
    return improvements[0], f"{_setting(best)}; up to {max(improvements):.2f} on other grids"


def _key(prediction: Prediction) -> tuple[Grid, int]:
    return prediction.grid, prediction.micro_batch


_METRICS: dict[str, Callable[[Row, Loaders], tuple[float, str]]] = {
    "fraction_of_peak": _fraction_of_peak,
    "pflops": _pflops,
    "step_seconds": _step_seconds,
    "weak_scaling_efficiency": _weak_scaling_efficiency,
    "improvement_from_overlap": _improvement_from_overlap,
}


def compare_links(rows: Sequence[Row], loaders: Loaders) -> list[Comparison]:
    """What the profiles imply for each ring of the published bandwidth tables."""
    comparisons = []
    for row in rows:
        stride, size = (np.array([int(row[name])]) for name in ("stride", "size"))
        links = axis_links(loaders.machine(row["machine"]), stride, size)
        gib_per_s = float(links.kinds["all_reduce"].bandwidth_bytes_per_s[0]) / GIB
        comparisons.append(
            Comparison(
                machine=row["machine"],
                subject=f"stride {row['stride']}, size {row['size']}",
                metric="ring bandwidth, GiB/s",
                published=float(row["gib_per_s"]),
                predicted=gib_per_s,
                setting="taken over" if row["where"] == "node" else "sharing law",
                certainty="table",
                source=row["source"],
            )
        )
    return comparisons


def summarise(comparisons: Sequence[Comparison]) -> ErrorSummary | None:
    """Errors over all predicted comparisons; None if there are none."""
    errors = [c.error_fraction for c in comparisons if c.error_fraction is not None]
    if not errors:
        return None
    sizes = [abs(error) for error in errors]
    return ErrorSummary(
        n=len(errors),
        bias=mean(errors),
        mape=mean(sizes),
        median=median(sizes),
        p90=float(np.percentile(sizes, 90)),
        max_error=max(sizes),
    )
