"""Which ranks form the groups of an axis."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.spec.candidates import Placements


@dataclass(frozen=True)
class AxisGroups:
    """The groups of an axis, or of a product of neighbouring axes, among the ranks of a layout.

    n_ranks
        Number of ranks of the layout.
    stride
        Distance in rank numbers between neighbours in a group.
    size
        Number of ranks in each group.
    """

    n_ranks: int
    stride: int
    size: int

    @classmethod
    def of(cls, placements: Placements, axis: str) -> AxisGroups:
        """Return the groups of an axis in the first of the placements."""
        n_ranks = placements.layout(0).n_ranks
        return cls(n_ranks, int(placements.stride(axis)[0]), int(placements.size(axis)[0]))

    def __len__(self) -> int:
        return self.n_ranks // self.size

    def place_of(self, rank: int) -> int:
        """Return the position of a rank in its group, counted from 0."""
        return rank // self.stride % self.size

    def group_of(self, rank: int) -> int:
        """Return the number of the group of a rank; groups are counted by their first ranks."""
        return rank // (self.stride * self.size) * self.stride + rank % self.stride

    def ranks(self, group: int) -> range:
        """Return the ranks of a group in rising order."""
        block, offset = divmod(group, self.stride)
        first = block * self.stride * self.size + offset
        return range(first, first + self.stride * self.size, self.stride)


def axes_by_ranks(placements: Placements, rank: int = 0) -> dict[tuple[int, ...], str]:
    """Map the ranks of each group that a rank is in to the group's axis, or product of axes.

    The groups are those of the first of the placements. If two groups have the same ranks, the axis
    that is named first is returned.
    """
    found: dict[tuple[int, ...], str] = {}
    for axis in placements.axes.groups:
        groups = AxisGroups.of(placements, axis)
        found.setdefault(tuple(groups.ranks(groups.group_of(rank))), axis)
    return found
