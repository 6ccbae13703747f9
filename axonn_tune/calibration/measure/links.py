"""Time collectives over groups of ranks, one group alone or all groups of an axis at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from axonn_tune.calibration.measure.timing import Sampling, Timing, time_work
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.ranks.collectives import Collectives, wait
from axonn_tune.runtime.ranks.recorder import Recorder
from axonn_tune.spec.layout import grid_layout

# The groups of this axis of the mesh have the wanted stride and size.
AXIS = "y"
ELEMENT = torch.float32


@dataclass(frozen=True, order=True)
class Groups:
    """Groups of the ranks ``b + r + i * stride`` for i < size, as `LinkPoint` defines them."""

    stride: int
    size: int
    n_rings: int
    everywhere: bool

    def __str__(self) -> str:
        where = "everywhere" if self.everywhere else "in the first block"
        return f"{self.n_rings} of {self.stride} groups of {self.size} {where}"

    @property
    def is_whole(self) -> bool:
        """Whether all groups of an axis communicate."""
        return self.everywhere and self.n_rings == self.stride

    def mesh(self, device: torch.device) -> Mesh:
        """Return a mesh whose axis `AXIS` has these groups; all ranks call it."""
        n_blocks = dist.get_world_size() // (self.stride * self.size)
        return Mesh(grid_layout(self.stride, self.size, n_blocks, 1), device=device)

    def is_active(self, rank: int) -> bool:
        """Return whether a rank communicates."""
        is_first_block = rank < self.stride * self.size
        return rank % self.stride < self.n_rings and (self.everywhere or is_first_block)


def whole_bytes(nbytes: int, n_ranks: int) -> int:
    """Round bytes up to a full buffer that has whole elements for each rank."""
    unit = n_ranks * int(ELEMENT.itemsize)
    return max(-(-nbytes // unit), 1) * unit


def time_collective(
    kind: str, nbytes: int, groups: Groups, mesh: Mesh, sampling: Sampling
) -> Timing:
    """Time one collective; all ranks call it, and all get the time of the slowest.

    Parameters
    ----------
    nbytes : int
        Size of the full buffer, as `Collective` counts it; see `whole_bytes`. [bytes]
    mesh : Mesh
        ``groups.mesh(device)``.
    """
    work: Callable[[], object] = _nothing
    if groups.is_active(dist.get_rank()):
        work = _collective(kind, nbytes, mesh)
    return time_work(work, mesh.device, sampling, lambda seconds: slowest(seconds, mesh.device))


def slowest(seconds: float, device: torch.device) -> float:
    """Return the longest time of any rank."""
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value.item())


def pair_rate(
    pair: tuple[int, int], nbytes: int, device: torch.device, sampling: Sampling
) -> float:
    """Return the bytes per second from one rank to another and back; all ranks call it.

    Torch warns of NCCL's sends and receives that are not issued as a batch.
    """
    message = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    rank = dist.get_rank()

    def back_and_forth() -> None:
        for sender, receiver in (pair, pair[::-1]):
            if rank == sender:
                _transfer(dist.P2POp(dist.isend, message, receiver))
            elif rank == receiver:
                _transfer(dist.P2POp(dist.irecv, message, sender))

    work = back_and_forth if rank in pair else _nothing
    timing = time_work(work, device, sampling, lambda seconds: slowest(seconds, device))
    return 2.0 * nbytes / timing.seconds


def is_supported(kind: str, mesh: Mesh) -> bool:
    """Return whether the backend has a collective; all ranks call it."""
    try:
        _collective(kind, whole_bytes(1, mesh.size(AXIS)), mesh)()
    except (RuntimeError, NotImplementedError) as error:
        lacks = isinstance(error, NotImplementedError) or "support" in str(error).lower()
        if not lacks:
            raise
        return False
    return True


def _nothing() -> None:
    """Do nothing while others communicate."""


def _collective(kind: str, nbytes: int, mesh: Mesh) -> Callable[[], object]:
    n_ranks = mesh.size(AXIS)
    n_elements = nbytes // ELEMENT.itemsize
    full = torch.randn(n_elements, dtype=ELEMENT, device=mesh.device)
    group = mesh.group(AXIS)
    collectives = Collectives(mesh, Recorder(mesh.device, active=False))
    if kind == "all_reduce":
        full.zero_()  # sums of sums would overflow
        return lambda: wait(collectives.all_reduce(kind, full, AXIS))
    if kind == "all_to_all":
        received = torch.empty_like(full)
        return lambda: dist.all_to_all_single(received, full, group=group)
    if kind == "send_recv":
        return _ring_shift(full, mesh)
    shard = torch.randn(n_elements // n_ranks, dtype=ELEMENT, device=mesh.device)
    if kind == "all_gather":
        return lambda: wait(collectives.all_gather(kind, full, shard, AXIS))
    return lambda: wait(collectives.reduce_scatter(kind, shard, full, AXIS))


def _ring_shift(message: torch.Tensor, mesh: Mesh) -> Callable[[], object]:
    """Send to the next rank of the group and receive from the one before."""
    group = mesh.group(AXIS)
    index = mesh.coordinate(AXIS)
    n_ranks = mesh.size(AXIS)
    following = dist.get_global_rank(group, (index + 1) % n_ranks)
    before = dist.get_global_rank(group, (index + n_ranks - 1) % n_ranks)
    received = torch.empty_like(message)

    def shift() -> None:
        _transfer(
            dist.P2POp(dist.isend, message, following, group),
            dist.P2POp(dist.irecv, received, before, group),
        )

    return shift


def _transfer(*operations: dist.P2POp) -> None:
    for work in dist.batch_isend_irecv(list(operations)):
        work.wait()
