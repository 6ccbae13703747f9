"""Measured steps of MLPerf Training v6.0, in which mixtures of experts train on 8 to 8,192 GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from axonn_tune.reproduce.bridge import layout_search
from axonn_tune.reproduce.runs import (
    Loaders,
    Paper,
    Row,
    Run,
    numbers,
    with_buckets,
    with_fused_loss,
)
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.model import Model

_ENGINES = {"yes": "megatron-core-graphs", "no": "megatron-core"}
_SOURCE = "mlcommons/training_results_v6.0 (Apache-2.0)"


def mlperf_experts(rows: Sequence[Row], loaders: Loaders) -> Iterator[Run]:
    """Yield measured steps, for which experts are taken to be equally busy."""
    for row in rows:
        model, machine = _model(row, loaders), loaders.machine(row["machine"])
        paper = Paper("MLPerf", _SOURCE, machine, "table", ("network",))
        search = layout_search(
            row,
            model,
            machine,
            _engine(row, loaders),
            mtp_modules=int(row["mtp"]),
            fp32_gradients=False,
            low_weights=row["low_weights"] == "yes",
            context_kind=row["context_kind"],
        )
        published = numbers(row, "step_seconds")
        subject = f"{model.name} on {row['gpus']} of {row['machine']}, {row['precision']}"
        yield paper.run(model.name, subject, search, published)


def _model(row: Row, loaders: Loaders) -> Model:
    """Return the model as the benchmark trains it: GPT-OSS with another tokenizer and rotation."""
    model = loaders.model(row["model"])
    if row["model"] != "gpt-oss-20b":
        return model
    return replace(model, vocab_size=128256, scaled_rotary=False)


def _engine(row: Row, loaders: Loaders) -> Engine:
    """Return the engine with the facts of the benchmark's program.

    Scripts of DeepSeek-V3 run the router in bf16 (MOE_ROUTER_DTYPE), and pretrain.py of GPT-OSS
    does not set its type. The loss is taken to be Transformer Engine's, as in Megatron-Bridge.
    """
    engine = with_fused_loss(loaders.engine(_ENGINES[row["graphs"]]))
    program = replace(
        engine.megatron,
        low_attention=row["low_attention"] == "yes",
        low_head=row["low_head"] == "yes",
        fp32_router=False,
        aligns_gathers=False,
    )
    return replace(engine, megatron=with_buckets(program, row))
