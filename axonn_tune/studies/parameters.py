"""The numbers of a machine that can be changed by name; what was measured changes with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from axonn_tune.errors import InputError, choices_hint
from axonn_tune.spec.machine import Machine
from axonn_tune.spec.quantity import Quantity
from axonn_tune.spec.resources import Resource, faster, resources
from axonn_tune.units import parse_quantity


@dataclass(frozen=True)
class Parameter:
    """A number of a machine under a short name.

    name
        Name under which users set it.
    field
        Name of its field in a profile, with the suffix of its unit.
    value
        Value that it has on the machine.
    origin
        How the value is known, one of `ORIGINS`.
    changed
        Function from another value to the machine that has it; measured points scale with it.
    """

    name: str
    field: str
    value: float
    origin: str
    changed: Callable[[float], Machine]


def parameters(machine: Machine, dtype: str) -> list[Parameter]:
    """Return every number that can change the result of a search.

    Parameters
    ----------
    machine : Machine
        Machine that has the numbers.
    dtype : str
        Type in which the job computes, whose peak is the rate of computation.
    """
    return [
        *(_resource_parameter(machine, resource, dtype) for resource in resources(machine)),
        _product_parameter(machine),
        _attention_parameter(machine),
        *(
            _plain_parameter(machine, name, part, field)
            for name, part, field in _PLAIN
            # The measured times of kernels include their launch.
            if name != "host.launch" or not machine.kernels.memory_points
        ),
    ]


# Numbers on which no measured point depends: the name, and the part and the field of a profile.
_PLAIN = (
    ("gemm.k_overhead", "gemm", "k_overhead"),
    ("gpu.memory", "gpu", "memory_bytes"),
    ("memory.reserved", "memory_reserve", "reserved_bytes"),
    ("memory.fragmentation", "memory_reserve", "fragmentation_fraction"),
    ("host.launch", "kernels", "launch_seconds"),
    ("host.gap", "kernels", "gap_seconds"),
    ("host.issue", "kernels", "issue_seconds"),
)
_MAY_BE_ZERO = (
    "gemm.k_overhead",
    "memory.reserved",
    "memory.fragmentation",
    "host.gap",
    "host.issue",
)


def _resource_parameter(machine: Machine, resource: Resource, dtype: str) -> Parameter:
    """Return a resource of the machine as a parameter."""
    quantity = resource.quantity
    if resource.field == "peak_flops_per_s":
        quantity = machine.gpu.peak_flops_per_s[dtype]
    elif resource.field == "memory_bandwidth_bytes_per_s":
        quantity = machine.gpu.memory_bandwidth_bytes_per_s

    def changed(value: float) -> Machine:
        if not quantity.value:
            raise InputError("it is 0 on this machine; give it a value in the profile")
        factor = value / quantity.value
        return resource.improved(1.0 / factor if resource.is_nuisance else factor)

    return Parameter(resource.key, resource.field, quantity.value, quantity.origin, changed)


def _product_parameter(machine: Machine) -> Parameter:
    """Return the rate of matrix products as a parameter."""
    gemm = machine.gemm
    quantity = gemm.sustained_fraction

    def changed(value: float) -> Machine:
        points = faster(gemm.points, value / quantity.value)
        rates = replace(gemm, sustained_fraction=replace(quantity, value=value), points=points)
        return replace(machine, gemm=rates)

    return Parameter("gemm.rate", "sustained_fraction", quantity.value, quantity.origin, changed)


def _attention_parameter(machine: Machine) -> Parameter:
    """Return the rate of forward attention as a parameter; backward attention changes with it."""
    kernels = machine.kernels
    quantity = kernels.flash_forward_fraction

    def changed(value: float) -> Machine:
        factor = value / quantity.value
        rates = replace(
            kernels,
            flash_forward_fraction=quantity.scaled(factor),
            flash_backward_fraction=kernels.flash_backward_fraction.scaled(factor),
            attention_points=faster(kernels.attention_points, factor),
        )
        return replace(machine, kernels=rates)

    field = "flash_forward_fraction"
    return Parameter("attention.rate", field, quantity.value, quantity.origin, changed)


def _plain_parameter(machine: Machine, name: str, part: str, field: str) -> Parameter:
    """Return a field of a part of the profile as a parameter."""
    owner: Any = getattr(machine, part)
    quantity: Quantity = getattr(owner, field)

    def changed(value: float) -> Machine:
        new: dict[str, Any] = {part: replace(owner, **{field: replace(quantity, value=value)})}
        return replace(machine, **new)

    return Parameter(name, field, quantity.value, quantity.origin, changed)


def with_settings(machine: Machine, settings: Sequence[str], dtype: str) -> Machine:
    """Return the machine with parameters changed one after another.

    Parameters
    ----------
    machine : Machine
        Machine as it is.
    settings : sequence of str
        Changes such as ``"slingshot.bandwidth=2x"``, ``"gpu.memory=80 GiB"``,
        ``"inter_node.latency=-20%"``.
    dtype : str
        Type in which the job computes.

    Raises
    ------
    InputError
        A parameter does not exist, or a value does not suit it.
    """
    for setting in settings:
        name, sign, text = (word.strip() for word in setting.partition("="))
        if not sign or not text:
            raise InputError(f"--set {setting}: write NAME=VALUE, such as inter_node.bandwidth=2x")
        known = {parameter.name: parameter for parameter in parameters(machine, dtype)}
        parameter = known.get(_full_name(name, machine))
        if parameter is None:
            of_levels = (f"{level}.{number}" for level in _LEVELS for number in _OF_LEVEL)
            allowed = sorted([*known, *of_levels, "gpu"])
            raise InputError(f"--set {setting}: no parameter '{name}'{choices_hint(name, allowed)}")
        value = _new_value(setting, text, parameter)
        try:
            machine = parameter.changed(value)
        except InputError as error:
            raise InputError(f"--set {setting}: {error}") from None
    return machine


# Beyond such a factor nothing is learnt from a machine that nobody can build.
LARGEST_FACTOR = 1e9
_LEVELS = ("intra_node", "inter_node")
_OF_LEVEL = ("bandwidth", "latency")


def _full_name(name: str, machine: Machine) -> str:
    """Return the name of a parameter with the name of its level.

    ``inter_node`` is the first level that leaves the node, ``intra_node`` the level before it.
    """
    level, _, field = name.partition(".")
    index = {"inter_node": machine.node_level, "intra_node": machine.node_level - 1}.get(level)
    if index is None or not 0 <= index < len(machine.links):
        return name
    return f"{machine.links[index].name}.{field}"


_FACTOR = re.compile(r"(\d+\.?\d*|\.\d+)\s*[x×]")
_CHANGE = re.compile(r"([-+]\d+\.?\d*)\s*%")


def _new_value(setting: str, text: str, parameter: Parameter) -> float:
    """Read a value with its unit, a factor (2x) or a change (+20%) of a parameter."""
    factor = _FACTOR.fullmatch(text)
    change = _CHANGE.fullmatch(text)
    if factor or change:
        if not parameter.value:
            raise InputError(
                f"--set {setting}: it is 0 on this machine; give a value, not a factor"
            )
        scale = float(factor[1]) if factor else 1.0 + 0.01 * float(change[1] if change else 0)
        value = scale * parameter.value
    else:
        try:
            value = parse_quantity(text, parameter.field, needs_unit=True)
        except InputError as error:
            raise InputError(f"--set {setting}: {error}, or a factor (2x), or +20%") from None
    if value < 0 or (not value and parameter.name not in _MAY_BE_ZERO):
        raise InputError(f"--set {setting}: the value must be above zero")
    factor_set = value / parameter.value if value and parameter.value else 1.0
    if not 1.0 / LARGEST_FACTOR <= factor_set <= LARGEST_FACTOR:
        raise InputError(
            f"--set {setting}: allowed: within a factor of {LARGEST_FACTOR:g} of the value so far"
        )
    return value


def with_gpu(machine: Machine, other: Machine) -> Machine:
    """Return the machine with the GPUs of another one: their memory and their rates of kernels.

    The links, the time that the host takes and everything else stay as they are.
    """
    kernels = replace(
        other.kernels,
        gap_seconds=machine.kernels.gap_seconds,
        issue_seconds=machine.kernels.issue_seconds,
        issue_factor=machine.kernels.issue_factor,
    )
    return replace(machine, gpu=other.gpu, gemm=other.gemm, kernels=kernels)
