"""The resources on which a machine's speed rests, each of which can be improved alone.

A what-if study asks how much faster a step would be if a machine had more of one resource.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from axonn_tune.spec.links import LinkLevel
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.points import (
    AttentionPoint,
    GemmPoint,
    GroupedGemmPoint,
    LinkPoint,
    MemoryPoint,
    StepPoint,
)
from axonn_tune.spec.quantity import Quantity

AnyPoint = TypeVar("AnyPoint", GemmPoint, GroupedGemmPoint, AttentionPoint, MemoryPoint, LinkPoint)
TimedMessage = TypeVar("TimedMessage", LinkPoint, StepPoint)


@dataclass(frozen=True)
class Resource:
    """One resource of a machine, or one nuisance, which is better the smaller it is.

    name
        Name in a report.
    key
        Name under which users set it.
    field
        Field of the profile, with the unit's suffix.
    improved
        Function from a factor to the machine that has that many times as much of the resource; a
        nuisance is divided by the factor.
    quantity
        Number of the profile that says how much there is, and how that is known.
    is_nuisance
        Whether less of it is better.
    """

    name: str
    key: str
    field: str
    improved: Callable[[float], Machine]
    quantity: Quantity
    is_nuisance: bool = False


def resources(machine: Machine) -> list[Resource]:
    """Return every resource of a machine; each level of links has two, bandwidth and latency."""
    kernels = machine.kernels
    per_level = [
        make(machine, index)
        for index in range(len(machine.links))
        for make in (_link_bandwidth, _link_latency)
    ]
    return [
        Resource(
            "GPU compute rate",
            "gpu.compute",
            "peak_flops_per_s",
            lambda factor: _with_compute(machine, factor),
            compute_rate(machine),
        ),
        Resource(
            "GPU memory bandwidth",
            "gpu.memory_bandwidth",
            "memory_bandwidth_bytes_per_s",
            lambda factor: _with_memory(machine, factor),
            kernels.memory_fraction,
        ),
        *per_level,
        Resource(
            "interference",
            "interference",
            "slowdown_fraction",
            lambda factor: _with_interference(machine, factor),
            kernels.slowdown_fraction,
            is_nuisance=True,
        ),
        Resource(
            "jitter between GPUs",
            "jitter",
            "jitter_fraction",
            lambda factor: replace(
                machine, jitter_fraction=machine.jitter_fraction.scaled(1.0 / factor)
            ),
            machine.jitter_fraction,
            is_nuisance=True,
        ),
    ]


def host_resources(machine: Machine) -> list[Resource]:
    """Return the further resources on which offload depends: the host's links and its memory."""
    host = machine.require_host()

    def improved(field: str) -> Callable[[float], Machine]:
        def with_more(factor: float) -> Machine:
            more = getattr(host, field).scaled(factor)
            return replace(machine, host=replace(host, **{field: more}))

        return with_more

    return [
        Resource(
            "host link bandwidth",
            "host.link_bandwidth",
            "link_bandwidth_bytes_per_s",
            improved("link_bandwidth_bytes_per_s"),
            host.link_bandwidth_bytes_per_s,
        ),
        Resource(
            "host memory bandwidth",
            "host.memory_bandwidth",
            "memory_bandwidth_bytes_per_s",
            improved("memory_bandwidth_bytes_per_s"),
            host.update_fraction,
        ),
    ]


def faster(points: tuple[AnyPoint, ...], factor: float) -> tuple[AnyPoint, ...]:
    """Return measured points whose times are divided by `factor`."""
    return tuple(replace(point, seconds=point.seconds / factor) for point in points)


def scaled(quantity: Quantity | None, factor: float) -> Quantity | None:
    """Return a quantity times `factor`, or None where there is none."""
    return None if quantity is None else quantity.scaled(factor)


def compute_rate(machine: Machine) -> Quantity:
    """Return the number that says how fast products are, as it is known.

    Where products were timed one by one, an assumed rate hardly matters, so that it counts as
    measured.
    """
    rate = machine.gemm.sustained_fraction
    if rate.origin == "assumed" and machine.gemm.points:
        return replace(rate, origin="measured", source="products that were timed one by one")
    return rate


def _with_compute(machine: Machine, factor: float) -> Machine:
    """Return the machine with GPUs that compute `factor` times as fast."""
    peak = {dtype: q.scaled(factor) for dtype, q in machine.gpu.peak_flops_per_s.items()}
    kernels = machine.kernels
    return replace(
        machine,
        gpu=replace(machine.gpu, peak_flops_per_s=peak),
        gemm=replace(machine.gemm, points=faster(machine.gemm.points, factor)),
        kernels=replace(
            kernels,
            attention_points=faster(kernels.attention_points, factor),
            strided_bytes_per_s=scaled(kernels.strided_bytes_per_s, factor),
        ),
    )


