"""What changed between two hardware profiles, and whether their spreads tell it from noise."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Any

from axonn_tune.spec.machine import Machine
from axonn_tune.spec.points import AttentionPoint, GemmPoint, LinkPoint, MemoryPoint
from axonn_tune.spec.provenance import quantities

# One of all comparisons may be called significant by chance with this probability (Bonferroni:
# no assumption on how they depend on each other, and a nightly job must not cry wolf).
FALSE_ALARM = 0.01
# Two calibrations of an unchanged machine differ by more than their samples do within each: the
# least change that is reported as one.
LEAST_CHANGE = 0.03
# A rank this much slower than the median rank, or than it was, is named.
SLOW_RANK = 0.05
# The standard error of a median over that of a mean, for a normal law: sqrt(pi / 2).
MEDIAN_ERROR = 1.2533
_LESS_IS_BETTER = (
    "_seconds",
    "slowdown_fraction",
    "jitter_fraction",
    "k_overhead",
    "reserved_bytes",
)


@dataclass(frozen=True)
class Change:
    """A number, or the times of a group of points, in two profiles.

    change_fraction: after over before, less one. z: change over its standard deviation, in
    logarithms; None where neither profile states a spread. is_worse: slower, or less of it.
    """

    name: str
    before: float
    after: float
    n_points: int
    z: float | None
    is_worse: bool
    is_significant: bool = False

    @property
    def change_fraction(self) -> float:
        """Relative change."""
        return self.after / self.before - 1.0


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slower than the others, or than before."""

    host: str
    rank: int
    before: float | None
    after: float


@dataclass(frozen=True)
class Difference:
    """All comparisons, the most significant first, and what else differs."""

    changes: tuple[Change, ...]
    only_in_one: tuple[str, ...]
    provenance: dict[str, tuple[str, str]]
    slow_ranks: tuple[SlowRank, ...]

    @property
    def significant(self) -> tuple[Change, ...]:
        """Changes that are neither noise nor small."""
        return tuple(change for change in self.changes if change.is_significant)


def difference(before: Machine, after: Machine, least_change: float = LEAST_CHANGE) -> Difference:
    """Compare every number and every group of measured points."""
    changes = [*_of_quantities(before, after), *_of_points(before, after)]
    n_tests = sum(change.z is not None for change in changes)
    limit = NormalDist().inv_cdf(1.0 - FALSE_ALARM / 2.0 / max(n_tests, 1))
    judged = [_judged(change, limit, least_change) for change in changes]
    judged.sort(key=lambda c: (not c.is_significant, -abs(c.z or 0.0), c.name))
    names = [set(_named(machine)) for machine in (before, after)]
    return Difference(
        tuple(judged),
        tuple(sorted(names[0] ^ names[1])),
        _provenance(before, after),
        _slow_ranks(before, after),
    )


def _judged(change: Change, limit: float, least_change: float) -> Change:
    if change.z is None:
        return change
    large = abs(math.log(change.after / change.before)) >= math.log1p(least_change)
    significant = large and abs(change.z) > limit
    return Change(
        change.name,
        change.before,
        change.after,
        change.n_points,
        change.z,
        change.is_worse,
        significant,
    )


def _named(machine: Machine) -> dict[str, Any]:
    return dict(quantities(machine))


def _of_quantities(before: Machine, after: Machine) -> Iterator[Change]:
    ours, theirs = _named(before), _named(after)
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if a.value <= 0 or b.value <= 0:
            continue
        spread = math.hypot(a.spread_fraction, b.spread_fraction)
        z = math.log(b.value / a.value) / spread if spread else None
        less_is_better = name.endswith(_LESS_IS_BETTER)
        is_worse = (b.value > a.value) == less_is_better and a.value != b.value
        yield Change(name, a.value, b.value, 0, z, is_worse)


def _of_points(before: Machine, after: Machine) -> Iterator[Change]:
    """Groups of points, matched one by one: the median ratio of their times."""
    known = {_key(p): p for p in _points(before)}
    groups: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for point in _points(after):
        if _key(point) in known:
            groups[_group(point)].append((known[_key(point)], point))
    for name, pairs in groups.items():
        logs = [math.log(b.seconds / a.seconds) for a, b in pairs]
        middle = median(logs)
        spreads = [math.hypot(a.spread_fraction, b.spread_fraction) for a, b in pairs]
        scatter = 1.4826 * median(abs(log - middle) for log in logs)
        error = MEDIAN_ERROR * max(scatter, median(spreads)) / math.sqrt(len(pairs))
        total = sum(a.seconds for a, _ in pairs)
        after_seconds = total * math.exp(middle)
        z = middle / error if error else (None if middle else 0.0)
        yield Change(name, total, after_seconds, len(pairs), z, middle > 0)


def _points(machine: Machine) -> Iterator[Any]:
    yield from machine.gemm.points
    yield from machine.kernels.attention_points
    yield from machine.kernels.memory_points
    yield from machine.link_points


def _key(point: Any) -> tuple[Any, ...]:
    fields = vars(point).items()
    values = (value for name, value in fields if name not in ("seconds", "spread_fraction"))
    return (type(point).__name__, *values)


def _group(point: GemmPoint | AttentionPoint | MemoryPoint | LinkPoint) -> str:
    if isinstance(point, GemmPoint):
        return f"products {point.mode} {point.dtype}"
    if isinstance(point, AttentionPoint):
        kind = "flash" if point.fused else "unfused"
        return f"{kind} attention {'backward' if point.backward else 'forward'} {point.dtype}"
    if isinstance(point, MemoryPoint):
        return f"kernel {point.kernel} {point.dtype}"
    part = "" if point.is_of_whole_axis else f", {point.n_rings} of {point.stride} at once"
    return f"{point.kind} over groups of {point.size}, stride {point.stride}{part}"


def _provenance(before: Machine, after: Machine) -> dict[str, tuple[str, str]]:
    ours, theirs = (_facts(machine) for machine in (before, after))
    return {
        name: (ours.get(name, "-"), theirs.get(name, "-"))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    }


def _facts(machine: Machine) -> dict[str, str]:
    facts = {"GPU": machine.gpu.name, "ranks per node": str(machine.ranks_per_node)}
    calibration = machine.calibration
    if calibration is None:
        return facts
    return {
        **facts,
        "backend": calibration.backend,
        "hosts": ", ".join(calibration.hosts),
        "ranks": str(calibration.n_ranks),
        **calibration.software,
        **calibration.environment,
    }


def _slow_ranks(before: Machine, after: Machine) -> tuple[SlowRank, ...]:
    if after.calibration is None:
        return ()
    earlier = {}
    if before.calibration is not None:
        earlier = {(s.host, s.rank): s.speed_fraction for s in before.calibration.speeds}
    slow = []
    for speed in after.calibration.speeds:
        was = earlier.get((speed.host, speed.rank))
        if speed.speed_fraction < (1.0 if was is None else min(was, 1.0)) * (1.0 - SLOW_RANK):
            slow.append(SlowRank(speed.host, speed.rank, was, speed.speed_fraction))
    return tuple(slow)
