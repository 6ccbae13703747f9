"""Measure a cluster, on every rank of it."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

from axonn_tune.calibrate.findings import Findings
from axonn_tune.calibrate.ledger import Ledger, gathered, least
from axonn_tune.calibrate.measure.compute import (
    Kernels,
    Products,
    measure_attention,
    measure_kernels,
    measure_products,
)
from axonn_tune.calibrate.measure.network import (
    Links,
    measure_interference,
    measure_links,
    measure_units,
)
from axonn_tune.calibrate.measure.progress import Progress
from axonn_tune.calibrate.measure.timing import ranks_per_core
from axonn_tune.calibrate.measure.topology import (
    Station,
    check_units,
    level_names,
    ranks_per_node,
)
from axonn_tune.calibrate.plan import extent_of
from axonn_tune.calibrate.setting import Request, Setting
from axonn_tune.runtime.ranks.session import Place, idle_bytes, joined, pick_device
from axonn_tune.runtime.run import device_name, software
from axonn_tune.spec.points import AttentionPoint, MemoryPoint

# A node's number, as torchrun and Slurm tell it: several may share a host's name.
NODE_VARIABLES = ("SLURM_NODEID", "GROUP_RANK")


def measure(request: Request, place: Place) -> Findings | None:
    """Measure on this rank, together with all others; rank 0 returns what was found.

    Raises
    ------
    AxonnTuneError
        Bad input, a failure of any rank, or results that cannot be kept.
    """
    device = pick_device(request.device, place)
    with joined(place, device, request.timeout_seconds):
        setting = setting_of(request, place, device)
        found = measured(setting)
        setting.progress.finish()
        return found if place.rank == 0 else None


def setting_of(request: Request, place: Place, device: torch.device) -> Setting:
    """Meet the other ranks and learn where all of them stand."""
    extent = extent_of(request.is_quick, device.type == "cuda")
    own = Station(_host_name(), _node_name(), device_name(device))
    stations = tuple(gathered(own))
    n_per_node = ranks_per_node(stations)
    if request.units is not None:
        check_units(request.units, len(stations))
    n_on_host = sum(station.host == own.host for station in stations)
    sharing = ranks_per_core(device, n_on_host)
    progress = Progress(silent=request.quiet or place.rank != 0)
    owner = {
        "device": stations[0].device_name,
        "nodes": [station.node for station in stations],
        "quick": request.is_quick,
        "software": software(device),
    }
    return Setting(
        request=request,
        device=device,
        extent=extent,
        effort=extent.effort.on_shared_cores(sharing),
        is_shared=sharing > 1.0,
        stations=stations,
        n_per_node=n_per_node,
        memory_bytes=least(_memory_bytes(device, n_per_node), device),
        ledger=Ledger(request.journal, owner, request.resume, progress),
        progress=progress,
    )


def measured(setting: Setting) -> Findings:
    """Go through all parts that were asked for, with every other rank."""
    parts = setting.request.parts
    has_links = "links" in parts and setting.n_ranks > 1
    products = measure_products(setting) if "gemm" in parts else Products()
    attention = measure_attention(setting) if "gemm" in parts else []
    kernels = measure_kernels(setting) if "memory" in parts else Kernels()
    units = measure_units(setting) if has_links else []
    links = measure_links(setting, units) if has_links else Links()
    slowdowns = measure_interference(setting) if has_links else []
    return Findings(
        device_name=setting.stations[0].device_name,
        on_gpu=setting.device.type == "cuda",
        n_multiprocessors=_n_multiprocessors(setting.device),
        memory_bytes=setting.memory_bytes,
        idle_bytes=idle_bytes(setting.device),
        backend=dist.get_backend(),
        software=software(setting.device),
        n_ranks=setting.n_ranks,
        n_per_node=setting.n_per_node,
        hosts=tuple(station.node for station in setting.stations[:: setting.n_per_node]),
        units=tuple(units),
        level_names=tuple(level_names(units, setting.n_per_node)),
        gemm_points=products.points,
        attention_points=(
            *attention,
            *(p for p in kernels.points if isinstance(p, AttentionPoint)),
        ),
        memory_points=tuple(p for p in kernels.points if isinstance(p, MemoryPoint)),
        link_points=links.points,
        slowdowns=tuple(slowdowns),
        gap_seconds=kernels.gap_seconds,
        speeds=products.speeds,
        notes=products.notes + links.notes,
        seconds=setting.ledger.seconds,
    )


def _host_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _node_name() -> str:
    numbers = (os.environ[name] for name in NODE_VARIABLES if name in os.environ)
    return f"{_host_name()}:{next(numbers, 0)}"


def _memory_bytes(device: torch.device, n_per_node: int) -> float:
    """Of the GPU, or an equal part of the node's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / n_per_node


def _n_multiprocessors(device: torch.device) -> int:
    """Of a GPU; a CPU's rank counts as one."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 1
