"""Published runs of Megatron-LM and of systems that are built on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run, fp16_job, gpt, held_to, numbers
from axonn_tune.search.search import Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.links import RingShare
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import RING_KINDS
from axonn_tune.spec.programs import MegatronProgram
from axonn_tune.spec.quantity import Quantity
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron.megatron3d import Megatron3D, megatron_of

# What NCCL expects of the link between two sockets of AMD's, each way (AMD_BW, published in
# NVIDIA/nccl at v2.19.3-1, src/graph/topo.h); before, it took this link to be as fast as any.
_SOCKETS_BYTES_PER_S = 16e9
# What an NIC of 200 Gb/s sends from the memory of the host over what it sends from a GPU beside it:
# 16 and 24 GB/s (S. Jeaugey of NCCL, 24 April 2023, NVIDIA/nccl issue 412).
_SHARE_THROUGH_HOST = 16.0 / 24.0


def megatron_search(scenario: Scenario, row: Row, recompute: str = "full") -> Search:
    """Return the search that is held to a row's sizes, and to its micro-batch if it states one.

    GPUs beside the tensor and the pipeline groups are data parallel.
    """
    sizes = {"tensor": int(row["tensor"]), "pipeline": int(row["pipeline"]), "context": 1}
    sizes["data"] = scenario.job.n_gpus // (sizes["tensor"] * sizes["pipeline"])
    micro_batch = int(row["micro_batch"]) if "micro_batch" in row else None
    return held_to(scenario, sizes, micro_batch, recompute)


def weak_scaling(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield Megatron-LM's weak scaling, as the authors' script of the table runs it."""
    paper = Paper(
        "Megatron-LM 2021",
        "Narayanan et al., SC21, Table 1, and its launch script",
        _before_pxn(loaders.machine("dgx-a100")),
    )
    local = loaders.engine("megatron-2021")
    engines = {"local": local, "torch": _in_torch_ddp(local)}
    for row in rows:
        strategy = megatron_of(engines[row["ddp"]], n_virtual=(int(row["v"]),))
        scenario = Scenario(gpt(row, 2048), fp16_job(row, 2048), paper.machine, strategy)
        search = megatron_search(scenario, row)
        subject = f"{row['parameters_b']}B on {row['gpus']}"
        published = {"hardware_tflops_per_gpu": float(row["tflops_per_gpu"])}
        yield paper.run("weak scaling", subject, search, published)


def _before_pxn(machine: Machine) -> Machine:
    """Return a machine of nodes of eight A100 whose NCCL does without PXN.

    NCCL has it from version 2.12 on, unless a network plugin of an older interface turns it off
    (NVIDIA/nccl at v2.14.3-1, src/graph/paths.cc, ncclPxnDisable). Without it, a ring enters a node
    and leaves it by the same NIC, and what a GPU behind another PCI switch sends there is copied
    through the memory of the host (NVIDIA/nccl at v2.10.3-1, src/graph/search.cc and paths.cc,
    ncclTopoCheckGdr: no GPUDirect beyond PXB).

    - Rings of every second GPU, as of two replicated tensor ranks, have both ends in one socket.
    - Rings of pairs of GPUs four apart, as of four tensor ranks, have one end in each socket. Half
      of what they send goes from one socket to the other, and half the other way.
    - All other rings have both ends beside the NIC.
    """
    level = machine.links[-1]
    bandwidth = level.bandwidth_bytes_per_s.value
    n_pairs = machine.ranks_per_node // 2
    between_sockets = 2.0 * _SOCKETS_BYTES_PER_S
    per_ring = {n: bandwidth / n for n in range(1, 2 * n_pairs + 1)}
    per_ring[2] *= _SHARE_THROUGH_HOST
    per_ring[n_pairs] = min(per_ring[n_pairs], between_sockets / n_pairs)
    source = "what passes through the memory of the host: NCCL's AMD_BW, and NVIDIA/nccl issue 412"
    shares = tuple(
        RingShare(kind, n, Quantity(value, "assumed", source))
        for kind in RING_KINDS
        for n, value in per_ring.items()
    )
    return replace(machine, links=(*machine.links[:-1], replace(level, ring_shares=shares)))


