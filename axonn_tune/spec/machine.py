"""A hardware profile: what a machine's GPUs, links and memory can do, and how we know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, ClassVar

from axonn_tune.errors import InputError
from axonn_tune.spec.calibration import Calibration
from axonn_tune.spec.checks import (
    require_choice,
    require_count,
    require_fraction,
    require_positive,
)
from axonn_tune.spec.plan import KINDS, MODES
from axonn_tune.spec.points import AttentionPoint, GemmPoint, LinkPoint, MemoryPoint

# Raised when a profile gains fields that an older axonn-tune cannot read.
PROFILE_VERSION = 4
ORIGINS = ("measured", "published", "assumed")


@dataclass(frozen=True)
class Quantity:
    """A number of a profile with its origin: measured, published or assumed, and by whom."""

    value: float
    origin: str
    source: str
    spread_fraction: float = 0.0

    def __post_init__(self) -> None:
        require_choice("quantity", "origin", self.origin, ORIGINS)
        require_fraction("quantity", "spread_fraction", self.spread_fraction)
        if not self.source:
            raise InputError("quantity: source is empty; say where the number comes from")

    def scaled(self, factor: float) -> Quantity:
        """The same quantity times `factor`, for sensitivities."""
        return replace(self, value=self.value * factor)


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one die (GCD) where the system shows each as a device."""

    name: str
    n_multiprocessors: int
    memory_bytes: Quantity
    memory_bandwidth_bytes_per_s: Quantity
    peak_flops_per_s: Mapping[str, Quantity]  # by dtype, dense

    def __post_init__(self) -> None:
        owner = f"gpu '{self.name}'"
        require_count(owner, "n_multiprocessors", self.n_multiprocessors)
        _all_positive(owner, self)


@dataclass(frozen=True)
class Tile:
    """An output tile of a GEMM kernel and its speed relative to the best tile."""

    rows: int
    columns: int
    speed_fraction: float

    def __post_init__(self) -> None:
        owner = f"tile {self.rows}x{self.columns}"
        require_count(owner, "rows", self.rows)
        require_count(owner, "columns", self.columns)
        require_positive(owner, "speed_fraction", self.speed_fraction)
        require_fraction(owner, "speed_fraction", self.speed_fraction)


@dataclass(frozen=True)
class GemmRates:
    """The efficiency curve of GEMMs, and the measured points that correct it.

    sustained_fraction: rate of a very large product over the advertised peak.
    k_overhead: elements of k whose time a tile loses to its prologue and epilogue.
    mode_fraction: rate of each mode relative to the best one.
    """

    sustained_fraction: Quantity
    k_overhead: Quantity
    tiles: tuple[Tile, ...]
    mode_fraction: Mapping[str, Quantity]
    points: tuple[GemmPoint, ...] = ()

    def __post_init__(self) -> None:
        require_positive("gemm", "sustained_fraction", self.sustained_fraction.value)
        if not self.tiles:
            raise InputError(
                "gemm: tiles is empty; give at least one {rows, columns, speed_fraction}"
            )
        for mode in MODES:
            if mode not in self.mode_fraction:
                raise InputError(f"gemm: mode_fraction has no {mode}; give NN, NT and TN")
            require_positive("gemm", f"mode_fraction.{mode}", self.mode_fraction[mode].value)


@dataclass(frozen=True)
class KernelRates:
    """Kernels that are not GEMMs.

    flash_forward_fraction, flash_backward_fraction: attention FLOPs actually computed per
    second over the advertised peak. memory_fraction: achieved over advertised memory
    bandwidth. launch_seconds: least time between two kernels of one stream.
    slowdown_fraction: how much longer a kernel takes while a collective runs beside it;
    collective_slowdown_fraction: how much longer a collective, while a kernel runs.
    gap_seconds: how long the host keeps the device idle between two kernels.
    issue_seconds: what the host needs to issue one operation, while the device works on those
    before; a step takes at least so long for each.
    attention_points correct the rates of attention, as GEMM points do the efficiency curve;
    memory_points, where a kernel has them, replace bandwidth and launch.
    """

    flash_forward_fraction: Quantity
    flash_backward_fraction: Quantity
    memory_fraction: Quantity
    launch_seconds: Quantity
    slowdown_fraction: Quantity
    collective_slowdown_fraction: Quantity = Quantity(0.0, "assumed", "not measured: taken as none")
    gap_seconds: Quantity = Quantity(0.0, "assumed", "not measured: the host runs ahead")
    issue_seconds: Quantity = Quantity(0.0, "assumed", "not measured: the host runs ahead")
    attention_points: tuple[AttentionPoint, ...] = ()
    memory_points: tuple[MemoryPoint, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "slowdown_fraction",
            "collective_slowdown_fraction",
            "gap_seconds",
            "issue_seconds",
        ):
            if not 0 <= getattr(self, name).value < math.inf:
                raise InputError(f"kernels: {name} must be finite and not negative")
        for name in (
            "flash_forward_fraction",
            "flash_backward_fraction",
            "memory_fraction",
            "launch_seconds",
        ):
            require_positive("kernels", name, getattr(self, name).value)


@dataclass(frozen=True)
class RingShare:
    """Bandwidth that each of `n_rings` rings gets when all pass through one boundary at once."""

    kind: str
    n_rings: int
    bandwidth_bytes_per_s: Quantity

    def __post_init__(self) -> None:
        owner = f"ring share ({self.kind}, {self.n_rings})"
        require_choice(owner, "kind", self.kind, KINDS)
        require_count(owner, "n_rings", self.n_rings)
        require_positive(owner, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s.value)


