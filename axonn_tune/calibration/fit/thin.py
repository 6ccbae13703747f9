"""Leave out measured points about which the others tell nearly as much.

A profile that people read holds few points. The choice among products looks at their sizes alone,
so that the products left out can judge those that stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from axonn_tune.spec.plan import MODES
from axonn_tune.spec.points import GemmPoint, LinkPoint


def thinned_collectives(
    points: Sequence[LinkPoint], error_fraction: float
) -> tuple[LinkPoint, ...]:
    """Return points such that straight lines between them predict all others within an error.

    The first and the last size of each kind of collective and each choice of groups stay.
    """
    curves: dict[tuple[object, ...], list[LinkPoint]] = defaultdict(list)
    for p in points:
        curves[p.series].append(p)
    kept: list[LinkPoint] = []
    for curve in curves.values():
        curve.sort(key=lambda p: p.nbytes)
        first = 0
        for last in range(2, len(curve)):
            if not _is_met(curve[first : last + 1], error_fraction):
                kept.append(curve[first])
                first = last - 1
        kept += dict.fromkeys((curve[first], curve[-1]))
    return tuple(kept)


def _is_met(curve: Sequence[LinkPoint], error_fraction: float) -> bool:
    """Return whether the line from the first to the last point predicts those between."""
    nbytes, seconds = np.array([(p.nbytes, p.seconds) for p in curve]).T
    line = np.interp(nbytes, nbytes[[0, -1]], seconds[[0, -1]])
    return bool((np.abs(line / seconds - 1.0) <= error_fraction).all())


def spread_products(points: Sequence[GemmPoint], most: int) -> tuple[GemmPoint, ...]:
    """Return at most `most` products of each dtype that lie far from each other.

    Each product is the one whose sizes, in doublings, differ most from those chosen before; the
    smallest product comes first.
    """
    by_dtype: dict[str, list[GemmPoint]] = defaultdict(list)
    for point in points:
        by_dtype[point.dtype].append(point)
    return tuple(p for own in by_dtype.values() for p in _spread(own, most))


def _spread(points: Sequence[GemmPoint], most: int) -> list[GemmPoint]:
    places = np.array([[*np.log2([p.m, p.n, p.k]), MODES.index(p.mode)] for p in points])
    chosen = [int(places.sum(axis=1).argmin())]
    distance = np.full(len(points), np.inf)
    while len(chosen) < min(most, len(points)):
        distance = np.minimum(distance, np.linalg.norm(places - places[chosen[-1]], axis=1))
        chosen.append(int(distance.argmax()))
    return [points[index] for index in sorted(chosen)]
