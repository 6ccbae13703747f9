"""A cluster to emulate: a tree of link levels, as in a hardware profile, with a rate for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import require_choice, require_count, require_name, require_positive


@dataclass(frozen=True)
class ShapedLevel:
    """The links that join units of `unit_ranks` ranks; the bandwidth is per link and direction."""

    name: str
    unit_ranks: int
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        owner = f"level '{self.name}'"
        require_name("level", self.name)
        require_count(owner, "unit_ranks", self.unit_ranks)
        require_positive(owner, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class OddUnit:
    """A unit (counted from 0) whose link has a rate of its own."""

    level: str
    unit: int
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        owner = f"unit {self.unit} of level '{self.level}'"
        require_count(owner, "unit", self.unit, least=0)
        require_positive(owner, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class Unit:
    """A unit of a level, with the link that joins it to the other units of the next level's unit.

    level
        Index of the level, the innermost being 0.
    index
        Number of the unit within its level, counted from 0.
    bandwidth_bytes_per_s
        Bandwidth of the link each way.
    """

    level: int
    index: int
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Cluster:
    """Ranks in nodes, joined by a tree of links, innermost level first."""

    name: str
    n_ranks: int
    ranks_per_node: int
    levels: tuple[ShapedLevel, ...]
    odd_units: tuple[OddUnit, ...] = ()
    description: str = ""

    def __post_init__(self) -> None:
        owner = f"cluster '{self.name}'"
        require_name("cluster", self.name)
        require_count(owner, "n_ranks", self.n_ranks, least=2)
        require_count(owner, "ranks_per_node", self.ranks_per_node)
        units = [level.unit_ranks for level in self.levels]
        if not units or units[0] != 1:
            raise InputError(f"{owner}: the innermost of its levels must have unit_ranks 1")
        chain = [*units, self.n_ranks]
        if any(outer <= inner or outer % inner for inner, outer in pairwise(chain)):
            raise InputError(
                f"{owner}: unit_ranks of its levels are {units}, of {self.n_ranks} ranks; each "
                "must be a larger multiple of the one before"
            )
        if self.ranks_per_node not in chain:
            allowed = ", ".join(map(str, chain))
            raise InputError(
                f"{owner}: ranks_per_node is {self.ranks_per_node}; allowed: the ranks of a unit "
                f"or of all ({allowed})"
            )
        for odd in self.odd_units:
            self._check_odd(odd, [level.name for level in self.levels])

    def _check_odd(self, odd: OddUnit, names: Sequence[str]) -> None:
        """Raise InputError unless the odd unit exists in the cluster."""
        require_choice(f"cluster '{self.name}'", "level of odd_units", odd.level, names)
        n_units = self.n_ranks // self.levels[names.index(odd.level)].unit_ranks
        if odd.unit >= n_units:
            raise InputError(
                f"cluster '{self.name}': odd_units names unit {odd.unit} of level '{odd.level}'; "
                f"allowed: 0 to {n_units - 1}"
            )

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units of all levels, those of the innermost level first."""
        odd_rates = {(odd.level, odd.unit): odd.bandwidth_bytes_per_s for odd in self.odd_units}
        return tuple(
            Unit(i, index, odd_rates.get((level.name, index), level.bandwidth_bytes_per_s))
            for i, level in enumerate(self.levels)
            for index in range(self.n_ranks // level.unit_ranks)
        )

    def around(self, unit: Unit) -> int:
        """Return the index of the next level's unit in which a unit lies, 0 for the outermost."""
        first_rank = unit.index * self.levels[unit.level].unit_ranks
        outer_levels = self.levels[unit.level + 1 :]
        outer_ranks = outer_levels[0].unit_ranks if outer_levels else self.n_ranks
        return first_rank // outer_ranks
