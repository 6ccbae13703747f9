"""Published runs of ZeRO-3 and ZeRO++ in DeepSpeed, and of plain data parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.megatron import megatron_search
from axonn_tune.reproduce.runs import (
    Loaders,
    Paper,
    Row,
    Run,
    fp16_job,
    gpt,
    held_to,
    job_sizes,
    numbers,
)
from axonn_tune.search.search import Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron.megatron3d import megatron_of
from axonn_tune.strategies.zero.zero import zero3, zeropp


def against_zero3(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield runs of Megatron-LM and DeepSpeed's ZeRO-3, which gathers parameters one by one.

    The table states only the product of Megatron-LM's tensor and pipeline sizes.
    """
    source = "Narayanan et al., SC21, Table 2"
    machine = loaders.machine("dgx-a100")
    deepspeed = zero3(loaders.engine("deepspeed-2021"))
    megatron = megatron_of(loaders.engine("megatron-2021"), n_virtual=(1, 2, 3, 4))
    for row in rows:
        model, job = gpt(row, 2048), fp16_job(row, 2048)
        if row["strategy"] == "zero3":
            paper = Paper("DeepSpeed ZeRO-3", source, machine, is_fitted=True)
            scenario = Scenario(model, job, machine, deepspeed)
            search = held_to(scenario, {"replica": 1}, int(row["micro_batch"]), "full")
        else:
            paper = Paper("Megatron-LM 2021", source, machine, assumed=("layout", "virtual stages"))
            stages = {96: "12", 105: "35"}[model.n_layers]
            full = {**row, "tensor": "8", "pipeline": stages}
            search = megatron_search(Scenario(model, job, machine, megatron), full)
        published = {"hardware_tflops_per_gpu": float(row["tflops_per_gpu"])}
        subject = f"{row['parameters_b']}B on {row['gpus']}"
        yield paper.run(
            f"ZeRO-3 and Megatron-LM, {row['parameters_b']}B", subject, search, published
        )


# Layers, hidden size and heads of a GPT, by billions of parameters; the source states only 18B. The
# others reach the same rates as each other wherever they ran, so that they are taken to differ by
# their layers alone, with the width of a usual 138B (12 l h^2).
_ZEROPP_SHAPES = {
    "18": (40, 6144, 32),
    "49": (27, 12288, 96),
    "91": (50, 12288, 96),
    "138": (76, 12288, 96),
}
_ZEROPP_ASSUMED = ("vocabulary", "global batch", "micro-batch", "recomputation")


def _first_zeropp(loaders: Loaders) -> Engine:
    """Return DeepSpeed with the first release of ZeRO++, and the settings of its tutorial.

    It has buckets of 1e7 gradients, so that each matrix is reduced alone.
    """
    deepspeed = loaders.engine("deepspeed-2023")
    return replace(deepspeed, zero=replace(deepspeed.zero, bucket_elements=1e7))


