"""Collectives over one axis of the grid, issued beside computation and recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.recorder import Recorder, Work
from axonn_tune.spec.grid import AXES

# One exchange among all ranks of so many bytes takes gloo a fraction of the time of its rings,
# which send in n - 1 rounds, or 2 (n - 1) to reduce: 0.8 instead of 4.6 ms to reduce 64 KiB over
# 4 ranks on 2 cores. To reduce S bytes it moves (n - 1) S, a ring 2 (n - 1) / n S; on a slow
# link the difference must stay small.
EXCHANGE_BYTES = 2**20
EXTRA_BYTES = 2**16
_FOLDS = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.MAX: torch.amax}

# torch 2.13 renamed them.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """Issues collectives; one over a group of one rank is not issued."""

    def __init__(self, mesh: Mesh, recorder: Recorder) -> None:
        self._on_cpu, self._recorder = mesh.device.type == "cpu", recorder
        self._groups = {axis: mesh.group(axis) for axis in AXES if mesh.size(axis) > 1}

    def all_reduce(
        self, name: str, tensor: torch.Tensor, axis: str, op: Any = dist.ReduceOp.SUM
    ) -> Work | None:
        """Sum a contiguous tensor over an axis, in place."""
        return self._issue(name, "all_reduce", tensor, axis, self._start_all_reduce, tensor, op)

    def all_gather(
        self, name: str, gathered: torch.Tensor, shard: torch.Tensor, axis: str
    ) -> Work | None:
        """Fill `gathered` with the shards of an axis, in their order."""
        return self._issue(
            name, "all_gather", gathered, axis, self._start_all_gather, gathered, shard
        )

    def reduce_scatter(
        self, name: str, shard: torch.Tensor, full: torch.Tensor, axis: str
    ) -> Work | None:
        """Sum `full` over an axis and leave each rank its part."""
        return self._issue(
            name, "reduce_scatter", full, axis, self._start_reduce_scatter, shard, full
        )

    def _issue(
        self,
        name: str,
        kind: str,
        full: torch.Tensor,
        axis: str,
        start: Callable[..., Work],
        *arguments: Any,
    ) -> Work | None:
        group = self._groups.get(axis)
        if group is None:
            return None
        return self._recorder.collective(
            name, kind, full.nbytes, axis, lambda: start(*arguments, group)
        )

    def _start_all_reduce(self, tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> Work:
        n_ranks = group.size()
        extra_bytes = (n_ranks - 1) * (n_ranks - 2) / n_ranks * tensor.nbytes
        fits = extra_bytes <= EXTRA_BYTES and self._fits_exchange(n_ranks * tensor.nbytes)
        if fits and op in _FOLDS:
            copies = tensor.expand(n_ranks, *tensor.shape).contiguous()
            return _Folded(tensor, copies, group, _FOLDS[op])
        return dist.all_reduce(tensor, op=op, group=group, async_op=True)

    def _start_all_gather(
        self, gathered: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> Work:
        if self._fits_exchange(gathered.nbytes):
            copies = shard.repeat(group.size())
            return dist.all_to_all_single(gathered, copies, group=group, async_op=True)
        return _all_gather(gathered, shard, group=group, async_op=True)

    def _start_reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup
    ) -> Work:
        if self._on_cpu:
            # gloo's own moves twice the bytes: an all-reduce and a copy.
            return _Folded(shard, full.view(group.size(), -1), group, torch.sum)
        return _reduce_scatter(shard, full, group=group, async_op=True)

    def _fits_exchange(self, nbytes: int) -> bool:
        return self._on_cpu and nbytes <= EXCHANGE_BYTES


class _Folded:
    """A reduction for gloo: each rank sends every other one part, and folds what it gets.

    The fold runs in gloo's thread, over the ranks in their order, so that ranks that fold
    the same parts get the same bits.
    """

    def __init__(
        self,
        result: torch.Tensor,
        parts: torch.Tensor,
        group: dist.ProcessGroup,
        fold: Callable[..., torch.Tensor],
    ) -> None:
        arrived = torch.empty_like(parts)
        exchange = dist.all_to_all_single(arrived, parts, group=group, async_op=True)

        def finish(exchanged: torch.futures.Future[Any]) -> torch.Tensor:
            exchanged.value()  # raises if a rank was lost
            return fold(arrived, 0, out=result)

        self._folded = exchange.get_future().then(finish)

    def wait(self) -> None:
        """Block until the result is there."""
        self._folded.wait()

    def get_future(self) -> torch.futures.Future[torch.Tensor]:
        """Completes with the result."""
        return self._folded


def wait(work: Work | None) -> None:
    """Let what the host launches next wait for a collective; on a CPU the host itself waits."""
    if work is not None:
        work.wait()
