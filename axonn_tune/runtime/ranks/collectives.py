"""Collectives over one axis of the grid, issued beside computation and recorded."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.ranks.gloo import GlooGroup
from axonn_tune.runtime.ranks.host_stream import HostStream
from axonn_tune.runtime.ranks.recorder import Recorder, Work
from axonn_tune.spec.grid import AXES

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """Issues collectives; one over a group of one rank is not issued.

    On a GPU NCCL's group of an axis is its stream; on a CPU a thread is.
    """

    def __init__(self, mesh: Mesh, recorder: Recorder) -> None:
        self._recorder = recorder
        axes = [axis for axis in AXES if mesh.size(axis) > 1]
        self._axes = {axis: issuer_of(mesh.group(axis), mesh.device.type) for axis in axes}

    def all_reduce(
        self, name: str, tensor: torch.Tensor, axis: str, op: Any = dist.ReduceOp.SUM
    ) -> Work | None:
        """Sum a contiguous tensor over an axis, in place."""
        return self._issue(name, "all_reduce", tensor, axis, tensor, op)

    def all_gather(
        self, name: str, gathered: torch.Tensor, shard: torch.Tensor, axis: str
    ) -> Work | None:
        """Fill `gathered` with the shards of an axis, in their order."""
        return self._issue(name, "all_gather", gathered, axis, gathered, shard)

    def reduce_scatter(
        self, name: str, shard: torch.Tensor, full: torch.Tensor, axis: str
    ) -> Work | None:
        """Sum `full` over an axis and leave each rank its part."""
        return self._issue(name, "reduce_scatter", full, axis, shard, full)

    def _issue(
        self, name: str, kind: str, full: torch.Tensor, axis: str, *arguments: Any
    ) -> Work | None:
        issuer = self._axes.get(axis)
        if issuer is None:
            return None
        start = getattr(issuer, kind)
        return self._recorder.collective(name, kind, full.nbytes, axis, lambda: start(*arguments))


def issuer_of(group: dist.ProcessGroup, device_type: str) -> Issuer:
    """What starts the collectives of a group of ranks."""
    return _OnHost(group) if device_type == "cpu" else _OnDevice(group)


class Issuer(Protocol):
    """Starts collectives of one group, one after the other."""

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Work:
        """Sum a tensor, or take the maximum, in place."""

    def all_gather(self, gathered: torch.Tensor, shard: torch.Tensor) -> Work:
        """Fill `gathered` with the shards of all ranks."""

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        """Sum `full` and leave each rank its part."""


class _OnDevice:
    """NCCL's collectives, which queue on a stream of their group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Work:
        return dist.all_reduce(tensor, op=op, group=self._group, async_op=True)

    def all_gather(self, gathered: torch.Tensor, shard: torch.Tensor) -> Work:
        return _all_gather(gathered, shard, group=self._group, async_op=True)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        return _reduce_scatter(shard, full, group=self._group, async_op=True)


class _OnHost:
    """Gloo's, in a thread for each group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._stream = GlooGroup(group), HostStream()

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> Work:
        return self._stream.issue(lambda: self._group.all_reduce(tensor, op))

    def all_gather(self, gathered: torch.Tensor, shard: torch.Tensor) -> Work:
        return self._stream.issue(lambda: self._group.all_gather(gathered, shard))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        return self._stream.issue(lambda: self._group.reduce_scatter(shard, full))


def wait(work: Work | None) -> None:
    """Let what the host launches next wait for a collective; on a CPU the host itself waits."""
    if work is not None:
        work.wait()
