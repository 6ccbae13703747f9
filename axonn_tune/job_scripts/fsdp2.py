"""FSDP2: the device mesh and how to shard a model over it."""

from __future__ import annotations

from axonn_tune.job_scripts.facts import facts
from axonn_tune.step.prediction import Prediction

NAME = "fsdp2_setup.py"

_TEMPLATE = '''"""FSDP2, {model} on {gpus} GPUs: `shard(model, blocks)` in a process group."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

MICRO_BATCH = {micro_batch}  # sequences that one rank processes at once
MICRO_STEPS = {micro_steps}  # of gradient accumulation, for {global_batch} sequences in a step
RECOMPUTE = "{recompute}"


def mesh(device_type="cuda"):
    """Shards are neighbours in rank order; replicas of a shard lie {shard} ranks apart."""
    return init_device_mesh(device_type, {shape}, mesh_dim_names={names})


def shard(model, blocks, device_type="cuda"):
    """Shard each block, then what is outside of blocks."""
    policy = MixedPrecisionPolicy(param_dtype=torch.{dtype}, reduce_dtype=torch.{dtype})
    over = mesh(device_type)
    for block in blocks:
        fully_shard(block, mesh=over, mp_policy=policy, reshard_after_forward=True)
    return fully_shard(model, mesh=over, mp_policy=policy)
'''
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def files(prediction: Prediction) -> dict[str, str]:
    """Return the module to import."""
    sizes = prediction.layout.sizes
    if sizes["replica"] > 1:
        shape = f"({sizes['replica']}, {sizes['shard']})"
        names = '("replicate", "shard")'
    else:
        shape = f"({sizes['shard']},)"
        names = '("shard",)'
    text = _TEMPLATE.format(
        **facts(prediction),
        shard=sizes["shard"],
        shape=shape,
        names=names,
        dtype=_DTYPES[prediction.scenario.job.dtype],
    )
    return {NAME: text}
