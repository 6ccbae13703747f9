"""Units of sharded weights: what is gathered together, and whose gradients are reduced together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array, Size
from axonn_tune.strategies.shapes import FP32_BYTES
from axonn_tune.strategies.zero.fetches import FETCHED_ONCE, BackwardFetches


@dataclass(frozen=True)
class GatherUnit:
    """Holds weights that are gathered together, and whose gradients are reduced together.

    Attributes
    ----------
    name
        Name of the unit, ``block``, ``experts`` or ``root``.
    count
        Number of such units of the model.
    parameters
        Number of its parameters, which its ranks hold in shards.
    trained
        Number of its trained parameters, as a mean over the units that have any; the others are
        frozen.
    n_trained
        Number of such units that have trained parameters.
    gathered
        Number of its parameters that are gathered: all of them, or those of matrices only.
    n_calls, n_calls_again
        Number of gathers that carry it in a forward pass, and in a later pass.
    n_reductions
        Number of reductions that carry its gradients; a share of one where units share them.
    sharded_over
        Group whose ranks share it; empty where this is the group of the strategy.
    low
        Number of its parameters that are stored and gathered in the format of low products.
    joined, joined_again
        Share of what these gathers bring that kernels copy out of messages.
    bucketed
        Share of its gradients that fit into a bucket, where they share a message with others.
    n_matrices
        Number of its matrices.
    fetches
        What is gathered of it when it is recomputed as a whole.
    """

    name: str
    count: int
    parameters: Size
    trained: Size
    n_trained: int
    gathered: Size
    n_calls: Size
    n_calls_again: Size
    n_reductions: Size
    sharded_over: str = ""
    low: Size = 0.0
    joined: Size = 1.0
    joined_again: Size = 1.0
    bucketed: Size = 0.0
    n_matrices: int = 1
    fetches: BackwardFetches = FETCHED_ONCE

    @property
    def all_trained(self) -> Size:
        """The number of parameters that are trained, of all such units."""
        return self.n_trained * self.trained

    def all_bytes(self, job: Job, stored_element_bytes: float) -> Size:
        """Return the bytes of all such units.

        Each trained parameter takes `stored_element_bytes`, and each frozen one, which no optimizer
        updates, an element of the job's type.
        """
        parameters = self.count * self.parameters
        return _stored_bytes(job, parameters, self.all_trained, stored_element_bytes)

    def bytes_of(self, elements: Size, job: Job) -> Size:
        """Return the bytes of some of its gathered elements."""
        return elements * job.element_bytes - self.share_of(elements) * self.saved_bytes(job)

    def share_of(self, elements: Size) -> Array:
        """Return the share of the unit that some of its gathered elements are."""
        return np.asarray(elements) / np.where(np.asarray(self.gathered) > 0, self.gathered, 1.0)

    def whole_bytes(self, job: Job) -> Size:
        """Return the bytes of a unit with which a rank computes."""
        return self.parameters * job.element_bytes - self.saved_bytes(job)

    def saved_bytes(self, job: Job) -> Size:
        """Return the bytes that a whole unit saves since some parameters have a low format."""
        return self.low * (job.element_bytes - job.operand_bytes)

    def fp32_shard_bytes(self, job: Job) -> Size:
        """Return the bytes of a whole unit whose trained parameters are stored in fp32."""
        return _stored_bytes(job, self.parameters, self.trained, FP32_BYTES)


def trained_share(units: Iterable[GatherUnit], table: CandidateTable, group: str) -> Array:
    """Return how many trained parameters a rank holds if the ranks of a group share them."""
    shares = (unit.all_trained / table.size(unit.sharded_over or group) for unit in units)
    return sum(shares, start=np.zeros(len(table)))


def gradients_of_block(model: Model) -> tuple[float, ...]:
    """Return the elements of a block's weights, norms and biases, as gradients are formed."""
    norm = float(model.norm_parameters)
    between = 0.0 if model.shares_norm else norm
    sizes: list[float] = []
    for linears, norm_before in ((model.mlp_linears, between), (model.attention_linears, norm)):
        for linear in reversed(linears):
            sizes += [float(linear.bias * linear.n_out), linear.parameters]
        sizes.append(norm_before)
    return tuple(size for size in sizes if size)


def reduced_beside(model: Model) -> dict[str, tuple[str, ...]]:
    """Return the layers of a block whose matrices are reduced once a layer's gradient is formed.

    A matrix that no other gradient joins is reduced when the next gradient comes, which is that of
    its own bias, of the norm before it, or of the next matrix (DeepSpeed 0.10 to 0.19,
    runtime/zero/stage3.py, reduce_independent_p_g_buckets_and_remove_grads).
    """
    after_norm = {model.attention_linears[0].name}
    if not model.shares_norm:
        after_norm.add(model.mlp_linears[0].name)
    reduced: dict[str, tuple[str, ...]] = {}
    waiting: tuple[str, ...] = ()
    for linear in reversed(model.block_linears):
        layer = linear.name
        is_followed = linear.bias or layer in after_norm
        reduced[layer] = (*waiting, layer) if is_followed else waiting
        waiting = () if is_followed else (layer,)
    return reduced


@lru_cache(maxsize=1024)
def reductions_per_block(sizes: tuple[float, ...], n_blocks: int, bucket_elements: float) -> float:
    """Return the number of reductions of a block's gradients, averaged over equal blocks.

    DeepSpeed reduces a bucket when the next gradient does not fit, so that a matrix which is larger
    than a bucket is reduced alone, and so are the norms and biases between two of them (0.10 to
    0.19, runtime/zero/stage3.py, reduce_independent_p_g_buckets_and_remove_grads). What the last
    bucket has room for counts as a share of a reduction.

    Parameters
    ----------
    sizes
        Numbers of elements of a block's gradients, in the order in which they are formed.
    """
    n_reductions, n_held = 0, 0.0
    for size in sizes * n_blocks:
        if n_held > 0.0 and n_held + size > bucket_elements:
            n_reductions, n_held = n_reductions + 1, 0.0
        n_held += size
    return (n_reductions + min(n_held / bucket_elements, 1.0)) / n_blocks


def _stored_bytes(job: Job, parameters: Size, trained: Size, stored_element_bytes: float) -> Size:
    """Return the bytes of some parameters, of which `trained` are not frozen."""
    return trained * stored_element_bytes + (parameters - trained) * job.element_bytes
