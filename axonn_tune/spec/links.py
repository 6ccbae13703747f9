"""The links of a machine, level by level, and what the rings that share them get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import (
    LARGEST_COUNT,
    require_amount,
    require_between,
    require_choice,
    require_count,
    require_name,
    require_not_negative,
    require_positive,
    require_wait,
)
from axonn_tune.spec.plan import KINDS
from axonn_tune.spec.points import ANY_KIND, StepPoint
from axonn_tune.spec.quantity import ORIGINS, Quantity


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
class TreeLimits:
    """The bandwidth that the library expects of trees at most, all NICs of a unit together.

    By it the library chooses between a ring and trees, whether or not trees are in fact that slow.
    The buffer of an all-reduce counts twice, for its ways up and down.

    two_units_bytes_per_s, more_units_bytes_per_s
        Limit over two units, and over more.
    """

    two_units_bytes_per_s: Quantity
    more_units_bytes_per_s: Quantity

    def __post_init__(self) -> None:
        for name in ("two_units_bytes_per_s", "more_units_bytes_per_s"):
            require_positive("tree limits", name, getattr(self, name).value)

    def check_possible(self) -> None:
        """Raise InputError unless trees can have these limits."""
        for name in ("two_units_bytes_per_s", "more_units_bytes_per_s"):
            require_amount("tree limits", name, getattr(self, name).value)


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
    tree_limits
        What the library expects of trees at most; None where links are all that limits them.
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
    tree_limits: TreeLimits | None = None
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
        if self.tree_limits is not None:
            self.tree_limits.check_possible()

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
