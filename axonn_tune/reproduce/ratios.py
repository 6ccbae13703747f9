"""Published ratios of sharded strategies on Frontier, each with its prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from axonn_tune.reproduce.comparison import Comparison
from axonn_tune.reproduce.runs import Loaders, Row, held_to
from axonn_tune.search.rank import rank_candidates
from axonn_tune.spec.job import Job
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.zero.zero import Zero, zero3, zero_topo, zeropp

# Numerator and denominator of each ratio.
_RATIOS = {
    "zero_topo_over_zeropp": ("zero-topo", "zeropp"),
    "zeropp_over_zero3": ("zeropp", "zero3"),
    "zero_topo_over_zero3": ("zero-topo", "zero3"),
}
# Numbers whose source says too little for a prediction, and what is missing.
_NOT_PREDICTED = {
    "zero_topo_scaling_efficiency": "not predicted: base and batch of the scaling are not known",
    "forge": "not predicted: model, layout and batch are not known",
}
_ASSUMED = ("model", "vocabulary", "global batch", "micro-batch", "recomputation", "software")


def compare_ratios(rows: Sequence[Row], loaders: Loaders) -> list[Comparison]:
    """Compare ratios of TFLOP/s, and list the numbers that cannot be predicted."""
    tflops = _predicted_tflops(loaders)
    return [_compare_ratio(row, tflops) for row in rows]


def _predicted_tflops(loaders: Loaders) -> dict[str, float]:
    """Return the TFLOP/s per GCD of 20B on 384 GCDs under each sharded strategy.

    The paper's batch is not known; assumed are 1536 sequences of 2048, one on each GCD in four
    micro-steps.
    """
    model = loaders.model("20b")
    machine = loaders.machine("frontier-2024")
    deepspeed = loaders.engine("deepspeed-eager")
    members: tuple[tuple[Zero, dict[str, int]], ...] = (
        (zero3(deepspeed), {"replica": 1}),
        (zeropp(engine=deepspeed), {"secondary": 8}),
        (zero_topo(engine=deepspeed), {"weights": 2, "gradients": 4}),
    )
    job = Job(384, 1536, model.seq_len)
    tflops = {}
    for strategy, sizes in members:
        search = held_to(Scenario(model, job, machine, strategy), sizes, 1, "full")
        tflops[strategy.name] = rank_candidates(search).prediction(0).tflops_per_gpu
    return tflops


def _compare_ratio(row: Row, tflops: Mapping[str, float]) -> Comparison:
    """Compare a row with what follows from the predicted TFLOP/s of each strategy."""
    name = row["system"]
    predicted = None
    strategy = ""
    setting = _NOT_PREDICTED.get(name, "batch of 1536 assumed")
    if name in _RATIOS:
        numerator, denominator = _RATIOS[name]
        predicted = tflops[numerator] / tflops[denominator]
        strategy = numerator
    return Comparison(
        machine="frontier-2024",
        subject=f"{name} {row['parameters_b']}B on {row['gcds'] or '?'}",
        metric=row["metric"],
        published=float(row["value"]),
        predicted=predicted,
        setting=setting,
        certainty="abstract",
        source="Xu et al., arXiv 2501.04266",
        system="ZeRO on Frontier",
        assumed=_ASSUMED,
        strategy=strategy,
    )
