"""Predictions of what AxoNN's papers report, from the presets alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from axonn_tune.cost.links import axis_links
from axonn_tune.processes import mapped
from axonn_tune.reproduce.comparison import Comparison
from axonn_tune.reproduce.results import LEAST_SHARED
from axonn_tune.reproduce.runs import Loaders, Row
from axonn_tune.search.batches import nearest_shared_batch
from axonn_tune.search.rank import Each, Ranking, rank_candidates
from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.configuration import Configuration
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import AXES, grid_layout, parse_layout
from axonn_tune.spec.scenario import Scenario
from axonn_tune.step.predict import predict
from axonn_tune.step.prediction import Prediction, hardware_flops
from axonn_tune.strategies.axonn.axonn4d import Axonn4D, padded_vocabulary
from axonn_tune.strategies.megatron.megatron3d import Megatron3D, megatron_of
from axonn_tune.units import gib

# Engines of the runs: that of the papers, and the one of the public logs, whose grid is known. On
# Frontier the latter ran with GPU_MAX_HW_QUEUES=1, so that nothing overlaps.
_OF_PAPERS = "axonn-sc24"
_OF_LOGS = "nanogpt"
_SERIAL_MACHINES = ("frontier-2024",)
# The authors ran the grids that are best by their own equations, of those whose tensor grid has at
# least the number of ranks below, and published the fastest (Megatron-AxoNN 885d2e7,
# launch_per_comm_model.py: topk and min_tensor_parallel). The equations here are the papers'. That
# launcher's count the sums of the forward pass twice, and exchange the widths of transposed layers:
# on Perlmutter 19 or 20 of 20 grids are the same, on 16,384 dies of Frontier and more hardly any.
_N_TRIED = 20
_LEAST_TENSOR_RANKS = {
    "5b": 4,
    "10b": 8,
    "20b": 16,
    "40b": 32,
    "60b": 64,
    "80b": 64,
    "160b": 128,
}
# The grid of the runs with overlap (Megatron-AxoNN 0887652, run_axonn.sh).
_GRID_WITH_OVERLAP = grid_layout(1, 4, 4, 1)
# What the papers leave open, and what the public logs leave open.
_ASSUMED_OF_PAPERS = ("vocabulary", "global batch", "layout", "micro-batch", "software")
_ASSUMED_OF_LOGS = ("vocabulary",)


def compare_runs(rows: Sequence[Row], loaders: Loaders, each: Each = iter) -> list[Comparison]:
    """Predict each row of the table of end results."""
    return list(mapped(partial(_compare_run, loaders=loaders), rows, LEAST_SHARED, each))


def _compare_run(row: Row, loaders: Loaders) -> Comparison:
    predicted, setting = _METRICS[row["metric"]](row, loaders)
    batch = _global_batch(row, row["gpus"])
    strategy = _strategy_of(row, loaders)
    if batch != int(row["global_batch"]):
        setting += f"; batch of {batch} assumed, which {row['gpus']} GPUs can share"
    return Comparison(
        machine=row["machine"],
        subject=f"{row['model']} on {row['gpus']} GPUs",
        metric=row["metric"],
        published=float(row["value"]),
        predicted=predicted,
        setting=setting,
        certainty=row["certainty"],
        source=row["source"],
        assumed=_ASSUMED_OF_LOGS if row["grid"] else _ASSUMED_OF_PAPERS,
        strategy=strategy.name,
        engine=strategy.engine.title,
        gpu=loaders.machine(row["machine"]).gpu.family,
        is_fitted=_is_serial(row),
    )


def _strategy_of(row: Row, loaders: Loaders) -> Axonn4D:
    """Return AxoNN with the engine of a row: the logs name their grid, the papers do not."""
    return Axonn4D(engine=loaders.engine(_OF_LOGS if row["grid"] else _OF_PAPERS))


def _is_serial(row: Row) -> bool:
    """Return whether nothing overlaps in a row: one of a log, on a machine that runs serially."""
    return bool(row["grid"]) and row["machine"] in _SERIAL_MACHINES


def _search(row: Row, loaders: Loaders, gpus: str, model: str) -> Search:
    axes: dict[str, int] = {}
    if row["grid"]:
        layout = parse_layout(row["grid"])
        axes = {axis: layout.size(axis) for axis in AXES}
    micro_batch = int(row["micro_batch"]) if row["micro_batch"] else None
    job = Job(
        int(gpus),
        _global_batch(row, gpus),
        int(row["seq_len"]),
        overlap=Overlap(False, False, False) if _is_serial(row) else Overlap(),
        # The papers' scripts leave Megatron's dropout on, attention's too (Megatron-AxoNN 885d2e7,
        # arguments.py and template_perlmutter.sh; 80def1e, run_axonn_amd.sh).
        dropout=not row["grid"],
    )
    scenario = Scenario(
        model=loaders.model(model),
        job=job,
        machine=loaders.machine(row["machine"]),
        strategy=_strategy_of(row, loaders),
    )
    return Search(
        scenario,
        constraints=Constraints(axes=axes, micro_batch=micro_batch),
        recomputes=("full",),
    )


def _global_batch(row: Row, gpus: str) -> int:
    """Return the row's global batch, or the nearest that this number of GPUs can share evenly."""
    return nearest_shared_batch(int(row["global_batch"]), int(gpus))


