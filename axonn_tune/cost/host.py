"""The time of what the host of a node does for offload: copies, and passes over its memory."""

from __future__ import annotations

import numpy as np

from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array, Size


def copy_seconds(nbytes: Size, machine: Machine, n_sharing: int) -> Array:
    """Return the time of a copy between GPU and host, in one direction.

    The link of each GPU bounds it, or the memory of the host, which `n_sharing` GPUs share.
    """
    host = machine.require_host()
    memory_share = host.memory_bandwidth_bytes_per_s.value / n_sharing
    bandwidth = min(host.link_bandwidth_bytes_per_s.value, memory_share)
    return np.asarray(nbytes, dtype=np.float64) / bandwidth


def update_seconds(nbytes: Size, machine: Machine, n_sharing: int) -> Array:
    """Return the time in which the cores read and write `nbytes` for each of `n_sharing` ranks."""
    host = machine.require_host()
    bandwidth = host.memory_bandwidth_bytes_per_s.value * host.update_fraction.value
    return np.asarray(nbytes, dtype=np.float64) * n_sharing / bandwidth
