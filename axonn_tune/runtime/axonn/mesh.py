"""The ranks of a grid as torch's DeviceMesh: one process group per axis, in any rank order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from axonn_tune.errors import InputError
from axonn_tune.spec.grid import AXES, PAPER_ORDER, Grid, check_order


class Mesh:
    """The rank's place in a G_x x G_y x G_z x G_data grid.

    Parameters
    ----------
    grid : Grid
        Its product must be the number of ranks of the default process group.
    order : str
        Fastest varying axis of the rank number first (``"xyzd"``, AxoNN's own).
    device : torch.device or str
        Where tensors live.

    Raises
    ------
    InputError
        The grid does not have as many ranks as the job.
    """

    def __init__(
        self, grid: Grid, order: str = PAPER_ORDER, device: torch.device | str = "cpu"
    ) -> None:
        world = dist.get_world_size()
        if grid.n_ranks != world:
            raise InputError(f"grid {grid} needs {grid.n_ranks} ranks; this job has {world}")
        self.grid, self.order, self.device = grid, check_order(order), torch.device(device)
        self.device_mesh = DeviceMesh(
            self.device.type, rank_table(grid, order), mesh_dim_names=tuple(reversed(AXES))
        )
        self._places: dict[str, int] = {
            axis: self.device_mesh.get_local_rank(axis) for axis in AXES
        }

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        size: int = getattr(self.grid, axis)
        return size

    def coordinate(self, axis: str) -> int:
        """The rank's place along an axis."""
        return self._places[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in their place along an axis only."""
        return self.device_mesh.get_group(axis)

    @property
    def batch_index(self) -> int:
        """Which share of the global batch this rank works on, of ``G_z * G_data``."""
        return self.coordinate("data") * self.size("z") + self.coordinate("z")

    def close(self) -> None:
        """Give the groups of the axes back."""
        for group in [self.group(axis) for axis in AXES]:
            if group is not dist.group.WORLD:  # which serves an axis that spans all ranks
                dist.destroy_process_group(group)


class Alone(Mesh):
    """A grid of this rank alone, whatever others there are: nothing is communicated."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.grid, self.order, self.device = Grid(1, 1, 1, 1), PAPER_ORDER, torch.device(device)
        self._places = dict.fromkeys(AXES, 0)

    def close(self) -> None:
        """There are no groups."""


def rank_table(grid: Grid, order: str) -> torch.Tensor:
    """Rank numbers, shape (G_data, G_z, G_y, G_x), when `order`'s first axis varies fastest."""
    axis_of = {axis[0]: axis for axis in AXES}
    slowest_first = [axis_of[letter] for letter in reversed(order)]
    ranks = torch.arange(grid.n_ranks).reshape([getattr(grid, axis) for axis in slowest_first])
    return ranks.permute([slowest_first.index(axis) for axis in reversed(AXES)]).contiguous()