def _setting(prediction: Prediction) -> str:
    return f"grid {_layout_text(prediction)}"


def _layout_text(prediction: Prediction) -> str:
    return f"{prediction.layout}, micro-batch {prediction.configuration.micro_batch}"


def _best(row: Row, loaders: Loaders) -> Prediction:
    return _best_tried(_search(row, loaders, row["gpus"], row["model"]))


def _best_tried(search: Search) -> Prediction:
    """Return the fastest of the configurations that the authors would have run."""
    ranking = rank_candidates(replace(search, cost_model="paper"))
    least = _LEAST_TENSOR_RANKS.get(search.scenario.model.name.removeprefix("gpt-"), 1)
    ranked = map(ranking.prediction, range(len(ranking)))
    large = (
        p for p in ranked if math.prod(p.layout.size(axis) for axis in ("x", "y", "z")) >= least
    )
    return min(islice(large, _N_TRIED), key=lambda prediction: prediction.step_seconds)


def _logged_tflops_per_gpu(prediction: Prediction) -> float:
    """Return the TFLOP/s of each GPU as the authors' program logs them.

    It counts the vocabulary as the ranks of the grid pad it (Megatron-AxoNN 885d2e7,
    megatron/training.py, get_flops: padded_vocab_size), of which the head's products are, too.
    """
    scenario, configuration = prediction.scenario, prediction.configuration
    padded = padded_vocabulary(scenario.model, CandidateTable.single(configuration))
    model = replace(scenario.model, vocab_size=int(padded[0]))
    flops = hardware_flops(replace(scenario, model=model), configuration.recompute)
    return flops / prediction.step_seconds / scenario.job.n_gpus * 1e-12


def _fraction_of_peak(row: Row, loaders: Loaders) -> tuple[float, str]:
    best = _best(row, loaders)
    peak = best.scenario.machine.peak_flops_per_s(best.scenario.job.dtype)
    return _logged_tflops_per_gpu(best) * 1e12 / peak, _setting(best)


def _pflops(row: Row, loaders: Loaders) -> tuple[float, str]:
    best = _best(row, loaders)
    return _logged_tflops_per_gpu(best) * float(row["gpus"]) * 1e-3, _setting(best)


def _step_seconds(row: Row, loaders: Loaders) -> tuple[float, str]:
    best = _best(row, loaders)
    return best.step_seconds, _setting(best)


def _weak_scaling_efficiency(row: Row, loaders: Loaders) -> tuple[float, str]:
    best = _best(row, loaders)
    base = _best_tried(_search(row, loaders, row["base_gpus"], row["base_model"]))
    efficiency = _logged_tflops_per_gpu(best) / _logged_tflops_per_gpu(base)
    return efficiency, f"{_setting(best)}; base {_layout_text(base)}"


