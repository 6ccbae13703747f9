"""A parameter has a place on the grid and initial values, which these functions find.

X and Y give each rank a box of the whole parameter; Z gives it a flat range of that box.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from axonn_tune.runtime.axonn.hashing import mix, unit_interval
from axonn_tune.runtime.axonn.mesh import Mesh

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes
CHUNK = 2**22  # elements initialised at once, which bounds the memory of their int64 indices


@dataclass(frozen=True)
class BlockLayout:
    """How the blocks of a parameter lie on the ranks.

    Attributes
    ----------
    shape
        Sizes of the whole parameter.
    axes
        The axis that splits each dimension, or None for a dimension that none splits.
    over_z
        Whether Z splits the rank's flattened box evenly for storage.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    over_z: bool = False

    def box(self, mesh: Mesh) -> Box:
        """Return the rank's box, before Z splits it."""
        n_parts = [mesh.size(axis) if axis else 1 for axis in self.axes]
        places = [mesh.coordinate(axis) if axis else 0 for axis in self.axes]
        sizes = tuple(size // n for size, n in zip(self.shape, n_parts, strict=True))
        return tuple(p * s for p, s in zip(places, sizes, strict=True)), sizes

    def stored_range(self, mesh: Mesh) -> tuple[int, int]:
        """Return where the rank's range of the flattened box starts, and where it stops."""
        n_elements = math.prod(self.box(mesh)[1])
        if not self.over_z:
            return 0, n_elements
        n_stored = n_elements // mesh.size("z")
        start = mesh.coordinate("z") * n_stored
        return start, start + n_stored

    def stored_boxes(self, mesh: Mesh) -> list[Box]:
        """Return the stored range as boxes of the whole parameter, in order."""
        offsets, sizes = self.box(mesh)
        return [
            (tuple(o + i for o, i in zip(offsets, inner, strict=True)), extent)
            for inner, extent in _boxes_of_range(sizes, *self.stored_range(mesh))
        ]

    def take(self, whole: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return what this rank stores of a whole parameter, flattened."""
        offsets, sizes = self.box(mesh)
        part = whole.reshape(self.shape)
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        start, stop = self.stored_range(mesh)
        return part.reshape(-1)[start:stop]

    @torch.no_grad()
    def initialise(
        self, stored: torch.Tensor, mesh: Mesh, name: str, seed: int, std: float
    ) -> None:
        """Fill what this rank stores with normal deviates.

        Each value depends on the element's place in the whole parameter only, so every grid
        starts from the same model.
        """
        start, stop = self.stored_range(mesh)
        for first in range(start, stop, CHUNK):
            last = min(first + CHUNK, stop)
            index = self._global_index(torch.arange(first, last, device=stored.device), mesh)
            values = std * normal_deviates(index, name, seed)
            stored[first - start : last - start] = values.to(stored.dtype)

    def _global_index(self, index: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return the indices in the flattened whole of elements of the flattened box."""
        offsets, sizes = self.box(mesh)
        whole = torch.zeros_like(index)
        stride = 1
        for offset, size, extent in reversed(list(zip(offsets, sizes, self.shape, strict=True))):
            whole += (index % size + offset) * stride
            index = index // size
            stride *= extent
        return whole


def normal_deviates(index: torch.Tensor, name: str, seed: int) -> torch.Tensor:
    """Return a normal deviate in float64 for each index of an element of a parameter."""
    key = mix(torch.tensor(zlib.crc32(name.encode()) + (seed << 32), device=index.device))
    radius = (-2.0 * unit_interval(mix(2 * index + key)).log()).sqrt()
    angle = 2.0 * math.pi * unit_interval(mix(2 * index + 1 + key))
    return radius * angle.cos()


def _boxes_of_range(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut elements `start` to `stop` of a flattened box into boxes of it, in order."""
    if start == stop:
        return
    if len(sizes) == 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(sizes[1:])
    first_whole = -(-start // row)
    end_whole = stop // row
    if first_whole > end_whole:
        yield from _within_row(sizes, end_whole, start - end_whole * row, stop - end_whole * row)
        return
    if start < first_whole * row:
        yield from _within_row(sizes, first_whole - 1, start - (first_whole - 1) * row, row)
    if first_whole < end_whole:
        zeros = (0,) * (len(sizes) - 1)
        yield (first_whole, *zeros), (end_whole - first_whole, *sizes[1:])
    if end_whole * row < stop:
        yield from _within_row(sizes, end_whole, 0, stop - end_whole * row)


def _within_row(sizes: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, extent in _boxes_of_range(sizes[1:], start, stop):
        yield (row, *offsets), (1, *extent)
