"""Measured steps of NeMo on sequences of 4 thousand to a million tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run
from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.job import Job
from axonn_tune.spec.plan import FLASH_ATTENTION
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron3d import megatron_of

# Of the software the source names neither the recipe of 8 bits, nor the type of summed gradients,
# nor the attention. FlashAttention is taken, which NeMo's launcher of that year chose for NVIDIA's
# benchmarks (NVIDIA/dgxc-benchmarking at v24.11.1, nemo_megatron/launch.sh).
_ASSUMED = ("network", "recomputation", "software")


def long_sequences(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps; NeMo cast with delayed scales then, and reduced gradients in bf16."""
    engine = replace(loaders.engine("megatron-core"), attention_library=FLASH_ATTENTION)
    strategy = megatron_of(engine, n_virtual=(1,), fp32_gradients=False)
    machine = loaders.machine("dgx-h100")
    model = loaders.model("llama2-7b")
    paper = Paper("NeMo", "NVIDIA/NeMo (Apache-2.0)", machine, assumed=_ASSUMED)
    for row in rows:
        seq_len = int(row["seq_len"])
        job = Job(int(row["gpus"]), int(row["global_batch"]), seq_len, precision="fp8-delayed")
        axes = {axis: int(row[axis]) for axis in ("tensor", "context", "pipeline")}
        scenario = Scenario(model, job, machine, strategy)
        search = Search(scenario, Constraints(axes, micro_batch=1), ("none",), include_oom=True)
        published = {"step_seconds": float(row["step_seconds"])}
        kind = "split sequences" if axes["context"] > 1 else "whole sequences"
        yield paper.run(f"{model.name}, {kind}", f"{seq_len} tokens", search, published)
