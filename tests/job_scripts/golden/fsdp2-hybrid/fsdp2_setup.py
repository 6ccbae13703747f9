"""FSDP2, gpt-20b on 64 GPUs: `shard(model, blocks)` in a process group."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

MICRO_BATCH = 1  # sequences that one rank processes at once
MICRO_STEPS = 128  # of gradient accumulation, for 8192 sequences in a step
RECOMPUTE = "full"


def mesh(device_type="cuda"):
    """Shards are neighbours in rank order; replicas of a shard lie 16 ranks apart."""
    return init_device_mesh(device_type, (4, 16), mesh_dim_names=("replicate", "shard"))


def shard(model, blocks, device_type="cuda"):
    """Shard each block, then what is outside of blocks."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    over = mesh(device_type)
    for block in blocks:
        fully_shard(block, mesh=over, mp_policy=policy, reshard_after_forward=True)
    return fully_shard(model, mesh=over, mp_policy=policy)
