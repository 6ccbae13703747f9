"""The memory of a rank with sharded states, as DeepSpeed and torch's first FSDP hold them.

That of torch's FSDP2 is in `fsdp2`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from axonn_tune.spec.engine import Engine
from axonn_tune.spec.plan import Array, Size
from axonn_tune.strategies.context import ContextParallelism
from axonn_tune.strategies.moved import (
    host_activations,
    largest_moved,
    moved_by_layers,
    saved_by_kernels,
)
from axonn_tune.strategies.optimizer import host_copies, states_of
from axonn_tune.strategies.shapes import Shapes
from axonn_tune.strategies.zero.communication import INT4_BYTES
from axonn_tune.strategies.zero.gathers import INT8_BYTES
from axonn_tune.strategies.zero.held import BucketRules, HeldModel, held
from axonn_tune.strategies.zero.sharding import Sharding
from axonn_tune.strategies.zero.zero_units import ZeroUnits


@dataclass(frozen=True, eq=False)
class ZeroMemory:
    """The peak memory of a rank.

    Attributes
    ----------
    units : ZeroUnits
        The units of its weights, one of them in a block.
    sharing : ContextParallelism
        How ranks share sequences, if they do.
    transposes : bool
        Whether weights are gathered in a low format, and transposed for the backward pass.
    quantised_weights, quantised_gradients : bool
        Whether weights are gathered in INT8, and whether gradients travel in INT4 between nodes.
    """

    shapes: Shapes
    units: ZeroUnits
    sharding: Sharding
    engine: Engine
    sharing: ContextParallelism
    transposes: bool
    quantised_weights: bool
    quantised_gradients: bool

    def peak(self) -> dict[str, Array]:
        """Return the peak bytes of a rank by term, each of shape (C,).

        A block saves the inputs of its products and of the kernels between them, at whole widths;
        selective recomputation forms the softmax of unfused attention again.
        """
        shapes, job, sharding = self.shapes, self.shapes.job, self.sharding
        owned = self._trained / shapes.table.size(sharding.states)
        without_scores = saved_by_kernels(shapes) + self.sharing.saved_bytes
        everything = without_scores + shapes.saved_score_bytes
        saved = {
            "none": everything,
            "selective": without_scores,
            "full": shapes.residual_bytes,
        }[shapes.recompute]
        # When attention's gradients are formed, its buffers exist, but what the MLP saved is freed.
        in_attention = everything - shapes.saved_mlp_bytes + self.sharing.working_bytes - saved
        working = np.maximum(shapes.working_set(everything, saved, last=True), in_attention)
        layers, n_layers = range(shapes.model.n_layers), shapes.n_backward
        moved = moved_by_layers(shapes, layers, n_layers)
        left = n_layers * (shapes.saved_by_layers(saved, n_layers) - moved)
        return {
            "weights": self._weight_bytes,
            "gradients": self._trained * job.element_bytes / shapes.table.size(sharding.gradients),
            "optimizer_states": owned * states_of(job, self.engine.low_states).nbytes,
            **host_copies(job, self.engine.offload_in(job), owned),
            "gathered_weights": self._held_bytes,
            **host_activations(job, n_layers * moved),
            "activations": left + shapes.residual_bytes,
            "working_set": working + largest_moved(shapes, layers),
        }

    @property
    def _parameters(self) -> Size:
        """The number of all parameters."""
        root, block = self.units.all
        return block.count * block.parameters + root.parameters

    @property
    def _trained(self) -> Size:
        """The number of all trained parameters."""
        root, block = self.units.all
        return block.all_trained + root.trained

    @property
    def _weight_bytes(self) -> Array:
        """The bytes of a rank's shards of the weights, and of their second copy, shape (C,)."""
        job, table = self.shapes.job, self.shapes.table
        _, block = self.units.all
        nbytes = self._parameters * job.element_bytes
        low_bytes = nbytes - block.count * block.saved_bytes(job)
        shard_bytes = low_bytes / table.size(self.sharding.weights)
        if not self.sharding.copy:
            return shard_bytes
        return shard_bytes + nbytes / table.size(self.sharding.copy)

    @property
    def _held_bytes(self) -> Array:
        """The bytes of whole gradients and of gathered weights that a rank holds, shape (C,).

        An engine that limits gathered elements holds what `held` plays, others whole blocks.
        """
        shapes, program = self.shapes, self.engine.zero
        element_bytes = shapes.job.element_bytes
        if not (self.sharding.weights and program.live_elements):
            return self._held_gradients * element_bytes + self._held_weight_bytes
        crosses_nodes = shapes.table.size(self.sharding.reduced_over[-1]) > 1
        is_exchanged = self.quantised_gradients & crosses_nodes
        reduced, exchanged = (self._held(exchanges) for exchanges in (False, True))
        return element_bytes * np.where(is_exchanged, exchanged, reduced)

    def _held(self, exchanges: bool) -> Array:
        """Return the elements of whole gradients and of gathered weights, shape (C,).

        Parameters
        ----------
        exchanges
            Whether gradients are quantised and exchanged.
        """
        program, job, model = self.engine.zero, self.shapes.job, self._held_model
        bucket = BucketRules(
            program.bucket_elements,
            (program.reduced_element_bytes or job.element_bytes) / job.element_bytes,
            exchanges * INT4_BYTES / job.element_bytes,
        )
        share = INT8_BYTES / job.element_bytes if self.quantised_weights else 1.0
        most = held(model, self.units.fetch_rules, bucket, share)
        return np.where(self._is_gathered, most.weights_and_gradients, most.gradients)

    @property
    def _held_model(self) -> HeldModel:
        """The matrices of the model, as modules use them."""
        job = self.shapes.job
        _, block = self.units.all
        return replace(
            self.units.matrices,
            trained_of_block=_of_all(block.trained) / _of_all(block.parameters),
            trained_embedding=float(job.trains_embedding),
            trained_head=float(job.trains_head),
        )

    @property
    def _is_gathered(self) -> np.ndarray:
        """Whether a rank computes with copies of weights that it gathers, shape (C,)."""
        offload = self.engine.offload_in(self.shapes.job)
        comes_from_host = offload is not None and offload.weights
        return (self.shapes.table.size(self.sharding.weights) > 1) | comes_from_host

    @property
    def _held_gradients(self) -> Size:
        """The number of whole gradients that a rank holds.

        They are those of two blocks and of the largest of the ends that are reduced by themselves,
        since only one of these is held at a time. Where weights are whole, each gradient is copied
        to one of two buckets as soon as it is formed (DeepSpeed 0.19,
        runtime/zero/stage_1_and_2.py, setup_buckets).
        """
        if not self.sharding.weights:
            return np.full(len(self.shapes.table), 2.0 * self.engine.zero.bucket_elements)
        _, block = self.units.all
        of_ends = [end.trained for end in self.units.ends.values()]
        return 2.0 * block.trained + reduce(np.maximum, of_ends)

    @property
    def _held_weight_bytes(self) -> Array:
        """The bytes of the gathered weights of two blocks and the root, shape (C,)."""
        job, program = self.shapes.job, self.engine.zero
        root, block = self.units.all
        two_blocks = 2.0 * block.parameters + root.parameters
        nbytes = two_blocks * job.element_bytes - 2.0 * block.saved_bytes(job)
        if self.transposes:
            n_transposed = block.count if program.keeps_transposed else 1
            nbytes = nbytes + n_transposed * block.low * job.operand_bytes
        return np.where(self._is_gathered, nbytes, 0.0)


def _of_all(size: Size) -> float:
    """Return the size that all candidates have, since DeepSpeed splits no layer."""
    return float(np.max(size))