def zero_plus_plus(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield ZeRO-3 and ZeRO++ on 384 V100, with one sequence on each.

    Their rates count recomputation, as the logs in DeepSpeed's tutorial of ZeRO++ do: these say
    20.70 TFLOP/s where 18B took 3.6806 s for 64 sequences of 512 tokens on 64 GPUs. Without
    recomputation, 18B over one link would have received more than 12.5 GB/s on each node.
    """
    deepspeed = _first_zeropp(loaders)
    for row in rows:
        layers, hidden, heads = _ZEROPP_SHAPES[row["model_b"]]
        links = row["ib_links"]
        machine = loaders.machine(f"dgx2-{links}ib")
        tokens = int(row["tokens_per_gpu"])
        model = Model(f"gpt-{row['model_b']}b", layers, hidden, heads, 51200, tokens)
        job = fp16_job({"gpus": "384", "global_batch": "384"}, tokens)
        assumed = _ZEROPP_ASSUMED if row["model_b"] == "18" else ("model", *_ZEROPP_ASSUMED)
        members = (
            ("DeepSpeed ZeRO-3", zero3(deepspeed), {"replica": 1}, "zero3_tflops"),
            ("ZeRO++", zeropp(engine=deepspeed), {"secondary": 16}, "zeropp_tflops"),
        )
        for system, strategy, sizes, column in members:
            source = "ZeRO++ blog of DeepSpeed (arXiv 2306.10209)"
            is_fitted = row["model_b"] == "138" and links == "4"  # gathers that hide behind nothing
            paper = Paper(system, source, machine, assumed=assumed, is_fitted=is_fitted)
            search = held_to(Scenario(model, job, machine, strategy), sizes, 1, "full")
            subject = f"{row['model_b']}B, {links} links, {tokens // 1024}K tokens"
            published = {"hardware_tflops_per_gpu": float(row[column])}
            yield paper.run(f"ZeRO++, {row['model_b']}B", subject, search, published)


def zeropp_tutorial(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield ZeRO-3 and ZeRO++ of the 18B on 64 V100, of which there are logs."""
    deepspeed = _first_zeropp(loaders)
    machine = loaders.machine("dgx2-1ib")
    model = Model("gpt-18b", *_ZEROPP_SHAPES["18"], 50304, 512)
    members = {
        "zero3": ("DeepSpeed ZeRO-3", zero3(deepspeed), {"replica": 1}),
        "zeropp": ("ZeRO++", zeropp(engine=deepspeed), {"secondary": 16}),
    }
    for row in rows:
        system, strategy, sizes = members[row["strategy"]]
        source = "DeepSpeed's tutorial of ZeRO++"
        paper = Paper(system, source, machine, assumed=("vocabulary", "network"))
        job = fp16_job(row, model.seq_len)
        search = held_to(Scenario(model, job, machine, strategy), sizes, 1, "full")
        published = numbers(row, "step_seconds", "allocated_gib")
        yield paper.run("ZeRO++, tutorial", "18B on 64", search, published)


# What the scripts of the runs below leave open: the version of DeepSpeed; of the data parallelism,
# whether embedding and head share one weight.
_OPEN_OF_DEEPSPEED = ("software",)
_OPEN_OF_DDP = ("model",)
# The run by which the profile of Frontier was chosen.
_CHOOSING = ("frontier-202502", "ZeRO-3", "1024")


def pccl_training(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield DeepSpeed's ZeRO-3, and data parallelism of whole models, over RCCL and NCCL.

    Both trained nanoGPT. DDP is the data parallelism of Megatron-LM's algorithm, without its other
    axes.
    """
    for row in rows:
        machine = loaders.machine(row["machine"])
        if row["workload"] == "ZeRO-3":
            system, assumed, search = "DeepSpeed ZeRO-3", _OPEN_OF_DEEPSPEED, _nanogpt_in_deepspeed
        else:
            system, assumed, search = "DDP", _OPEN_OF_DDP, _nanogpt_in_ddp
        is_fitted = (row["machine"], row["workload"], row["gpus"]) == _CHOOSING
        source = "arXiv 2504.18658v2 (IPDPS 2026)"
        paper = Paper(system, source, machine, "figure", assumed, is_fitted)
        subject = f"{row['parameters_b']}B on {row['gpus']}"
        published = numbers(row, "step_seconds")
        group = f"{row['machine']}, {system} of {row['parameters_b']}B"
        yield paper.run(group, subject, search(row, machine, loaders), published)


def _nanogpt(row: Row, tied_embeddings: bool) -> Model:
    """Return nanoGPT, whose layers have no biases and whose norms have gains only."""
    model = gpt(row, int(row["seq_len"]), vocabulary=50304)
    return replace(
        model,
        bias=False,
        qkv_bias=False,
        proj_bias=False,
        norm="rms",
        tied_embeddings=tied_embeddings,
    )


def _nanogpt_in_deepspeed(row: Row, machine: Machine, loaders: Loaders) -> Search:
    """Return nanoGPT in ZeRO-3 as its script runs it, with full recomputation.

    `ds_config_z3.json` has gradients reduced in fp32 (`communication_data_type`), and, without
    `overlap_comm`, between the kernels. In `model.py` the activation is a module.
    """
    engine = loaders.engine("deepspeed-eager")
    program = replace(engine.zero, reduced_element_bytes=4.0, activation_is_module=True)
    engine = replace(engine, zero=program)
    model = _nanogpt(row, tied_embeddings=False)
    job = Job(*job_sizes(row), overlap=Overlap(ors=False))
    scenario = Scenario(model, job, machine, zero3(engine))
    return held_to(scenario, {"replica": 1}, int(row["micro_batch"]), row["recompute"])


def _nanogpt_in_ddp(row: Row, machine: Machine, loaders: Loaders) -> Search:
    """Return nanoGPT in DDP as its script runs it: compiled, and without recomputation.

    With GPU_MAX_HW_QUEUES=1 in the script nothing overlaps.
    """
    engine = loaders.engine("ddp")
    program = replace(engine.megatron, overlap_grad_reduce=False)
    ddp = megatron_of(replace(engine, kernels={}, megatron=program), n_virtual=(1,))
    sizes = {"tensor": 1, "context": 1, "pipeline": 1}
    model = _nanogpt(row, tied_embeddings=True)
    scenario = Scenario(model, Job(*job_sizes(row)), machine, ddp)
    return held_to(scenario, sizes, int(row["micro_batch"]), row["recompute"])
