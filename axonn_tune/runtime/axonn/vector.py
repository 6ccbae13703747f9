"""Parameters that Z does not split: norms, biases, positions."""

from __future__ import annotations

import math

import torch
from torch import nn

from axonn_tune.runtime.axonn.boxes import Layout
from axonn_tune.runtime.axonn.mesh import Mesh


class Vector(nn.Module):
    """A parameter of which ranks along one axis hold parts and the others copies.

    Attributes
    ----------
    shard : Parameter, shape (elements of the rank's part,)
    axis : str
        The axis that splits it.
    """

    def __init__(self, mesh: Mesh, layout: Layout, dtype: torch.dtype) -> None:
        super().__init__()
        self.layout = layout
        self.axis = next(axis for axis in layout.axes if axis is not None)
        n_elements = math.prod(layout.box(mesh)[1])
        self.shard = nn.Parameter(torch.empty(n_elements, dtype=dtype, device=mesh.device))
