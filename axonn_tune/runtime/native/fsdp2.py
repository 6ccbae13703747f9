"""ZeRO-3 and hybrid sharding through torch's FSDP2."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from axonn_tune.errors import InputError
from axonn_tune.runtime.axonn.engine import DTYPES
from axonn_tune.runtime.native.plain import PlainGPT
from axonn_tune.runtime.native.trainer import ParallelModel, TorchTrainer
from axonn_tune.runtime.ranks.collectives import issuer_of
from axonn_tune.runtime.ranks.groups import device_mesh
from axonn_tune.runtime.ranks.recorder import PendingCollective
from axonn_tune.runtime.ranks.wait_recorder import WaitRecorder
from axonn_tune.runtime.request import RunRequest
from axonn_tune.spec import names


def sharded_trainer(request: RunRequest, device: torch.device) -> TorchTrainer:
    """Build a trainer on `shard` x `replica` ranks, where neighbours share the shards."""
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise InputError(
            f"torch {torch.__version__} cannot record FSDP2's collectives "
            "(FSDPModule.set_custom_all_gather); allowed: a newer torch"
        )
    job = request.job
    sizes = request.configuration.layout.sizes
    recorder = WaitRecorder(device)
    mesh = _mesh(device, sizes["shard"], sizes["replica"])
    dtype = DTYPES[job.dtype]
    options: dict[str, Any] = {"mesh": mesh}
    if dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    sharded = partial(fully_shard, reshard_after_forward=True, **options)
    with device:
        model = PlainGPT(request.model, job.attention, request.configuration.recompute, sharded)
    fully_shard(model, reshard_after_forward=False, **options)
    model.initialise(request.seed)
    comm = _Communication(recorder, mesh, sizes["shard"], gathers_ahead=job.overlap.oag)
    _record_collectives(model, "root", comm)
    for block in model.blocks:
        _record_collectives(block, "block", comm)
    if job.overlap.oag:
        for block, following in pairwise(model.blocks):
            block.set_modules_to_forward_prefetch([following])

    def before_microstep(is_last: bool) -> None:
        if request.engine.zero.reduces_once:
            model.set_requires_gradient_sync(is_last)
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)

    parallel = ParallelModel(
        _ChainSwitch(model, comm, request.configuration.recompute),
        recorder,
        n_shares=dist.get_world_size(),
        share=dist.get_rank(),
        before_microstep=before_microstep,
        backward_ends_with_wait=device.type == "cuda",
    )
    return TorchTrainer(parallel, request, device)


def _mesh(device: torch.device, n_shards: int, n_replicas: int) -> DeviceMesh:
    ranks = torch.arange(n_replicas * n_shards)
    if n_replicas == 1:
        return device_mesh(device, ranks, ("shard",))
    return device_mesh(device, ranks.view(n_replicas, n_shards), ("replicate", "shard"))


class _ChainSwitch(nn.Module):
    """Runs a model, and tells its communication when each pass begins."""

    def __init__(self, model: nn.Module, comm: _Communication, recompute: str) -> None:
        super().__init__()
        self.model = model
        self._comm = comm
        self._backward = names.RECOMPUTE if recompute == "full" else names.BACKWARD

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (b, s) to logits (b, s, v)."""
        self._comm.chain = names.FORWARD
        logits = self.model(tokens)
        self._comm.chain = self._backward
        return logits


class _Communication:
    """Records FSDP2's collectives under the names of the step plan.

    Attributes
    ----------
    chain : str
        The chain to which the next collectives belong: forward, recompute or backward.
    """

    def __init__(
        self, recorder: WaitRecorder, mesh: DeviceMesh, n_shards: int, gathers_ahead: bool
    ) -> None:
        self.chain = names.FORWARD
        self._recorder = recorder
        self._gathers_ahead = gathers_ahead
        self._issuer = None
        if n_shards > 1:
            self._issuer = issuer_of(mesh.get_group("shard"))

    def gather(self, unit: str, output: torch.Tensor, shard: torch.Tensor) -> dist.Work | None:
        """Issue an all-gather; return None if computation already waits for it.

        Without gathers ahead, nothing is computed meanwhile, even where FSDP2 issues the gather
        before it needs the weights: it takes an empty list of modules to prefetch for its default.
        """
        assert self._issuer is not None
        issuer = self._issuer
        pending = self._recorder.collective(
            names.all_gather(names.of_layer(self.chain, unit)),
            "all_gather",
            output.nbytes,
            "shard",
            lambda: issuer.all_gather(output, shard),
        )
        if self._gathers_ahead:
            return _PendingWork(pending)
        pending.wait_at_once()
        return None

    def scatter(self, unit: str, shard: torch.Tensor, full: torch.Tensor, op: Any) -> None:
        """Reduce and scatter; on a CPU, FSDP2 reads the result as soon as this returns."""
        assert self._issuer is not None
        issuer = self._issuer
        pending = self._recorder.collective(
            names.reduce(names.unit_gradient(unit, "shard")),
            "reduce_scatter",
            full.nbytes,
            "shard",
            lambda: issuer.reduce_scatter(shard, full),
        )
        pending.wait()
        if op == dist.ReduceOp.AVG:
            shard /= full.numel() // shard.numel()


class _PendingWork(dist.Work):
    """A pending collective in the form that FSDP2 expects."""

    def __init__(self, pending: PendingCollective) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the collective."""
        self._pending.wait()
        return True


def _record_collectives(module: nn.Module, unit: str, comm: _Communication) -> None:
    """Have FSDP2 issue the collectives of a module through `comm`."""
    assert isinstance(module, FSDPModule)
    module.set_custom_all_gather(_AllGather(comm, unit))
    module.set_custom_reduce_scatter(_ReduceScatter(comm, unit))


class _CustomCollective:
    """The part of FSDP2's interface for custom collectives that both kinds share.

    The interface is `Comm` of torch.distributed.fsdp.
    """

    def __init__(self, comm: _Communication, unit: str) -> None:
        self.comm = comm
        self.unit = unit

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer for a message."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_CustomCollective):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return self.comm.gather(self.unit, output_tensor, input_tensor)


class _ReduceScatter(_CustomCollective):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.comm.scatter(self.unit, output_tensor, input_tensor, op)
        return None
