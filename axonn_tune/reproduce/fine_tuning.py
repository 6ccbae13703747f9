"""Measured steps of fine-tuning with low-rank adapters: MLPerf, and Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import (
    Loaders,
    Paper,
    Row,
    Run,
    by_maker,
    held_to_row,
    job_sizes,
    numbers,
    with_fused_loss,
    with_kernels,
)
from axonn_tune.search.search import Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.tuning import Adapters
from axonn_tune.strategies.megatron.megatron3d import megatron_of

_SOURCES = {
    "MLPerf": "MLPerf Training v4.0 to v6.0 (Apache-2.0)",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge (Apache-2.0)",
}
_ENGINES = {"MLPerf": "nemo", "Megatron-Bridge": "megatron-core"}
# The time in which NeMo's host issues an operation is fitted to these steps.
_FITTED = {("v4.0", "eos_n8_ngc24.04_nemo"), ("v4.0", "eos_n128_ngc24.04_nemo")}


def fine_tuning(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield the measured steps."""
    engines = {system: loaders.engine(name) for system, name in _ENGINES.items()}
    # Its loss is Transformer Engine's (scripts/performance/utils/overrides.py).
    engines["Megatron-Bridge"] = with_fused_loss(engines["Megatron-Bridge"])
    for row in rows:
        machine = loaders.machine(row["machine"])
        is_fitted = (row["release"], row["file"]) in _FITTED
        source = _SOURCES[row["system"]]
        paper = Paper(row["system"], source, machine, "table", ("network",), is_fitted)
        subject = f"LoRA of {row['model']} on {row['gpus']} of {row['machine']}, {row['release']}"
        search = _search(row, loaders, engines[row["system"]])
        published = numbers(row, "step_seconds")
        yield paper.run(by_maker(row["system"], machine), subject, search, published)


def _search(row: Row, loaders: Loaders, engine: Engine) -> Search:
    """Return the search that is held to a row's layout; cuBLAS chooses kernels by itself.

    The host launches a recorded layer once, and not kernel by kernel.
    """
    program = replace(with_kernels(engine.megatron, row), fuses_adapters=row["casts"] == "yes")
    issue_seconds = None if row["graphs"] == "yes" else engine.issue_seconds
    strategy = megatron_of(
        replace(
            engine,
            megatron=program,
            attention_library=row["attention"],
            issue_seconds=issue_seconds,
        ),
        n_virtual=(int(row["virtual"]),),
        fp32_gradients=False,
        low_weights=True,
        overlaps_tensor=row["overlaps"] == "yes",
        exchanges_adapters=row["system"] == "MLPerf",
        context_kind=row["context_kind"],
    )
    job = Job(
        *job_sizes(row),
        precision=row["precision"],
        kernel_tuning=False,
        adapters=Adapters(int(row["rank"]), (row["targets"],), row["dropout"] == "yes"),
        samples_per_sequence=float(row["samples"]),
    )
    machine = loaders.machine(row["machine"])
    scenario = Scenario(loaders.model(row["model"]), job, machine, strategy)
    return held_to_row(scenario, row, row["recompute"])
