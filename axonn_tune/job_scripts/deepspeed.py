"""DeepSpeed: a training program, and the JSON of ZeRO's stages and of ZeRO++.

Keys as DeepSpeed documents them (deepspeed.ai, "DeepSpeed Configuration JSON" and the ZeRO++
tutorial; deepspeed/runtime/zero/config.py of DeepSpeed 0.19, which has no MiCS any more).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from axonn_tune.errors import InputError
from axonn_tune.job_scripts.framework import Program, Start, training_start
from axonn_tune.spec.layout import CONTEXT
from axonn_tune.step.prediction import Prediction
from axonn_tune.strategies.zero.zero import Zero

CONFIG = "ds_config.json"
# The stages of ZeRO by strategy; ZeRO++ is a kind of the third.
_STAGES = {"zero1": 1, "zero2": 2}
PROGRAM = Program(
    "train_deepspeed.py",
    ("gpt.py", "layers.py", "training.py"),
    "deepspeed-eager",
    " and deepspeed",
)


def start(prediction: Prediction, train: str | None) -> Start:
    """Return how DeepSpeed is started."""
    begun = training_start(prediction, PROGRAM, tuple(prediction.layout.sizes), train)
    command = begun.command
    if train is not None:
        command = ((*command[0], "--deepspeed", "--deepspeed_config", CONFIG),)
    return replace(begun, files={**begun.files, CONFIG: config_text(prediction)}, command=command)


def config_text(prediction: Prediction) -> str:
    """Return DeepSpeed's configuration."""
    job = prediction.scenario.job
    strategy = prediction.scenario.strategy
    sizes = prediction.layout.sizes
    assert isinstance(strategy, Zero)
    zero: dict[str, Any] = {
        "stage": _STAGES.get(strategy.name, 3),
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if sizes.get("replica", 1) > 1:
        raise InputError(
            f"DeepSpeed has had no replicas since it removed MiCS, and {prediction.layout} has "
            "some; allowed: --framework fsdp2, or a layout with replica=1"
        )
    if strategy.sharding.copy:
        zero["zero_hpz_partition_size"] = sizes[strategy.sharding.copy]
    if strategy.quantised_weights:
        zero["zero_quantized_weights"] = True
    if strategy.quantised_gradients:
        zero["zero_quantized_gradients"] = True
    if job.offloads_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    document = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": prediction.configuration.micro_batch,
        "gradient_accumulation_steps": prediction.n_microsteps,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
    n_context = prediction.layout.size(CONTEXT)
    if n_context > 1:
        # Without them DeepSpeed takes every rank for a replica, and refuses the sizes of batches.
        document["sequence_parallel_size"] = n_context
        document["data_parallel_size"] = job.n_gpus // n_context
    if job.dtype != "fp32":
        document[job.dtype] = {"enabled": True}
    return json.dumps(document, indent=2) + "\n"