def _with_memory(machine: Machine, factor: float) -> Machine:
    """Return the machine with `factor` times the memory bandwidth."""
    bandwidth = machine.gpu.memory_bandwidth_bytes_per_s.scaled(factor)
    kernels = machine.kernels
    return replace(
        machine,
        gpu=replace(machine.gpu, memory_bandwidth_bytes_per_s=bandwidth),
        kernels=replace(kernels, memory_points=faster(kernels.memory_points, factor)),
    )


def _with_interference(machine: Machine, factor: float) -> Machine:
    """Return the machine with slowdowns divided by `factor`."""
    kernels = machine.kernels
    calmer = replace(
        kernels,
        slowdown_fraction=kernels.slowdown_fraction.scaled(1.0 / factor),
        collective_slowdown_fraction=kernels.collective_slowdown_fraction.scaled(1.0 / factor),
    )
    return replace(machine, kernels=calmer)


def _link_bandwidth(machine: Machine, index: int) -> Resource:
    """Return the bandwidth of a level as a resource.

    The rings and collectives that were measured across this level, and no further, change with it.
    """
    link = machine.links[index]

    def improved(factor: float) -> Machine:
        faster_link = replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s.scaled(factor),
            ring_shares=tuple(
                replace(share, bandwidth_bytes_per_s=share.bandwidth_bytes_per_s.scaled(factor))
                for share in link.ring_shares
            ),
            **_changed_steps(link, bandwidth=factor),
        )
        rings = tuple(
            replace(ring, bandwidth_bytes_per_s=ring.bandwidth_bytes_per_s.scaled(factor))
            if _outermost_level(machine, ring.stride * ring.size) == index
            else ring
            for ring in machine.ring_bandwidths
        )
        points = _changed_points(machine, index, bandwidth=factor)
        return replace(
            _with_link(machine, index, faster_link), ring_bandwidths=rings, link_points=points
        )

    return Resource(
        f"{link.name} bandwidth",
        f"{link.name}.bandwidth",
        "bandwidth_bytes_per_s",
        improved,
        link.bandwidth_bytes_per_s,
    )


def _link_latency(machine: Machine, index: int) -> Resource:
    """Return the latency of a level as a resource, with the collectives measured across it."""
    link = machine.links[index]

    def improved(factor: float) -> Machine:
        quicker_link = replace(
            link,
            latency_seconds=link.latency_seconds.scaled(1.0 / factor),
            kind_latency_seconds={
                kind: q.scaled(1.0 / factor) for kind, q in link.kind_latency_seconds.items()
            },
            **_changed_steps(link, latency=factor),
        )
        points = _changed_points(machine, index, latency=factor)
        return replace(_with_link(machine, index, quicker_link), link_points=points)

    return Resource(
        f"{link.name} latency",
        f"{link.name}.latency",
        "latency_seconds",
        improved,
        link.latency_seconds,
        is_nuisance=True,
    )


def _changed_points(
    machine: Machine, index: int, bandwidth: float = 1.0, latency: float = 1.0
) -> tuple[LinkPoint, ...]:
    """Return the measured collectives, with changed times for those across the given level."""
    changed = _changed_series(machine.link_points, bandwidth, latency)
    return tuple(
        new if _outermost_level(machine, old.stride * old.size) == index else old
        for old, new in zip(machine.link_points, changed, strict=True)
    )


def _changed_steps(link: LinkLevel, bandwidth: float = 1.0, latency: float = 1.0) -> dict[str, Any]:
    """Return the measured steps of a level with changed times, by the name of their field."""
    return {
        name: replace(steps, points=_changed_series(steps.points, bandwidth, latency))
        for name, steps in link.measured_steps.items()
    }


def _changed_series(
    points: Sequence[TimedMessage], bandwidth: float, latency: float
) -> tuple[TimedMessage, ...]:
    """Return points whose latency is divided by `latency`, and the rest of the time by `bandwidth`.

    The latency of a measured series is the time of its quickest message.
    """
    latency_of: dict[tuple[object, ...], float] = {}
    for point in points:
        least = latency_of.get(point.series, point.seconds)
        latency_of[point.series] = min(point.seconds, least)

    def changed(point: TimedMessage) -> TimedMessage:
        latency_seconds = latency_of[point.series]
        rest_seconds = point.seconds - latency_seconds
        return replace(point, seconds=latency_seconds / latency + rest_seconds / bandwidth)

    return tuple(changed(point) for point in points)


def _outermost_level(machine: Machine, span: int) -> int:
    """Return the outermost level that a group spanning that many ranks crosses."""
    return max(i for i, link in enumerate(machine.links) if span > link.unit_ranks)


def _with_link(machine: Machine, index: int, link: LinkLevel) -> Machine:
    """Return the machine with one of its levels replaced."""
    return replace(machine, links=(*machine.links[:index], link, *machine.links[index + 1 :]))
