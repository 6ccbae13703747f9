"""Find what changed between two hardware profiles, and tell it from noise by their spreads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist, median
from typing import Any

from axonn_tune.spec.machine import Machine
from axonn_tune.spec.normal import NORMAL_FROM_MEDIAN
from axonn_tune.spec.points import (
    AttentionPoint,
    GemmPoint,
    LinkPoint,
    MemoryPoint,
    StepPoint,
)
from axonn_tune.spec.provenance import quantities

# This is the probability that any of all comparisons is called significant by chance. Bonferroni's
# correction does not assume how they depend on each other; a nightly job must not cry wolf.
FALSE_ALARM = 0.01
# Smaller changes are not reported, because two calibrations of an unchanged machine differ by
# more than the samples within each of them.
LEAST_CHANGE = 0.03
# A rank is named if it is slower by this share than the median rank, or than it was.
SLOW_RANK = 0.05
# Ratio of the standard error of a median to that of a mean, for a normal law: sqrt(pi / 2).
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

    Parameters
    ----------
    n_points : int
        Number of points in the group; 0 for a number.
    z : float or None
        The logarithm of the change over its standard deviation; None where neither profile
        states a spread.
    is_worse : bool
        Whether the machine became slower, or has less.
    is_significant : bool
        Whether the change is neither noise nor small.
    """

    name: str
    before: float
    after: float
    n_points: int
    z: float | None
    is_worse: bool
    is_significant: bool = False

    @property
    def change_fraction(self) -> float | None:
        """The later value over the earlier one, minus one; None if only the earlier one is zero."""
        if self.after == self.before:
            return 0.0
        return self.after / self.before - 1.0 if self.before else None

    @property
    def is_restated(self) -> bool:
        """Whether a number differs that states no spread, so that somebody wrote another one."""
        return self.z is None and self.after != self.before


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slower than the others, or slower than before."""

    host: str
    rank: int
    before: float | None
    after: float


@dataclass(frozen=True)
class Difference:
    """Holds all comparisons, those that differ first, and what else differs.

    Parameters
    ----------
    only_in_one : tuple of str
        Names of the numbers, and of the steps of collectives, that only one profile has.
    provenance : dict
        Facts that differ, such as a driver's version: name to values before and after.
    """

    changes: tuple[Change, ...]
    only_in_one: tuple[str, ...]
    provenance: dict[str, tuple[str, str]]
    slow_ranks: tuple[SlowRank, ...]

    @property
    def significant(self) -> tuple[Change, ...]:
        """The changes that are neither noise nor small."""
        return tuple(change for change in self.changes if change.is_significant)

    @property
    def restated(self) -> tuple[Change, ...]:
        """The numbers without a spread that differ."""
        return tuple(change for change in self.changes if change.is_restated)


def difference(before: Machine, after: Machine, least_change: float = LEAST_CHANGE) -> Difference:
    """Compare every number and every group of measured points."""
    changes = [*_quantity_changes(before, after), *_point_changes(before, after)]
    n_tests = sum(change.z is not None for change in changes)
    limit = NormalDist().inv_cdf(1.0 - FALSE_ALARM / 2.0 / max(n_tests, 1))
    judged = [_judged(change, limit, least_change) for change in changes]
    judged.sort(key=_importance)
    return Difference(
        tuple(judged),
        tuple(sorted(_names(before) ^ _names(after))),
        _provenance(before, after),
        _slow_ranks(before, after),
    )


def _importance(change: Change) -> tuple[bool, bool, float, str]:
    """Return a key that puts significant changes first, and then numbers that were restated."""
    return not change.is_significant, not change.is_restated, -abs(change.z or 0.0), change.name


def _judged(change: Change, limit: float, least_change: float) -> Change:
    if change.z is None:
        return change
    is_large = abs(math.log(change.after / change.before)) >= math.log1p(least_change)
    return replace(change, is_significant=is_large and abs(change.z) > limit)


def _names(machine: Machine) -> set[str]:
    """Return the names of all numbers, and of the steps of collectives."""
    return {*dict(quantities(machine)), *(name for name, _ in _steps(machine))}


def _quantity_changes(before: Machine, after: Machine) -> Iterator[Change]:
    quantities_before = dict(quantities(before))
    quantities_after = dict(quantities(after))
    for name in quantities_before.keys() & quantities_after.keys():
        a = quantities_before[name]
        b = quantities_after[name]
        spread = math.hypot(a.spread_fraction, b.spread_fraction)
        has_ratio = a.value > 0 and b.value > 0
        z = math.log(b.value / a.value) / spread if spread and has_ratio else None
        less_is_better = name.endswith(_LESS_IS_BETTER)
        is_worse = (b.value > a.value) == less_is_better and a.value != b.value
        yield Change(name, a.value, b.value, 0, z, is_worse)


def _point_changes(before: Machine, after: Machine) -> Iterator[Change]:
    """Match points one by one and take the median ratio of the times of each group of points."""
    points_before = {_key(name, point): point for name, point in _points(before)}
    groups: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for name, point in _points(after):
        if _key(name, point) in points_before:
            groups[name].append((points_before[_key(name, point)], point))
    for name, pairs in groups.items():
        logs = [math.log(b.seconds / a.seconds) for a, b in pairs]
        middle = median(logs)
        spreads = [math.hypot(a.spread_fraction, b.spread_fraction) for a, b in pairs]
        scatter = NORMAL_FROM_MEDIAN * median(abs(log - middle) for log in logs)
        error = MEDIAN_ERROR * max(scatter, median(spreads)) / math.sqrt(len(pairs))
        seconds_before = sum(a.seconds for a, _ in pairs)
        seconds_after = seconds_before * math.exp(middle)
        z = middle / error if error else (None if middle else 0.0)
        yield Change(name, seconds_before, seconds_after, len(pairs), z, middle > 0)


def _points(machine: Machine) -> Iterator[tuple[str, Any]]:
    """Yield the points of a profile, each with the name of its group."""
    points: tuple[GemmPoint | AttentionPoint | MemoryPoint | LinkPoint, ...] = (
        *machine.gemm.points,
        *machine.kernels.attention_points,
        *machine.kernels.memory_points,
        *machine.link_points,
    )
    yield from ((_group(point), point) for point in points)
    yield from _steps(machine)


def _steps(machine: Machine) -> Iterator[tuple[str, StepPoint]]:
    """Yield the steps of collectives with their name, which steps of other sizes share."""
    for link in machine.links:
        for name, steps in link.measured_steps.items():
            for point in steps.points:
                yield f"links.{link.name}.{name}{_conditions(point)}", point


def _conditions(step: StepPoint) -> str:
    """Return for which collectives a step holds, as text that follows its name."""
    kind = f" of {step.kind}" if step.kind else ""
    ranks = f" over more than {step.above_ranks} ranks" if step.above_ranks else ""
    rings = f", {step.n_rings} at once" if step.n_rings > 1 else ""
    return f"{kind}{ranks}{rings}"


def _key(group: str, point: Any) -> tuple[Any, ...]:
    """Return what was measured, without its time."""
    fields = vars(point).items()
    values = (value for name, value in fields if name not in ("seconds", "spread_fraction"))
    return (group, *values)


def _group(point: GemmPoint | AttentionPoint | MemoryPoint | LinkPoint) -> str:
    if isinstance(point, GemmPoint):
        return f"products {point.mode} {point.dtype}"
    if isinstance(point, AttentionPoint):
        kind = "flash" if point.fused else "unfused"
        if point.window:
            kind = f"windowed {kind}"
        return f"{kind} attention {'backward' if point.backward else 'forward'} {point.dtype}"
    if isinstance(point, MemoryPoint):
        return f"kernel {point.kernel} {point.dtype}"
    part = "" if point.is_of_whole_axis else f", {point.n_rings} of {point.stride} at once"
    return f"{point.kind} over groups of {point.size}, stride {point.stride}{part}"


def _provenance(before: Machine, after: Machine) -> dict[str, tuple[str, str]]:
    facts_before = _facts(before)
    facts_after = _facts(after)
    return {
        name: (facts_before.get(name, "-"), facts_after.get(name, "-"))
        for name in sorted(facts_before.keys() | facts_after.keys())
        if facts_before.get(name) != facts_after.get(name)
    }


def _facts(machine: Machine) -> dict[str, str]:
    facts = {
        "GPU": machine.gpu.name,
        "multiprocessors": str(machine.gpu.n_multiprocessors),
        "ranks per node": str(machine.ranks_per_node),
        "link levels": ", ".join(f"{level.name} of {level.unit_ranks}" for level in machine.links),
    }
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
    speeds_before = {}
    if before.calibration is not None:
        speeds_before = {(s.host, s.rank): s.speed_fraction for s in before.calibration.speeds}
    slow = []
    for speed in after.calibration.speeds:
        speed_before = speeds_before.get((speed.host, speed.rank))
        normal = 1.0 if speed_before is None else min(speed_before, 1.0)
        if speed.speed_fraction < normal * (1.0 - SLOW_RANK):
            slow.append(SlowRank(speed.host, speed.rank, speed_before, speed.speed_fraction))
    return tuple(slow)
