"""Seconds of kernels that memory bandwidth limits."""

from __future__ import annotations

import numpy as np

from axonn_tune.cost.curve import measured_seconds
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array, Size


def achieved_memory_bandwidth(machine: Machine) -> float:
    """Bytes per second that a streaming kernel moves."""
    advertised = machine.gpu.memory_bandwidth_bytes_per_s.value
    return advertised * machine.kernels.memory_fraction.value


def memory_bound_seconds(nbytes: Size, machine: Machine, kernel: str, dtype: str) -> Array:
    """Time of a kernel that moves so many bytes; one without any is not launched.

    Where the profile has measured this kernel, that time; otherwise the achieved memory
    bandwidth and a launch. Points of the wanted dtype are preferred to those of another.

    Parameters
    ----------
    nbytes : array_like, shape (C,)
        Bytes read plus bytes written.
    """
    nbytes = np.asarray(nbytes, dtype=np.float64)
    of_kernel = [p for p in machine.kernels.memory_points if p.kernel == kernel]
    points = [p for p in of_kernel if p.dtype == dtype] or of_kernel
    if points:
        sizes, times = ([getattr(p, name) for p in points] for name in ("nbytes", "seconds"))
        seconds = measured_seconds(nbytes, sizes, times)
    else:
        launch = machine.kernels.launch_seconds.value
        seconds = nbytes / achieved_memory_bandwidth(machine) + launch
    launched: Array = seconds * (nbytes > 0)
    return launched


def moved_copy_seconds(nbytes: Size, machine: Machine, dtype: str) -> Array:
    """Time of a transposed copy of `nbytes`: read once, written once."""
    return memory_bound_seconds(2.0 * nbytes, machine, "copy", dtype)
