"""Train a GPT with torch's FSDP2 on the layout of settings.json.

`shard` is what a program of your own needs; everything else is an example of its use.
"""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import torch
import torch.distributed as dist
from gpt import GPT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from training import CLIP_NORM, DTYPES, joined, load_settings, mean_loss, parse_arguments, train


def make_mesh(settings: SimpleNamespace, device: torch.device) -> DeviceMesh:
    """Return the mesh: shards are neighbours in rank order, replicas of a shard lie further."""
    layout = settings.layout
    if layout.replica == 1:
        return init_device_mesh(device.type, (layout.shard,), mesh_dim_names=("shard",))
    sizes = (layout.replica, layout.shard)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))


def offloads(settings: SimpleNamespace) -> bool:
    """Return whether weights, gradients and optimizer states are in the host's memory."""
    return settings.offload == "optimizer"


def shard(
    model: nn.Module, blocks: nn.ModuleList, settings: SimpleNamespace, device: torch.device
) -> nn.Module:
    """Shard each block of a model, then what is outside of blocks."""
    mesh = make_mesh(settings, device)
    dtype = DTYPES[settings.dtype]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    offload = OffloadPolicy()
    if offloads(settings):
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=True,
        )
    return fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)


def sharded_gpt(settings: SimpleNamespace, device: torch.device) -> nn.Module:
    """Return a model with random weights, of which no rank ever has all."""
    with torch.device("meta"):
        model = GPT(settings)
    shard(model, model.blocks, settings, device)
    model.to_empty(device="cpu" if offloads(settings) else device)
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def run(
    settings: SimpleNamespace, arguments: argparse.Namespace, device: torch.device
) -> list[float]:
    """Train in the process group that exists, and return the losses."""
    model = sharded_gpt(settings, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, fused=True)

    def train_step(texts: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), device=device)
        for number, text in enumerate(texts, 1):
            is_last = number == len(texts)
            if settings.reduces_once:
                model.set_requires_gradient_sync(is_last)
            model.set_requires_all_reduce(is_last)
            model.set_is_last_backward(is_last)
            loss = mean_loss(model(text[:, :-1]), text[:, 1:]) / len(texts)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return train(settings, arguments, device, dist.get_rank(), dist.get_world_size(), train_step)


if __name__ == "__main__":
    given = parse_arguments("Train a GPT with FSDP2.")
    chosen = load_settings()
    # The norm of gradients in the host's memory is summed by gloo.
    with joined("cpu:gloo,cuda:nccl" if offloads(chosen) else None) as own_device:
        run(chosen, given, own_device)
