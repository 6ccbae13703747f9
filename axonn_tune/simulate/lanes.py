"""The lanes on which groups queue, for candidates that do not agree on them.

A compiled program gives each group one lane. Candidates whose groups lie otherwise on the links can
still be played together: each group has a lane of its own in the program, and where two of them are
the same links for some candidates, what one of them does moves the other one, too, for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from axonn_tune.simulate.program import AxisLanes
from axonn_tune.spec.candidates import Ints
from axonn_tune.spec.plan import Array

# Times of the lanes of a program, by lane, arrays of shape (C,).
LaneTimes = dict[int, Array]


class LaneSharing(NamedTuple):
    """How the lanes of a program differ among the candidates that are played together.

    Arrays hold 1 for candidates for which a statement is true, and 0 for others: to multiply by
    them takes half as long as to choose.

    is_used
        By lane, for which candidates its groups have more than one rank, shape (C,). Lanes that all
        candidates use are left out.
    same
        By lane, other lanes that are the same links for some candidates, and for which ones,
        shape (C,).
    """

    is_used: Mapping[int, Array]
    same: Mapping[int, Sequence[tuple[int, Array]]]

    def occupy(self, lane_times: LaneTimes, lane: int, free: Array) -> Array:
        """Note when a lane will be free, and return it: at 0 for candidates that do not use it.

        A lane is never free earlier than it was before.
        """
        if lane in self.is_used:
            free = free * self.is_used[lane]
        lane_times[lane] = free
        for other, is_same in self.same.get(lane, ()):
            lane_times[other] = np.maximum(lane_times[other], free * is_same)
        return free

    def joined(self, lanes: frozenset[int]) -> frozenset[int]:
        """Add to some lanes those that stand for the same links, for at least one candidate."""
        return lanes.union(other for lane in lanes for other, _ in self.same.get(lane, ()))

    def rows(self, rows: np.ndarray) -> LaneSharing:
        """Return how the lanes differ among some of the candidates."""
        return LaneSharing(
            {lane: is_used[rows] for lane, is_used in self.is_used.items()},
            {
                lane: [(other, is_same[rows]) for other, is_same in others]
                for lane, others in self.same.items()
            },
        )


# Candidates that agree on all lanes.
ALIKE = LaneSharing({}, {})


def shared_lanes(groups: Sequence[str], lanes: Ints) -> tuple[AxisLanes, LaneSharing]:
    """Return the lane of each group in a program for all candidates, and how lanes differ.

    Parameters
    ----------
    groups : sequence of str
        Names of the groups over which the program runs collectives.
    lanes : array of int, shape (G, C)
        Lane of each group of each candidate; 0 for a single rank.
    """
    axis_lanes: dict[str, int] = {}
    distinct: dict[int, Ints] = {}
    for group, own in zip(groups, lanes, strict=True):
        known = [lane for lane, other in distinct.items() if np.array_equal(own, other)]
        axis_lanes[group] = known[0] if known else (len(distinct) + 1 if own.any() else 0)
        if axis_lanes[group] and not known:
            distinct[axis_lanes[group]] = own
    is_used = {lane: (own != 0) * 1.0 for lane, own in distinct.items() if not own.all()}
    same: dict[int, list[tuple[int, Array]]] = {}
    for lane, own in distinct.items():
        for other, of_other in distinct.items():
            is_same = (own == of_other) & (own != 0)
            if other != lane and is_same.any():
                same.setdefault(lane, []).append((other, is_same * 1.0))
    return axis_lanes, LaneSharing(is_used, same)
