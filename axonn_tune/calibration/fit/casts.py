"""Take the cast of an operand out of the times of products in low formats.

Libraries for serving time a layer whose input, the m x k operand, is in 16 bits, and cast it within
the time. A cast moves m k elements and is launched once. Its time is told from the product's by
fitting

    t = a m n k + b m k + c m n + d

to the products of one format, without negative terms and by relative least squares; b m k + d is
the cast's. A cast reads its tensor twice at most, once for the largest value, and writes it once:
b is not above the time of these bytes. What exceeds it is the product's own, which reads the
operand, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from axonn_tune.cost.memory_bound import achieved_memory_bandwidth
from axonn_tune.errors import InputError
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.points import GemmPoint
from axonn_tune.spec.precision import BYTES_PER_ELEMENT, FORMATS, operand_bytes

# A product that takes less than this share of its time with the cast is not told well from it.
LEAST_SHARE = 0.5
# The fit has four terms. It needs as many products, and four more that can contradict it.
LEAST_POINTS = 8


def without_casts(points: Sequence[GemmPoint], machine: Machine) -> tuple[GemmPoint, ...]:
    """Return products without the casts of their operands; those in wide formats have none.

    Products of which the cast takes the larger part are left out.

    Parameters
    ----------
    machine : Machine
        Machine that timed the products. Its memory bandwidth bounds the time of a cast.

    Raises
    ------
    InputError
        A format has too few products to tell.
    """
    memory_bytes_per_s = achieved_memory_bandwidth(machine)
    kept = [point for point in points if point.dtype not in FORMATS]
    for number_format in FORMATS:
        own = [point for point in points if point.dtype == number_format]
        if own:
            kept += _without_casts(own, number_format, memory_bytes_per_s)
    return tuple(kept)


def _without_casts(
    points: Sequence[GemmPoint], number_format: str, memory_bytes_per_s: float
) -> list[GemmPoint]:
    """Return the products of one format without their casts."""
    if len(points) < LEAST_POINTS:
        raise InputError(
            f"--without-casts: {len(points)} products in {number_format}; allowed: at least "
            f"{LEAST_POINTS}, to which the time of a cast can be fitted"
        )
    seconds = np.array([point.seconds for point in points])
    most_bytes = 2.0 * BYTES_PER_ELEMENT["bf16"] + operand_bytes(number_format)
    left = seconds - _cast_seconds(points, seconds, most_bytes / memory_bytes_per_s)
    return [
        replace(point, seconds=float(own_seconds))
        for point, own_seconds in zip(points, left, strict=True)
        if own_seconds > LEAST_SHARE * point.seconds
    ]


def _cast_seconds(
    points: Sequence[GemmPoint], seconds: npt.NDArray[np.float64], most_seconds: float
) -> npt.NDArray[np.float64]:
    """Return the fitted time of each product's cast, with a longest time of each element."""
    from scipy.optimize import lsq_linear

    m, n, k = np.array([[p.m, p.n, p.k] for p in points], dtype=np.float64).T
    terms = np.stack([m * n * k, m * k, m * n, np.ones(len(points))], axis=1) / seconds[:, None]
    largest = terms.max(axis=0)
    most = np.array([np.inf, most_seconds * largest[1], np.inf, np.inf])
    fit = lsq_linear(terms / largest, np.ones(len(points)), (0.0, most), method="bvls")
    coefficients = fit.x / largest
    return np.asarray(coefficients[1] * m * k + coefficients[3])
