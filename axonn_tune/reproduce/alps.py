"""Measured steps of Megatron-Core on Alps, whose nodes have four GH200 and Slingshot-11."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.runs import Loaders, Paper, Row, Run, held_to_row, job_sizes, numbers
from axonn_tune.search.search import Search
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.model import Model
from axonn_tune.spec.precision import FULL
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.megatron.megatron3d import megatron_of

# CSCS's tests expect a rate of steps, whose tokenizer is taken to be that of Apertus.
_TOKENS_OF_TESTS = 131072
# GPT-2's tokens, padded.
_VOCABULARY = 50304
# The clock that GH200 holds in training is fitted to the steps of 8B in bf16 on one node, and the
# time in which its host issues an operation to those of sequences that are too short for the GPU.
_FITTED_ON_GPUS = ("8b", "4", FULL)
_LONGEST_OF_HOST = 2048


def megatron_on_alps(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps, in which weights are gathered in bf16 and nothing is recomputed."""
    machine = loaders.machine("alps")
    engine = loaders.engine("megatron-core")
    for row in rows:
        of_gpu = (row["model"], row["gpus"], row["precision"]) == _FITTED_ON_GPUS
        of_host = int(row["seq_len"]) <= _LONGEST_OF_HOST
        paper = Paper("Megatron-Core on Alps", row["source"], machine, is_fitted=of_gpu or of_host)
        bits = "" if row["precision"] == FULL else " in 8 bits"
        subject = f"{row['model']} on {row['gpus']} GH200, {row['seq_len']} tokens"
        published = numbers(row, "step_seconds")
        search = _search(row, machine, engine)
        yield paper.run(f"{row['model']}{bits}", subject, search, published)


def steps_of_cscs(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield the steps that CSCS's regression tests expect; no number is fitted to them."""
    source = "eth-cscs/cscs-reframe-tests at 2f813557"
    machine = loaders.machine("alps")
    paper = Paper("Megatron-Core in CSCS's tests", source, machine, assumed=("vocabulary",))
    engine = loaders.engine("megatron-core")
    for row in rows:
        gpus, batch, seq_len = job_sizes(row)
        rate = gpus * float(row["tokens_per_second_per_gpu"])
        published = {"step_seconds": batch * seq_len / rate}
        subject = f"{row['model']} on {gpus} GH200, {seq_len} tokens"
        search = _search_of_test(row, machine, engine, loaders.model(row["model"]))
        yield paper.run(row["model"], subject, search, published)


def _search_of_test(row: Row, machine: Machine, engine: Engine, model: Model) -> Search:
    """Return the search that is held to a test's layout, with one bucket for each stage."""
    program = replace(engine.megatron, bucket_elements=1e10, bucket_elements_per_replica=0.0)
    strategy = megatron_of(
        replace(engine, attention_library="cudnn", megatron=program),
        n_virtual=(int(row["virtual"]),),
        fp32_gradients=row["fp32_gradients"] == "yes",
    )
    job = Job(*job_sizes(row), kernel_tuning=False)
    of_row = replace(model, vocab_size=_TOKENS_OF_TESTS, seq_len=int(row["seq_len"]))
    return held_to_row(Scenario(of_row, job, machine, strategy), row)


def _search(row: Row, machine: Machine, engine: Engine) -> Search:
    """Return the search that is held to a row's layout; cuBLAS chooses kernels by itself.

    With each micro-batch, the tensor ranks of core_v0.16.1 and 0.17 are told how many sequences are
    packed in it, for which the host waits (training/utils.py, _broadcast_cu_seqlens). It does not
    wait for the loss (--no-check-for-nan-in-loss-and-grad in launch.sh and launch-mp.sh).
    """
    strategy = megatron_of(
        replace(engine, attention_library=row["attention"], awaits_device=True),
        n_virtual=(1,),
        fp32_gradients=False,
    )
    job = Job(
        *job_sizes(row),
        precision=row["precision"],
        kernel_tuning=False,
        moments=row["moments"],
    )
    return held_to_row(Scenario(_model(row), job, machine, strategy), row)


def _model(row: Row) -> Model:
    """Return the model of a row, which is a Llama of its sizes."""
    return Model(
        row["model"],
        int(row["layers"]),
        int(row["hidden"]),
        int(row["heads"]),
        _VOCABULARY,
        int(row["seq_len"]),
        n_kv_heads=int(row["kv_heads"]),
        ffn_hidden_size=int(row["ffn"]),
        gated_mlp=True,
        norm="rms",
        position="rotary",
        bias=False,
        tied_embeddings=False,
    )
