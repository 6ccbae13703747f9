"""Every grid of a GPU count, and the reason for which each one was rejected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from axonn_tune.errors import NoCandidateError
from axonn_tune.spec.grid import AXES, PAPER_ORDER, CandidateTable, Ints, Placements
from axonn_tune.strategies.axonn4d import AXONN
from axonn_tune.strategies.strategy import Strategy

# How far from a count that admits no grid the nearest ones that do are looked for.
NEAREST_TRIED = 1024

# Axes that split the products of one token.
TENSOR_AXES = ("x", "y", "z", "tensor")

Rules = Callable[[Placements], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Constraints:
    """What the user fixed: axes, the largest tensor-parallel degree, orders, micro-batch."""

    axes: Mapping[str, int] = field(default_factory=dict)
    max_tp: int | None = None
    orders: tuple[str, ...] = (PAPER_ORDER,)
    micro_batch: int | None = None


def divisors(n: int) -> Ints:
    """All divisors of n, ascending."""
    small = np.arange(1, int(n**0.5) + 1)
    small = small[n % small == 0]
    large = (n // small)[::-1]
    return np.concatenate([small, large[large > small[-1]]])


def factorisations(n_gpus: int, n_factors: int = 4) -> Ints:
    """All ordered factorisations into so many factors, shape (factors, number of grids)."""
    factors = divisors(n_gpus)
    chosen = np.ones((0, 1), dtype=np.int64)
    for _ in range(n_factors - 1):
        chosen = np.concatenate(
            [
                np.repeat(chosen, factors.size, axis=1),
                np.tile(factors, chosen.shape[1])[None],
            ]
        )
        chosen = chosen[:, n_gpus % chosen.prod(axis=0) == 0]
    return np.concatenate([chosen, n_gpus // chosen.prod(axis=0, keepdims=True)])


def legal_placements(
    n_gpus: int, constraints: Constraints, rules: Rules, strategy: Strategy = AXONN
) -> tuple[Placements, dict[str, int]]:
    """The placements that keep every rule, and how many fell to each reason.

    A placement that breaks several rules counts for the first.
    """
    sizes = factorisations(n_gpus, len(strategy.axes.names))
    placements = Placements.of_sizes(sizes, constraints.orders, strategy.axes)
    broken = broken_rules(placements, constraints, rules)
    legal = np.ones(len(placements), dtype=bool)
    rejected: dict[str, int] = {}
    for reason, mask in broken.items():
        count = int((mask & legal).sum())
        if count:
            rejected[reason] = count
        legal &= ~mask
    return placements.take(legal), rejected


def _shown(axis: str) -> str:
    return f"G_{axis}" if axis in AXES else axis


def broken_rules(
    placements: Placements, constraints: Constraints, rules: Rules
) -> Mapping[str, np.ndarray]:
    """For each reason the placements it rejects, the user's constraints first."""
    masks: dict[str, np.ndarray] = {}
    for axis, size in constraints.axes.items():
        masks[f"{_shown(axis)} fixed to {size}"] = placements.size(axis) != size
    split = [axis for axis in placements.axes.names if axis in TENSOR_AXES]
    if constraints.max_tp is not None and split:
        masks[f"{'*'.join(map(_shown, split))} above --max-tp {constraints.max_tp}"] = (
            placements.size("*".join(split)) > constraints.max_tp
        )
    return {**masks, **rules(placements)}


def with_micro_batches(
    placements: Placements, global_batch: int, constraints: Constraints
) -> tuple[CandidateTable, dict[str, int]]:
    """Each placement with every micro-batch that divides its share of the global batch."""
    share = global_batch // placements.size("*".join(placements.axes.batch))
    shares, which = np.unique(share, return_inverse=True)
    choices = [divisors(int(local)) for local in shares]
    if constraints.micro_batch is not None:
        choices = [sizes[sizes == constraints.micro_batch] for sizes in choices]
    counts = np.array([sizes.size for sizes in choices], dtype=np.int64)[which]
    rows = np.repeat(np.arange(len(placements)), counts)
    none = np.zeros(0, dtype=np.int64)
    micro_batch = np.concatenate([none, *(choices[index] for index in which)])
    rejected = {}
    if constraints.micro_batch is not None and (counts == 0).any():
        reason = f"micro-batch {constraints.micro_batch} does not divide the share of the batch"
        rejected[reason] = int((counts == 0).sum())
    return CandidateTable(placements, rows, micro_batch), rejected


def no_grid_error(
    n_gpus: int,
    constraints: Constraints,
    rules: Rules,
    rejected: Mapping[str, int],
    strategy: Strategy = AXONN,
) -> NoCandidateError:
    """Says what each grid fell to and which counts of GPUs nearby do admit one."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.items())

    def admits(n: int) -> bool:
        return len(legal_placements(n, constraints, rules, strategy)[0]) > 0

    near = nearest_counts(n_gpus, admits)
    hint = f"; nearest counts that do: {', '.join(map(str, near))}" if near else ""
    return NoCandidateError(f"no grid for {n_gpus} GPUs ({reasons}){hint}")


def nearest_counts(n_gpus: int, admits: Callable[[int], bool]) -> Sequence[int]:
    """The nearest smaller and larger count that `admits`, within `NEAREST_TRIED` of it."""
    below = range(n_gpus - 1, max(n_gpus - NEAREST_TRIED, 0), -1)
    above = range(n_gpus + 1, n_gpus + NEAREST_TRIED)
    found = (next((n for n in counts if admits(n)), None) for counts in (below, above))
    return [n for n in found if n is not None]
