"""Measured steps of NeMo on sequences of 4 thousand to a million tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run, held_to, numbers, with_fused_loss
from axonn_tune.spec.job import Job
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron.megatron3d import megatron_of

# The source names neither the recipe of 8 bits nor the type of summed gradients.
_ASSUMED = ("network", "recomputation", "software")


def long_sequences(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps; NeMo reduced gradients in bf16.

    The loss is Transformer Engine's (scripts/performance/helpers.py), before 2025 by assumption.
    """
    engine = with_fused_loss(loaders.engine("megatron-core"))
    for row in rows:
        machine = loaders.machine(row["machine"])
        model = loaders.model(row["model"])
        seq_len = int(row["seq_len"])
        job = Job(int(row["gpus"]), int(row["global_batch"]), seq_len, precision=row["precision"])
        axes = {axis: int(row[axis]) for axis in ("tensor", "context", "pipeline")}
        used = replace(engine, attention_library=row["attention"])
        strategy = megatron_of(used, n_virtual=(1,), fp32_gradients=False)
        search = held_to(Scenario(model, job, machine, strategy), axes, 1)
        published = numbers(row, "step_seconds")
        kind = "split sequences" if axes["context"] > 1 else "whole sequences"
        paper = Paper("NeMo", "NVIDIA/NeMo (Apache-2.0)", machine, assumed=_ASSUMED)
        group = f"{machine.gpu.family}, {kind}"
        yield paper.run(group, f"{seq_len} tokens", search, published)
