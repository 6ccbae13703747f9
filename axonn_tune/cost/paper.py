"""AxoNN's own analytical model: the bandwidth-only communication time of a grid.

The model (Singh et al., arXiv 2502.08145, performance model) counts ring lower bounds without
latency and without computation, over the four linear layers of each block; 2 bytes per element
for weights and activations, 4 for the data-parallel gradients. Each function is one of its
equations for one layer with weight k x n; arrays have shape (P,).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from axonn_tune.cost.links import AxisLinks
from axonn_tune.spec.blocks import Linear
from axonn_tune.spec.candidates import Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import AXES
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array

ELEMENT_BYTES = 2.0
GRADIENT_BYTES = 4.0


def all_gather_z_seconds(kn: float, x: Array, y: Array, z: Array, beta_z: Array) -> Array:
    """Return t_AG,z = 1/beta_z (G_z - 1) B k n / (G_x G_y G_z)."""
    return (z - 1.0) * ELEMENT_BYTES * kn / (x * y * z) / beta_z


def reduce_scatter_z_seconds(kn: float, x: Array, y: Array, z: Array, beta_z: Array) -> Array:
    """Return t_RS,z = 1/beta_z (G_z - 1)/G_z B k n / (G_x G_y)."""
    return (z - 1.0) / z * ELEMENT_BYTES * kn / (x * y) / beta_z


def all_reduce_forward_seconds(
    m_local: Array, n: float, x: Array, y: Array, beta_x: Array
) -> Array:
    """Return t_AR,fwd = 2/beta_x (G_x - 1)/G_x B m_local n / G_y."""
    return 2.0 * (x - 1.0) / x * ELEMENT_BYTES * m_local * n / y / beta_x


def all_reduce_backward_seconds(
    m_local: Array, k: float, x: Array, y: Array, beta_y: Array
) -> Array:
    """Return t_AR,bwd = 2/beta_y (G_y - 1)/G_y B m_local k / G_x."""
    return 2.0 * (y - 1.0) / y * ELEMENT_BYTES * m_local * k / x / beta_y


def all_reduce_data_seconds(
    kn: float, x: Array, y: Array, z: Array, data: Array, beta_data: Array
) -> Array:
    """Return t_AR,data = 2/beta_data (G_data - 1)/G_data B k n / (G_x G_y G_z), B = 4."""
    share = GRADIENT_BYTES * kn / (x * y * z)
    return 2.0 * (data - 1.0) / data * share / beta_data


def layer_seconds(linear: Linear, m_local: Array, sizes: Array, betas: dict[str, Array]) -> Array:
    """Return the time of all collectives of one layer.

    These are two gathers and one scatter over Z, and the all-reduces over X, Y and data.
    """
    x, y, z, data = sizes
    kn = linear.parameters
    total = 2.0 * all_gather_z_seconds(kn, x, y, z, betas["z"])
    total = total + reduce_scatter_z_seconds(kn, x, y, z, betas["z"])
    total = total + all_reduce_data_seconds(kn, x, y, z, data, betas["data"])
    beta_x, beta_y = betas["x"], betas["y"]
    if linear.transposed:
        x, y = y, x
        beta_x, beta_y = beta_y, beta_x
    total = total + all_reduce_forward_seconds(m_local, linear.n_out, x, y, beta_x)
    return total + all_reduce_backward_seconds(m_local, linear.n_in, x, y, beta_y)


def communication_seconds(
    model: Model, job: Job, placements: Placements, links: Mapping[str, AxisLinks]
) -> Array:
    """Return the paper's cost of each placement: the sum over the linear layers of all blocks."""
    sizes = np.stack([placements.size(axis) for axis in AXES]).astype(np.float64)
    m_local = job.tokens / (sizes[2] * sizes[3])
    betas = {
        axis: group_links.kinds["all_reduce"].bandwidth_bytes_per_s
        for axis, group_links in links.items()
    }
    per_block = sum(layer_seconds(linear, m_local, sizes, betas) for linear in model.block_linears)
    return model.n_layers * np.asarray(per_block)
