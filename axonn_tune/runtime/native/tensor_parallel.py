"""Megatron-LM's tensor parallelism through torch's own API, with data parallelism."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from axonn_tune.runtime.axonn.engine import DTYPES
from axonn_tune.runtime.native.plain import PlainGPT
from axonn_tune.runtime.native.trainer import ParallelModel, TorchTrainer
from axonn_tune.runtime.ranks.collectives import issuer_of
from axonn_tune.runtime.ranks.groups import device_mesh
from axonn_tune.runtime.ranks.wait_recorder import WaitRecorder
from axonn_tune.runtime.request import RunRequest
from axonn_tune.spec import names

# Columns of qkv and up are split, rows of proj and down, and the vocabulary of embedding and head.
_BLOCK_STYLES = {
    "qkv": ColwiseParallel(),
    "proj": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}
_END_STYLES = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}


def tensor_parallel_trainer(request: RunRequest, device: torch.device) -> TorchTrainer:
    """Build a trainer on `tensor` x `data` ranks, where neighbours share the layers."""
    spec = request.model
    job = request.job
    sizes = request.configuration.layout.sizes
    dtype = DTYPES[job.dtype]
    n_replicas = sizes["data"]
    ranks = torch.arange(dist.get_world_size()).view(n_replicas, sizes["tensor"])
    mesh = device_mesh(device, ranks, ("data", "tensor"))
    with device:
        model = PlainGPT(
            spec,
            job.attention,
            request.configuration.recompute,
            lambda block: parallelize_module(block.to(dtype), mesh["tensor"], _BLOCK_STYLES),
            reentrant=True,  # as Megatron-LM's, which run the whole block again
        )
    model = parallelize_module(model.to(dtype), mesh["tensor"], _END_STYLES)
    model.tie()
    model.initialise(request.seed)
    recorder = WaitRecorder(device)
    parallel = ParallelModel(
        model,
        recorder,
        n_shares=n_replicas,
        share=mesh.get_local_rank("data"),
        after_microsteps=_GradientSum(recorder, mesh, n_replicas).reduce,
        loss_context=loss_parallel,
    )
    return TorchTrainer(parallel, request, device)


class _GradientSum:
    """Sums the gradients of the replicas once in a step, as one message."""

    def __init__(self, recorder: WaitRecorder, mesh: DeviceMesh, n_replicas: int) -> None:
        self._recorder = recorder
        self._n_replicas = n_replicas
        self._issuer = None
        if n_replicas > 1:
            self._issuer = issuer_of(mesh.get_group("data"))

    def reduce(self, spread: list[torch.Tensor]) -> None:
        """All-reduce the gradients and divide them, since the loss is a mean over the batch."""
        if self._issuer is None:
            return
        issuer = self._issuer
        gradients = [_local(gradient) for gradient in spread]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        pending = self._recorder.collective(
            names.GRADIENT_REDUCE,
            "all_reduce",
            flat.nbytes,
            "context*data",
            lambda: issuer.all_reduce(flat, dist.ReduceOp.SUM),
        )
        pending.wait()
        flat /= self._n_replicas
        pieces = flat.split([gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
