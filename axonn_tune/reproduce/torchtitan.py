"""Published runs of torchtitan: FSDP2 alone, with tensor or context parallelism, and in stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.fsdp import fsdp_search
from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.precision import FULL
from axonn_tune.spec.quantity import Quantity
from axonn_tune.spec.resources import resources

# Share of the peak that large products reach on the GPUs of torchtitan's runs (pytorch/ao at
# c788ee7a, of February 2025, torchao/testing/float8/roofline_utils.py: "Meta's H100 variant" of
# 2.4 TB/s). Later revisions have 0.78, which is more than such products reach with 700 W.
_PRODUCTS_AT_500_W = 0.6

# The columns of the axes beside the shards, with the short names of the groups.
_AXES = {"tensor": "TP", "context": "CP", "pipeline": "PP"}
# Short names of the engines, by the year of their code.
_YEARS = {
    "torchtitan-2024-eager": "2024, eager",
    "torchtitan-2024": "2024",
    "torchtitan-2025": "2025",
}


def torchtitan(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield Llama with FSDP2, tensor groups inside a node, shared sequences, and stages.

    The network of several nodes is assumed to be that of a DGX, which has the same bandwidth, and
    weights to be gathered in bf16 where nothing says that it is in 8 bits. Nodes of A100 are taken
    to have the 400 Gb/s of EFA.
    """
    machines = {
        "H100": _with_500_watts(loaders.machine("dgx-h100")),
        "H200": loaders.machine("dgx-h200"),
        "A100": loaders.machine("a100-400g"),
    }
    for row in rows:
        machine = machines[row["gpu"]]
        source = f"pytorch/torchtitan, {row['document']} (BSD-3)"
        paper = Paper("FSDP of torchtitan", source, machine, assumed=_assumed(row, machine))
        model = replace(loaders.model(row["model"]), seq_len=int(row["seq_len"]))
        engine = _as_in(row, loaders.engine(row["engine"]))
        sizes = {"shard": int(row["shard"]), "replica": 1}
        sizes |= {axis: int(row[axis]) for axis in _AXES if int(row[axis]) > 1}
        search = fsdp_search(row, model, machine, engine, sizes)
        published = {"tokens_per_second_per_gpu": float(row["tokens_per_s_per_gpu"])}
        if row["memory_gib"]:
            published["memory_gib"] = float(row["memory_gib"])
        is_low = row["precision"] != FULL
        bits = ", 8 bits" if is_low else ""
        kind = ", stages" if int(row["pipeline"]) > 1 else ""
        kind += ", long sequences" if _is_long(row) else ""
        group = f"{row['model']}, {engine.title}{bits}, {row['gpu']}{kind}"
        subject = f"{_subject(row)}, fp8" if is_low else _subject(row)
        yield paper.run(group, subject, search, published)


def _assumed(row: Row, machine: Machine) -> tuple[str, ...]:
    """Return the facts of a run that are assumed."""
    assumed = ["GPU"] if row["gpu"] == "H100" else []
    if int(row["gpus"]) > machine.ranks_per_node:
        assumed.append("network")
    if int(row["pipeline"]) > 1:
        assumed.append("micro-batch")  # Nothing says that it was not the usual one.
    # For low products it may be unknown whether weights are gathered in 8 bits; for the rows of
    # docs/ the switches of that month are unknown.
    is_low, is_known = row["precision"] != FULL, row["low_weights"] == "yes"
    if (is_low and not is_known) or row["document"].startswith("docs/"):
        assumed.append("software")
    return tuple(assumed)


def _as_in(row: Row, engine: Engine) -> Engine:
    """Return an engine of torchtitan with the norms of a row.

    Fused ones are kernels of Triton, as other engines have them (models/norms.py at 1ea476e9).
    """
    if row["norms"] != "fused":
        return engine
    kernels = {name: form for name, form in engine.kernels.items() if "rms_norm" not in name}
    return replace(engine, kernels=kernels)


def _is_long(row: Row) -> bool:
    """Return whether a run had longer sequences than most."""
    return int(row["seq_len"]) > 8192


def _subject(row: Row) -> str:
    """Return the model, the layout, and what else distinguishes a run."""
    layout = f"FSDP{row['shard']}"
    for axis, name in _AXES.items():
        if int(row[axis]) > 1:
            layout += f" {name}{row[axis]}"
    if int(row["virtual"]) > 1:
        layout += f"x{row['virtual']}"
    version = _YEARS[row["engine"]]
    if row["overlaps"] == "yes":
        version = "async" if version == "2024" else f"{version}, async"
    if _is_long(row):
        version = f"{int(row['seq_len']) // 1024}K"
    if row["gpu"] == "A100":
        version += f", {row['recompute']}"
    return f"{row['model']}, {layout}, {version}"


def _with_500_watts(machine: Machine) -> Machine:
    """Return a DGX H100 with the GPUs of torchtitan's runs: HBM2e of 2.4 TB/s, and 500 W of 700.

    Assumed: everything that the GPU computes is slower by as much as its largest products.
    """
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
