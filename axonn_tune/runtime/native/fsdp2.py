"""ZeRO-3 and hybrid sharding through torch's FSDP2."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from axonn_tune.errors import InputError
from axonn_tune.runtime.axonn.engine import DTYPES
from axonn_tune.runtime.axonn.trainer import RandomTokens
from axonn_tune.runtime.native.plain import PlainGPT
from axonn_tune.runtime.native.trainer import Share, Standstills, TorchTrainer
from axonn_tune.runtime.ranks.collectives import issuer_of
from axonn_tune.runtime.ranks.recorder import Recorder, Work
from axonn_tune.spec.grid import AnyGrid
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model


def sharded_trainer(
    spec: Model,
    job: Job,
    layout: AnyGrid,
    micro_batch: int,
    recompute: str,
    device: torch.device,
    seed: int,
) -> TorchTrainer:
    """A trainer on `shard` x `replica` ranks; neighbours share the shards."""
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise InputError(
            f"torch {torch.__version__} cannot record FSDP2's collectives "
            "(FSDPModule.set_custom_all_gather); allowed: a newer torch"
        )
    sizes, recorder = layout.sizes, Recorder(device)
    mesh = _mesh(device, sizes["shard"], sizes["replica"])
    model = PlainGPT(spec, job.attention, recompute).initialise(seed).to(device)
    dtype = DTYPES[job.dtype]
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **{**options, "reshard_after_forward": False})
    standstills = Standstills()
    comm = _Communication(recorder, standstills, mesh, sizes["shard"])
    units: list[tuple[str, nn.Module]] = [("root", model), *(("block", b) for b in model.blocks)]
    for unit, module in units:
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(_AllGather(comm, unit))
        module.set_custom_reduce_scatter(_ReduceScatter(comm, unit))
    blocks = list(model.blocks)
    if job.overlap.oag:
        for block, following in pairwise(blocks):
            block.set_modules_to_forward_prefetch([following])
    else:
        for block in blocks:
            block.set_modules_to_backward_prefetch([])
    comm.is_asynchronous = job.overlap.oag

    def before_microstep(is_last: bool) -> None:
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)

    return TorchTrainer(
        _Entered(model, comm, recompute),
        RandomTokens(spec.vocab_size, job.seq_len, seed),
        recorder,
        standstills,
        Share(dist.get_world_size(), dist.get_rank()),
        device,
        job.global_batch,
        micro_batch,
        before_microstep,
    )


def _mesh(device: torch.device, shard: int, replica: int) -> DeviceMesh:
    if replica == 1:
        return init_device_mesh(device.type, (shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (replica, shard), mesh_dim_names=("replicate", "shard"))


class _Entered(nn.Module):
    """A model whose backward pass is told from its forward pass."""

    def __init__(self, model: nn.Module, comm: _Communication, recompute: str) -> None:
        super().__init__()
        self.model, self._comm = model, comm
        self._backward = "recompute" if recompute == "full" else "backward"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The model's logits."""
        self._comm.enter("forward")
        logits: torch.Tensor = self.model(tokens)
        self._comm.enter(self._backward)
        return logits


class _Communication:
    """Records FSDP2's collectives under the names of the step plan."""

    def __init__(
        self, recorder: Recorder, standstills: Standstills, mesh: DeviceMesh, n_shards: int
    ) -> None:
        self.recorder, self.standstills = recorder, standstills
        self.chain, self.is_asynchronous = "forward", True
        group = mesh.get_group("shard")
        self._issuer = issuer_of(group, mesh.device_type) if n_shards > 1 else None

    def enter(self, chain: str) -> None:
        """What follows belongs to the forward, the recomputed or the backward chain."""
        self.chain = chain

    def gather(self, unit: str, output: torch.Tensor, shard: torch.Tensor) -> dist.Work | None:
        """Issue an all-gather; None once it is done, where nothing may run beside it."""
        assert self._issuer is not None
        issuer = self._issuer
        work = self.recorder.collective(
            f"{self.chain}.{unit}.all_gather",
            "all_gather",
            output.nbytes,
            "shard",
            lambda: issuer.all_gather(output, shard),
        )
        if self.is_asynchronous:
            return _Pending(work, self.standstills)
        self.standstills.wait(work)
        return None

    def scatter(self, unit: str, shard: torch.Tensor, full: torch.Tensor, op: Any) -> None:
        """Reduce and scatter; FSDP2 reads the result as soon as this returns (CPU)."""
        assert self._issuer is not None
        issuer = self._issuer
        work = self.recorder.collective(
            f"gradient.{unit}.shard.reduce",
            "reduce_scatter",
            full.nbytes,
            "shard",
            lambda: issuer.reduce_scatter(shard, full),
        )
        self.standstills.wait(work)
        if op == dist.ReduceOp.AVG:
            shard /= full.numel() // shard.numel()


class _Pending(dist.Work):
    """A collective under way, as FSDP2 knows them."""

    def __init__(self, work: Work, standstills: Standstills) -> None:
        super().__init__()
        self._work, self._standstills = work, standstills

    def wait(self, timeout: Any = None) -> bool:
        """Let what follows wait for it."""
        self._standstills.wait(self._work)
        return True


class _Allocates:
    """FSDP2's interface for collectives of one's own (torch.distributed.fsdp, `Comm`)."""

    def __init__(self, comm: _Communication, unit: str) -> None:
        self.comm, self.unit = comm, unit

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for a message."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocates):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return self.comm.gather(self.unit, output_tensor, input_tensor)


class _ReduceScatter(_Allocates):
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
