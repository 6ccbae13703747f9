"""Measured steps of NeMo, which is Megatron-Core: NVIDIA's benchmarks on H100, and MLPerf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import (
    Loaders,
    Paper,
    Row,
    Run,
    by_maker,
    held_to_row,
    named,
    numbers,
    with_buckets,
    with_fused_loss,
    with_kernels,
)
from axonn_tune.search.search import Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.precision import FULL
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron.megatron3d import megatron_of

# What the groups of steps of a precision are called; all others are in 8 bits.
_BITS = {FULL: "", "nvfp4": " in 4 bits"}


def nemo(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield the measured steps of NVIDIA's benchmarks, also of models with fewer layers."""
    source = "NVIDIA/dgxc-benchmarking (Apache-2.0)"
    paper = Paper("NeMo", source, loaders.machine("dgx-h100"), assumed=("network",))
    engine = loaders.engine("nemo")
    for row in rows:
        program = replace(engine.megatron, low_sums=named(row["low_sums"]))
        yield _run(paper, row, loaders, replace(engine, megatron=program))


def nemo_releases(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield the measured steps of two years of NeMo's releases, also of models without a preset."""
    engine = loaders.engine("nemo")
    unstated = ("network", "recomputation", "software")
    for row in rows:
        machine = loaders.machine(row["machine"])
        paper = Paper("NeMo", "NVIDIA/NeMo (Apache-2.0)", machine, assumed=unstated)
        yield _run(paper, row, loaders, engine)


def mlperf(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield the measured steps of submissions to MLPerf."""
    source = "MLPerf Training v3.0 to v6.0 (Apache-2.0)"
    # The releases of cuDNN on H100 are not stated, nor what the copy of round 6.0 lacks.
    unstated = ("network", "software")
    engines = {name: loaders.engine(name) for name in {row["engine"] for row in rows}}
    for row in rows:
        paper = Paper("MLPerf", source, loaders.machine(row["machine"]), assumed=unstated)
        yield _run(paper, row, loaders, _with_facts(engines[row["engine"]], row))


def _with_facts(engine: Engine, row: Row) -> Engine:
    """Return an engine with what a submission says of its program.

    Since Megatron-Core has taken NeMo's place the loss is Transformer Engine's (CE_FUSION_IMPL).
    """
    program = with_buckets(with_kernels(engine.megatron, row), row)
    program = replace(program, fills_buckets=True, checks_gradients=row["checks"] == "yes")
    is_nemo = row["engine"] == "nemo"
    return replace(engine if is_nemo else with_fused_loss(engine), megatron=program)


def _run(paper: Paper, row: Row, loaders: Loaders, engine: Engine) -> Run:
    """Return the run of a row."""
    model = _model(row, loaders)
    subject = f"{row['model']}, {model.n_layers} layers, {row['gpus']} GPUs"
    published = numbers(row, "step_seconds")
    bits = _BITS.get(row["precision"], " in 8 bits")
    group = by_maker(f"{row['model']}{bits}", paper.machine)
    return paper.run(group, subject, _search(row, model, paper.machine, engine), published)


def _model(row: Row, loaders: Loaders) -> Model:
    """Return the model of a row: a preset with its layers and vocabulary, or one of its sizes."""
    layers = int(row["layers"])
    if row.get("hidden"):
        sizes = {name: int(row[name]) for name in ("hidden", "heads", "kv_heads", "ffn")}
        is_nemotron = row["model"].startswith("nemotron")
        return Model(
            row["model"],
            layers,
            sizes["hidden"],
            sizes["heads"],
            int(row["vocabulary"]),
            int(row["seq_len"]),
            n_kv_heads=sizes["kv_heads"],
            ffn_hidden_size=sizes["ffn"],
            position="rotary" if is_nemotron else "learned",
            bias=not is_nemotron,
            tied_embeddings=not is_nemotron,
        )
    model = replace(loaders.model(row["model"]), n_layers=layers)
    return replace(model, vocab_size=int(row.get("vocabulary") or model.vocab_size))


def _search(row: Row, model: Model, machine: Machine, engine: Engine) -> Search:
    """Return the search that is held to a row's layout."""
    with_its_attention = replace(engine, attention_library=row["attention"])
    strategy = megatron_of(
        with_its_attention,
        n_virtual=(int(row["virtual"]),),
        fp32_gradients=False,
        low_weights=row.get("low_weights", "yes") == "yes",
        overlaps_tensor=row.get("overlaps") != "no",
        overlap_grad_reduce=False if row.get("overlap_grad_reduce") == "no" else None,
    )
    gpus = int(row["gpus"])
    dropout = row["dropout"] == "yes"
    job = Job(
        gpus,
        int(row["global_batch"]),
        int(row["seq_len"]),
        precision=row["precision"],
        dropout=dropout,
    )
    return held_to_row(Scenario(model, job, machine, strategy), row)
