"""Measure a cluster, on every rank of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist

from axonn_tune.calibration.measure.compute import (
    TimedKernels,
    TimedProducts,
    measure_attention,
    measure_kernels,
    measure_products,
)
from axonn_tune.calibration.measure.network import (
    TimedCollectives,
    measure_collectives,
    measure_slowdowns,
    measure_units,
)
from axonn_tune.calibration.measure.progress_bar import ProgressBar
from axonn_tune.calibration.measure.timing import ranks_per_core
from axonn_tune.calibration.measure.together import Ledger, MeasuringRanks, gathered, least
from axonn_tune.calibration.measure.topology import (
    RankLocation,
    check_units,
    level_names,
    ranks_per_node,
)
from axonn_tune.calibration.measured_cluster import MeasuredCluster
from axonn_tune.calibration.request import Request
from axonn_tune.runtime.axonn.mesh import Mesh
from axonn_tune.runtime.ranks.memory import idle_bytes
from axonn_tune.runtime.ranks.place import Place
from axonn_tune.runtime.ranks.session import joined, pick_device
from axonn_tune.runtime.run import device_name, software
from axonn_tune.spec.layout import AXES, Layout, grid_layout
from axonn_tune.spec.points import AttentionPoint, MemoryPoint

# torchrun and Slurm state the number of a node in these: several nodes may share a host's name.
NODE_VARIABLES = ("SLURM_NODEID", "GROUP_RANK")


def measure_cluster(request: Request, place: Place) -> MeasuredCluster | None:
    """Measure on this rank, together with all others; rank 0 returns the results.

    Raises
    ------
    AxonnTuneError
        Bad input, a failure of any rank, or results that cannot be kept.
    """
    device = pick_device(request.device, place)
    with joined(place, device, request.timeout_seconds) as alive:
        ranks = meet(request, place, device, alive)
        measured = measure_parts(ranks)
        ranks.progress.finish()
        return measured if place.rank == 0 else None


def meet(
    request: Request,
    place: Place,
    device: torch.device,
    alive: Callable[[], None] = lambda: None,
) -> MeasuringRanks:
    """Exchange with the other ranks where each of them runs; `alive` follows each result."""
    own_location = RankLocation(_host_name(), _node_name(), device_name(device))
    locations = tuple(gathered(own_location))
    n_per_node = ranks_per_node(locations)
    if request.units is not None:
        check_units(request.units, len(locations))
    n_on_host = sum(location.host == own_location.host for location in locations)
    sharing = ranks_per_core(device, n_on_host)
    progress = ProgressBar(silent=request.quiet or place.rank != 0)
    owner = {
        "device": locations[0].device_name,
        "nodes": [location.node for location in locations],
        "quick": request.extent.is_quick,
        "software": software(device),
    }
    return MeasuringRanks(
        request=request,
        device=device,
        sampling=request.extent.sampling.on_shared_cores(sharing),
        share_cores=sharing > 1.0,
        locations=locations,
        n_per_node=n_per_node,
        memory_bytes=least(_memory_bytes(device, n_per_node), device),
        ledger=Ledger(request.store, owner, request.resume, progress, alive),
        progress=progress,
    )


def measure_parts(ranks: MeasuringRanks) -> MeasuredCluster:
    """Measure all parts that were asked for, together with every other rank."""
    parts = ranks.request.parts
    has_links = "links" in parts and ranks.n_ranks > 1
    products = measure_products(ranks) if "gemm" in parts else TimedProducts()
    attention = measure_attention(ranks) if "gemm" in parts else []
    kernels = measure_kernels(ranks) if "memory" in parts else TimedKernels()
    units = measure_units(ranks) if has_links else []
    collectives = measure_collectives(ranks, units) if has_links else TimedCollectives()
    slowdowns = measure_slowdowns(ranks) if has_links else []
    attention += [point for point in kernels.points if isinstance(point, AttentionPoint)]
    return MeasuredCluster(
        device_name=ranks.locations[0].device_name,
        n_multiprocessors=_n_multiprocessors(ranks.device),
        memory_bytes=ranks.memory_bytes,
        idle_bytes=_idle_bytes(ranks),
        backend=dist.get_backend(),
        software=software(ranks.device),
        n_ranks=ranks.n_ranks,
        n_per_node=ranks.n_per_node,
        hosts=tuple(location.node for location in ranks.locations[:: ranks.n_per_node]),
        units=tuple(units),
        level_names=tuple(level_names(units, ranks.n_per_node)),
        gemm_points=products.points,
        attention_points=tuple(attention),
        memory_points=tuple(p for p in kernels.points if isinstance(p, MemoryPoint)),
        link_points=collectives.points,
        slowdowns=tuple(slowdowns),
        gap_seconds=kernels.gap_seconds,
        speeds=products.speeds,
        notes=products.notes + collectives.notes,
        seconds=ranks.ledger.seconds,
    )


def _idle_bytes(ranks: MeasuringRanks) -> float:
    """Return the memory that training cannot use, while as many axes communicate as can at once.

    Each communicator of NCCL takes some hundred MB of a GPU.
    """
    if ranks.device.type != "cuda":
        return idle_bytes(ranks.device)
    mesh = Mesh(most_axes(ranks.n_ranks), device=ranks.device)
    for axis in AXES:
        if mesh.size(axis) > 1:
            dist.all_reduce(torch.zeros(1, device=ranks.device), group=mesh.group(axis))
    idle = -least(-idle_bytes(ranks.device), ranks.device)
    mesh.close()
    return idle


def most_axes(n_ranks: int) -> Layout:
    """Return a grid of all ranks that has as many axes with several ranks as can be.

    >>> from axonn_tune.calibration.measure.run import most_axes
    >>> [str(most_axes(n)) for n in (1, 6, 7, 8, 64)]
    ['1x1x1x1', '2x3x1x1', '7x1x1x1', '2x2x2x1', '2x2x2x8']
    """
    left = n_ranks
    sizes = []
    for _ in range(3):
        sizes.append(next((n for n in range(2, left + 1) if left % n == 0), 1))
        left //= sizes[-1]
    x, y, z = sizes
    return grid_layout(x, y, z, left)


def _host_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _node_name() -> str:
    numbers = (os.environ[name] for name in NODE_VARIABLES if name in os.environ)
    return f"{_host_name()}:{next(numbers, 0)}"


def _memory_bytes(device: torch.device, n_per_node: int) -> float:
    """Return the memory of the GPU, or an equal part of the node's memory."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / n_per_node


def _n_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; a rank on a CPU counts as one."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 1