@dataclass(frozen=True)
class LinkLevel:
    """The links that join the units of one level, innermost level first.

    A unit holds `unit_ranks` ranks (1 for a GPU, 4 for a node of four); its boundary
    carries `bandwidth_bytes_per_s` each way; a hop to the next unit costs
    `latency_seconds`. For a kind of collective `kind_fraction` scales the bandwidth,
    `kind_latency_seconds` replaces the latency, and `ring_shares` say how rings share the
    boundary where that was measured; elsewhere each gets an equal part of the bandwidth.
    """

    name: str
    unit_ranks: int
    bandwidth_bytes_per_s: Quantity
    latency_seconds: Quantity
    kind_fraction: Mapping[str, Quantity] = field(default_factory=dict)
    kind_latency_seconds: Mapping[str, Quantity] = field(default_factory=dict)
    ring_shares: tuple[RingShare, ...] = ()

    def __post_init__(self) -> None:
        owner = f"link level '{self.name}'"
        require_count(owner, "unit_ranks", self.unit_ranks)
        require_positive(
            owner,
            "bandwidth_bytes_per_s",
            self.bandwidth_bytes_per_s.value,
            "; did you leave out the unit, as in '25 GB/s'?",
        )
        latencies = {"latency_seconds": self.latency_seconds}
        for kind, quantity in self.kind_latency_seconds.items():
            require_choice(owner, "kind_latency_seconds", kind, KINDS)
            latencies[f"kind_latency_seconds.{kind}"] = quantity
        for name, quantity in latencies.items():
            if not 0 <= quantity.value < math.inf:
                raise InputError(f"{owner}: {name} must be finite and not negative")
        for kind, quantity in self.kind_fraction.items():
            require_choice(owner, "kind_fraction", kind, KINDS)
            require_positive(owner, f"kind_fraction.{kind}", quantity.value)


@dataclass(frozen=True)
class RingBandwidth:
    """Bandwidth of each ring measured inside a node, all groups of the axis at once.

    `stride` is the product of the sizes of the faster axes, `size` that of this axis.
    """

    stride: int
    size: int
    bandwidth_bytes_per_s: Quantity

    def __post_init__(self) -> None:
        owner = f"ring bandwidth ({self.stride}, {self.size})"
        require_count(owner, "stride", self.stride)
        require_count(owner, "size", self.size, least=2)
        require_positive(owner, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s.value)


@dataclass(frozen=True)
class MemoryReserve:
    """Memory that training cannot use: context and communication buffers, and fragmentation."""

    reserved_bytes: Quantity
    fragmentation_fraction: Quantity

    def __post_init__(self) -> None:
        if not 0 <= self.reserved_bytes.value < math.inf:
            raise InputError("memory_reserve: reserved_bytes must be finite and not negative")
        require_fraction(
            "memory_reserve", "fragmentation_fraction", self.fragmentation_fraction.value
        )


@dataclass(frozen=True)
class JobScript:
    """What this machine's batch scripts need besides nodes and GPUs, all of it for Slurm.

    sbatch, srun: options. environment: variables of every rank. modules: to load.
    """

    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facility:
    """What a whole training run needs to know of the place where the machine stands.

    n_nodes: that the machine has. node_power_watts: of one at work. node_hour_price: of one for
    an hour, in `currency`.
    gpu_mtbf_seconds: mean time between interruptions of a job on a single GPU, whatever fails;
    that of a job is as many times shorter as it has GPUs. checkpoint_bytes_per_s: at which all
    nodes together write a checkpoint, and read it. restart_seconds: from an interruption to the
    first step, without reading the checkpoint.
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
        _all_positive("facility", self)
        if self.node_hour_price is not None and not self.currency:
            raise InputError("facility: currency is empty; say of what node_hour_price is")


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes.

    jitter_fraction: standard deviation of the speed of equal GPUs; a synchronous step
    waits for the slowest of N. link_points: measured collectives; where one is of the
    groups of a whole axis, it is what those groups take. calibration: None for a profile
    that was put together from what others published.
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
    calibration: Calibration | None = None
    profile_version: int = PROFILE_VERSION

    def __post_init__(self) -> None:
        owner = f"machine '{self.name}'"
        require_count(owner, "ranks_per_node", self.ranks_per_node)
        require_fraction(owner, "jitter_fraction", self.jitter_fraction.value)
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
        names = [level.name for level in self.links]
        if len(set(names)) != len(names):
            raise InputError(f"{owner}: two link levels share a name ({', '.join(names)})")

    def peak_flops_per_s(self, dtype: str) -> float:
        """The advertised dense peak.

        Raises
        ------
        InputError
            The profile has no peak for this dtype.
        """
        if dtype not in self.gpu.peak_flops_per_s:
            known = ", ".join(self.gpu.peak_flops_per_s)
            raise InputError(f"machine '{self.name}' has no peak for dtype {dtype}; known: {known}")
        return self.gpu.peak_flops_per_s[dtype].value

    @property
    def node_level(self) -> int:
        """Index of the first link level that leaves the node; ``len(links)`` if none does."""
        outside = (i for i, link in enumerate(self.links) if link.unit_ranks >= self.ranks_per_node)
        return next(outside, len(self.links))


def _all_positive(owner: str, instance: Any) -> None:
    for item in fields(instance):
        value = getattr(instance, item.name)
        entries = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, entry in entries:
            if isinstance(entry, Quantity):
                name = f"{item.name}.{key}" if key else item.name
                require_positive(owner, name, entry.value)
