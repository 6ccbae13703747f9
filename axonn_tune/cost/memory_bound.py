"""Seconds of kernels that memory bandwidth limits."""

from __future__ import annotations

import numpy as np

from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array, Size


def achieved_memory_bandwidth(machine: Machine) -> float:
    """Bytes per second that a streaming kernel moves."""
    advertised = machine.gpu.memory_bandwidth_bytes_per_s.value
    return advertised * machine.kernels.memory_fraction.value


def memory_bound_seconds(nbytes: Size, n_kernels: int, machine: Machine) -> Array:
    """Time to move bytes at the achieved memory bandwidth, plus a launch for each kernel.

    Parameters
    ----------
    nbytes : array_like, shape (C,)
        Bytes read plus bytes written; a kernel without any is not launched.
    """
    nbytes = np.asarray(nbytes)
    launches = n_kernels * machine.kernels.launch_seconds.value
    seconds: Array = nbytes / achieved_memory_bandwidth(machine) + launches * (nbytes > 0)
    return seconds


def moved_copy_seconds(nbytes: Size, machine: Machine) -> Array:
    """Time of a transposed copy of `nbytes`: read once, written once."""
    return memory_bound_seconds(2.0 * nbytes, 1, machine)
