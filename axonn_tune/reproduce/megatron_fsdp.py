"""Measured steps of Megatron-FSDP, which NVIDIA published for Megatron-Bridge and for NeMo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run, held_to, numbers
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.offload import LAYERS
from axonn_tune.spec.quantity import Quantity
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.zero.zero import zero3

_SOURCES = {
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge (Apache-2.0)",
    "NeMo": "NVIDIA/NeMo (Apache-2.0)",
}
# Transformer Engine up to 2.17, which all releases of the table had, writes the gradient of the
# loss to where the logits were.
_IN_PLACE = Quantity(2.0, "published", "Transformer Engine 2.14, pytorch/triton/cross_entropy.py")


def megatron_fsdp(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps."""
    engine = loaders.engine("megatron-fsdp")
    for row in rows:
        machine, model = loaders.machine(row["machine"]), loaders.model(row["model"])
        n_gpus = int(row["gpus"])
        assumed = ("network",) if n_gpus > machine.ranks_per_node else ()
        paper = Paper("Megatron-FSDP", _SOURCES[row["program"]], machine, assumed=assumed)
        n_offloaded = int(row["offloaded_layers"])
        job = Job(
            n_gpus,
            int(row["global_batch"]),
            int(row["seq_len"]),
            precision=row["precision"],
            kernel_tuning=False,
            offload_modules=f"{LAYERS}:{n_offloaded}" if n_offloaded else "",
        )
        scenario = Scenario(model, job, machine, zero3(_with_options(engine, row)))
        search = held_to(scenario, {"shard": n_gpus, "replica": 1}, int(row["micro_batch"]))
        subject = f"{row['model']} on {n_gpus} of {row['machine']}, {row['program']}"
        published = numbers(row, "step_seconds")
        yield paper.run(row["machine"], f"{subject} {row['release']}", search, published)


def _with_options(engine: Engine, row: Row) -> Engine:
    """Return the engine with the options of a row's recipe, and the loss of its time."""
    program = replace(
        engine.zero,
        keeps_transposed=row["keeps_transposed"] == "yes",
        scales_gradients=row["scales_gradients"] == "yes",
    )
    return replace(engine, zero=program, memory=replace(engine.memory, logit_bytes=_IN_PLACE))
