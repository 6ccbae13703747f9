"""The steps of rings and trees, from collectives that were timed over several numbers of ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TypeAlias

import numpy as np

from axonn_tune.calibration.fit.robust import robust_spread_fraction
from axonn_tune.cost.curve import Curve
from axonn_tune.spec.points import ANY_KIND, LinkPoint, StepPoint
from axonn_tune.units import rounded

# Kinds that always run on a ring; an all-reduce may run on a tree.
GATHERS = ("all_gather", "reduce_scatter")
# Steps of two kinds count as equal up to this factor, and are then taken together.
SAME_KIND_FACTOR = 1.1
# Steps of two sizes of rings are of two regimes if they differ by more than this factor.
SAME_REGIME_FACTOR = 1.4
# An all-reduce on a ring is a scatter and a gather. One that takes less than this fraction of
# their time did not run on a ring.
LEAST_RING_FRACTION = 0.9

# Seconds of the steps of single collectives, by number of ranks and by bytes of the step.
StepsBySize: TypeAlias = Mapping[int, Mapping[float, Sequence[float]]]


def fitted_ring_steps(points: Sequence[LinkPoint]) -> tuple[StepPoint, ...]:
    """Return the steps of single rings over consecutive ranks.

    It takes rings of at least two sizes to tell a step from a latency; without them there are none.

    Parameters
    ----------
    points : sequence of LinkPoint
        Collectives that cross one level and none beyond it.
    """
    of_kind = {kind: _ring_steps(points, [kind]) for kind in GATHERS}
    if _agree(*of_kind.values()):
        of_kind = {ANY_KIND: _ring_steps(points, GATHERS)}
    gathers = [point for kind, steps in of_kind.items() for point in _in_regimes(kind, steps)]
    rings = [p for p in points if p.kind == "all_reduce" and not _is_on_tree(p, gathers)]
    reduces = _in_regimes("all_reduce", _ring_steps(rings, ["all_reduce"]))
    return (*gathers, *reduces)


def fitted_tree_steps(
    points: Sequence[LinkPoint], ring_steps: Sequence[StepPoint], unit_ranks: int
) -> tuple[StepPoint, ...]:
    """Return the steps of the all-reduces that were faster than any ring.

    Steps between two units are apart from those of more, since there a tree sends each byte once,
    and not twice (`tree_passes`). If no more than two units were measured, the steps tell what
    their chain and one hop take, and the law adds further hops (`cost.links.SteppedTrees`).

    Parameters
    ----------
    points : sequence of LinkPoint
        Collectives that cross one level and none beyond it.
    unit_ranks : int
        Number of ranks in a unit of the level; a tree joins units.
    """
    gathers = [point for point in ring_steps if point.kind != "all_reduce"]
    regimes: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for p in points:
        if p.kind == "all_reduce" and p.stride == 1 and _is_on_tree(p, gathers):
            n_levels = math.log2(p.size / unit_ranks)
            above_ranks = 2 * unit_ranks if p.size > 2 * unit_ranks else 0
            regimes[above_ranks][float(p.nbytes)].append(p.seconds / (2.0 * n_levels))
    return tuple(
        point
        for above in sorted(regimes)
        for point in _points("all_reduce", above, [regimes[above]])
    )


def fitted_hop_steps(points: Sequence[LinkPoint]) -> tuple[StepPoint, ...]:
    """Return what each further rank adds to a ring over consecutive ranks.

    It is the difference of the largest and the smallest rings with the same chunk, in which all
    that a collective does but once drops out. Without rings of two sizes there is none.

    Parameters
    ----------
    points : sequence of LinkPoint
        Collectives whose hops are all of one level.
    """
    return tuple(
        point
        for kind in GATHERS
        for point in _points(kind, 0, [_hop_steps(_ring_steps(points, [kind]))])
    )


def _hop_steps(by_size: StepsBySize) -> Mapping[float, Sequence[float]]:
    """Return the time that each rank adds to the smallest of rings, by bytes of the chunk."""
    few, many = min(by_size, default=0), max(by_size, default=0)
    if few == many:
        return {}
    of_few = {chunk: (few - 1) * median(steps) for chunk, steps in by_size[few].items()}
    smallest = Curve.through(list(of_few), list(of_few.values()))
    added = {
        chunk: [
            ((many - 1) * step - float(smallest.at(chunk))) / (many - few)
            for step in by_size[many][chunk]
        ]
        for chunk in by_size[many]
        if min(of_few) <= chunk <= max(of_few)
    }
    return {chunk: seconds for chunk, seconds in added.items() if median(seconds) > 0.0}


def _ring_steps(points: Iterable[LinkPoint], kinds: Sequence[str]) -> StepsBySize:
    """Return the steps of rings, sorted by number of ranks."""
    steps: dict[int, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for p in sorted(points, key=lambda p: (p.size, p.nbytes)):
        if p.kind in kinds and p.stride == 1:
            n_steps = (p.size - 1) * (2 if p.kind == "all_reduce" else 1)
            steps[p.size][p.nbytes / p.size].append(p.seconds / n_steps)
    return steps


def _is_on_tree(all_reduce: LinkPoint, gathers: Sequence[StepPoint]) -> bool:
    """Return whether an all-reduce was faster than a scatter and a gather can be."""
    regimes = [p.above_ranks for p in gathers if p.above_ranks < all_reduce.size]
    steps = [p for p in gathers if regimes and p.above_ranks == max(regimes)]
    if not steps:
        return False
    chunk = all_reduce.nbytes / all_reduce.size
    step = Curve.through([p.nbytes for p in steps], [p.seconds for p in steps]).at(chunk)
    return all_reduce.seconds < LEAST_RING_FRACTION * 2 * (all_reduce.size - 1) * float(step)


def _agree(first: StepsBySize, second: StepsBySize) -> bool:
    """Return whether steps of two kinds take equally long, over the same ranks and bytes."""
    ratios = [
        median(second[size][nbytes]) / median(first[size][nbytes])
        for size in first.keys() & second.keys()
        for nbytes in first[size].keys() & second[size].keys()
    ]
    return bool(ratios) and abs(math.log(median(ratios))) < math.log(SAME_KIND_FACTOR)


def _in_regimes(kind: str, by_size: StepsBySize) -> list[StepPoint]:
    """Return the steps of one kind; where they jump as rings grow, a new regime begins."""
    if len(by_size) < 2:
        return []
    regimes: dict[int, list[Mapping[float, Sequence[float]]]] = {}
    newest = before = 0
    known: dict[float, float] = {}
    for size, seconds_of in by_size.items():
        steps = {nbytes: median(seconds) for nbytes, seconds in seconds_of.items()}
        if known and _departure(known, steps) > math.log(SAME_REGIME_FACTOR):
            newest = before
            known = {}
        regimes.setdefault(newest, []).append(seconds_of)
        known |= steps
        before = size
    return [point for above, steps in regimes.items() for point in _points(kind, above, steps)]


def _departure(known: Mapping[float, float], steps: Mapping[float, float]) -> float:
    """Return the median logarithm of steps over the known steps of smaller rings.

    A chunk that is smaller than all known ones departs only where its step takes longer than that
    of the smallest known one. Larger ones are not compared.
    """
    chunks = np.array([chunk for chunk in steps if chunk <= max(known)])
    if not chunks.size:
        return 0.0
    found = np.array([steps[chunk] for chunk in chunks])
    logs = np.log(found / Curve.through(list(known), list(known.values())).at(chunks))
    return float(np.median(np.where(chunks < min(known), logs, np.abs(logs))))


def _points(
    kind: str, above_ranks: int, steps: Iterable[Mapping[float, Sequence[float]]]
) -> tuple[StepPoint, ...]:
    """Return one point for each number of bytes, with the median of its steps."""
    seconds_of: dict[float, list[float]] = defaultdict(list)
    for by_bytes in steps:
        for nbytes, seconds in by_bytes.items():
            seconds_of[nbytes] += seconds
    return tuple(
        StepPoint(
            kind,
            above_ranks,
            nbytes,
            rounded(median(seconds), 4),
            rounded(robust_spread_fraction(seconds), 3) if len(seconds) > 1 else 0.0,
        )
        for nbytes, seconds in sorted(seconds_of.items())
    )
