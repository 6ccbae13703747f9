"""Published training runs of other systems, each as a search that is held to what was run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from axonn_tune.search.search import Constraints, Search
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import RECOMPUTES, Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron3d import Megatron3D
from axonn_tune.strategies.zero import Zero, zero3, zero_topo, zeropp

# Megatron-LM of 2021: unfused attention, dropout, fp16 gradients summed in a kernel of their own
# and reduced after the last backward pass; sequence parallelism, fp32 sums (18 bytes for each
# parameter in Korthikanti et al.) and their fusion came in 2022.
MEGATRON_2021 = Megatron3D(
    sequence_parallel=False,
    distributed_optimizer=False,
    overlap_grad_reduce=False,
    fused_accumulation=False,
    fp32_gradients=False,
)
MEGATRON_2022 = replace(MEGATRON_2021, fused_accumulation=True, fp32_gradients=True)
SEQUENCE_PARALLEL_2022 = replace(MEGATRON_2022, sequence_parallel=True)
MEGATRON_2023 = replace(SEQUENCE_PARALLEL_2022, distributed_optimizer=True)
MEGATRON_CORE = Megatron3D()

# A row of a published table: texts by name of their column.
Row: TypeAlias = Mapping[str, str]


@dataclass(frozen=True)
class Loaders:
    """Functions that find a preset by its name; this room itself touches no files."""

    model: Callable[[str], Model]
    machine: Callable[[str], Machine]


@dataclass(frozen=True)
class Run:
    """One published configuration: what was run and what was measured.

    system
        System whose measurement it is.
    group
        Name that is shared by the runs that their paper compares with each other.
    search
        Search for the best configuration that fits, in which everything that the paper says is
        fixed.
    published
        Numbers that were measured, by metric.
    certainty
        Where the numbers come from: table, abstract, or recalled (from memory).
    """

    system: str
    group: str
    subject: str
    search: Search
    published: Mapping[str, float]
    certainty: str
    source: str


@dataclass(frozen=True)
class _Paper:
    """Fields that all runs of one table share."""

    system: str
    source: str
    machine: Machine
    certainty: str = "table"

    def run(self, group: str, subject: str, search: Search, published: Mapping[str, float]) -> Run:
        return Run(self.system, group, subject, search, published, self.certainty, self.source)


def gpt(row: Row, seq_len: int, vocabulary: int = 51200, heads: int | None = None) -> Model:
    """Return a GPT of the sizes that a table states."""
    hidden = int(row["hidden"])
    layers = int(row["layers"])
    n_heads = int(row["heads"]) if heads is None else heads
    return Model(f"gpt-{layers}x{hidden}", layers, hidden, n_heads, vocabulary, seq_len)


def _megatron(
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
        attention,
        dropout=attention == "unfused",
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
    paper = _Paper(
        "Megatron-LM 2021", "Narayanan et al., SC21, Table 1", loaders.machine("dgx-a100")
    )
    for row in rows:
        search = _megatron(
            row, gpt(row, 2048), paper.machine, MEGATRON_2021, n_virtual=(1, 2, 3, 4, 5)
        )
        subject = f"{row['parameters_b']}B on {row['gpus']}"
        published = {"hardware_tflops_per_gpu": float(row["tflops_per_gpu"])}
        yield paper.run("weak scaling", subject, search, published)


def against_zero3(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield runs of Megatron-LM and DeepSpeed's ZeRO-3, which gathers parameters one by one."""
    source = "Narayanan et al., SC21, Table 2"
    for row in rows:
        is_zero = row["strategy"] == "zero3"
        system = "DeepSpeed ZeRO-3" if is_zero else "Megatron-LM 2021"
        paper = _Paper(system, source, loaders.machine("dgx-a100"))
        model = gpt(row, 2048)
        micro_batch = int(row["micro_batch"])
        if is_zero:
            search = _sharded(
                row, model, paper.machine, zero3(0), {"replica": 1}, micro_batch, "fp16", "unfused"
            )
        else:
            stages = {96: 12, 105: 35}[model.n_layers]
            search = _megatron(
                row,
                model,
                paper.machine,
                MEGATRON_2021,
                micro_batch=micro_batch,
                sizes={"tensor": 8, "pipeline": stages},
                n_virtual=(1, 2, 3, 4),
            )
        published = {"hardware_tflops_per_gpu": float(row["tflops_per_gpu"])}
        subject = f"{row['parameters_b']}B on {row['gpus']}"
        yield paper.run(
            f"ZeRO-3 and Megatron-LM, {row['parameters_b']}B", subject, search, published
        )


