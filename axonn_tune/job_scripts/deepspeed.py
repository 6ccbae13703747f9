"""DeepSpeed: the JSON of ZeRO-3, of MiCS for hybrid sharding, and of ZeRO++.

Keys as DeepSpeed documents them (deepspeed.ai, "DeepSpeed Configuration JSON" and the ZeRO++
and MiCS tutorials; deepspeed/runtime/zero/config.py).
"""

from __future__ import annotations

import json
from typing import Any

from axonn_tune.step.prediction import Prediction
from axonn_tune.strategies.zero import Zero

NAME = "ds_config.json"


def files(prediction: Prediction) -> dict[str, str]:
    """Return the configuration to pass as ``--deepspeed_config``."""
    job = prediction.scenario.job
    strategy = prediction.scenario.strategy
    sizes = prediction.layout.sizes
    assert isinstance(strategy, Zero)
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if sizes.get("replica", 1) > 1:
        zero["mics_shard_size"] = sizes["shard"]
    if strategy.sharding.copy:
        zero["zero_hpz_partition_size"] = sizes[strategy.sharding.copy]
    if strategy.quantised_weights:
        zero["zero_quantized_weights"] = True
    if strategy.quantised_gradients:
        zero["zero_quantized_gradients"] = True
    document = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": prediction.configuration.micro_batch,
        "gradient_accumulation_steps": prediction.n_microsteps,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
    }
    if job.dtype != "fp32":
        document[job.dtype] = {"enabled": True}
    return {NAME: json.dumps(document, indent=2) + "\n"}
