"""The tree of link levels: from where the ranks stand, then from what pairs of them measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from axonn_tune.errors import InputError

# Pairs that cross a boundary at less than this share of the rate inside make it a level.
CLEARLY_SLOWER = 0.8
# Dies of one package, by a word of the device's name.
PACKAGES = {"MI250X": 2, "MI250": 2}

Pair = tuple[int, int]


@dataclass(frozen=True)
class Station:
    """Where one rank stands, as it tells the others.

    host: the machine's name; one that emulates several nodes has the same for all of them.
    """

    host: str
    node: str
    device_name: str


def ranks_per_node(stations: Sequence[Station]) -> int:
    """Ranks of each node, which must be equally many and follow each other.

    Raises
    ------
    InputError
        Nodes with different numbers of ranks, or ranks dealt over nodes in turn.
    """
    nodes = [station.node for station in stations]
    counts = {node: nodes.count(node) for node in dict.fromkeys(nodes)}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{node} has {count}" for node, count in counts.items())
        raise InputError(f"nodes have different numbers of ranks ({told}); give each equally many")
    n_changes = sum(a != b for a, b in pairwise(nodes))
    if n_changes + 1 != len(counts):
        raise InputError(
            f"neighbouring ranks are on different nodes ({', '.join(nodes[:3])} ...); start them "
            "block by block, as with srun --distribution=block"
        )
    return next(iter(counts.values()))


def known_units(stations: Sequence[Station], n_per_node: int) -> list[int]:
    """Ranks of the units that names alone tell: packages of two dies, and nodes."""
    name = stations[0].device_name
    packages = [n for word, n in PACKAGES.items() if word in name and n_per_node % n == 0]
    units = {*packages[:1], n_per_node}
    return sorted(unit for unit in units if 1 < unit < len(stations))


def pairs_to_measure(n_ranks: int, n_per_node: int) -> list[Pair]:
    """All pairs of the first node, and its first rank with the first of each power-of-two node."""
    inside = [(a, b) for b in range(n_per_node) for a in range(b)]
    across, other = [], n_per_node
    while other < n_ranks:
        across.append((0, other))
        other *= 2
    return inside + across


def measured_units(rates: Mapping[Pair, float], n_ranks: int) -> list[int]:
    """Ranks of the units whose boundary slows pairs down, innermost first.

    Looking from outside inwards, a unit of u ranks is one if pairs that cross its boundary,
    and none beyond, are clearly slower than those inside.

    Parameters
    ----------
    rates : bytes per second of pairs of ranks (a < b)
    """
    units: list[int] = []
    outer = n_ranks
    for unit in (n for n in range(n_ranks - 1, 1, -1) if n_ranks % n == 0):
        if outer % unit:
            continue
        within = {pair: rate for pair, rate in rates.items() if _same(pair, outer)}
        inside = {pair: rate for pair, rate in within.items() if _same(pair, unit)}
        crossing = [rate for pair, rate in within.items() if pair not in inside]
        if inside and crossing and median(crossing) < CLEARLY_SLOWER * _slowest(inside, unit):
            units.append(unit)
            outer = unit
    return units[::-1]


def _slowest(rates: Mapping[Pair, float], n_ranks: int) -> float:
    """Median rate of the pairs that are equally far apart, of the slowest such kind."""
    divisors = [n for n in range(2, n_ranks + 1) if n_ranks % n == 0]
    kinds: dict[int, list[float]] = {}
    for pair, rate in rates.items():
        kinds.setdefault(next(n for n in divisors if _same(pair, n)), []).append(rate)
    return min(median(kind) for kind in kinds.values())


def _same(pair: Pair, unit: int) -> bool:
    return pair[0] // unit == pair[1] // unit


def merged_units(known: Sequence[int], measured: Sequence[int]) -> list[int]:
    """Units that names tell, and those measured that fit between them."""
    units = list(known)
    for unit in measured:
        if all(max(unit, other) % min(unit, other) == 0 for other in units):
            units.append(unit)
    return sorted(set(units))


def check_units(units: Sequence[int], n_ranks: int) -> None:
    """Refuse units that the user gave (``--levels 2,8``) and that do not nest.

    Raises
    ------
    InputError
        Sizes that do not divide each other or the ranks.
    """
    chain = [1, *units, n_ranks]
    if any(outer <= inner or outer % inner for inner, outer in pairwise(chain)):
        raise InputError(
            f"--levels {','.join(map(str, units))}: each unit must be a multiple of the one "
            f"before, and less than the {n_ranks} ranks"
        )


def level_names(units: Sequence[int], n_per_node: int) -> list[str]:
    """Names of the levels that join ranks, then units of the given sizes."""
    joined = [1, *units]
    inside = [unit for unit in joined if unit < n_per_node]
    names = {1: "intra-node"} if len(inside) == 1 else {}
    if len(inside) > 1:
        names = {inside[0]: "package", inside[-1]: "intra-node"}
    outside = [unit for unit in joined if unit >= n_per_node]
    if outside:
        names |= {outside[0]: "inter-node"}
    return [names.get(unit, f"units-of-{unit}") for unit in joined]
