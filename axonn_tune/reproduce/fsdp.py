"""Published runs of PyTorch's FSDP, in llm-foundry and fms-fsdp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run, held_to
from axonn_tune.search.search import Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.precision import FULL
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.zero.zero import zero3

# Hidden size, layers and heads of MPT models.
_MPT_SHAPES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "70b": (8192, 80, 64),
}


def llm_foundry(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps of MPT models; the source states all but the latency of the network."""
    source = "mosaicml/llm-foundry, scripts/train/benchmarking (Apache-2.0)"
    machines = _llm_foundry_machines(loaders)
    engine = loaders.engine("llm-foundry")
    for row in rows:
        machine = machines[row["gpu"]]
        is_one_node = int(row["gpus"]) <= machine.ranks_per_node
        assumed = () if is_one_node else ("network",)
        # Two numbers of the engine are fitted to the steps on one node of A100, and the clock of
        # H100 to all steps there.
        is_fitted = (is_one_node and row["gpu"].startswith("A100")) or row["gpu"].startswith("H100")
        paper = Paper("FSDP of llm-foundry", source, machine, assumed=assumed, is_fitted=is_fitted)
        n_sequences = int(row["micro_batch"]) * int(row["micro_steps"]) * int(row["gpus"])
        model = mpt(row["model"], int(row["seq_len"]))
        used = _as_in(row, engine)
        search = fsdp_search({**row, "global_batch": str(n_sequences)}, model, machine, used)
        tokens = n_sequences * model.seq_len
        published = {"step_seconds": tokens / float(row["tokens_per_s"])}
        subject = f"{row['model']} x {row['seq_len']} on {row['gpus']}"
        group = f"{row['gpu']}, {'one node' if is_one_node else 'several nodes'}"
        yield paper.run(group, subject, search, published)


def _as_in(row: Row, engine: Engine) -> Engine:
    """Return an engine of FSDP with the torch and the mixed precision of a row of llm-foundry.

    Checkpoints that are not reentrant, as these are, stop at the last needed tensor since torch 2.1
    (pytorch/pytorch#96866). DEFAULT sums gradients in fp32, PURE in bf16 (mosaicml/composer at
    ec0bff71, trainer/mosaic_fsdp_utils.py, get_mixed_precision).
    """
    sums_in_fp32 = row["mixed_precision"] == "DEFAULT"
    return replace(
        engine,
        recomputes_last_product=row["torch"] == "1.13",
        zero=replace(engine.zero, reduced_element_bytes=4.0 if sums_in_fp32 else None),
    )


def fsdp_search(
    row: Row,
    model: Model,
    machine: Machine,
    engine: Engine,
    sizes: Mapping[str, int] | None = None,
) -> Search:
    """Return the search of a row's FSDP, whose shards are spread over all ranks if no size says."""
    strategy = zero3(
        engine,
        context_kind=engine.zero.context_kind if "context" in (sizes or {}) else "",
        overlaps_tensor=row.get("overlaps") == "yes",
        n_virtual=(int(row.get("virtual", 1)),),
        low_weights=row.get("low_weights") == "yes",
    )
    job = Job(
        int(row["gpus"]),
        int(row["global_batch"]),
        model.seq_len,
        precision=row.get("precision", FULL),
    )
    scenario = Scenario(model, job, machine, strategy)
    return held_to(scenario, sizes or {"replica": 1}, int(row["micro_batch"]), row["recompute"])


def mpt(name: str, seq_len: int) -> Model:
    """Return an MPT model, whose published counts of parameters include biases and positions."""
    hidden, layers, heads = _MPT_SHAPES[name]
    return Model(f"mpt-{name}", layers, hidden, heads, 50368, seq_len)


def _llm_foundry_machines(loaders: Loaders) -> dict[str, Machine]:
    """Return the machines by the source's names of their GPUs.

    The nodes have the GPUs, the links and the network bandwidth of DGX nodes. The profile of
    Perlmutter describes the A100 of 40 GB.
    """
    dgx_a100 = loaders.machine("dgx-a100")
    small_gpu = loaders.machine("perlmutter").gpu
    return {
        "H100-80GB": loaders.machine("dgx-h100"),
        "A100-80GB": dgx_a100,
        "A100-40GB": replace(dgx_a100, name="dgx-a100, 40 GB", gpu=small_gpu),
    }


def fms_fsdp(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield Llama 2 with FSDP and hybrid sharding on 128 A100, with 400 Gb/s between nodes."""
    machine = loaders.machine("a100-400g")
    engine = loaders.engine("fms-fsdp")
    large = loaders.model("llama2-70b")
    models = {
        "7b": loaders.model("llama2-7b"),
        "13b": loaders.model("llama2-13b"),
        # The README names no sizes of 34b: those of Code Llama, arXiv 2308.12950, are taken.
        "34b": replace(large, name="llama2-34b", n_layers=48, ffn_hidden_size=22016),
        "70b": large,
    }
    source = "foundation-model-stack/fms-fsdp, README.md"
    for row in rows:
        assumed = ("model", "network") if row["model"] == "34b" else ("network",)
        paper = Paper("FSDP of IBM", source, machine, assumed=assumed)
        n_sequences = int(row["micro_batch"]) * int(row["gpus"])
        sizes = {"shard": machine.ranks_per_node} if row["sharding"] == "HSDP" else None
        search = fsdp_search(
            {**row, "global_batch": str(n_sequences)},
            models[row["model"]],
            machine,
            engine,
            sizes,
        )
        subject = f"{row['model']}, {row['sharding']}"
        published = {"tokens_per_second_per_gpu": float(row["tokens_per_s_per_gpu"])}
        yield paper.run("Llama 2", subject, search, published)
