"""Megatron-LM: the flags of ``pretrain_gpt.py``.

Names as in NVIDIA/Megatron-LM, megatron/training/arguments.py and the configurations of Megatron
Core from which it builds its arguments (main, August 2026).
"""

from __future__ import annotations

from axonn_tune.errors import InputError
from axonn_tune.job_scripts.framework import N_STEPS, Start
from axonn_tune.spec.engine import ALL_GATHER, RING, ULYSSES
from axonn_tune.spec.layout import PIPELINE
from axonn_tune.spec.model import Model
from axonn_tune.spec.recomputation import is_partial
from axonn_tune.step.prediction import Prediction
from axonn_tune.strategies.megatron3d import Megatron3D

PROGRAM = "Megatron-LM/pretrain_gpt.py"
# validate_args asserts it with tensor or context parallelism on GPUs before Blackwell, so that
# kernels run in the order in which they were issued.
_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
# The names of Transformer Engine, which Megatron-Core passes on.
_CONTEXT_KINDS = {RING: "p2p", ALL_GATHER: "all_gather", ULYSSES: "a2a"}

_TRAINING_FLAGS = (
    "--mock-data",
    f"--train-iters {N_STEPS}",
    "--lr 1e-4",
    "--min-lr 1e-5",
    "--lr-decay-style cosine",
    "--clip-grad 1.0",
    "--eval-iters 0",
    "--log-interval 1",
    "--log-throughput",
    "--distributed-backend nccl",
)


def start(prediction: Prediction, train: str | None) -> Start:
    """Return how Megatron-LM is started; `train` is the path of its pretrain_gpt.py."""
    program = train or PROGRAM
    command = (("python", program), *(tuple(line.split()) for line in flags(prediction)))
    to_fill_in = (
        "Activate an environment in which python finds what Megatron-LM needs.",
        f"Clone Megatron-LM so that {program} exists (--train names another path).",
        "It trains on mock data; replace --mock-data by --data-path, and the tokenizer by yours.",
    )
    return Start({}, command, to_fill_in, _ENVIRONMENT)


def flags(prediction: Prediction) -> list[str]:
    """Return the flags with their values, one per line; no name or text is among them."""
    scenario = prediction.scenario
    configuration = prediction.configuration
    model = scenario.model
    job = scenario.job
    strategy = scenario.strategy
    sizes = prediction.layout.sizes
    assert isinstance(strategy, Megatron3D)
    lines = [
        *_model_flags(model, job.seq_len),
        *_TRAINING_FLAGS,
        f"--tensor-model-parallel-size {sizes['tensor']}",
        f"--pipeline-model-parallel-size {sizes[PIPELINE]}",
        f"--context-parallel-size {sizes['context']}",
        f"--micro-batch-size {configuration.micro_batch}",
        f"--global-batch-size {job.global_batch}",
    ]
    if configuration.n_virtual > 1:
        lines.append(f"--num-virtual-stages-per-pipeline-rank {configuration.n_virtual}")
    if model.n_layers % (sizes[PIPELINE] * configuration.n_virtual):
        lines.append("--account-for-embedding-in-pipeline-split")
        lines.append("--account-for-loss-in-pipeline-split")
    if sizes["context"] > 1:
        lines.append(f"--cp-comm-type {_CONTEXT_KINDS[strategy.context_kind]}")
    if strategy.sequence_parallel and sizes["tensor"] > 1:
        lines.append("--sequence-parallel")
    if strategy.distributed_optimizer:
        lines.append("--use-distributed-optimizer")
    if strategy.overlap_grad_reduce:
        lines.append("--overlap-grad-reduce")
    if strategy.overlap_grad_reduce and strategy.distributed_optimizer:
        lines.append("--overlap-param-gather")
    if job.offloads_optimizer:
        lines += _offload_flags(strategy)
    if not strategy.fused_accumulation:
        lines.append("--no-gradient-accumulation-fusion")
    if configuration.recompute == "full":
        uniform = "--recompute-method uniform --recompute-num-layers 1"
        lines.append(f"--recompute-granularity full {uniform}")
    elif is_partial(configuration.recompute):
        n_layers = configuration.recompute.removeprefix("full:")
        block = f"--recompute-method block --recompute-num-layers {n_layers}"
        lines.append(f"--recompute-granularity full {block}")
    elif configuration.recompute == "selective":
        lines.append("--recompute-granularity selective")
    if job.dtype != "fp32":
        lines.append(f"--{job.dtype}")
    lines.append(f"--attention-backend {'flash' if job.attention == 'flash' else 'unfused'}")
    rate = 0.1 if job.dropout else 0.0
    return [*lines, f"--attention-dropout {rate}", f"--hidden-dropout {rate}"]


def _offload_flags(strategy: Megatron3D) -> tuple[str, ...]:
    """Return the flags of offload; copies run one after another, as predicted.

    OptimizerConfig asserts the distributed optimizer with a precision-aware one, which offload
    needs.
    """
    if not strategy.distributed_optimizer:
        raise InputError(
            "--no-distributed-optimizer: Megatron-Core offloads the optimizer states of its "
            "distributed optimizer only; leave out the one or --offload"
        )
    return (
        "--optimizer-cpu-offload",
        "--optimizer-offload-fraction 1.0",
        "--use-precision-aware-optimizer",
    )


def _model_flags(model: Model, seq_len: int) -> list[str]:
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
    if model.gated_mlp:
        lines.append("--swiglu")
    if model.norm == "rms":
        lines.append("--normalization RMSNorm")
    if not model.bias:
        lines.append("--disable-bias-linear")
    if model.qkv_bias and not model.bias:
        lines.append("--add-qkv-bias")
    if model.position == "rotary":
        lines.append("--position-embedding-type rope")
    elif model.position == "none":
        lines.append("--position-embedding-type none")
    if not model.tied_embeddings:
        lines.append("--untie-embeddings-and-output-weights")
    return lines