def _improvement_from_overlap(row: Row, loaders: Loaders) -> tuple[float, str]:
    """Return how much faster the grid of the authors' script becomes with overlap.

    The script of these runs switches both on together: the overlaps, and keeping the weights of all
    layers once they are gathered (OVERLAP and CACHE_LAYERS of run_axonn.sh, Megatron-AxoNN
    0887652). The micro-batch is the one that is best without them. The setting also states the
    memory that this takes, and the largest improvement of any configuration that fits without.
    """
    search = _search(row, loaders, row["gpus"], row["model"])
    search = replace(search, every_configuration=True)
    without = rank_candidates(_with_job(search, overlap=Overlap(False, False, False)))
    keeping = replace(_with_job(search, keep_gathered_weights=True), include_oom=True)
    overlapped = _seconds_by_configuration(rank_candidates(keeping))
    improvements = {
        configuration: seconds / overlapped[configuration] - 1.0
        for configuration, seconds in _seconds_by_configuration(without).items()
    }
    rank = next(i for i, c in enumerate(improvements) if c.layout == _GRID_WITH_OVERLAP)
    best = without.prediction(rank)
    kept = predict(keeping.scenario, best.configuration)
    memory = f"{gib(kept.memory_bytes):.0f} of {gib(kept.memory_capacity_bytes):.0f} GiB"
    most = max(improvements.values())
    setting = f"{_setting(best)}; kept weights, {memory}; up to {most:.2f} elsewhere"
    return improvements[best.configuration], setting


def _with_job(search: Search, **changes: Any) -> Search:
    """Return the search with changes to the job."""
    job = replace(search.scenario.job, **changes)
    return replace(search, scenario=replace(search.scenario, job=job))


def _seconds_by_configuration(ranking: Ranking) -> dict[Configuration, float]:
    """Return the time of a step of each ranked configuration, in rank order."""
    configurations = map(ranking.table.configuration, range(len(ranking)))
    return dict(zip(configurations, ranking.step_seconds.tolist(), strict=True))


def _speedup_over_megatron(row: Row, loaders: Loaders) -> tuple[float, str]:
    """Compare the best grid with Megatron-LM's best layout, both with full recomputation."""
    search = _search(row, loaders, row["gpus"], row["model"])
    strategy = _megatron_beside_axonn(loaders)
    of_megatron = replace(search, scenario=replace(search.scenario, strategy=strategy))
    best = rank_candidates(search).prediction(0)
    megatron = rank_candidates(of_megatron).prediction(0)
    setting = f"{_setting(best)}; Megatron-LM {_layout_text(megatron)}"
    return megatron.step_seconds / best.step_seconds, setting


def _megatron_beside_axonn(loaders: Loaders) -> Megatron3D:
    """Return the Megatron-LM that the authors keep beside their program: that of September 2023.

    Its loss, gradients and copies of heads are those of January 2023, and it calls FlashAttention-2
    as AxoNN's does (Megatron-AxoNN, branch megatron-lm, 8737bc1: megatron/model/transformer.py and
    distributed.py, megatron/core/tensor_parallel/cross_entropy.py).
    """
    engine = loaders.engine("megatron-2023")
    return megatron_of(replace(engine, attention_rate=None, attention_widths=()))


_METRICS: dict[str, Callable[[Row, Loaders], tuple[float, str]]] = {
    "fraction_of_peak": _fraction_of_peak,
    "pflops": _pflops,
    "step_seconds": _step_seconds,
    "weak_scaling_efficiency": _weak_scaling_efficiency,
    "improvement_from_overlap": _improvement_from_overlap,
    "speedup_over_megatron_lm": _speedup_over_megatron,
}


def compare_links(rows: Sequence[Row], loaders: Loaders) -> list[Comparison]:
    """Compare what the profiles imply for each ring of the published bandwidth tables."""
    comparisons = []
    for row in rows:
        stride = np.array([int(row["stride"])])
        size = np.array([int(row["size"])])
        links = axis_links(loaders.machine(row["machine"]), stride, size)
        gib_per_s = gib(float(links.kinds["all_reduce"].bandwidth_bytes_per_s[0]))
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
