"""Measured steps of NeMo AutoModel, which trains with torch's FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run, held_to, numbers
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import EXPERT
from axonn_tune.spec.model import Model
from axonn_tune.spec.programs import RING
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.strategy import Strategy
from axonn_tune.strategies.megatron.megatron3d import Megatron3D, megatron_of
from axonn_tune.strategies.zero.zero import zero3

_SOURCE = "NVIDIA-NeMo/Automodel, docs/performance-summary.md (Apache-2.0)"


def automodel(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps; the latency of the network is that of the profile."""
    machine = loaders.machine("dgx-h100")
    for row in rows:
        n_gpus = int(row["gpus"])
        assumed = ("network",) if n_gpus > machine.ranks_per_node else ()
        paper = Paper("NeMo AutoModel", _SOURCE, machine, "table", assumed)
        model = loaders.model(row["model"])
        group = "dense" if model.is_dense else "experts"
        if model.is_dense:
            strategy: Strategy = zero3(_compiled(loaders.engine("fsdp2")), context_kind=RING)
        else:
            model = with_neighbours(model)
            strategy = _with_experts(row, model, loaders.engine("automodel-2025"))
        job = Job(n_gpus, int(row["global_batch"]), int(row["seq_len"]))
        scenario = Scenario(model, job, machine, strategy)
        search = held_to(scenario, _axes(row), int(row["micro_batch"]), row["recompute"])
        published = numbers(row, "step_seconds")
        yield paper.run(group, f"{model.name} on {n_gpus}, {row['commit']}", search, published)


def with_neighbours(model: Model) -> Model:
    """Return the model with a gate whose choices for a token are neighbouring experts."""
    experts = model.experts
    assert experts is not None, "only models with experts have a gate"
    n_groups = experts.n_experts // experts.top_k
    return replace(model, experts=replace(experts, n_groups=n_groups, top_groups=1))


def _axes(row: Row) -> dict[str, int]:
    """Return the layout of a row: shards of FSDP, or stages of which each has its replicas."""
    n_gpus, context, expert, n_stages = (
        int(row[name]) for name in ("gpus", "context", "expert", "pipeline")
    )
    if n_stages > 1:
        return {"data": n_gpus // n_stages, "pipeline": n_stages, EXPERT: expert}
    sizes = {"shard": n_gpus // context, "replica": 1}
    return sizes | ({"context": context} if context > 1 else {EXPERT: expert})


def _compiled(engine: Engine) -> Engine:
    """Return FSDP2 as dense models are trained with it.

    That is how components/distributed/parallelizer.py at 2013a4dd shards them, and how
    components/models/llama/model.py forms their products.
    """
    program = replace(
        engine.zero, reduced_element_bytes=4.0, keeps_last_block=True, separates_products=True
    )
    return replace(engine, zero=program)


def _with_experts(row: Row, model: Model, engine: Engine) -> Strategy:
    """Return the strategy of a mixture of experts, with the switches of a row's script."""
    program = replace(
        engine.zero,
        keeps_mixtures=row["keeps_blocks"] == "yes",
        syncs_mixtures_once=row["syncs_once"] == "yes",
    )
    used = replace(engine, attention_library=row["attention"], zero=program)
    return _pipelined(row, model, used) if int(row["pipeline"]) > 1 else zero3(used, True)


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