def _in_torch_ddp(engine: Engine) -> Engine:
    """Return Megatron-LM of 2021 within torch's DDP (--DDP-impl torch).

    The last micro-step reduces gradients in fp16 while it computes: forward_backward_no_pipelining
    of schedules.py has the others in no_sync. A bucket holds 25 MiB, and the copy of a gradient
    into its bucket divides it, too (torch's reducer.cpp, copy_grad_to_bucket).
    """
    program = replace(
        engine.megatron,
        overlap_grad_reduce=True,
        bucket_elements=25 * 2**20 / 2,
        bucket_elements_per_replica=0.0,
        fills_buckets=True,
        copies_to_buckets=True,
        scales_gradients=False,
    )
    return replace(engine, megatron=program)


def sequence_parallelism(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield full recomputation, and sequence parallelism with selective recomputation."""
    paper = Paper(
        "Megatron-LM 2022",
        "Korthikanti et al., arXiv 2205.05198, Table 5",
        loaders.machine("dgx-a100"),
    )
    for row in rows:
        is_parallel = row["recompute"] != "full"
        search = _search_of_2022(row, loaders, row["recompute"], is_parallel)
        published = numbers(row, "step_seconds")
        yield paper.run(row["model"], f"{row['model']}, {row['recompute']}", search, published)


def _search_of_2022(
    layout: Row, loaders: Loaders, recompute: str, is_sequence_parallel: bool
) -> Search:
    """Return a search at a layout of Table 5, with sequence parallelism or without."""
    strategy = megatron_of(
        loaders.engine("megatron-2022"),
        n_virtual=(int(layout["v"]),),
        sequence_parallel=is_sequence_parallel,
    )
    machine = loaders.machine("dgx-a100")
    scenario = Scenario(gpt(layout, 2048), fp16_job(layout, 2048), machine, strategy)
    return megatron_search(scenario, layout, recompute)


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
            search = _search_of_2022(layout, loaders, recompute, recompute != "none")
            yield paper.run("memory", f"{row['model']}, {recompute}", search, published)


def bigscience(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield Megatron-DeepSpeed with ZeRO-1 in fp16 and a vocabulary of 250,880.

    The chronicles say that runs of this size always hung without CUDA_LAUNCH_BLOCKING=1. The
    script of these days has ALiBi (bigscience at 8aff319, train/tr11-200B-ml/tr11-200B-ml.slurm).
    """
    strategy = _with_alibi(_with_zero_1(loaders))
    strategy, machine = _launch_blocking(strategy, loaders.machine("jean-zay"))
    paper = Paper("BigScience", "BigScience chronicles (Apache-2.0)", machine)
    for row in rows:
        full = {**row, "gpus": "384"}
        model = replace(gpt(row, 2048, 250880), position="none")
        search = megatron_search(Scenario(model, fp16_job(full, 2048), machine, strategy), full)
        layout = f"tensor {row['tensor']}, pipeline {row['pipeline']}, data {row['data']}"
        subject = f"{layout}, {row['micro_batch']} of {row['global_batch']}"
        published = {"fits": float(row["memory_gb"] != "OOM")}
        if published["fits"]:
            stated = [name for name in ("memory_gb", "step_seconds") if row[name]]
            published |= numbers(row, *stated)
        yield paper.run("BigScience", subject, search, published)


def _with_alibi(strategy: Megatron3D) -> Megatron3D:
    """Return the strategy with biases of positions on the scores of its attention."""
    program = replace(strategy.engine.megatron, biases_scores=True)
    return replace(strategy, engine=replace(strategy.engine, megatron=program))


def _launch_blocking(strategy: Megatron3D, machine: Machine) -> tuple[Megatron3D, Machine]:
    """Return both with a host that issues a kernel only when the one before it has ended.

    CUDA_LAUNCH_BLOCKING makes every launch wait, those of NCCL's kernels, too.
    """
    gap = machine.kernels.issue_seconds
    engine = replace(strategy.engine, collective_gap_seconds=gap)
    kernels = replace(machine.kernels, gap_seconds=gap)
    return replace(strategy, engine=engine), replace(machine, kernels=kernels)


def _with_zero_1(loaders: Loaders) -> Megatron3D:
    """Return Megatron-DeepSpeed: Megatron-LM of 2021 with the optimizer states of ZeRO-1.

    DeepSpeed v0.5.9 to v0.12.6 ignores contiguous_gradients and reduce_scatter in stage 1
    (runtime/engine.py, _configure_zero_optimizer; zero/stage_1_and_2.py, buffered_reduce_fallback
    and allreduce_bucket). It all-reduces all gradients, but forms the norm of its own share and
    clips that. Its buckets for these sums and for gathers are the defaults of zero/constants.py.
    Its stages keep what they send.
    """
    local = loaders.engine("megatron-2021")
    program = replace(
        local.megatron,
        sums_sharded=True,
        clips_shard=True,
        buckets_without_overlap=True,
        bucket_elements=5e8,
        bucket_elements_per_replica=0.0,
    )
    memory = replace(local.memory, keeps_transfers=True)
    engine = replace(local, megatron=program, memory=memory)
    return megatron_of(engine, (1,), distributed_optimizer=True)


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
    of_2023 = megatron_of(loaders.engine("megatron-2023"), n_virtual=(6,))
    program = MegatronProgram(one_queue=False, overlaps_transfers=True)
    of_megascale = Megatron3D(n_virtual=(6,), engine=Engine(megatron=program), overlaps_tensor=True)
    systems = (
        ("megatron", "Megatron-LM 2023", of_2023, _MEGASCALE_ASSUMED),
        ("megascale", "MegaScale", of_megascale, ("model", *_MEGASCALE_ASSUMED)),
    )
    for row in rows:
        full = {**row, "tensor": "8", "pipeline": "8", "micro_batch": "1"}
        job = Job(int(row["gpus"]), int(row["global_batch"]), model.seq_len)
        for name, system, strategy, assumed in systems:
            paper = Paper(system, "Jiang et al., NSDI24 (MegaScale)", machine, assumed=assumed)
            search = megatron_search(Scenario(model, job, machine, strategy), full, "selective")
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
        job = Job(int(row["gpus"]), batch, int(row["seq_len"]))
        trained = replace(model, seq_len=job.seq_len)
        scenario = Scenario(trained, job, paper.machine, Megatron3D(n_virtual=(8,)))
        search = megatron_search(scenario, {**row, "micro_batch": "1"}, "none")
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
        job = fp16_job(row, 2048, row["attention"])
        search = megatron_search(Scenario(gpt(row, 2048), job, paper.machine, strategy), row)
        published = {"fraction_of_peak": float(row["fraction_of_peak"])}
        subject = f"{row['parameters_b']}B on {row['gpus']}"
        assumed = tuple(row["assumed"].split("; "))
        yield replace(paper, assumed=assumed).run("", subject, search, published)


def vtrain(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps of Megatron-DeepSpeed, as steps of the Megatron-LM of September 2021.

    The file omits recomputation: full is taken for all, as in vTrain's own configurations of them.
    It omits the versions of the program and of NCCL, too. The steps themselves chose the engine:
    gradients are summed over the tensor group beside products. NCCL is one without PXN.
    """
    paper = Paper(
        "vTrain",
        "VIA-Research/vTrain, data/ (MIT)",
        _before_pxn(loaders.machine("a100-800g")),
        assumed=("vocabulary", "recomputation", "software"),
        is_fitted=True,
    )
    strategy = megatron_of(loaders.engine("megatron-2021-09"), n_virtual=(1,))
    for row in rows:
        model = gpt(row, int(row["seq_len"]))
        scenario = Scenario(model, fp16_job(row, model.seq_len), paper.machine, strategy)
        search = megatron_search(scenario, row)
        layout = f"{row['layers']} x {row['hidden']} on {row['gpus']}"
        published = {"step_seconds": 1e-3 * float(row["step_milliseconds"])}
        yield paper.run(f"{row['parameters_b']}B", layout, search, published)
