"""Published runs of Megatron-LM and of systems that are built on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run, gpt
from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.engine import Engine, MegatronProgram
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron3d import Megatron3D, megatron_of


def megatron_search(
    row: Row,
    model: Model,
    machine: Machine,
    strategy: Megatron3D,
    recompute: str = "full",
    attention: str = "unfused",
    dtype: str = "fp16",
    micro_batch: int | None = None,
    sizes: Mapping[str, int] | None = None,
    n_virtual: Sequence[int] = (1,),
    dropout: bool = False,
) -> Search:
    """Return a search with a row's tensor and pipeline sizes; the other GPUs are data parallel."""
    gpus = int(row["gpus"])
    fixed = dict(sizes or {"tensor": int(row["tensor"]), "pipeline": int(row["pipeline"])})
    fixed.setdefault("context", 1)
    fixed["data"] = gpus // (fixed["tensor"] * fixed["pipeline"] * fixed["context"])
    job = Job(
        gpus,
        int(row["global_batch"]),
        model.seq_len,
        dtype,
        attention=attention,
        dropout=dropout or attention == "unfused",
    )
    constraints = Constraints(fixed, micro_batch=micro_batch)
    return Search(
        Scenario(model, job, machine, replace(strategy, n_virtual=tuple(n_virtual))),
        constraints,
        (recompute,),
        include_oom=micro_batch is not None,
    )


