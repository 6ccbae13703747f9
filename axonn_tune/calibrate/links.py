"""Time collectives over groups of ranks, one group alone or all groups of an axis at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from axonn_tune.calibrate.timing import Effort, Timing, time_work
from axonn_tune.runtime.collectives import Collectives, wait
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.recorder import Recorder
from axonn_tune.spec.grid import Grid

# The axis of the mesh whose groups have the wanted stride and size.
AXIS = "y"


@dataclass(frozen=True, order=True)
class Groups:
    """The groups of ranks ``b + r + i * stride`` for i < size.

    n_active: how many of the `stride` groups that interleave communicate, in each block of
    ``stride * size`` ranks; with `everywhere` in all blocks, else in the first only.
    """

    stride: int
    size: int
    n_active: int
    everywhere: bool

    def mesh(self, device: torch.device) -> Mesh:
        """A mesh whose `AXIS` these are; all ranks call it."""
        n_blocks = dist.get_world_size() // (self.stride * self.size)
        return Mesh(Grid(self.stride, self.size, n_blocks, 1), device=device)

    def is_active(self, rank: int) -> bool:
        """Whether a rank communicates."""
        is_first_block = rank < self.stride * self.size
        return rank % self.stride < self.n_active and (self.everywhere or is_first_block)


def time_collective(
    kind: str,
    nbytes: int,
    groups: Groups,
    mesh: Mesh,
    effort: Effort,
) -> Timing:
    """Time one collective; all ranks call it, and all get the time of the slowest.

    Parameters
    ----------
    nbytes : int
        The full buffer, as `Collective` counts it; rounded up to whole elements for each rank.
    mesh : Mesh
        ``groups.mesh(device)``.
    """
    device = mesh.device
    work: Callable[[], object] = _nothing
    if groups.is_active(dist.get_rank()):
        work = _collective(kind, nbytes, mesh)

    def slowest(seconds: float) -> float:
        value = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value.item())

    return time_work(work, device, effort, slowest)


def _nothing() -> None:
    """What a rank does while others communicate."""


def _collective(kind: str, nbytes: int, mesh: Mesh) -> Callable[[], object]:
    n_ranks = mesh.size(AXIS)
    element = torch.float32
    n_each = max(-(-nbytes // (n_ranks * element.itemsize)), 1)
    full = torch.randn(n_each * n_ranks, dtype=element, device=mesh.device)
    shard = torch.randn(n_each, dtype=element, device=mesh.device)
    group = mesh.group(AXIS)
    collectives = Collectives(mesh, Recorder(mesh.device, active=False))
    if kind == "all_gather":
        return lambda: wait(collectives.all_gather(kind, full, shard, AXIS))
    if kind == "reduce_scatter":
        return lambda: wait(collectives.reduce_scatter(kind, shard, full, AXIS))
    if kind == "all_reduce":
        full.zero_()  # sums of sums would overflow
        return lambda: wait(collectives.all_reduce(kind, full, AXIS))
    if kind == "all_to_all":
        received = torch.empty_like(full)
        return lambda: dist.all_to_all_single(received, full, group=group)
    return _ring_shift(full, mesh)


def _ring_shift(message: torch.Tensor, mesh: Mesh) -> Callable[[], object]:
    """Each rank of a group sends to the next and receives from the one before."""
    group, place, n_ranks = mesh.group(AXIS), mesh.coordinate(AXIS), mesh.size(AXIS)
    following, before = (
        dist.get_global_rank(group, (place + step) % n_ranks) for step in (1, n_ranks - 1)
    )
    received = torch.empty_like(message)

    def shift() -> None:
        operations = [
            dist.P2POp(dist.isend, message, following, group),
            dist.P2POp(dist.irecv, received, before, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return shift
