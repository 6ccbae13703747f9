"""Published runs of PyTorch's FSDP, in llm-foundry, torchtitan and fms-fsdp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run
from axonn_tune.reproduce.sharded import sharded_search
from axonn_tune.search.search import Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.machine import Machine, Quantity
from axonn_tune.spec.model import Model
from axonn_tune.spec.precision import FULL
from axonn_tune.spec.resources import resources
from axonn_tune.strategies.zero import zero3

# Hidden size, layers and heads of MPT models.
_MPT_SHAPES = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "70b": (8192, 80, 64),
}

# Share of the peak that large products reach on the GPUs of torchtitan's runs (pytorch/ao at
# c788ee7a, of February 2025, torchao/testing/float8/roofline_utils.py: "Meta's H100 variant" of
# 2.4 TB/s). Later revisions have 0.78, which is more than such products reach with 700 W.
_PRODUCTS_AT_500_W = 0.6


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
        search = _fsdp_search({**row, "global_batch": str(n_sequences)}, model, machine, used)
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


def _fsdp_search(
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
    )
    return sharded_search(
        row,
        model,
        machine,
        strategy,
        sizes or {"replica": 1},
        int(row["micro_batch"]),
        recomputes=(row["recompute"],),
        precision=row.get("precision", FULL),
    )


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


# Names of the axes beside the shards in torchtitan's runs.
_TITAN_AXES = {"tensor": "TP", "context": "CP"}
# Short names of the engines of torchtitan, by the year of their code.
_TITANS = {
    "torchtitan-2024-eager": "2024, eager",
    "torchtitan-2024": "2024",
    "torchtitan": "2025",
}


def torchtitan(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield Llama 3.1 with FSDP2, alone and with tensor or context parallelism inside a node.

    The network of several nodes is assumed to be that of a DGX, which has the same bandwidth, and
    weights to be gathered in bf16.
    """
    machines = {"H100": _torchtitan_machine(loaders), "H200": loaders.machine("dgx-h200")}
    for row in rows:
        machine = machines[row["gpu"]]
        source = f"pytorch/torchtitan, benchmarks/{row['document']} (BSD-3)"
        assumed = ["GPU"] if row["gpu"] == "H100" else []
        if int(row["gpus"]) > machine.ranks_per_node:
            assumed.append("network")
        if row["precision"] != FULL:
            assumed.append("software")  # Whether weights are gathered in 8 bits.
        paper = Paper("FSDP of torchtitan", source, machine, assumed=tuple(assumed))
        model = replace(loaders.model(row["model"]), seq_len=int(row["seq_len"]))
        engine = loaders.engine(row["engine"])
        sizes = {"shard": int(row["shard"]), "replica": 1}
        sizes |= {axis: int(row[axis]) for axis in _TITAN_AXES if int(row[axis]) > 1}
        search = _fsdp_search(row, model, machine, engine, sizes)
        published = {"tokens_per_second_per_gpu": float(row["tokens_per_s_per_gpu"])}
        if row["memory_gib"]:
            published["memory_gib"] = float(row["memory_gib"])
        bits = "" if row["precision"] == FULL else ", 8 bits"
        length = ", long sequences" if _is_long(row) else ""
        group = f"{row['model']}, {engine.title}{bits}, {row['gpu']}{length}"
        yield paper.run(group, f"{_titan_subject(row)}{bits}", search, published)


def _is_long(row: Row) -> bool:
    """Return whether a run of torchtitan had longer sequences than most."""
    return int(row["seq_len"]) > 8192


def _titan_subject(row: Row) -> str:
    """Return the model, the layout, and what else distinguishes a run of torchtitan."""
    layout = f"FSDP {row['shard']}"
    for axis, name in _TITAN_AXES.items():
        if int(row[axis]) > 1:
            layout += f" x {name} {row[axis]}"
    version = "async" if row["overlaps"] == "yes" else _TITANS[row["engine"]]
    if _is_long(row):
        version = f"{int(row['seq_len']) // 1024}K"
    return f"{row['model']}, {layout}, {version}"


def _torchtitan_machine(loaders: Loaders) -> Machine:
    """Return a DGX H100 with the GPUs of torchtitan's runs: HBM2e of 2.4 TB/s, and 500 W of 700.

    Assumed: everything that the GPU computes is slower by as much as its largest products.
    """
    machine = loaders.machine("dgx-h100")
    largest = max(
        (point for point in machine.gemm.points if point.dtype == "bf16"),
        key=lambda point: point.m * point.n * point.k,
    )
    reached_at_700_w = 2.0 * largest.m * largest.n * largest.k / largest.seconds
    reached = _PRODUCTS_AT_500_W * machine.peak_flops_per_s("bf16")
    factors = {"gpu.compute": reached / reached_at_700_w, "gpu.memory_bandwidth": 2.4 / 3.35}
    for key, factor in factors.items():
        resource = next(each for each in resources(machine) if each.key == key)
        machine = resource.improved(factor)
    under_load = Quantity(1.0, "assumed", "what its products reach, they reach under load")
    gpu = replace(machine.gpu, training_clock_fraction=under_load)
    return replace(machine, name="dgx-h100, 500 W, HBM2e", gpu=gpu)


def fms_fsdp(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield Llama 2 with FSDP and hybrid sharding on 128 A100.

    Jean Zay's nodes have the same GPUs and the same 400 Gb/s of another network.
    """
    machine = loaders.machine("jean-zay")
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
        search = _fsdp_search(
            {**row, "global_batch": str(n_sequences)},
            models[row["model"]],
            machine,
            engine,
            sizes,
        )
        subject = f"{row['model']}, {row['sharding']}"
        published = {"tokens_per_second_per_gpu": float(row["tokens_per_s_per_gpu"])}
        yield paper.run("Llama 2", subject, search, published)
