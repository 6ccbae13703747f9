"""What a machine's speed rests on, each thing alone: to see what more of it would bring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from axonn_tune.spec.machine import LinkLevel, Machine, Quantity
from axonn_tune.spec.points import AttentionPoint, GemmPoint, LinkPoint, MemoryPoint

AnyPoint = TypeVar("AnyPoint", GemmPoint, AttentionPoint, MemoryPoint, LinkPoint)


@dataclass(frozen=True)
class Resource:
    """Something of which a machine may have more; of a nuisance, less.

    key: the name under which it can be set. field: of the profile, with the unit's suffix.
    improved: the machine with so many times as much of it (a nuisance divided by it).
    quantity: the number of the profile that says how much there is, and how surely.
    """

    name: str
    key: str
    field: str
    improved: Callable[[float], Machine]
    quantity: Quantity
    is_nuisance: bool = False


def resources(machine: Machine) -> list[Resource]:
    """Every resource of a machine, those of its links by level."""
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
            machine.gemm.sustained_fraction,
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


def faster(points: tuple[AnyPoint, ...], factor: float) -> tuple[AnyPoint, ...]:
    """Measured points in so many times less time."""
    return tuple(replace(point, seconds=point.seconds / factor) for point in points)


def _with_compute(machine: Machine, factor: float) -> Machine:
    peak = {dtype: q.scaled(factor) for dtype, q in machine.gpu.peak_flops_per_s.items()}
    kernels = machine.kernels
    return replace(
        machine,
        gpu=replace(machine.gpu, peak_flops_per_s=peak),
        gemm=replace(machine.gemm, points=faster(machine.gemm.points, factor)),
        kernels=replace(kernels, attention_points=faster(kernels.attention_points, factor)),
    )


def _with_memory(machine: Machine, factor: float) -> Machine:
    bandwidth = machine.gpu.memory_bandwidth_bytes_per_s.scaled(factor)
    kernels = machine.kernels
    return replace(
        machine,
        gpu=replace(machine.gpu, memory_bandwidth_bytes_per_s=bandwidth),
        kernels=replace(kernels, memory_points=faster(kernels.memory_points, factor)),
    )


def _with_interference(machine: Machine, factor: float) -> Machine:
    kernels = machine.kernels
    calmer = replace(
        kernels,
        slowdown_fraction=kernels.slowdown_fraction.scaled(1.0 / factor),
        collective_slowdown_fraction=kernels.collective_slowdown_fraction.scaled(1.0 / factor),
    )
    return replace(machine, kernels=calmer)


def _link_bandwidth(machine: Machine, index: int) -> Resource:
    """Of a level, with the rings and collectives measured across it and no further."""
    link = machine.links[index]

    def improved(factor: float) -> Machine:
        faster = replace(
            link,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s.scaled(factor),
            ring_shares=tuple(
                replace(share, bandwidth_bytes_per_s=share.bandwidth_bytes_per_s.scaled(factor))
                for share in link.ring_shares
            ),
        )
        rings = tuple(
            replace(ring, bandwidth_bytes_per_s=ring.bandwidth_bytes_per_s.scaled(factor))
            if _outermost_level(machine, ring.stride * ring.size) == index
            else ring
            for ring in machine.ring_bandwidths
        )
        points = _changed_points(machine, index, bandwidth=factor)
        return replace(
            _with_link(machine, index, faster), ring_bandwidths=rings, link_points=points
        )

    key, field = f"{link.name}.bandwidth", "bandwidth_bytes_per_s"
    return Resource(f"{link.name} bandwidth", key, field, improved, link.bandwidth_bytes_per_s)


def _link_latency(machine: Machine, index: int) -> Resource:
    link = machine.links[index]

    def improved(factor: float) -> Machine:
        quicker = replace(
            link,
            latency_seconds=link.latency_seconds.scaled(1.0 / factor),
            kind_latency_seconds={
                kind: q.scaled(1.0 / factor) for kind, q in link.kind_latency_seconds.items()
            },
        )
        points = _changed_points(machine, index, latency=factor)
        return replace(_with_link(machine, index, quicker), link_points=points)

    key, field = f"{link.name}.latency", "latency_seconds"
    return Resource(f"{link.name} latency", key, field, improved, link.latency_seconds, True)


def _changed_points(
    machine: Machine, index: int, bandwidth: float = 1.0, latency: float = 1.0
) -> tuple[LinkPoint, ...]:
    """Measured collectives across a level, with the latency and the rest of each time changed.

    The latency of a measured series is the time of its quickest message.
    """
    series: dict[tuple[object, ...], float] = {}
    for p in machine.link_points:
        key = _series_of(p)
        series[key] = min(p.seconds, series.get(key, p.seconds))
    return tuple(
        replace(
            p,
            seconds=series[_series_of(p)] / latency
            + (p.seconds - series[_series_of(p)]) / bandwidth,
        )
        if _outermost_level(machine, p.stride * p.size) == index
        else p
        for p in machine.link_points
    )


def _series_of(point: LinkPoint) -> tuple[object, ...]:
    return (point.kind, point.stride, point.size, point.n_rings, point.everywhere)


def _outermost_level(machine: Machine, span: int) -> int:
    return max(i for i, link in enumerate(machine.links) if span > link.unit_ranks)


def _with_link(machine: Machine, index: int, link: LinkLevel) -> Machine:
    return replace(machine, links=(*machine.links[:index], link, *machine.links[index + 1 :]))
