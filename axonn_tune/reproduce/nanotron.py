"""Measured steps of nanotron on H100."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run
from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron3d import megatron_of

_SEQ_LEN = 4096
_VOCABULARY = 131072
# On so many nodes the same layout was measured up to ten times slower than its neighbours.
_SCATTERING_GPUS = 512


def nanotron(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps; the profile describes the machine on which they ran.

    The steps of 1B on up to 16 nodes are those on which the engine's times of the host were
    fitted.
    """
    engine = loaders.engine("nanotron")
    machine = loaders.machine("aws-p5")
    paper = Paper("nanotron", "Ultra-Scale Playbook of Hugging Face (Apache-2.0)", machine)
    fitting = replace(paper, is_fitted=True)
    for row in rows:
        layout = f"TP {row['tensor']}, PP {row['pipeline']}, DP {row['data']}"
        subject = f"{row['model']}, {layout}, micro-batch {row['micro_batch']}"
        is_scattering = int(row["gpus"]) >= _SCATTERING_GPUS
        nodes = "64 nodes" if is_scattering else "up to 16 nodes"
        is_fitted = row["model"] == "1B" and not is_scattering
        published = {name: float(row[name]) for name in ("step_seconds", "memory_gib")}
        yield (fitting if is_fitted else paper).run(
            f"{row['model']}, {nodes}", subject, _search(row, machine, engine), published
        )


def _search(row: Row, machine: Machine, engine: Engine) -> Search:
    """Return the search that is held to a row's layout."""
    strategy = megatron_of(engine, n_virtual=(1,), distributed_optimizer=row["sharded"] == "yes")
    job = Job(int(row["gpus"]), int(row["global_batch"]), _SEQ_LEN)
    axes = {axis: int(row[axis]) for axis in ("tensor", "data", "pipeline")}
    return Search(
        Scenario(_model(row), job, machine, strategy),
        Constraints({**axes, "context": 1}, micro_batch=int(row["micro_batch"])),
        ("none",),
        include_oom=True,
    )


def _model(row: Row) -> Model:
    """Return the Llama of a row's sizes."""
    return Model(
        f"llama-{row['model'].lower()}",
        n_layers=int(row["layers"]),
        hidden_size=int(row["hidden"]),
        n_heads=int(row["heads"]),
        vocab_size=_VOCABULARY,
        seq_len=_SEQ_LEN,
        ffn_hidden_size=int(row["ffn"]),
        gated_mlp=True,
        norm="rms",
        position="rotary",
        bias=False,
        tied_embeddings=row["tied"] == "yes",
    )
