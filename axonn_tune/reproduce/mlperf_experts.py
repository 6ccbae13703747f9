"""Measured steps of MLPerf Training v6.0, in which DeepSeek-V3 trains on up to 8,192 GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.bridge import layout_search
from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run

_MODEL = "deepseek-v3"


def mlperf_experts(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps, for which experts are taken to be equally busy."""
    model = loaders.model(_MODEL)
    engine = loaders.engine("megatron-core-graphs")
    program = replace(engine.megatron, low_attention=True, aligns_gathers=False)
    engine = replace(engine, megatron=program)
    machines = {name: loaders.machine(name) for name in {row["machine"] for row in rows}}
    source = "mlcommons/training_results_v6.0 (Apache-2.0)"
    for row in rows:
        machine = machines[row["machine"]]
        paper = Paper("MLPerf", source, machine, "table", ("network",))
        search = layout_search(
            row,
            model,
            machine,
            engine,
            mtp_modules=1,
            fp32_gradients=False,
            low_weights=True,
        )
        published = {"step_seconds": float(row["step_seconds"])}
        subject = f"{model.name} on {row['gpus']} of {row['machine']}, {row['precision']}"
        yield paper.run(machine.name, subject, search, published)
