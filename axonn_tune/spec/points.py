"""Measured times of single operations: calibration finds them and a profile keeps them.

In every point `seconds` is the median time and `spread_fraction` the relative standard deviation
of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from axonn_tune.spec.checks import (
    LARGEST_BYTES,
    require_between,
    require_choice,
    require_count,
    require_duration,
    require_fraction,
    require_positive,
)
from axonn_tune.spec.plan import ATTENTION_LIBRARIES, KINDS, MEMORY_KERNELS, MODES, RING_KINDS
from axonn_tune.spec.precision import BYTES_PER_ELEMENT, PRODUCT_FORMATS


class _Timed:
    """A point with a measured time."""

    seconds: float

    def check_possible(self) -> None:
        """Raise InputError unless a clock can show this time for one kernel or collective."""
        require_duration("point", "seconds", self.seconds)


@dataclass(frozen=True)
class GemmPoint(_Timed):
    """One measured product, (m x k) times (k x n); `dtype` is the format of its operands."""

    m: int
    n: int
    k: int
    mode: str
    dtype: str
    seconds: float
    spread_fraction: float = 0.0

    def __post_init__(self) -> None:
        owner = f"gemm point {self.m}x{self.n}x{self.k}"
        _check(owner, self, ("m", "n", "k"))
        require_choice(owner, "mode", self.mode, MODES)
        require_choice(owner, "dtype", self.dtype, PRODUCT_FORMATS)


@dataclass(frozen=True)
class GroupedGemmPoint(_Timed):
    """Measured equal products, `n_groups` of (m x k) times (k x n) with weights of their own.

    `n_at_once` of them ran at the same time. If `sum_bytes` is not 0, the results were added to
    sums whose elements have so many bytes.
    """

    n_groups: int
    m: int
    n: int
    k: int
    mode: str
    dtype: str
    n_at_once: int
    sum_bytes: float
    seconds: float
    spread_fraction: float = 0.0

    def __post_init__(self) -> None:
        owner = f"grouped gemm point {self.n_groups}x{self.m}x{self.n}x{self.k}"
        _check(owner, self, ("n_groups", "m", "n", "k", "n_at_once"))
        require_choice(owner, "mode", self.mode, MODES)
        require_choice(owner, "dtype", self.dtype, PRODUCT_FORMATS)
        require_between(owner, "sum_bytes", self.sum_bytes, 0, 8)


@dataclass(frozen=True)
class AttentionPoint(_Timed):
    """One measured softmax attention over whole sequences, with a causal mask or without one.

    `dtype` is the format of its operands, and `library` the library of its kernel, one of
    `ATTENTION_LIBRARIES`; empty if it is unknown. With a `window` each query attended to that many
    tokens, its own included; with 0 it attended to all earlier ones.
    """

    n_sequences: int
    n_heads: int
    seq_len: int
    head_dim: int
    backward: bool
    fused: bool
    dtype: str
    seconds: float
    spread_fraction: float = 0.0
    masked: bool = True
    library: str = ""
    window: int = 0

    def __post_init__(self) -> None:
        owner = f"attention point {self.n_sequences}x{self.n_heads}x{self.seq_len}x{self.head_dim}"
        _check(owner, self, ("n_sequences", "n_heads", "seq_len", "head_dim"))
        require_between(owner, "window", self.window, 0, self.seq_len)
        require_choice(owner, "dtype", self.dtype, PRODUCT_FORMATS)
        if self.library:
            require_choice(owner, "library", self.library, ATTENTION_LIBRARIES)


@dataclass(frozen=True)
class MemoryPoint(_Timed):
    """One measured kernel that memory bandwidth limits; `nbytes` counts reads and writes."""

    kernel: str
    dtype: str
    nbytes: int
    seconds: float
    spread_fraction: float = 0.0

    def __post_init__(self) -> None:
        owner = f"memory point {self.kernel}"
        _check(owner, self, ("nbytes",))
        require_choice(owner, "kernel", self.kernel, MEMORY_KERNELS)
        require_choice(owner, "dtype", self.dtype, BYTES_PER_ELEMENT)


@dataclass(frozen=True)
class LinkPoint(_Timed):
    """One measured collective over the groups of ranks ``b + r + i * stride`` for i < size.

    Here b, the first rank of a block, is a multiple of ``stride * size``, and r < stride.

    kind
        Kind of collective.
    stride, size
        Distance between neighbours of a group, and number of ranks of a group.
    n_rings
        Number of the `stride` interleaving groups of a block that communicate at once.
    everywhere
        Whether the groups of all blocks communicate, and not only those of the first block.
    nbytes
        Full buffer, as `Collective` counts it.
    seconds
        Time of the slowest rank.
    spread_fraction
        Relative standard deviation of a sample.
    """

    kind: str
    stride: int
    size: int
    n_rings: int
    everywhere: bool
    nbytes: int
    seconds: float
    spread_fraction: float = 0.0

    def __post_init__(self) -> None:
        owner = f"link point {self.kind} ({self.stride}, {self.size})"
        _check(owner, self, ("stride", "size", "n_rings", "nbytes"))
        require_choice(owner, "kind", self.kind, KINDS)
        require_count(owner, "size", self.size, least=2)

    @property
    def is_of_whole_axis(self) -> bool:
        """Whether all groups of the axis communicated, as they do in training."""
        return self.everywhere and self.n_rings == self.stride

    @property
    def series(self) -> tuple[str, int, int, int, bool]:
        """Everything but bytes and times, which points with messages of other sizes share."""
        return self.kind, self.stride, self.size, self.n_rings, self.everywhere


ANY_KIND = ""


@dataclass(frozen=True)
class StepPoint(_Timed):
    """The time of one step of a ring, or of a tree.

    In a step of a ring every rank passes one chunk, the full buffer over the number of ranks, on
    to the next rank. In a step of a tree a message climbs, or descends, one level of the tree.

    kind
        Kind of collective; empty for every kind that runs on a ring.
    above_ranks
        The point holds for groups of more ranks than this, up to the next larger number that the
        points of its kind name. A tree counts all ranks of the units that it joins. A point of a
        tree that holds for two units was measured there: over more units, for which the points name
        no number, the law adds what further levels of the tree take.
    nbytes
        Size of the chunk, or of the message of a tree.
    seconds
        Time of a collective over the number of its steps.
    spread_fraction
        Relative standard deviation between collectives with this step.
    n_rings
        Number of groups that shared a boundary while the step was timed.
    """

    kind: str
    above_ranks: int
    nbytes: float
    seconds: float
    spread_fraction: float = 0.0
    n_rings: int = 1

    def __post_init__(self) -> None:
        owner = f"step point {self.kind}"
        require_choice(owner, "kind", self.kind, (ANY_KIND, *RING_KINDS))
        require_count(owner, "above_ranks", self.above_ranks, least=0)
        require_positive(owner, "nbytes", self.nbytes)
        require_positive(owner, "seconds", self.seconds)
        require_count(owner, "n_rings", self.n_rings)
        require_fraction(owner, "spread_fraction", self.spread_fraction)

    @property
    def series(self) -> tuple[str, int, int]:
        """Everything but bytes and times, which points with messages of other sizes share."""
        return self.kind, self.above_ranks, self.n_rings


POINTS = (GemmPoint, AttentionPoint, MemoryPoint, LinkPoint)


def _check(owner: str, point: Any, counts: tuple[str, ...]) -> None:
    """Raise InputError unless the counts and the time of a point are possible."""
    for name in counts:
        # A number of bytes may be larger than the largest allowed count.
        if name == "nbytes":
            require_between(owner, name, point.nbytes, 1, LARGEST_BYTES)
        else:
            require_count(owner, name, getattr(point, name))
    require_positive(owner, "seconds", point.seconds)
    require_fraction(owner, "spread_fraction", point.spread_fraction)