def _sharded(
    row: Row,
    model: Model,
    machine: Machine,
    strategy: Zero,
    sizes: Mapping[str, int],
    micro_batch: int,
    dtype: str = "bf16",
    attention: str = "flash",
) -> Search:
    """Return a search of a sharded strategy with full recomputation."""
    job = Job(
        int(row["gpus"]),
        int(row["global_batch"]),
        model.seq_len,
        dtype,
        attention,
        dropout=attention == "unfused",
    )
    constraints = Constraints(dict(sizes), micro_batch=micro_batch)
    return Search(Scenario(model, job, machine, strategy), constraints, ("full",), include_oom=True)


def sequence_parallelism(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield full recomputation, and sequence parallelism with selective recomputation."""
    paper = _Paper(
        "Megatron-LM 2022",
        "Korthikanti et al., arXiv 2205.05198, Table 5",
        loaders.machine("dgx-a100"),
    )
    for row in rows:
        is_full = row["recompute"] == "full"
        search = _megatron(
            row,
            gpt(row, 2048),
            paper.machine,
            MEGATRON_2022 if is_full else SEQUENCE_PARALLEL_2022,
            row["recompute"],
            micro_batch=int(row["micro_batch"]),
            n_virtual=(int(row["v"]),),
        )
        published = {"step_seconds": float(row["step_seconds"])}
        yield paper.run(row["model"], f"{row['model']}, {row['recompute']}", search, published)


def activation_memory(
    rows: Sequence[Row], layouts: Sequence[Row], loaders: Loaders
) -> Iterator[Run]:
    """Yield the memory of Figure 1 of the same paper, at the layouts of Table 5."""
    paper = _Paper(
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
            search = _megatron(
                layout,
                gpt(layout, 2048),
                paper.machine,
                MEGATRON_2022 if recompute == "none" else SEQUENCE_PARALLEL_2022,
                recompute,
                micro_batch=int(layout["micro_batch"]),
                n_virtual=(int(layout["v"]),),
            )
            yield paper.run("memory", f"{row['model']}, {recompute}", search, published)


def bigscience(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield Megatron-DeepSpeed with ZeRO-1 in fp16, heads of 128, a vocabulary of 250,880."""
    paper = _Paper("BigScience", "BigScience chronicles (Apache-2.0)", loaders.machine("jean-zay"))
    strategy = replace(MEGATRON_2021, distributed_optimizer=True)
    for row in rows:
        full = {**row, "gpus": "384", "global_batch": "2048"}
        model = gpt(row, 2048, 250880, heads=int(row["hidden"]) // 128)
        search = _megatron(
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


def megascale(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield 175B on Megatron-LM with selective recomputation, and on MegaScale with its overlaps.

    MegaScale's other changes (parallel block, sliding windows, LAMB) are not modelled.
    """
    machine = loaders.machine("dgx-a100")
    model = Model("gpt-175b", 96, 12288, 128, 51200, 2048)
    for row in rows:
        for name, strategy in (("megatron", MEGATRON_2023), ("megascale", MEGATRON_CORE)):
            system = "Megatron-LM 2023" if name == "megatron" else "MegaScale"
            paper = _Paper(system, "Jiang et al., NSDI24 (MegaScale)", machine)
            search = _megatron(
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
    paper = _Paper(
        "Llama 3", "Llama 3 herd, arXiv 2407.21783, Table 4", loaders.machine("dgx-h100")
    )
    model = loaders.model("llama3-405b")
    for row in rows:
        batch = int(row["batch_per_data"]) * int(row["data"])
        full = {**row, "global_batch": str(batch)}
        search = _megatron(
            full,
            replace(model, seq_len=int(row["seq_len"])),
            paper.machine,
            MEGATRON_CORE,
            "none",
            "flash",
            "bf16",
            micro_batch=1,
            n_virtual=(8,),
        )
        published = {"tflops_per_gpu": float(row["tflops_per_gpu"])}
        yield paper.run("Llama 3", f"405B on {row['gpus']}", search, published)


# Layers, hidden size and heads of a GPT, by billions of parameters; the source states only 18B, the
# others are the nearest usual shapes (12 l h^2).
_ZEROPP_SHAPES = {
    "18": (40, 6144, 32),
    "49": (61, 8192, 64),
    "91": (89, 9216, 72),
    "138": (76, 12288, 96),
}


def zero_plus_plus(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield ZeRO-3 and ZeRO++ on 384 V100, with one sequence on each."""
    for row in rows:
        layers, hidden, heads = _ZEROPP_SHAPES[row["model_b"]]
        links = row["ib_links"]
        machine = loaders.machine(f"dgx2-{links}ib")
        tokens = int(row["tokens_per_gpu"])
        model = Model(f"gpt-{row['model_b']}b", layers, hidden, heads, 51200, tokens)
        full = {"gpus": "384", "global_batch": "384"}
        members = (
            ("DeepSpeed ZeRO-3", zero3(0), {"replica": 1}, "zero3_tflops"),
            ("ZeRO++", zeropp(calls_per_block=0), {"secondary": 16}, "zeropp_tflops"),
        )
        for system, strategy, sizes, column in members:
            paper = _Paper(system, "ZeRO++ blog of DeepSpeed (arXiv 2306.10209)", machine)
            search = _sharded(full, model, machine, strategy, sizes, 1, "fp16", "unfused")
            subject = f"{row['model_b']}B, {links} links"
            published = {"tflops_per_gpu": float(row[column])}
            yield paper.run(f"ZeRO++, {row['model_b']}B", subject, search, published)


def vtrain(rows: Sequence[Row], machine: Machine) -> Iterator[Run]:
    """Yield measured steps of Megatron-LM; the files omit recomputation: full is taken for all."""
    paper = _Paper("vTrain", "VIA-Research/vTrain, data/ (MIT)", machine)
    for row in rows:
        model = gpt(row, int(row["seq_len"]))
        search = _megatron(row, model, machine, MEGATRON_2022, micro_batch=int(row["micro_batch"]))
        group = f"{row['parameters_b']}B" if "parameters_b" in row else f"hidden {row['hidden']}"
        layout = f"{row['layers']} x {row['hidden']} on {row['gpus']}"
        published = {"step_seconds": 1e-3 * float(row["step_milliseconds"])}
        yield paper.run(group, layout, search, published)


def all_runs(load: Callable[[str], Sequence[Row]], loaders: Loaders) -> list[Run]:
    """Return the runs of all tables of end results except AxoNN's; `load` finds a table by name."""
    layouts = load("korthikanti22_table5")
    return [
        *weak_scaling(load("megatron_sc21_table1"), loaders),
        *against_zero3(load("megatron_sc21_zero3"), loaders),
        *sequence_parallelism(layouts, loaders),
        *activation_memory(load("korthikanti22_memory"), layouts, loaders),
        *bigscience(load("bigscience_176b"), loaders),
        *megascale(load("megascale_table"), loaders),
        *llama3(load("llama3"), loaders),
        *zero_plus_plus(load("zeropp"), loaders),
    ]


def sharded_on_frontier(loaders: Loaders) -> dict[str, Search]:
    """Return searches of 20B on 384 GCDs under ZeRO-3, ZeRO++ and ZeRO-topo.

    The paper's batch is not known; assumed are 1536 sequences of 2048, one on each GCD in four
    micro-steps.
    """
    model = loaders.model("20b")
    machine = loaders.machine("frontier-2024")
    members: tuple[tuple[str, Zero, dict[str, int]], ...] = (
        ("zero3", zero3(0), {"replica": 1}),
        ("zeropp", zeropp(calls_per_block=0), {"secondary": 8}),
        ("zero_topo", zero_topo(calls_per_block=0), {"weights": 2, "gradients": 4}),
    )
    row = {"gpus": "384", "global_batch": "1536"}
    return {
        name: _sharded(row, model, machine, strategy, sizes, 1) for name, strategy, sizes in members
    }


def megatron_on_frontier(row: Row, loaders: Loaders) -> Search:
    """Return a search for Megatron-DeepSpeed 3D with ZeRO-1, whose layout and batch are unknown."""
    shapes = {"22": "megatron-22b", "175": "gpt3-175b", "1000": "megatron-1t"}
    gpus = int(row["gcds"] or 64)
    strategy = replace(MEGATRON_2023, n_virtual=(1,))
    # 3072 GCDs share a batch that three divides.
    job = Job(gpus, 8192 if gpus & (gpus - 1) == 0 else 9216, 2048)
    model = loaders.model(shapes[row["parameters_b"]])
    constraints = Constraints({"context": 1})
    machine = loaders.machine("frontier-2024")
    return Search(Scenario(model, job, machine, strategy), constraints, RECOMPUTES)
