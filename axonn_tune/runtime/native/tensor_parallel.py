"""Megatron-LM's tensor parallelism through torch's own tensor-parallel API, times data."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from axonn_tune.runtime.axonn.engine import DTYPES
from axonn_tune.runtime.axonn.trainer import RandomTokens
from axonn_tune.runtime.native.plain import PlainGPT
from axonn_tune.runtime.native.trainer import Share, Standstills, TorchTrainer
from axonn_tune.runtime.ranks.collectives import issuer_of
from axonn_tune.runtime.ranks.recorder import Recorder
from axonn_tune.spec.grid import AnyGrid
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model


def tensor_parallel_trainer(
    spec: Model,
    job: Job,
    layout: AnyGrid,
    micro_batch: int,
    recompute: str,
    device: torch.device,
    seed: int,
) -> TorchTrainer:
    """A trainer on `tensor` x `data` ranks; neighbours share the layers."""
    sizes, recorder = layout.sizes, Recorder(device)
    names = ("data", "tensor")
    mesh = init_device_mesh(device.type, (sizes["data"], sizes["tensor"]), mesh_dim_names=names)
    model = PlainGPT(spec, job.attention, recompute).initialise(seed)
    model = model.to(device, DTYPES[job.dtype])
    _split(model, mesh["tensor"], spec.tied_embeddings)
    standstills = Standstills()
    gradients = _Gradients(model, recorder, standstills, mesh, sizes["data"])
    share = Share(sizes["data"], mesh.get_local_rank("data"))
    return TorchTrainer(
        model,
        RandomTokens(spec.vocab_size, job.seq_len, seed),
        recorder,
        standstills,
        share,
        device,
        job.global_batch,
        micro_batch,
        after_microsteps=gradients.reduce,
        loss_context=loss_parallel,
    )


def _split(model: PlainGPT, mesh: DeviceMesh, is_tied: bool) -> None:
    """Columns of qkv and up, rows of proj and down, the vocabulary of embedding and head."""
    plan = {
        "qkv": ColwiseParallel(),
        "proj": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    if is_tied:
        model.head.weight = model.embedding.weight


class _Gradients:
    """Sums the gradients of the replicas once in a step, as one message."""

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        standstills: Standstills,
        mesh: DeviceMesh,
        n_replicas: int,
    ) -> None:
        self._parameters = list(model.parameters())
        self._recorder, self._standstills = recorder, standstills
        self._n_replicas = n_replicas
        group, kind = mesh.get_group("data"), mesh.device_type
        self._issuer = issuer_of(group, kind) if n_replicas > 1 else None

    def reduce(self) -> None:
        """All-reduce, and divide: the loss is a mean over the batch."""
        if self._issuer is None:
            return
        issuer = self._issuer
        gradients = [_local(p.grad) for p in self._parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        work = self._recorder.collective(
            "gradient.reduce",
            "all_reduce",
            flat.nbytes,
            "context*data",
            lambda: issuer.all_reduce(flat, dist.ReduceOp.SUM),
        )
        self._standstills.wait(work)
        flat /= self._n_replicas
        for gradient, summed in zip(
            gradients, flat.split([g.numel() for g in gradients]), strict=True
        ):
            gradient.copy_(summed.view_as(gradient))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
