"""The process groups along the axes of a mesh, which time out as the group of all ranks does."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def device_mesh(device: torch.device, ranks: torch.Tensor, names: Sequence[str]) -> DeviceMesh:
    """Return a mesh of ranks with one process group for each axis.

    Torch by itself gives these groups the time-out of their backend, 10 or 30 minutes, whatever
    the time-out of the group of all ranks is.

    Parameters
    ----------
    ranks : Tensor
        The ranks' numbers, with one dimension for each axis.
    names : sequence of str
        The names of the axes.
    """
    more: dict[str, Any] = {}
    if "backend_override" in inspect.signature(DeviceMesh.__init__).parameters:
        of_proper_groups = None, group_options(device)
        more["backend_override"] = tuple(
            (None, None)
            if size == dist.get_world_size() and takes_group_of_all()
            else of_proper_groups
            for size in ranks.shape
        )
    return DeviceMesh(device.type, ranks, mesh_dim_names=tuple(names), **more)


def takes_group_of_all() -> bool:
    """Tell whether torch takes the group of all ranks for an axis that holds all of them.

    It does not for gloo where there is a GPU. To form a further group, a rank waits for all others,
    and so also for one that has failed.
    """
    return not (dist.get_backend() == dist.Backend.GLOO and torch.cuda.is_available())


def group_options(device: torch.device) -> Any:
    """Return the options of a new group, with the time-out of the group of all ranks.

    NCCL gets a stream of high priority: a collective that is issued beside a large product would
    otherwise begin when the product's last blocks have begun.
    """
    backend = dist.get_backend()
    if backend == dist.Backend.NCCL:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    elif backend == dist.Backend.GLOO:
        options = dist.ProcessGroupGloo._Options()
    else:
        return None
    options._timeout = timeout_of_all(device)
    return options


def timeout_of_all(device: torch.device) -> timedelta:
    """Return the time-out of the group of all ranks."""
    timeout: timedelta = dist.group.WORLD._get_backend(device).options._timeout
    return timeout
