"""The resources of a machine that are learned from steps, finer than those of `resources`.

The kernels of an engine are slower than those of a benchmark, each kind by a factor of its own, and
its host issues operations more slowly than the host on which the engine was timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from axonn_tune.spec.machine import Machine
from axonn_tune.spec.resources import Resource, compute_rate, faster, resources, scaled

# The resource of `resources` that products and attention share, and that of memory-bound kernels.
_COARSE = ("gpu.compute", "gpu.memory_bandwidth")
# No kernel is faster than the peak of its GPU.
_LARGEST_EFFICIENCY = 0.999


def learnable(machine: Machine) -> list[Resource]:
    """Return every resource that is learned: four of kernels and host, and those of links."""
    return [
        Resource(
            "matrix products",
            "products",
            "sustained_fraction",
            lambda factor: _with_products(machine, factor),
            compute_rate(machine),
        ),
        Resource(
            "fused attention",
            "attention",
            "flash_forward_fraction",
            lambda factor: _with_attention(machine, factor),
            machine.kernels.flash_forward_fraction,
        ),
        Resource(
            "memory-bound kernels",
            "memory_kernels",
            "memory_fraction",
            lambda factor: _with_memory_kernels(machine, factor),
            machine.kernels.memory_fraction,
        ),
        Resource(
            "the host's time for an operation",
            "host",
            "issue_factor",
            lambda factor: _with_host(machine, factor),
            machine.kernels.issue_factor,
            is_nuisance=True,
        ),
        *(resource for resource in resources(machine) if resource.key not in _COARSE),
    ]


def improved(machine: Machine, log_factors: Iterable[float]) -> Machine:
    """Return the machine with every resource of `learnable` changed by its factor."""
    for index, log_factor in enumerate(log_factors):
        if log_factor:
            machine = learnable(machine)[index].improved(math.exp(log_factor))
    return machine


def largest_log_factors(machine: Machine) -> list[float]:
    """Return the logarithm of the largest factor of each resource: no kernel exceeds the peak."""
    kernels = machine.kernels
    efficiencies = {
        "products": [machine.gemm.sustained_fraction],
        "attention": [kernels.flash_forward_fraction, kernels.flash_backward_fraction],
        "memory_kernels": [kernels.memory_fraction],
    }
    return [
        math.log(_LARGEST_EFFICIENCY / max(q.value for q in efficiencies[resource.key]))
        if resource.key in efficiencies
        else math.inf
        for resource in learnable(machine)
    ]


def _with_products(machine: Machine, factor: float) -> Machine:
    """Return the machine with products that are `factor` times as fast."""
    gemm = machine.gemm
    return replace(
        machine,
        gemm=replace(
            gemm,
            sustained_fraction=gemm.sustained_fraction.scaled(factor),
            points=faster(gemm.points, factor),
            grouped_points=faster(gemm.grouped_points, factor),
        ),
    )


def _with_attention(machine: Machine, factor: float) -> Machine:
    """Return the machine with fused attention that is `factor` times as fast."""
    kernels = machine.kernels
    faster_kernels = replace(
        kernels,
        flash_forward_fraction=kernels.flash_forward_fraction.scaled(factor),
        flash_backward_fraction=kernels.flash_backward_fraction.scaled(factor),
        attention_points=faster(kernels.attention_points, factor),
    )
    return replace(machine, kernels=faster_kernels)


def _with_memory_kernels(machine: Machine, factor: float) -> Machine:
    """Return the machine whose memory-bound kernels are `factor` times as fast."""
    kernels = machine.kernels
    return replace(
        machine,
        kernels=replace(
            kernels,
            memory_fraction=kernels.memory_fraction.scaled(factor),
            memory_points=faster(kernels.memory_points, factor),
            strided_bytes_per_s=scaled(kernels.strided_bytes_per_s, factor),
        ),
    )


def _with_host(machine: Machine, factor: float) -> Machine:
    """Return the machine with a host that issues `factor` times as many operations per second."""
    kernels = machine.kernels
    times = kernels.issue_factor.scaled(1.0 / factor)
    seconds = kernels.issue_seconds.scaled(1.0 / factor)
    return replace(machine, kernels=replace(kernels, issue_factor=times, issue_seconds=seconds))
