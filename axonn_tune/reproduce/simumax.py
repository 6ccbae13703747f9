"""Measured steps and memory of Megatron-Core on B200, from SimuMax."""

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

_N_GPUS = 8
_SEQ_LEN = 4096


def simumax(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps of models with fewer layers, and the memory that the allocator held."""
    engine = loaders.engine("megatron-core")
    machine = loaders.machine("b200-simumax")
    paper = Paper("Megatron-Core on B200", "MooreThreads/SimuMax (Apache-2.0)", machine)
    for row in rows:
        model = replace(loaders.model(row["model"]), n_layers=int(row["layers"]))
        layout = f"TP {row['tensor']}, PP {row['pipeline']}, DP {row['data']}"
        published = {name: float(row[name]) for name in ("step_seconds", "memory_gib")}
        subject = f"{row['model']}, {layout}, batch {row['global_batch']}"
        yield paper.run(row["model"], subject, _search(row, model, machine, engine), published)


def _search(row: Row, model: Model, machine: Machine, engine: Engine) -> Search:
    """Return the search that is held to a row's layout; cuBLAS chooses kernels by itself."""
    strategy = megatron_of(engine, n_virtual=(1,), overlap_grad_reduce=False)
    job = Job(_N_GPUS, int(row["global_batch"]), _SEQ_LEN, kernel_tuning=False)
    axes = {axis: int(row[axis]) for axis in ("tensor", "pipeline", "data")}
    constraints = Constraints({**axes, "context": 1}, micro_batch=1)
    return Search(Scenario(model, job, machine, strategy), constraints, ("none",), include_oom=True)
