"""Megatron-FSDP: the flags of Megatron-LM's ``pretrain_gpt.py`` that shard a model over all ranks.

Names as in NVIDIA/Megatron-LM at d98e8a64, docs/user-guide/features/megatron_fsdp.md and
examples/megatron_fsdp.
"""

from __future__ import annotations

from axonn_tune.errors import InputError
from axonn_tune.job_scripts.framework import Start
from axonn_tune.job_scripts.megatron import (
    TRAINING_FLAGS,
    attention_flags,
    recompute_flags,
    start_of,
    type_flags,
)
from axonn_tune.job_scripts.megatron_model import model_flags
from axonn_tune.spec.layout import CONTEXT, EXPERT, PIPELINE, TENSOR
from axonn_tune.spec.offload import offloaded_layers
from axonn_tune.step.prediction import Prediction
from axonn_tune.strategies.zero.zero import Zero

# It asserts its own format of checkpoints. Gradients are copied to where they are reduced, as
# NVIDIA's recipes have it.
_SHARDING = (
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy optim_grads_params",
    "--ckpt-format fsdp_dtensor",
    "--use-distributed-optimizer",
    "--init-model-with-meta-device",
    "--no-gradient-accumulation-fusion",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
)


def start(prediction: Prediction, train: str | None) -> Start:
    """Return how Megatron-LM is started; it asserts that its kernels have several queues."""
    return start_of(prediction, train, flags(prediction), {})


def _require_written(prediction: Prediction, strategy: Zero) -> None:
    """Raise InputError if the prediction, for another engine, has what no flag can say."""
    layout = prediction.layout
    for axis in (TENSOR, CONTEXT, PIPELINE, EXPERT):
        if layout.size(axis) > 1:
            raise InputError(
                f"the script of megatron-fsdp spreads a model over shards and replicas only, and "
                f"not as {layout}; allowed: a layout with {axis}=1"
            )
    if strategy.engine.zero.reduces_once:
        raise InputError(
            "Megatron-FSDP reduces gradients in every micro-step; leave out --reduces-once, or "
            "take --framework fsdp2"
        )


def flags(prediction: Prediction) -> list[str]:
    """Return the flags with their values, one per line; no name or text is among them."""
    job, configuration = prediction.scenario.job, prediction.configuration
    strategy = prediction.scenario.strategy
    assert isinstance(strategy, Zero)
    _require_written(prediction, strategy)
    lines = [
        *model_flags(prediction.scenario.model, job.seq_len),
        *TRAINING_FLAGS,
        f"--micro-batch-size {configuration.micro_batch}",
        f"--global-batch-size {job.global_batch}",
        *_SHARDING,
    ]
    n_replicas = prediction.layout.size("replica")
    if n_replicas > 1:
        lines.append(f"--num-distributed-optimizer-instances {n_replicas}")
    n_offloaded = offloaded_layers(job.offload_modules)
    if n_offloaded:
        lines.append(f"--cpu-offloading-num-layers {n_offloaded}")
    # Selective recomputation is predicted to run unfused attention again, and nothing else.
    if configuration.recompute != "selective" or job.attention == "unfused":
        lines += recompute_flags(configuration.recompute, job.precision)
    lines += type_flags(job)
    if strategy.gathers_low(job):
        lines.append("--fp8-param-gather")
    return [*lines, *attention_flags(job, strategy.engine)]
