"""Collectives over one axis of the grid, issued beside computation and recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.recorder import Recorder, Work

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """Issues collectives; one over a group of one rank is not issued."""

    def __init__(self, mesh: Mesh, recorder: Recorder) -> None:
        self._mesh, self._recorder = mesh, recorder
        self._groups = {axis: mesh.group(axis) for axis in ("x", "y", "z", "data")}

    def all_reduce(
        self, name: str, tensor: torch.Tensor, axis: str, op: Any = dist.ReduceOp.SUM
    ) -> Work | None:
        """Sum a contiguous tensor over an axis, in place."""
        return self._issue(
            name,
            "all_reduce",
            tensor,
            axis,
            lambda group: dist.all_reduce(tensor, op=op, group=group, async_op=True),
        )

    def all_gather(
        self, name: str, gathered: torch.Tensor, shard: torch.Tensor, axis: str
    ) -> Work | None:
        """Fill `gathered` with the shards of an axis, in their order."""
        return self._issue(
            name,
            "all_gather",
            gathered,
            axis,
            lambda group: _all_gather(gathered, shard, group=group, async_op=True),
        )

    def reduce_scatter(
        self, name: str, shard: torch.Tensor, full: torch.Tensor, axis: str
    ) -> Work | None:
        """Sum `full` over an axis and leave each rank its part."""
        return self._issue(
            name,
            "reduce_scatter",
            full,
            axis,
            lambda group: self._start_reduce_scatter(shard, full, group),
        )

    def _start_reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup
    ) -> Work:
        if self._mesh.device.type == "cpu":
            return _SummedChunks(shard, full, group)
        return _reduce_scatter(shard, full, group=group, async_op=True)

    def _issue(
        self,
        name: str,
        kind: str,
        full: torch.Tensor,
        axis: str,
        start: Callable[[dist.ProcessGroup], Work],
    ) -> Work | None:
        if self._mesh.size(axis) == 1:
            return None
        group = self._groups[axis]
        return self._recorder.collective(name, kind, full.nbytes, axis, lambda: start(group))


class _SummedChunks:
    """A reduce-scatter for gloo, whose own moves twice the bytes: an all-reduce and a copy.

    Each rank sends every other its chunk; the chunks are summed in gloo's thread.
    """

    def __init__(self, shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup) -> None:
        chunks = torch.empty_like(full)
        sent = dist.all_to_all_single(chunks, full, group=group, async_op=True)
        by_rank = chunks.view(-1, shard.numel())
        self._summed = sent.get_future().then(lambda _: torch.sum(by_rank, 0, out=shard))

    def wait(self) -> None:
        """Block until the shard holds the sum."""
        self._summed.wait()

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        """Completes with the sum."""
        return self._summed


def wait(work: Work | None) -> None:
    """Let what the host launches next wait for a collective; on a CPU the host itself waits."""
    if work is not None:
        work.wait()
