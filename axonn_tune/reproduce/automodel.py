"""Measured steps of NeMo AutoModel, which trains mixtures of experts with torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run
from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import EXPERT
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron3d import Megatron3D, megatron_of
from axonn_tune.strategies.zero import zero3

_SEQ_LEN = 4096
_SOURCE = "NVIDIA-NeMo/Automodel, docs/performance-summary.md (Apache-2.0)"


def automodel(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps; the latency of the network is that of the profile."""
    machine = loaders.machine("dgx-h100")
    engine = loaders.engine("automodel-2025")
    for row in rows:
        n_gpus = int(row["gpus"])
        assumed = ("network",) if n_gpus > machine.ranks_per_node else ()
        paper = Paper("NeMo AutoModel", _SOURCE, machine, "table", assumed)
        model = with_neighbours(loaders.model(row["model"]))
        job = Job(n_gpus, int(row["global_batch"]), _SEQ_LEN)
        constraints = Constraints(_axes(row), micro_batch=int(row["micro_batch"]))
        used = _as_in(row, engine)
        strategy = _pipelined(row, model, used) if int(row["pipeline"]) > 1 else zero3(used, True)
        scenario = Scenario(model, job, machine, strategy)
        search = Search(scenario, constraints, (row["recompute"],), include_oom=True)
        published = {"step_seconds": float(row["step_seconds"])}
        yield paper.run("experts", f"{model.name} on {n_gpus}, {row['commit']}", search, published)


def with_neighbours(model: Model) -> Model:
    """Return the model with a gate whose choices for a token are neighbouring experts."""
    experts = model.experts
    assert experts is not None, "all models of the table have experts"
    n_groups = experts.n_experts // experts.top_k
    return replace(model, experts=replace(experts, n_groups=n_groups, top_groups=1))


def _axes(row: Row) -> dict[str, int]:
    """Return the layout of a row: shards of FSDP, or stages of which each has its replicas."""
    n_gpus, expert, n_stages = (int(row[name]) for name in ("gpus", "expert", "pipeline"))
    if n_stages == 1:
        return {"shard": n_gpus, "replica": 1, EXPERT: expert}
    return {"data": n_gpus // n_stages, "pipeline": n_stages, EXPERT: expert}


def _as_in(row: Row, engine: Engine) -> Engine:
    """Return the engine with the switches of a row's script."""
    program = replace(
        engine.zero,
        keeps_mixtures=row["keeps_blocks"] == "yes",
        syncs_mixtures_once=row["syncs_once"] == "yes",
    )
    return replace(engine, attention_library=row["attention"], zero=program)


def _pipelined(row: Row, model: Model, engine: Engine) -> Megatron3D:
    """Return the strategy of a row with stages, which have as many layers as any other or one less.

    The first ones have more (components/distributed/pipelining/functional.py at 89e3a9fd,
    generate_hf_model_fqn_per_model_part).
    """
    n_chunks = int(row["pipeline"]) * int(row["virtual"])
    n_least, n_larger = divmod(model.n_layers, n_chunks)
    stages = ["t" * (n_least + (chunk < n_larger)) for chunk in range(n_chunks)]
    layout = f"E{'|'.join(stages)}L"
    n_virtual = (int(row["virtual"]),)
    return megatron_of(engine, n_virtual, has_experts=True, stage_layout=layout)
