"""Measured steps and memory of Megatron-Core on B200, from SimuMax."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run, held_to, numbers, with_fused_loss
from axonn_tune.search.search import Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import EXPERT
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.programs import ULYSSES
from axonn_tune.spec.quantity import Quantity
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron.megatron3d import megatron_of

_N_GPUS = 8
_AXES = ("tensor", "context", "pipeline", "data")
_LOGIT_BYTES = Quantity(
    2.0,
    "published",
    "Transformer Engine 2.11, common/triton/cross_entropy.py: a gradient takes its logit's place",
)


def simumax(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps of models with fewer layers, and the memory that the allocator held."""
    engine = _as_launched(loaders.engine("megatron-core"))
    machine = loaders.machine("b200-simumax")
    paper = Paper("Megatron-Core on B200", "MooreThreads/SimuMax (Apache-2.0)", machine)
    for row in rows:
        model = _shortened(loaders.model(row["model"]), int(row["layers"]))
        short = {"tensor": "TP", "context": "CP", "pipeline": "PP", "data": "DP"}
        layout = ", ".join(f"{short[axis]} {row[axis]}" for axis in _AXES)
        layout += "" if model.is_dense else f", EP {row[EXPERT]}"
        published = numbers(row, "step_seconds", "memory_gib")
        length = "long sequences" if row["context"] != "1" else "4096 tokens"
        subject = f"{row['model']}, {layout}, {row['seq_len']} tokens, batch {row['global_batch']}"
        search = _search(row, model, machine, engine)
        yield paper.run(f"{row['model']}, {length}", subject, search, published)


def _shortened(model: Model, n_layers: int) -> Model:
    """Return a model with fewer layers, of which the first one is dense in a mixture of experts."""
    experts = model.experts and replace(model.experts, first_layer=1)
    return replace(model, n_layers=n_layers, experts=experts)


def _as_launched(engine: Engine) -> Engine:
    """Return the engine with what the runs chose (simu_tools/megatron_scripts at 4dcaae51).

    The loss is fused (--cross-entropy-fusion-impl te). Gradients are looked through for what is no
    number and divided by the replicas, since neither --no-check-for-nan-in-loss-and-grad nor
    --ddp-average-in-collective is given. Without --moe-router-dtype the router runs in bf16. Every
    expert takes a fixed number of tokens (--moe-pad-expert-input-to-capacity), so that the host
    waits for no numbers of tokens and runs ahead (Megatron-LM 23e00ed0, token_dispatcher.py,
    preprocess).
    """
    return replace(
        with_fused_loss(engine),
        expert_issue_seconds=None,
        memory=replace(engine.memory, logit_bytes=_LOGIT_BYTES),
        megatron=replace(
            engine.megatron, checks_gradients=True, scales_gradients=True, fp32_router=False
        ),
    )


def _search(row: Row, model: Model, machine: Machine, engine: Engine) -> Search:
    """Return the search that is held to a row's layout; cuBLAS chooses kernels by itself."""
    strategy = megatron_of(
        engine,
        n_virtual=(1,),
        overlap_grad_reduce=False,
        context_kind=ULYSSES,
        has_experts=not model.is_dense,
    )
    job = Job(_N_GPUS, int(row["global_batch"]), int(row["seq_len"]), kernel_tuning=False)
    axes = _AXES if model.is_dense else (*_AXES, EXPERT)
    sizes = {axis: int(row[axis]) for axis in axes}
    return held_to(Scenario(model, job, machine, strategy), sizes, 1)
