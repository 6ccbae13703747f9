"""Measured steps of Megatron-Bridge, which is Megatron-Core, on H100 to GB300."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import (
    Loaders,
    Paper,
    Row,
    Run,
    held_to_row,
    job_sizes,
    numbers,
    with_fused_loss,
)
from axonn_tune.search.search import Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import ADAMW, MUON, Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron.megatron3d import megatron_of

# The steps to which the host's times for experts are fitted, those to which the clock is that GB200
# holds in training, and those to which the rates of NVFP4 are that GB200 and GB300 reach: model,
# machine, precision, stages and micro-batch.
_FITTED = {
    ("qwen3-30b-a3b", "dgx-h100", "fp8-current", "1", "1"),
    ("qwen3-30b-a3b", "dgx-b200", "mxfp8", "1", "1"),
    ("llama3-70b", "gb200-nvl72-64", "mxfp8", "4", "1"),
    ("llama3-70b", "gb200-nvl72-64", "nvfp4", "4", "1"),
    ("llama3-405b", "gb200-nvl72-64", "nvfp4", "16", "1"),
    ("llama3-70b", "gb300-nvl72-64", "nvfp4", "4", "1"),
}
# The recipes of all releases turn it off in this precision (tp_comm_overlap, v0.3.0 to v0.6.0).
_WITHOUT_TENSOR_OVERLAP = ("nvfp4",)
# Weights are stored and gathered in these (fp8_param_gather, v0.2.0 to v0.5.0).
_STORED_FORMATS = ("mxfp8", "fp8-current")
# Models whose router runs in fp32 (moe_router_dtype of their providers and bridges, v0.2.0 to
# v0.6.0). Providers and recipes of the others do not set it.
_FP32_ROUTERS = ("deepseek-v3", "kimi-k2")
# Models that Muon trains (docs/performance-summary-archive.md). Replicas do not have shares of one
# size then, and gather no weights in 8 bits (use_distributed_optimizer and overlap_param_gather of
# recipes/kimi/kimi_k2.py and fp8_param_gather of scripts/performance/configs/kimi/
# kimi_llm_pretrain.py, v0.3.1 to v0.5.0).
_WITH_MUON = ("kimi-k2",)
# A CUDA graph holds a whole iteration, or there is none; other words name parts of a layer.
_WHOLE_GRAPH, _NO_GRAPH = "yes", "no"


def megatron_bridge(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps."""
    models = {name: loaders.model(name) for name in {row["model"] for row in rows}}
    machines = {name: loaders.machine(name) for name in {row["machine"] for row in rows}}
    usual, in_graph = loaders.engine("megatron-core"), loaders.engine("megatron-core-graphs")
    for row in rows:
        model, machine = models[row["model"]], machines[row["machine"]]
        has_whole_graph = row["graphs"] == _WHOLE_GRAPH
        engine = _as_recipe(in_graph if has_whole_graph else usual, row)
        source = "NVIDIA-NeMo/Megatron-Bridge (Apache-2.0)"
        columns = ("model", "machine", "precision", "pipeline", "micro_batch")
        is_fitted = tuple(row[column] for column in columns) in _FITTED
        paper = Paper("Megatron-Bridge", source, machine, "table", ("network",), is_fitted)
        published = numbers(row, "step_seconds")
        kind = "dense" if model.is_dense else "experts"
        graphs = " in a CUDA graph" if has_whole_graph else ""
        subject = f"{row['model']} on {row['gpus']} of {row['machine']}, {row['precision']}"
        has_muon = row["model"] in _WITH_MUON
        overlaps_tensor = model.is_dense and row["precision"] not in _WITHOUT_TENSOR_OVERLAP
        search = layout_search(
            row,
            model,
            machine,
            engine,
            int(row["mtp"]),
            fp32_gradients=False,
            optimizer=MUON if has_muon else ADAMW,
            low_weights=row["precision"] in _STORED_FORMATS and not has_muon,
            overlaps_tensor=overlaps_tensor,
        )
        yield paper.run(f"{kind}{graphs}", f"{subject}, {row['release']}", search, published)


def _as_recipe(engine: Engine, row: Row) -> Engine:
    """Return an engine with the formats of attention and of the router that a recipe chooses.

    The loss is Transformer Engine's (scripts/performance/utils/overrides.py).
    """
    is_low = row["low_attention"] == "yes"
    is_exact = row["model"] in _FP32_ROUTERS
    pads_shares = row["model"] not in _WITH_MUON
    program = replace(
        engine.megatron, low_attention=is_low, fp32_router=is_exact, pads_shares=pads_shares
    )
    engine = with_fused_loss(replace(engine, megatron=program))
    has_parts = row["graphs"] not in (_WHOLE_GRAPH, _NO_GRAPH)
    return with_graphs_of_parts(engine) if has_parts else engine


def with_graphs_of_parts(engine: Engine) -> Engine:
    """Return an engine that records CUDA graphs of parts of a layer.

    What its host issues in a layer that is paired with another one is less, but not known. The
    operations within a graph count as any others, although the host launches one graph for each
    pass of a layer in their place (Megatron-LM d98e8a64, core/transformer/transformer_layer.py,
    `_te_cuda_graph_replay`): without them, steps to which nothing is fitted are predicted less
    well.
    """
    return replace(engine, megatron=replace(engine.megatron, combined_issues=None))


def layout_search(
    row: Row,
    model: Model,
    machine: Machine,
    engine: Engine,
    mtp_modules: int = 0,
    moments: str = "fp32",
    offload_modules: str = "",
    optimizer: str = ADAMW,
    **options: bool | str,
) -> Search:
    """Return the search that is held to a row's layout; cuBLAS chooses kernels by itself.

    `options` are further ones of the strategy.
    """
    strategy = megatron_of(
        engine,
        n_virtual=(int(row["virtual"]),),
        has_experts=not model.is_dense,
        sends_once=row["dispatcher"] == "flex",
        overlaps_experts=row["overlaps"] == "yes",
        **options,
    )
    job = Job(
        *job_sizes(row),
        precision=row["precision"],
        kernel_tuning=False,
        mtp_modules=mtp_modules,
        moments=moments,
        offload_modules=offload_modules,
        optimizer=optimizer,
    )
    recompute = row["recomputed"]
    if recompute != "none":
        recompute = f"selective:{recompute.replace('+', ',')}"
    return held_to_row(Scenario(model, job, machine, strategy), row, recompute)
