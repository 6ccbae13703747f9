"""Collectives over one axis of the grid, which run while the rank computes and are recorded."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.ranks.device_stream import DeviceStream
from axonn_tune.runtime.ranks.gloo import GlooGroup
from axonn_tune.runtime.ranks.host_stream import HostStream
from axonn_tune.runtime.ranks.recorder import PendingCollective, Recorder
from axonn_tune.spec.layout import AXES

# An engine that trains here may find others in their place. Torch 2.13 renamed two of them.
_all_reduce = dist.all_reduce
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """Issues collectives over the axes of a mesh, except over an axis of one rank.

    The collectives of an axis run in order: on a GPU in a stream of its own, on a CPU in a thread.
    """

    def __init__(self, mesh: Mesh, recorder: Recorder) -> None:
        self._recorder = recorder
        axes = [axis for axis in AXES if mesh.size(axis) > 1]
        self._axes = {axis: issuer_of(mesh.group(axis)) for axis in axes}

    def all_reduce(
        self, name: str, tensor: torch.Tensor, axis: str, op: Any = dist.ReduceOp.SUM
    ) -> PendingCollective | None:
        """Sum a contiguous tensor over an axis, in place; `op` may name another reduction."""
        return self._issue(name, "all_reduce", tensor, axis, tensor, op)

    def all_gather(
        self, name: str, gathered: torch.Tensor, shard: torch.Tensor, axis: str
    ) -> PendingCollective | None:
        """Fill `gathered` with the shards of an axis, in their order."""
        return self._issue(name, "all_gather", gathered, axis, gathered, shard)

    def reduce_scatter(
        self, name: str, shard: torch.Tensor, full: torch.Tensor, axis: str
    ) -> PendingCollective | None:
        """Sum `full` over an axis, and leave each rank its part in `shard`."""
        return self._issue(name, "reduce_scatter", full, axis, shard, full)

    def _issue(
        self, name: str, kind: str, full: torch.Tensor, axis: str, *arguments: Any
    ) -> PendingCollective | None:
        issuer = self._axes.get(axis)
        if issuer is None:
            return None
        start = getattr(issuer, kind)
        return self._recorder.collective(name, kind, full.nbytes, axis, lambda: start(*arguments))


def issuer_of(group: dist.ProcessGroup) -> Issuer:
    """Return what starts the collectives of a group of ranks."""
    backend = dist.get_backend(group)
    if backend == dist.Backend.GLOO:
        return _OnHost(group)
    return _OnDevice(group) if backend == dist.Backend.NCCL else _AsTorchDoes(group)


def is_on_host() -> bool:
    """Return whether collectives of all ranks run on the host."""
    return dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO


class Issuer(Protocol):
    """Starts collectives of one group, one after the other."""

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> PendingCollective:
        """Sum a tensor, or take the maximum, in place."""

    def all_gather(self, gathered: torch.Tensor, shard: torch.Tensor) -> PendingCollective:
        """Fill `gathered` with the shards of all ranks."""

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> PendingCollective:
        """Sum `full`, and leave each rank its part in `shard`."""


class _AsTorchDoes:
    """Starts torch's collectives, as a rehearsal does."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> PendingCollective:
        return _all_reduce(tensor, op=op, group=self._group, async_op=True)

    def all_gather(self, gathered: torch.Tensor, shard: torch.Tensor) -> PendingCollective:
        return _all_gather(gathered, shard, group=self._group, async_op=True)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> PendingCollective:
        return _reduce_scatter(shard, full, group=self._group, async_op=True)


class _OnDevice:
    """Starts collectives of NCCL, which run on a stream of their group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._stream = group, DeviceStream()

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> PendingCollective:
        return self._stream.issue(lambda: _all_reduce(tensor, op=op, group=self._group))

    def all_gather(self, gathered: torch.Tensor, shard: torch.Tensor) -> PendingCollective:
        return self._stream.issue(lambda: _all_gather(gathered, shard, group=self._group))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> PendingCollective:
        return self._stream.issue(lambda: _reduce_scatter(shard, full, group=self._group))


class _OnHost:
    """Starts collectives over gloo, which run in a thread of their group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._stream = GlooGroup(group), HostStream()

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> PendingCollective:
        return self._stream.issue(lambda: self._group.all_reduce(tensor, op))

    def all_gather(self, gathered: torch.Tensor, shard: torch.Tensor) -> PendingCollective:
        return self._stream.issue(lambda: self._group.all_gather(gathered, shard))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> PendingCollective:
        return self._stream.issue(lambda: self._group.reduce_scatter(shard, full))


def wait(pending: PendingCollective | None) -> None:
    """Let what the host launches next wait for a collective; on a CPU, the host itself waits."""
    if pending is not None:
        pending.wait()