def weak_scaling(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield Megatron-LM's weak scaling; micro-batch and virtual stages are not in the table."""
    paper = Paper(
        "Megatron-LM 2021",
        "Narayanan et al., SC21, Table 1",
        loaders.machine("dgx-a100"),
        assumed=("virtual stages", "micro-batch"),
    )
    strategy = megatron_of(loaders.engine("megatron-2021"))
    for row in rows:
        search = megatron_search(
            row, gpt(row, 2048), paper.machine, strategy, n_virtual=(1, 2, 3, 4, 5)
        )
        subject = f"{row['parameters_b']}B on {row['gpus']}"
        published = {"hardware_tflops_per_gpu": float(row["tflops_per_gpu"])}
        yield paper.run("weak scaling", subject, search, published)


def sequence_parallelism(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield full recomputation, and sequence parallelism with selective recomputation."""
    paper = Paper(
        "Megatron-LM 2022",
        "Korthikanti et al., arXiv 2205.05198, Table 5",
        loaders.machine("dgx-a100"),
    )
    for row in rows:
        strategy = _of_2022(loaders, is_sequence_parallel=row["recompute"] != "full")
        search = megatron_search(
            row,
            gpt(row, 2048),
            paper.machine,
            strategy,
            row["recompute"],
            micro_batch=int(row["micro_batch"]),
            n_virtual=(int(row["v"]),),
        )
        published = {"step_seconds": float(row["step_seconds"])}
        yield paper.run(row["model"], f"{row['model']}, {row['recompute']}", search, published)


def _of_2022(loaders: Loaders, is_sequence_parallel: bool) -> Megatron3D:
    """Return Megatron-LM of 2022, with sequence parallelism or without."""
    return megatron_of(loaders.engine("megatron-2022"), sequence_parallel=is_sequence_parallel)


def activation_memory(
    rows: Sequence[Row], layouts: Sequence[Row], loaders: Loaders
) -> Iterator[Run]:
    """Yield the memory of Figure 1 of the same paper, at the layouts of Table 5."""
    paper = Paper(
        "Megatron-LM 2022",
        "Korthikanti et al., arXiv 2205.05198, Fig. 1",
        loaders.machine("dgx-a100"),
    )
    by_model = {row["model"]: row for row in layouts}
    for row in rows:
        layout = by_model[row["model"]]
        metrics = {
            "none": {
                "mean_state_gib": float(row["parameters_and_optimizer_gib"]),
                "activation_gib": float(row["activations_no_recompute_gib"]),
            },
            "selective": {"activation_gib": float(row["activations_selective_sp_gib"])},
        }
        for recompute, published in metrics.items():
            search = megatron_search(
                layout,
                gpt(layout, 2048),
                paper.machine,
                _of_2022(loaders, is_sequence_parallel=recompute != "none"),
                recompute,
                micro_batch=int(layout["micro_batch"]),
                n_virtual=(int(layout["v"]),),
            )
            yield paper.run("memory", f"{row['model']}, {recompute}", search, published)


def bigscience(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield Megatron-DeepSpeed with ZeRO-1 in fp16, heads of 128, a vocabulary of 250,880."""
    paper = Paper("BigScience", "BigScience chronicles (Apache-2.0)", loaders.machine("jean-zay"))
    strategy = _with_zero_1(loaders)
    for row in rows:
        full = {**row, "gpus": "384", "global_batch": "2048"}
        model = gpt(row, 2048, 250880, heads=int(row["hidden"]) // 128)
        search = megatron_search(
            full, model, paper.machine, strategy, micro_batch=int(row["micro_batch"])
        )
        layout = f"tensor {row['tensor']}, pipeline {row['pipeline']}, data {row['data']}"
        if row["memory_gb"] == "OOM":
            published = {"fits": 0.0}
        else:
            published = {
                "fits": 1.0,
                "memory_gb": float(row["memory_gb"]),
                "step_seconds": float(row["step_seconds"]),
            }
        yield paper.run("BigScience", layout, search, published)


def _with_zero_1(loaders: Loaders) -> Megatron3D:
    """Return Megatron-DeepSpeed: Megatron-LM of 2021 with the optimizer states of ZeRO-1."""
    return megatron_of(loaders.engine("megatron-2021"), distributed_optimizer=True)


# The source says "Ampere", and not which; of its Megatron-LM it states the commit, not the options.
_MEGASCALE_ASSUMED = ("GPU", "micro-batch", "recomputation", "software")


def megascale(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield 175B on Megatron-LM with selective recomputation, and on MegaScale with its overlaps.

    MegaScale sends tokens within the tensor group beside its products, and results to the next
    stage, new weights and gradients beside its passes (section 3.2). Its other changes (parallel
    block, sliding windows, LAMB) are not modelled.
    """
    machine = loaders.machine("dgx-a100")
    model = Model("gpt-175b", 96, 12288, 128, 64000, 2048)
    of_2023 = megatron_of(loaders.engine("megatron-2023"))
    program = MegatronProgram(one_queue=False, overlaps_transfers=True)
    of_megascale = Megatron3D(engine=Engine(megatron=program), overlaps_tensor=True)
    systems = (
        ("megatron", "Megatron-LM 2023", of_2023, _MEGASCALE_ASSUMED),
        ("megascale", "MegaScale", of_megascale, ("model", *_MEGASCALE_ASSUMED)),
    )
    for row in rows:
        for name, system, strategy, assumed in systems:
            paper = Paper(system, "Jiang et al., NSDI24 (MegaScale)", machine, assumed=assumed)
            search = megatron_search(
                row,
                model,
                machine,
                strategy,
                "selective",
                "flash",
                "bf16",
                sizes={"tensor": 8, "pipeline": 8},
                n_virtual=(6,),
                micro_batch=1,
            )
            published = {"step_seconds": float(row[f"{name}_step_seconds"])}
            yield paper.run(f"MegaScale {name}", f"175B on {row['gpus']}", search, published)


def llama3(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield 405B with sharded optimizer states and overlapped reductions, one sequence at once."""
    paper = Paper(
        "Llama 3",
        "Llama 3 herd, arXiv 2407.21783, Table 4",
        loaders.machine("dgx-h100"),
        assumed=("network", "virtual stages", "micro-batch", "recomputation", "software"),
    )
    model = loaders.model("llama3-405b")
    for row in rows:
        batch = int(row["batch_per_data"]) * int(row["data"])
        full = {**row, "global_batch": str(batch)}
        search = megatron_search(
            full,
            replace(model, seq_len=int(row["seq_len"])),
            paper.machine,
            Megatron3D(),
            "none",
            "flash",
            "bf16",
            micro_batch=1,
            n_virtual=(8,),
        )
        published = {"tflops_per_gpu": float(row["tflops_per_gpu"])}
        yield paper.run("Llama 3", f"405B on {row['gpus']}", search, published)


def on_frontier(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield Megatron-DeepSpeed with ZeRO-1 on Frontier, at the layouts of its launch scripts.

    The scripts leave Megatron's dropout on (megatron/arguments.py at their commits).
    """
    paper = Paper(
        "Megatron-DeepSpeed",
        "Dash et al., arXiv 2312.12705, and its launch scripts",
        loaders.machine("frontier-2024"),
        "abstract",
        is_fitted=True,
    )
    strategy = _with_zero_1(loaders)
    for row in rows:
        search = megatron_search(
            row,
            gpt(row, 2048),
            paper.machine,
            strategy,
            attention=row["attention"],
            micro_batch=int(row["micro_batch"]),
            dropout=True,
        )
        published = {"fraction_of_peak": float(row["fraction_of_peak"])}
        subject = f"{row['parameters_b']}B on {row['gpus']}"
        assumed = tuple(row["assumed"].split("; "))
        yield replace(paper, assumed=assumed).run("", subject, search, published)


def vtrain(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps of Megatron-DeepSpeed, whose layers are those of Megatron-LM of 2021.

    The file omits recomputation: full is taken for all, as in vTrain's own configurations of them.
    """
    paper = Paper(
        "vTrain",
        "VIA-Research/vTrain, data/ (MIT)",
        loaders.machine("a100-800g"),
        assumed=("vocabulary", "recomputation"),
    )
    strategy = megatron_of(loaders.engine("megatron-2021"))
    for row in rows:
        model = gpt(row, int(row["seq_len"]))
        micro_batch = int(row["micro_batch"])
        search = megatron_search(row, model, paper.machine, strategy, micro_batch=micro_batch)
        layout = f"{row['layers']} x {row['hidden']} on {row['gpus']}"
        published = {"step_seconds": 1e-3 * float(row["step_milliseconds"])}
        yield paper.run(f"{row['parameters_b']}B", layout, search, published)
