"""The ranks of a grid as torch's DeviceMesh: one process group per axis, in any rank order."""

from __future__ import annotations

import torch
import torch.distributed as dist

from axonn_tune.errors import InputError
from axonn_tune.runtime.ranks.groups import device_mesh
from axonn_tune.spec.layout import (
    AXES,
    LETTERS,
    PAPER_ORDER,
    Layout,
    check_order,
    grid_layout,
)


class Mesh:
    """The place of this rank in a G_x x G_y x G_z x G_data grid, and its groups along the axes.

    Parameters
    ----------
    grid : Layout
        The product of its sizes must be the number of ranks of the default process group.
    order : str
        The axes, the one that varies fastest with the rank number first (AxoNN's is ``"xyzd"``).
    device : torch.device or str
        Device of the rank's tensors.

    Raises
    ------
    InputError
        The grid has another number of ranks than the job.
    """

    def __init__(
        self, grid: Layout, order: str = PAPER_ORDER, device: torch.device | str = "cpu"
    ) -> None:
        world = dist.get_world_size()
        if grid.n_ranks != world:
            raise InputError(f"grid {grid} needs {grid.n_ranks} ranks; this job has {world}")
        self.grid = grid
        self.order = check_order(order)
        self.device = torch.device(device)
        table = rank_table(grid, order)
        self.device_mesh = device_mesh(self.device, table, tuple(reversed(AXES)))
        self._places: dict[str, int] = {
            axis: self.device_mesh.get_local_rank(axis) for axis in AXES
        }

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.grid.size(axis)

    def coordinate(self, axis: str) -> int:
        """Return the place of this rank along an axis."""
        return self._places[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the ranks that differ from this one in their place along one axis only."""
        return self.device_mesh.get_group(axis)

    @property
    def batch_index(self) -> int:
        """Which of the ``G_z * G_data`` shares of the global batch this rank takes, from 0 on."""
        return self.coordinate("data") * self.size("z") + self.coordinate("z")

    def close(self) -> None:
        """Destroy the groups of the axes; the group of all ranks, which may serve as one, stays."""
        for group in [self.group(axis) for axis in AXES]:
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


class Alone(Mesh):
    """A grid that holds this rank only, so that it communicates with no other."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.grid = grid_layout(1, 1, 1, 1)
        self.order = PAPER_ORDER
        self.device = torch.device(device)
        self._places = dict.fromkeys(AXES, 0)

    def close(self) -> None:
        """Do nothing, since there are no groups."""


def rank_table(grid: Layout, order: str) -> torch.Tensor:
    """Return the rank numbers, shape (G_data, G_z, G_y, G_x), in an order of the axes."""
    axis_of = {letter: axis for axis, letter in LETTERS.items()}
    slowest_first = [axis_of[letter] for letter in reversed(order)]
    ranks = torch.arange(grid.n_ranks).reshape([grid.size(axis) for axis in slowest_first])
    return ranks.permute([slowest_first.index(axis) for axis in reversed(AXES)]).contiguous()
