"""Hand-overs for which the ranks of two neighbouring stages stand still together.

The order is that of nanotron's 1F1B (67c5ebb6, parallel/pipeline_parallel/engine.py, block.py and
state.py). A rank hands a forward pass on at once, before its backward pass. It keeps what a
backward pass has formed until it takes in the next micro-batch, and only then hands it back, so
that both pass in one hand-over. Before forward and backward passes alternate, and after, each has a
hand-over of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from axonn_tune.simulate.orders import FORWARD, n_warmup_passes
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import Array

# What is handed over: a forward pass, a backward pass, or one of each.
ONWARD, BACK, BOTH = range(3)


class Handovers(NamedTuple):
    """Hand-overs, each once for either of its two ranks, shape (hand-overs,).

    rank, number
        The rank, and the number of the slot in which it takes part.
    kind
        What is handed over: `ONWARD`, `BACK` or `BOTH`.
    partner
        Index of the same hand-over of the other rank.
    """

    rank: Ints
    number: Ints
    kind: Ints
    partner: Ints


_NONE = np.zeros(0, dtype=np.int64)
NO_HANDOVERS = Handovers(_NONE, _NONE, _NONE, _NONE)


def handover_durations(handover_seconds: tuple[float, float], n_candidates: int) -> Array:
    """Return how long hand-overs take by their kind, shape (kinds, C)."""
    onward, back = handover_seconds
    return np.repeat([[onward], [back], [onward + back]], n_candidates, axis=1)


def with_handovers(orders: Sequence[Ints], n_micro: int) -> tuple[list[Ints], Handovers]:
    """Return passes whose slots leave room for hand-overs, and the hand-overs.

    Parameters
    ----------
    orders : sequence of arrays of int, shape (5, passes)
        The passes of each rank, which has one stage, as `ordered_passes` returns them.
    """
    n_stages = len(orders)
    warmup = n_warmup_passes(np.arange(n_stages), n_stages, 1, n_micro)
    moved, ranks, numbers, borders, items = [], [], [], [], []
    for rank, (number, place, direction, chunk, micro) in enumerate(orders):
        is_forward = direction == FORWARD
        # A hand-over has the number of its micro-batch; that of a gradient alone comes after all.
        item = np.where(is_forward, micro, n_micro + micro)
        follows = is_forward & (rank < n_stages - 1)
        precedes = is_forward & (rank > 0)
        # A gradient passes with the micro-batch that comes as many later as the warm-up has passes.
        if rank < n_stages - 1:
            precedes |= ~is_forward & (micro + warmup[rank] >= n_micro)
        if rank > 0:
            follows |= ~is_forward & (micro + warmup[rank - 1] >= n_micro)
        number = number + np.cumsum(precedes) + np.cumsum(follows) - follows
        moved.append(np.stack([number, place, direction, chunk, micro]))
        for is_handed, slot, is_above in (
            (precedes, number - 1, is_forward),
            (follows, number + 1, ~is_forward),
        ):
            numbers.append(slot[is_handed])
            items.append(item[is_handed])
            borders.append((rank - is_above)[is_handed])
            ranks.append(np.full(int(is_handed.sum()), rank))
    border, item = np.concatenate(borders), np.concatenate(items)
    # The two halves of a hand-over stand next to each other where they are sorted.
    halves = np.lexsort((item, border)).reshape(-1, 2)
    partner = np.empty(item.size, dtype=np.int64)
    partner[halves] = halves[:, ::-1]
    is_early = item < warmup[border]
    kind = np.where(item >= n_micro, BACK, np.where(is_early, ONWARD, BOTH))
    return moved, Handovers(np.concatenate(ranks), np.concatenate(numbers), kind, partner)
