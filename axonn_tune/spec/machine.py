"""A hardware profile: what a machine's GPUs, links and memory can do, and how that is known.

What-if studies ask for machines that nobody can build. So the types refuse only what has no
meaning; `check_possible` refuses what a file should not say of a machine that exists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import ClassVar

from axonn_tune.errors import InputError
from axonn_tune.spec.calibration import Calibration
from axonn_tune.spec.checks import (
    LARGEST_AMOUNT,
    require_amount,
    require_between,
    require_count,
    require_efficiency,
    require_fraction,
    require_name,
    require_not_negative,
)
from axonn_tune.spec.gpu import GemmRates, Gpu, KernelRates
from axonn_tune.spec.learned import Learned
from axonn_tune.spec.links import LinkLevel, RingBandwidth
from axonn_tune.spec.points import LinkPoint
from axonn_tune.spec.precision import RECIPES
from axonn_tune.spec.quantity import Quantity, require_all_positive

# The version grows when a profile gains fields that an older axonn-tune cannot read.
PROFILE_VERSION = 8
# No fact of a computing centre, in its unit, is smaller: a price of a millionth, a microsecond.
LEAST_FACT = 1e-6
# What a profile states of its hosts, if it states anything.
HOST_FACTS = ("link_bandwidth_bytes_per_s", "memory_bytes", "memory_bandwidth_bytes_per_s")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class MemoryReserve:
    """Memory that training cannot use.

    reserved_bytes
        Memory of the device context and of communication buffers.
    fragmentation_fraction
        Share of the memory that is lost to fragmentation.
    """

    reserved_bytes: Quantity
    fragmentation_fraction: Quantity

    def __post_init__(self) -> None:
        require_not_negative("memory_reserve", "reserved_bytes", self.reserved_bytes.value)
        require_fraction(
            "memory_reserve", "fragmentation_fraction", self.fragmentation_fraction.value
        )


@dataclass(frozen=True)
class Host:
    """What offload needs to know about the host of a node: its memory, and its links to the GPUs.

    link_bandwidth_bytes_per_s
        Bandwidth of the link between the host and each GPU, each way.
    memory_bytes
        Size of the memory of a node's host.
    memory_bandwidth_bytes_per_s
        Advertised bandwidth of this memory.
    update_fraction
        Share of this bandwidth that an optimizer on the host's cores reaches.
    """

    link_bandwidth_bytes_per_s: Quantity
    memory_bytes: Quantity
    memory_bandwidth_bytes_per_s: Quantity
    update_fraction: Quantity = Quantity(
        0.46,
        "assumed",
        "as CPU-Adam on a DGX-2 (ZeRO-Offload, arXiv 2101.06840, tables 2 and 4): 10 billion "
        "parameters in 2.57 s, 30 bytes each, of 256 GB/s (2 x 6 channels of DDR4-2666)",
    )

    def __post_init__(self) -> None:
        require_all_positive("host", self)

    def check_possible(self) -> None:
        """Raise InputError unless a host with these amounts can exist."""
        for name in HOST_FACTS:
            require_amount("host", name, getattr(self, name).value)
        require_efficiency("host", "update_fraction", self.update_fraction.value)


@dataclass(frozen=True)
class JobScript:
    """What this machine's Slurm scripts need besides the numbers of nodes and GPUs.

    sbatch, srun
        Options of these commands.
    environment
        Environment variables of every rank.
    modules
        Modules that the script loads.
    container
        Words of the command that runs a program in a container, such as ``apptainer``, ``exec``,
        ``--nv`` and the image.

    The script quotes all values, so that the shell expands no variable in them.
    """

    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    container: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.environment:
            if not _VARIABLE.fullmatch(name):
                raise InputError(
                    f"job_script: environment has {name!r}; allowed: the name of a variable, made "
                    "of letters, digits and _"
                )
        for item in fields(self):
            value = getattr(self, item.name)
            for text in value.values() if isinstance(value, Mapping) else value:
                if not text.isprintable():
                    raise InputError(
                        f"job_script: {item.name} is {text!r}; allowed: one line that can be "
                        "printed"
                    )


@dataclass(frozen=True)
class Facility:
    """What the plan of a whole training run needs to know about the computing centre.

    n_nodes
        Number of nodes that the machine has.
    node_power_watts
        Power of a node at work.
    node_hour_price
        Price of a node for an hour, in `currency`.
    currency
        Currency of the price.
    gpu_mtbf_seconds
        Mean time between interruptions of a job on a single GPU, whatever fails. The mean time
        of a job on N GPUs is N times shorter.
    checkpoint_bytes_per_s
        Rate at which all nodes together write or read a checkpoint.
    restart_seconds
        Time from an interruption to the first step, without reading the checkpoint.
    """

    n_nodes: Quantity | None = None
    node_power_watts: Quantity | None = None
    node_hour_price: Quantity | None = None
    currency: str = ""
    gpu_mtbf_seconds: Quantity = Quantity(
        16384 * 54 * 86400 / 419,
        "published",
        "419 unexpected interruptions in 54 days on 16,384 H100 (Llama 3, arXiv 2407.21783, "
        "section 3.3.4)",
    )
    checkpoint_bytes_per_s: Quantity = Quantity(
        273e9, "published", "384 nodes on Selene (Narayanan et al., SC21, section 5.10)"
    )
    restart_seconds: Quantity = Quantity(
        600.0, "assumed", "to notice, to replace a node, to start all ranks"
    )

    def __post_init__(self) -> None:
        require_all_positive("facility", self)
        if self.node_hour_price is not None and not self.currency:
            raise InputError("facility: currency is empty; name the currency of node_hour_price")

    def check_possible(self) -> None:
        """Raise InputError if a fact is so small or so large that no computing centre has it."""
        for item in fields(self):
            fact = getattr(self, item.name)
            if isinstance(fact, Quantity):
                require_between("facility", item.name, fact.value, LEAST_FACT, LARGEST_AMOUNT)


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes.

    name
        Name of the machine.
    gpu
        The GPU of which every rank has one.
    ranks_per_node
        Number of ranks on a node.
    gemm
        Rates of matrix products.
    kernels
        Rates of all other kernels.
    links
        Levels of links, the innermost first.
    memory_reserve
        Memory that training cannot use.
    jitter_fraction
        Relative standard deviation of the speed of equal GPUs. A synchronous step waits for the
        slowest of them.
    ring_bandwidths
        Measured bandwidths of rings inside a node, which replace the formula.
    link_points
        Measured collectives. Points of a whole axis replace the formula for its groups, and points
        on a switch for all groups of as many ranks on it.
    description
        Text for people.
    job_script
        Settings of the machine's batch scripts.
    facility
        What whole training runs need to know.
    host
        The host of a node; None where the profile does not know it.
    calibration
        Record of the calibration; None for a profile that was put together from publications.
    learned
        What it has learned from runs; None if nothing.
    profile_version
        Version of the file format.
    """

    # A file always states its version.
    ALWAYS_WRITTEN: ClassVar[tuple[str, ...]] = ("profile_version",)

    name: str
    gpu: Gpu
    ranks_per_node: int
    gemm: GemmRates
    kernels: KernelRates
    links: tuple[LinkLevel, ...]
    memory_reserve: MemoryReserve
    jitter_fraction: Quantity
    ring_bandwidths: tuple[RingBandwidth, ...] = ()
    link_points: tuple[LinkPoint, ...] = ()
    description: str = ""
    job_script: JobScript = field(default_factory=JobScript)
    facility: Facility = field(default_factory=Facility)
    host: Host | None = None
    calibration: Calibration | None = None
    learned: Learned | None = None
    profile_version: int = PROFILE_VERSION

    def __hash__(self) -> int:
        return hash((self.name, self.ranks_per_node))

    def __post_init__(self) -> None:
        owner = f"machine '{self.name}'"
        require_name("machine", self.name)
        require_count(owner, "ranks_per_node", self.ranks_per_node)
        require_not_negative(owner, "jitter_fraction", self.jitter_fraction.value)
        if not self.links:
            raise InputError(f"{owner}: links is empty; give at least one level")
        units = [level.unit_ranks for level in self.links]
        if units[0] != 1:
            raise InputError(f"{owner}: the innermost link level must have unit_ranks 1")
        for inner, outer in pairwise(units):
            if outer <= inner or outer % inner:
                raise InputError(
                    f"{owner}: unit_ranks of the link levels are {units}; each must be a larger "
                    "multiple of the one before"
                )
        for unit in units:
            if self.ranks_per_node % unit and unit % self.ranks_per_node:
                raise InputError(
                    f"{owner}: ranks_per_node is {self.ranks_per_node}; allowed: a multiple or a "
                    f"divisor of the unit_ranks of each link level ({units})"
                )
        names = [level.name for level in self.links]
        if len(set(names)) != len(names):
            raise InputError(f"{owner}: two link levels share a name ({', '.join(names)})")

    def check_possible(self) -> None:
        """Raise InputError if the GPUs would vary by more than their speed."""
        owner = f"machine '{self.name}'"
        require_fraction(owner, "jitter_fraction", self.jitter_fraction.value)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Return the advertised dense peak of a dtype.

        Raises
        ------
        InputError
            The profile has no peak for this dtype.
        """
        if dtype not in self.gpu.peak_flops_per_s:
            known = ", ".join(self.gpu.peak_flops_per_s)
            raise InputError(f"machine '{self.name}' has no peak for dtype {dtype}; known: {known}")
        return self.gpu.peak_flops_per_s[dtype].value

    def require_precision(self, precision: str) -> None:
        """Refuse a precision in whose format the GPU cannot form products.

        Raises
        ------
        InputError
            The message names the precisions that are allowed.
        """
        if precision not in self.gpu.precisions:
            number_format = RECIPES[precision].number_format
            raise InputError(
                f"machine '{self.name}' has no peak_flops_per_s.{number_format}, which precision "
                f"{precision} needs; allowed: {', '.join(self.gpu.precisions)}"
            )

    def require_host(self) -> Host:
        """Return the host of a node.

        Raises
        ------
        InputError
            The profile does not know it; the message names the missing fields.
        """
        if self.host is None:
            missing = ", ".join(f"host.{name}" for name in HOST_FACTS)
            raise InputError(
                f"machine '{self.name}' has no facts for --offload; its profile lacks {missing}"
            )
        return self.host

    @property
    def node_level(self) -> int:
        """The index of the first link level that leaves the node, or ``len(links)``."""
        outside = (i for i, link in enumerate(self.links) if link.unit_ranks >= self.ranks_per_node)
        return next(outside, len(self.links))

    def without_foreign_points(self, base: Machine) -> Machine:
        """Return the machine without what its base measured over groups that lie otherwise here.

        A group of eight ranks, for example, leaves a node of four GPUs, which it does not where the
        base has eight.
        """

        def holds(measured: LinkPoint | RingBandwidth) -> bool:
            n_ranks = measured.stride * measured.size
            return self._units_within(n_ranks) == base._units_within(n_ranks)

        taken = {*base.link_points, *base.ring_bandwidths}
        rings = self.ring_bandwidths
        return replace(
            self,
            link_points=tuple(p for p in self.link_points if p not in taken or holds(p)),
            ring_bandwidths=tuple(ring for ring in rings if ring not in taken or holds(ring)),
        )

    def _units_within(self, n_ranks: int) -> list[int]:
        """Return the ranks of the units whose boundaries a group of neighbouring ranks crosses."""
        return [link.unit_ranks for link in self.links if link.unit_ranks < n_ranks]

    @property
    def switch_ranks(self) -> int:
        """The number of ranks that a non-blocking switch joins; 1 where there is no switch."""
        if not self.links[0].is_switch:
            return 1
        return self.links[1].unit_ranks if len(self.links) > 1 else self.ranks_per_node
