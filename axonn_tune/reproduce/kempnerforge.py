"""Measured steps of KempnerForge, which trains with torch's FSDP2 and DTensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run, held_to, numbers
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import TENSOR
from axonn_tune.spec.links import RingBandwidth
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.zero.zero import zero3

_SOURCE = "KempnerInstitute/KempnerForge at 5666d0d, benchmarks (MIT)"
_RANKS_PER_NODE = 4
_SEQ_LEN = 4096


def kempnerforge(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps of Llamas; without a compiler, kernels are those of eager FSDP2."""
    machine = _half_nodes(loaders.machine("dgx-h200"))
    models = _models(loaders)
    compiled = loaders.engine("kempnerforge")
    eager = _eager(compiled, loaders.engine("fsdp2-eager"))
    for row in rows:
        n_gpus, tensor = int(row["gpus"]), int(row["tensor"])
        n_shards = n_gpus // tensor
        is_compiled = row["compiled"] == "yes"
        assumed = [] if is_compiled else ["software"]
        if n_gpus > 1:
            assumed.append("network")
        micro_batch = int(row["micro_batch"])
        job = Job(n_gpus, n_shards * micro_batch * int(row["accumulated"]), _SEQ_LEN)
        strategy = zero3(compiled if is_compiled else eager)
        scenario = Scenario(models[row["model"]], job, machine, strategy)
        axes = {TENSOR: tensor, "shard": n_shards, "replica": 1}
        search = held_to(scenario, axes, micro_batch, "full")
        paper = Paper("KempnerForge", _SOURCE, machine, "table", tuple(assumed))
        group = "FSDP" if tensor == 1 else "FSDP with a tensor group"
        subject = f"{row['model']} on {n_gpus}, TP {tensor}, micro-batch {micro_batch}"
        published = numbers(row, "step_seconds", "allocated_gib")
        yield paper.run(group, subject, search, published)


def _models(loaders: Loaders) -> dict[str, Model]:
    """Return the models of the rows by their names."""
    small = loaders.model("llama3-8b")
    middle = replace(
        small,
        name="llama3-13b",
        n_layers=40,
        hidden_size=5120,
        n_heads=40,
        ffn_hidden_size=17920,
        published_parameters=None,
    )
    return {"7B": small, "13B": middle, "70B": loaders.model("llama3-70b")}


def _eager(engine: Engine, kernels_of: Engine) -> Engine:
    """Return the engine without a compiler."""
    program = replace(engine.zero, runs_eagerly=True)
    return replace(engine, zero=program, kernels=kernels_of.kernels)


def _half_nodes(machine: Machine) -> Machine:
    """Return a machine with nodes of half as many GPUs, of which two share an adapter.

    Adapters of 400 Gbit/s are published, and their number is assumed. In a trace of 13B on 24 GPUs
    (benchmarks/profiling/13b_24gpu_profiling.md), which is no row, reductions over nodes reached 20
    GB/s a GPU and gathers 15, beside messages in the node: 205 of 338 MB over 6 ranks took 2.95 s,
    and 1,640 of 169 MB took 15.9 s. NVLink of four GPUs is assumed to be as fast as that of four
    out of eight. Boards of four have no switch: any two GPUs share a third of their links (NVIDIA,
    "Introducing NVIDIA HGX H100", recalled: 300 of 900 GB/s), as pairs on Perlmutter were measured.
    """
    inside, between = machine.links
    half = replace(
        between,
        unit_ranks=_RANKS_PER_NODE,
        bandwidth_bytes_per_s=between.bandwidth_bytes_per_s.scaled(0.25),
    )
    points = tuple(
        replace(point, everywhere=True)
        for point in machine.link_points
        if point.size == _RANKS_PER_NODE
    )
    third = inside.bandwidth_bytes_per_s.scaled(1.0 / 3.0)
    pairs = tuple(RingBandwidth(stride, 2, third) for stride in (1, 2))
    return replace(
        machine,
        name="dgx-h200, four GPUs a node",
        ranks_per_node=_RANKS_PER_NODE,
        links=(inside, half),
        link_points=points,
        ring_bandwidths=pairs,
    )
