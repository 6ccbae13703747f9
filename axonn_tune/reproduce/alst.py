"""Measured steps of DeepSpeed on sequences of 32 thousand to 15 million tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run, held_to, numbers
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import CONTEXT
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.zero.zero import zero3


def arctic_long_sequences(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps of a Llama on one to 32 H100.

    A node's host and network are taken to be those of a DGX. Weights in the host's memory have no
    place in DeepSpeed's plan.
    """
    machine = loaders.machine("dgx-h100")
    model = loaders.model("llama3-8b")
    for row in rows:
        n_gpus, n_sharing, seq_len = (int(row[name]) for name in ("gpus", "context", "seq_len"))
        engine = loaders.engine(row["engine"])
        tiled = replace(engine.memory, tiles_mlp=row["tiles_mlp"] == "yes")
        axes = {"shard": n_gpus // n_sharing, "replica": 1}
        if n_sharing > 1:
            axes[CONTEXT] = n_sharing
        context_kind = engine.zero.context_kind if n_sharing > 1 else ""
        strategy = zero3(replace(engine, memory=tiled), context_kind=context_kind)
        job = Job(
            n_gpus,
            n_gpus // n_sharing,
            seq_len,
            offload="optimizer",
            offload_modules=row["offloaded"],
        )
        search = held_to(Scenario(model, job, machine, strategy), axes, 1, "full")
        unknown = ("software",) if row["weights"] == "on host" else ()
        source = "arXiv 2506.13996v1"
        paper = Paper("DeepSpeed ALST", source, machine, "table", ("network", *unknown))
        group = "shared sequences" if n_sharing > 1 else "whole sequences"
        published = numbers(row, "step_seconds")
        yield paper.run(group, f"{seq_len} tokens on {n_gpus}", search, published)
