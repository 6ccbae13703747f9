"""Megatron-LM: the flags of ``pretrain_gpt.py``.

Names as in NVIDIA/Megatron-LM, megatron/training/arguments.py and the configurations of Megatron
Core from which it builds its arguments (main, August 2026).
"""

from __future__ import annotations

from axonn_tune.spec.layout import PIPELINE
from axonn_tune.spec.model import Model
from axonn_tune.step.prediction import Prediction
from axonn_tune.strategies.megatron3d import Megatron3D

SCRIPT = "pretrain_gpt.py"


def flags(prediction: Prediction) -> list[str]:
    """One flag per line, with its value."""
    scenario, sizes = prediction.scenario, prediction.layout.sizes
    job, options = scenario.job, scenario.strategy
    assert isinstance(options, Megatron3D)
    lines = [
        *_model(scenario.model, job.seq_len),
        f"--tensor-model-parallel-size {sizes['tensor']}",
        f"--pipeline-model-parallel-size {sizes[PIPELINE]}",
        f"--context-parallel-size {sizes['context']}",
        f"--micro-batch-size {prediction.configuration.micro_batch}",
        f"--global-batch-size {job.global_batch}",
    ]
    if prediction.configuration.n_virtual > 1:
        lines.append(f"--num-virtual-stages-per-pipeline-rank {prediction.configuration.n_virtual}")
    if scenario.model.n_layers % (sizes[PIPELINE] * prediction.configuration.n_virtual):
        lines += ["--account-for-embedding-in-pipeline-split"]
        lines += ["--account-for-loss-in-pipeline-split"]
    if options.sequence_parallel and sizes["tensor"] > 1:
        lines.append("--sequence-parallel")
    if options.distributed_optimizer:
        lines.append("--use-distributed-optimizer")
    if options.overlap_grad_reduce:
        lines.append("--overlap-grad-reduce")
        lines += ["--overlap-param-gather"] * options.distributed_optimizer
    lines += ["--no-gradient-accumulation-fusion"] * (not options.fused_accumulation)
    lines += _recompute(prediction.configuration.recompute)
    lines += [f"--{job.dtype}"] * (job.dtype != "fp32")
    lines.append(f"--attention-backend {'flash' if job.attention == 'flash' else 'unfused'}")
    rate = 0.1 if job.dropout else 0.0
    return [*lines, f"--attention-dropout {rate}", f"--hidden-dropout {rate}"]


def _model(model: Model, seq_len: int) -> list[str]:
    lines = [
        f"--num-layers {model.n_layers}",
        f"--hidden-size {model.hidden_size}",
        f"--ffn-hidden-size {model.ffn_hidden_size}",
        f"--num-attention-heads {model.n_heads}",
        f"--kv-channels {model.head_dim}",
        f"--seq-length {seq_len}",
        f"--max-position-embeddings {max(seq_len, model.seq_len)}",
        f"--tokenizer-type NullTokenizer --vocab-size {model.vocab_size}",
    ]
    if model.n_kv_heads < model.n_heads:
        lines.append(f"--group-query-attention --num-query-groups {model.n_kv_heads}")
    lines += ["--swiglu"] * model.gated_mlp
    lines += ["--normalization RMSNorm"] * (model.norm == "rms")
    lines += ["--disable-bias-linear"] * (not model.bias)
    lines += ["--add-qkv-bias"] * (bool(model.qkv_bias) and not model.bias)
    lines += ["--position-embedding-type rope"] * (model.position == "rotary")
    lines += ["--position-embedding-type none"] * (model.position == "none")
    return lines + ["--untie-embeddings-and-output-weights"] * (not model.tied_embeddings)


def _recompute(recompute: str) -> list[str]:
    if recompute == "full":
        uniform = "--recompute-method uniform --recompute-num-layers 1"
        return [f"--recompute-granularity full {uniform}"]
    return ["--recompute-granularity selective"] if recompute == "selective" else []
