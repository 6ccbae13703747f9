"""AxoNN's own analytical model: bandwidth-only communication time of a grid.

Singh et al., arXiv 2502.08145 (performance model): ring lower bounds without latency and
without computation, over the four linear layers of each block; 2 bytes per element for
weights and activations, 4 for the data-parallel gradients. Each function is one of its
equations for one layer with weight k x n; arrays have shape (P,).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from axonn_tune.cost.links import AxisLinks
from axonn_tune.spec.candidates import Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import AXES
from axonn_tune.spec.model import Linear, Model
from axonn_tune.spec.plan import Array

ELEMENT_BYTES = 2.0
GRADIENT_BYTES = 4.0


def all_gather_z_seconds(kn: float, x: Array, y: Array, z: Array, beta_z: Array) -> Array:
    """t_AG,z = 1/beta_z (G_z - 1) B k n / (G_x G_y G_z)."""
    seconds: Array = (z - 1.0) * ELEMENT_BYTES * kn / (x * y * z) / beta_z
    return seconds


def reduce_scatter_z_seconds(kn: float, x: Array, y: Array, z: Array, beta_z: Array) -> Array:
    """t_RS,z = 1/beta_z (G_z - 1)/G_z B k n / (G_x G_y)."""
    seconds: Array = (z - 1.0) / z * ELEMENT_BYTES * kn / (x * y) / beta_z
    return seconds


def all_reduce_forward_seconds(
    m_local: Array, n: float, x: Array, y: Array, beta_x: Array
) -> Array:
    """t_AR,fwd = 2/beta_x (G_x - 1)/G_x B m_local n / G_y."""
    seconds: Array = 2.0 * (x - 1.0) / x * ELEMENT_BYTES * m_local * n / y / beta_x
    return seconds


def all_reduce_backward_seconds(
    m_local: Array, k: float, x: Array, y: Array, beta_y: Array
) -> Array:
    """t_AR,bwd = 2/beta_y (G_y - 1)/G_y B m_local k / G_x."""
    seconds: Array = 2.0 * (y - 1.0) / y * ELEMENT_BYTES * m_local * k / x / beta_y
    return seconds


def all_reduce_data_seconds(
    kn: float, x: Array, y: Array, z: Array, data: Array, beta_data: Array
) -> Array:
    """t_AR,data = 2/beta_data (G_data - 1)/G_data B k n / (G_x G_y G_z), B = 4."""
    share = GRADIENT_BYTES * kn / (x * y * z)
    seconds: Array = 2.0 * (data - 1.0) / data * share / beta_data
    return seconds


def layer_seconds(linear: Linear, m_local: Array, sizes: Array, betas: dict[str, Array]) -> Array:
    """Two gathers and one scatter over Z, the all-reduces over X, Y and data, of one layer."""
    x, y, z, data = sizes
    over_z, over_data = betas["z"], betas["data"]
    kn = linear.parameters
    total = 2.0 * all_gather_z_seconds(kn, x, y, z, over_z)
    total = total + reduce_scatter_z_seconds(kn, x, y, z, over_z)
    total = total + all_reduce_data_seconds(kn, x, y, z, data, over_data)
    # A transposed layer exchanges the X and Y axes.
    a, b = (y, x) if linear.transposed else (x, y)
    over_a, over_b = (betas["y"], betas["x"]) if linear.transposed else (betas["x"], betas["y"])
    total = total + all_reduce_forward_seconds(m_local, linear.n_out, a, b, over_a)
    return total + all_reduce_backward_seconds(m_local, linear.n_in, a, b, over_b)


def communication_seconds(
    model: Model, job: Job, placements: Placements, links: Mapping[str, AxisLinks]
) -> Array:
    """The paper's cost of each placement: the sum over the linear layers of all blocks."""
    sizes = np.stack([placements.size(axis) for axis in AXES]).astype(np.float64)
    m_local = job.tokens / (sizes[2] * sizes[3])
    betas = {
        axis: of_axis.kinds["all_reduce"].bandwidth_bytes_per_s for axis, of_axis in links.items()
    }
    per_block = sum(layer_seconds(linear, m_local, sizes, betas) for linear in model.block_linears)
    total: Array = model.n_layers * np.asarray(per_block)
    return total
