"""A GPU of a machine, and the rates that its products and its other kernels reach."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import (
    LARGEST_COUNT,
    require_amount,
    require_between,
    require_choice,
    require_count,
    require_efficiency,
    require_name,
    require_not_negative,
    require_positive,
    require_wait,
)
from axonn_tune.spec.plan import MODES
from axonn_tune.spec.points import AttentionPoint, GemmPoint, GroupedGemmPoint, MemoryPoint
from axonn_tune.spec.precision import FULL, PRECISIONS, PRODUCT_FORMATS, RECIPES
from axonn_tune.spec.quantity import Quantity, require_all_positive

# Kernels and collectives that run at the same time slow each other down, but not more than this.
LARGEST_SLOWDOWN = 100.0


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
        require_all_positive(owner, self)
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
        Time in which the host issues an operation, or works by itself, over the time that engines
        state, which were timed on other hosts.
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
