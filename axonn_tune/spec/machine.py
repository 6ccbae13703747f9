"""A hardware profile: what a machine's GPUs, links and memory can do, and how that is known.

What-if studies ask for machines that nobody can build. So the types refuse only what has no
meaning; `check_possible` refuses what a file should not say of a machine that exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, ClassVar

from axonn_tune.errors import InputError
from axonn_tune.spec.calibration import Calibration
from axonn_tune.spec.checks import (
    LARGEST_AMOUNT,
    LARGEST_COUNT,
    require_amount,
    require_between,
    require_choice,
    require_count,
    require_efficiency,
    require_fraction,
    require_name,
    require_not_negative,
    require_positive,
    require_wait,
)
from axonn_tune.spec.learned import Learned
from axonn_tune.spec.plan import KINDS, MODES
from axonn_tune.spec.points import (
    ANY_KIND,
    AttentionPoint,
    GemmPoint,
    GroupedGemmPoint,
    LinkPoint,
    MemoryPoint,
    StepPoint,
)
from axonn_tune.spec.precision import FULL, PRECISIONS, PRODUCT_FORMATS, RECIPES

# The version grows when a profile gains fields that an older axonn-tune cannot read.
PROFILE_VERSION = 8
ORIGINS = ("measured", "published", "fitted", "assumed")
# Kernels and collectives that run at the same time slow each other down, but not more than this.
LARGEST_SLOWDOWN = 100.0
# No fact of a computing centre, in its unit, is smaller: a price of a millionth, a microsecond.
LEAST_FACT = 1e-6
# What a profile states of its hosts, if it states anything.
HOST_FACTS = ("link_bandwidth_bytes_per_s", "memory_bytes", "memory_bandwidth_bytes_per_s")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Quantity:
    """A number of a profile, with its origin.

    value
        The number, in the unit that the field's name ends with.
    origin
        How the number is known: measured, published, fitted or assumed.
    source
        Who measured or published it, on which steps it was fitted, or why it is assumed.
    spread_fraction
        Relative standard deviation of the number.
    """

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
        """Return this quantity with its value times `factor`, for sensitivities."""
        return replace(self, value=self.value * factor)


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one die (GCD) where the system shows each as a device.

    name
        Name of the GPU.
    n_multiprocessors
        Number of multiprocessors (compute units).
    memory_bytes
        Size of its memory.
    memory_bandwidth_bytes_per_s
        Advertised bandwidth of its memory.
    peak_flops_per_s
        Advertised dense peak by dtype, and by format of low products (`FORMATS`).
    transposes_operands
        Whether low products read their operands along rows only, so that others are transposed.
    one_queue
        Whether Megatron-LM has the kernels of all streams wait in one queue where ranks split
        tensors or sequences (CUDA_DEVICE_MAX_CONNECTIONS=1), as it demands before Blackwell.
        Transfers between stages then hold computation up.
    training_clock_fraction
        Clock that it holds while it trains with products alone, over that of the measurements of
        products and of fused attention, which end before its power limit is reached.
    training_peak_fraction
        Highest rate of a product over the advertised peak while the GPU trains; None where nothing
        but the clock bounds it. Long measurements of products reach the power limit and short ones
        do not, so that no one clock holds for all of them.
    workspace_bytes
        Workspace that cuBLAS is given for a product, where the program forms it by cuBLAS itself,
        as Transformer Engine does; None where none is counted.
    torch_workspace_bytes
        Workspace that torch gives to each handle of cuBLAS; None where none is counted.
    """

    name: str
    n_multiprocessors: int
    memory_bytes: Quantity
    memory_bandwidth_bytes_per_s: Quantity
    peak_flops_per_s: Mapping[str, Quantity]
    transposes_operands: bool = False
    one_queue: bool = True
    training_clock_fraction: Quantity = Quantity(1.0, "assumed", "not measured: taken as the same")
    training_peak_fraction: Quantity | None = None
    workspace_bytes: Quantity | None = None
    torch_workspace_bytes: Quantity | None = None

    def __post_init__(self) -> None:
        owner = f"gpu '{self.name}'"
        require_name("gpu", self.name)
        require_count(owner, "n_multiprocessors", self.n_multiprocessors)
        for dtype in self.peak_flops_per_s:
            require_choice(owner, "peak_flops_per_s", dtype, PRODUCT_FORMATS)
        _all_positive(owner, self)
        clock = self.training_clock_fraction.value
        require_between(owner, "training_clock_fraction", clock, 0.01, 1.0)

    def training_clock(self, attention_share: float) -> float:
        """Return the clock of a training step over that of the measurements.

        Attention leaves room below the power limit and products do not, so that the clock rises
        with attention's share of the FLOPs, to that of the measurements for attention alone.
        """
        beside_products = self.training_clock_fraction.value
        return beside_products + (1.0 - beside_products) * attention_share

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions whose format has a peak, with the one that casts nothing."""
        return tuple(
            name
            for name in PRECISIONS
            if name == FULL or RECIPES[name].number_format in self.peak_flops_per_s
        )

    @property
    def family(self) -> str:
        """The name without vendor, memory and form, such as A100; the whole name where it has none.

        The first word of letters and digits names the family.
        """
        word = re.search(r"[A-Z]+\d+[A-Z]*", self.name.upper())
        return word[0] if word else self.name

    def check_possible(self) -> None:
        """Raise InputError unless a GPU with these amounts can exist."""
        owner = f"gpu '{self.name}'"
        amounts = {
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s,
        }
        for dtype, peak in self.peak_flops_per_s.items():
            amounts[f"peak_flops_per_s.{dtype}"] = peak
        for name, amount in amounts.items():
            require_amount(owner, name, amount.value)


@dataclass(frozen=True)
class Tile:
    """An output tile of a GEMM kernel, and its speed relative to the best tile."""

    rows: int
    columns: int
    speed_fraction: float

    def __post_init__(self) -> None:
        owner = f"tile {self.rows}x{self.columns}"
        require_count(owner, "rows", self.rows)
        require_count(owner, "columns", self.columns)
        require_efficiency(owner, "speed_fraction", self.speed_fraction)


@dataclass(frozen=True)
class GemmRates:
    """The efficiency curve of GEMMs, and the measured points that correct it.

    sustained_fraction
        Rate of a very large product over the advertised peak.
    k_overhead
        Number of elements of k whose time a tile loses to its prologue and epilogue.
    tiles
        Output tiles among which the library chooses.
    mode_fraction
        Rate of each mode relative to the best one.
    points
        Measured products, which correct the curve.
    grouped_points
        Measured grouped products, which correct the curve for these.
    """

    sustained_fraction: Quantity
    k_overhead: Quantity
    tiles: tuple[Tile, ...]
    mode_fraction: Mapping[str, Quantity]
    points: tuple[GemmPoint, ...] = ()
    grouped_points: tuple[GroupedGemmPoint, ...] = ()

    def __post_init__(self) -> None:
        require_positive("gemm", "sustained_fraction", self.sustained_fraction.value)
        require_not_negative("gemm", "k_overhead", self.k_overhead.value)
        if not self.tiles:
            raise InputError(
                "gemm: tiles is empty; give at least one {rows, columns, speed_fraction}"
            )
        for mode in MODES:
            if mode not in self.mode_fraction:
                raise InputError(f"gemm: mode_fraction has no {mode}; give NN, NT and TN")
            require_positive("gemm", f"mode_fraction.{mode}", self.mode_fraction[mode].value)

    def check_possible(self) -> None:
        """Raise InputError if a product would be faster than the peak, or never end."""
        require_efficiency("gemm", "sustained_fraction", self.sustained_fraction.value)
        require_between("gemm", "k_overhead", self.k_overhead.value, 0, LARGEST_COUNT)
        for mode, fraction in self.mode_fraction.items():
            require_efficiency("gemm", f"mode_fraction.{mode}", fraction.value)


@dataclass(frozen=True)
class KernelRates:
    """The rates of kernels that are not GEMMs, and what all kernels lose.

    flash_forward_fraction, flash_backward_fraction
        Attention FLOPs actually computed per second over the advertised peak, from 2,048 tokens on.
    dropout_forward_factor, dropout_backward_factor
        Time of fused attention with dropout over that of the same attention without it.
    memory_fraction
        Achieved over advertised memory bandwidth.
    strided_bytes_per_s
        Rate of a kernel of 16-bit elements which broadcasts an operand or reads a slice, so that it
        handles one element at a time; None where that takes no longer than to stream the bytes.
    launch_seconds
        Least time between two kernels of one stream.
    slowdown_fraction
        Additional time, relative, of a kernel while a collective runs.
    collective_slowdown_fraction
        Additional time, relative, of a collective while a kernel runs.
    gap_seconds
        Time for which the host keeps the device idle between two kernels.
    issue_seconds
        Time in which the host issues one operation while the device works on earlier ones. A
        step takes at least this time for each of its operations.
    issue_factor
        Time in which the host issues an operation over the time that engines state, which were
        timed on other hosts.
    attention_points
        Measured attention, which corrects the rates as GEMM points correct the efficiency curve.
    memory_points
        Measured times of kernels that memory bandwidth limits. They replace bandwidth and launch
        of the kernels that they name.
    """

    flash_forward_fraction: Quantity
    flash_backward_fraction: Quantity
    memory_fraction: Quantity
    launch_seconds: Quantity
    slowdown_fraction: Quantity
    dropout_forward_factor: Quantity = Quantity(1.0, "assumed", "not measured: as without dropout")
    dropout_backward_factor: Quantity = Quantity(1.0, "assumed", "not measured: as without dropout")
    collective_slowdown_fraction: Quantity = Quantity(0.0, "assumed", "not measured: taken as none")
    gap_seconds: Quantity = Quantity(0.0, "assumed", "not measured: the host runs ahead")
    issue_seconds: Quantity = Quantity(0.0, "assumed", "not measured: the host runs ahead")
    issue_factor: Quantity = Quantity(1.0, "assumed", "as the hosts on which engines were timed")
    strided_bytes_per_s: Quantity | None = None
    attention_points: tuple[AttentionPoint, ...] = ()
    memory_points: tuple[MemoryPoint, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "slowdown_fraction",
            "collective_slowdown_fraction",
            "gap_seconds",
            "issue_seconds",
        ):
            require_not_negative("kernels", name, getattr(self, name).value)
        for name in (
            "flash_forward_fraction",
            "flash_backward_fraction",
            "memory_fraction",
            "launch_seconds",
            "dropout_forward_factor",
            "dropout_backward_factor",
            "issue_factor",
        ):
            require_positive("kernels", name, getattr(self, name).value)
        if self.strided_bytes_per_s is not None:
            require_positive("kernels", "strided_bytes_per_s", self.strided_bytes_per_s.value)

    def check_possible(self) -> None:
        """Raise InputError if a kernel would exceed the peak, or be slowed down beyond measure."""
        for name in ("flash_forward_fraction", "flash_backward_fraction", "memory_fraction"):
            require_efficiency("kernels", name, getattr(self, name).value)
        for name in ("slowdown_fraction", "collective_slowdown_fraction"):
            slowdown = getattr(self, name).value
            require_between("kernels", name, slowdown, 0.0, LARGEST_SLOWDOWN)
        largest = LARGEST_SLOWDOWN
        for name in ("dropout_forward_factor", "dropout_backward_factor", "issue_factor"):
            require_between("kernels", name, getattr(self, name).value, 1.0 / largest, largest)
        if self.strided_bytes_per_s is not None:
            require_amount("kernels", "strided_bytes_per_s", self.strided_bytes_per_s.value)
        for name in ("launch_seconds", "gap_seconds", "issue_seconds"):
            require_wait("kernels", name, getattr(self, name).value)


@dataclass(frozen=True)
class RingShare:
    """The bandwidth that each of `n_rings` rings gets when all cross one boundary at once.

    kind
        Kind of the collectives that the rings carry.
    n_rings
        Number of rings.
    bandwidth_bytes_per_s
        Bandwidth of each ring.
    """

    kind: str
    n_rings: int
    bandwidth_bytes_per_s: Quantity

    def __post_init__(self) -> None:
        owner = f"ring share ({self.kind}, {self.n_rings})"
        require_choice(owner, "kind", self.kind, KINDS)
        require_count(owner, "n_rings", self.n_rings)
        require_positive(owner, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s.value)

    def check_possible(self) -> None:
        """Raise InputError unless a ring can have this bandwidth."""
        require_amount("ring", "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s.value)


@dataclass(frozen=True)
class Steps:
    """The steps of one algorithm on a level.

    origin, source
        How the points are known, and who measured them with which software.
    points
        Times of a step, in a single group of consecutive ranks unless they say otherwise.
    """

    origin: str
    source: str
    points: tuple[StepPoint, ...]

    def __post_init__(self) -> None:
        require_choice("steps", "origin", self.origin, ORIGINS)
        if not self.source:
            raise InputError("steps: source is empty; say where the points come from")
        if not self.points:
            raise InputError("steps: points is empty; leave out the steps instead")

    def of_kind(self, kind: str) -> dict[int, list[StepPoint]]:
        """Return the points that hold for a kind of collective, by number of rings, ascending.

        A kind without points of its own takes those of every kind, or those of gathers.
        """
        by_rings = {}
        for n_rings in sorted({point.n_rings for point in self.points}):
            points = [point for point in self.points if point.n_rings == n_rings]
            own = [point for point in points if point.kind == kind]
            shared = [point for point in points if point.kind in (ANY_KIND, "all_gather")]
            if own or shared:
                by_rings[n_rings] = own or shared
        return by_rings


@dataclass(frozen=True)
class LinkLevel:
    """The links that join the units of one level.

    name
        Name of the level.
    unit_ranks
        Number of ranks in a unit: 1 for a GPU, 4 for a node of four.
    bandwidth_bytes_per_s
        Bandwidth that the boundary of a unit carries each way.
    latency_seconds
        Time of a hop to the next unit.
    kind_fraction
        Factors of the bandwidth, by kind of collective.
    kind_latency_seconds
        Latencies that replace `latency_seconds`, by kind of collective.
    ring_shares
        Measured shares of rings that cross the boundary at once. Without any, each ring gets an
        equal part of the bandwidth.
    ring_steps, tree_steps
        Steps of rings, and of the trees of all-reduces, which replace bandwidth and latency.
    hop_steps
        Steps of hops on this level in rings that also cross a level further out. Groups inside the
        level may be served otherwise: NCCL lets a switch gather and sum within one node only
        (NVIDIA/nccl, src/graph/tuning.cc, NVLS).
    is_switch
        Whether a non-blocking switch joins the ranks, so that a group takes as long as any other
        group of as many ranks, whatever its stride and whichever other groups communicate.
    """

    name: str
    unit_ranks: int
    bandwidth_bytes_per_s: Quantity
    latency_seconds: Quantity
    kind_fraction: Mapping[str, Quantity] = field(default_factory=dict)
    kind_latency_seconds: Mapping[str, Quantity] = field(default_factory=dict)
    ring_shares: tuple[RingShare, ...] = ()
    ring_steps: Steps | None = None
    tree_steps: Steps | None = None
    hop_steps: Steps | None = None
    is_switch: bool = False

    def __post_init__(self) -> None:
        owner = f"link level '{self.name}'"
        require_name("link level", self.name)
        require_count(owner, "unit_ranks", self.unit_ranks)
        if self.is_switch and self.unit_ranks > 1:
            raise InputError(f"{owner}: is_switch is true; allowed: only where unit_ranks is 1")
        require_positive(
            owner,
            "bandwidth_bytes_per_s",
            self.bandwidth_bytes_per_s.value,
            "; did you leave out the unit, as in '25 GB/s'?",
        )
        for kind in self.kind_latency_seconds:
            require_choice(owner, "kind_latency_seconds", kind, KINDS)
        for name, latency in self._latencies():
            require_not_negative(owner, name, latency)
        for kind, quantity in self.kind_fraction.items():
            require_choice(owner, "kind_fraction", kind, KINDS)
            require_positive(owner, f"kind_fraction.{kind}", quantity.value)

    def check_possible(self) -> None:
        """Raise InputError unless links can have this bandwidth and these latencies."""
        owner = f"link level '{self.name}'"
        require_amount(owner, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s.value)
        for kind, fraction in self.kind_fraction.items():
            least, most = 1.0 / LARGEST_COUNT, LARGEST_COUNT
            require_between(owner, f"kind_fraction.{kind}", fraction.value, least, most)
        for name, latency in self._latencies():
            require_wait(owner, name, latency)

    def _latencies(self) -> Iterator[tuple[str, float]]:
        yield "latency_seconds", self.latency_seconds.value
        for kind, quantity in self.kind_latency_seconds.items():
            yield f"kind_latency_seconds.{kind}", quantity.value

    @property
    def measured_steps(self) -> dict[str, Steps]:
        """The steps that are known, by the name of their field."""
        steps = {name: getattr(self, name) for name in ("ring_steps", "tree_steps", "hop_steps")}
        return {name: each for name, each in steps.items() if each is not None}

    def latency_of(self, kind: str) -> Quantity:
        """Return the latency of a hop in collectives of a kind."""
        return self.kind_latency_seconds.get(kind, self.latency_seconds)


@dataclass(frozen=True)
class RingBandwidth:
    """The bandwidth of each ring inside a node, measured with all groups of an axis at once.

    stride
        Product of the sizes of the axes that vary faster.
    size
        Size of the axis.
    bandwidth_bytes_per_s
        Bandwidth of each ring.
    """

    stride: int
    size: int
    bandwidth_bytes_per_s: Quantity

    def __post_init__(self) -> None:
        owner = f"ring bandwidth ({self.stride}, {self.size})"
        require_count(owner, "stride", self.stride)
        require_count(owner, "size", self.size, least=2)
        require_positive(owner, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s.value)

    def check_possible(self) -> None:
        """Raise InputError unless a ring can have this bandwidth."""
        require_amount("ring", "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s.value)


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
        _all_positive("host", self)

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
        _all_positive("facility", self)
        if self.node_hour_price is not None and not self.currency:
            raise InputError("facility: currency is empty; say of what node_hour_price is")

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

    @property
    def switch_ranks(self) -> int:
        """The number of ranks that a non-blocking switch joins; 1 where there is no switch."""
        if not self.links[0].is_switch:
            return 1
        return self.links[1].unit_ranks if len(self.links) > 1 else self.ranks_per_node


def _all_positive(owner: str, instance: Any) -> None:
    """Raise InputError unless every quantity in the fields of `instance` is above zero."""
    for item in fields(instance):
        value = getattr(instance, item.name)
        entries = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, entry in entries:
            if isinstance(entry, Quantity):
                name = f"{item.name}.{key}" if key else item.name
                require_positive(owner, name, entry.value)
