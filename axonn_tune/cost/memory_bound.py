"""The time of kernels that memory bandwidth limits."""

from __future__ import annotations

import numpy as np

from axonn_tune.cost.curve import Curve
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.plan import Array, Size


def achieved_memory_bandwidth(machine: Machine) -> float:
    """Return the bytes per second that a streaming kernel moves."""
    advertised = machine.gpu.memory_bandwidth_bytes_per_s.value
    return advertised * machine.kernels.memory_fraction.value


def memory_bound_seconds(nbytes: Size, machine: Machine, kernel: str, dtype: str) -> Array:
    """Return the time of a kernel that moves `nbytes`; without any bytes it is not launched.

    Where the profile has measured this kernel, the time lies between the measured times;
    otherwise it follows from the achieved memory bandwidth and a launch. Points of the wanted
    dtype are preferred to points of another.

    Parameters
    ----------
    nbytes : array_like, shape (C,)
        Bytes read plus bytes written.
    """
    nbytes = np.asarray(nbytes, dtype=np.float64)
    kernel_points = [p for p in machine.kernels.memory_points if p.kernel == kernel]
    points = [p for p in kernel_points if p.dtype == dtype] or kernel_points
    if points:
        seconds = Curve.through([p.nbytes for p in points], [p.seconds for p in points]).at(nbytes)
    else:
        launch = machine.kernels.launch_seconds.value
        seconds = nbytes / achieved_memory_bandwidth(machine) + launch
    return seconds * (nbytes > 0)


def strided_excess_seconds(nbytes: Size, machine: Machine, clock_fraction: float) -> Array | float:
    """Return the extra time of kernels that handle one element at a time, over streaming ones.

    Instructions and not bytes bound them, so that their rate is proportional to the GPU's clock.

    Parameters
    ----------
    nbytes : array_like, shape (C,)
        Bytes that they move.
    clock_fraction
        Ratio of the GPU's clock to the clock at which they were measured.
    """
    rate = machine.kernels.strided_bytes_per_s
    if rate is None:
        return 0.0
    rate_in_training = rate.value * clock_fraction
    excess_per_byte = 1.0 / rate_in_training - 1.0 / achieved_memory_bandwidth(machine)
    return np.asarray(nbytes) * max(excess_per_byte, 0.0)


def moved_copy_seconds(nbytes: Size, machine: Machine, dtype: str) -> Array:
    """Return the time of a transposed copy of `nbytes`, which reads and writes them once."""
    return memory_bound_seconds(2.0 * nbytes, machine, "copy", dtype)
