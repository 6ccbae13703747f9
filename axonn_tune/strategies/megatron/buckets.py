"""The buckets in which replicas of Megatron-LM reduce gradients and gather updated weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from axonn_tune.spec.plan import Array, Size
from axonn_tune.strategies.shapes import Shapes

if TYPE_CHECKING:
    from axonn_tune.strategies.megatron.megatron3d import Megatron3D


@dataclass(frozen=True, eq=False)
class Buckets:
    """How the gradients of a rank are cut into buckets.

    Gradients enter a bucket in the order in which they are formed: those of the head first, then
    those of the blocks, the last block first.

    Attributes
    ----------
    shapes
        The sizes on a rank.
    options
        The strategy.
    """

    shapes: Shapes
    options: Megatron3D

    def least_elements(self, axis: str) -> Array:
        """Return the least number of elements of a bucket that travels over an axis of replicas."""
        program = self.options.engine.megatron
        per_replica = program.bucket_elements_per_replica * self.shapes.table.size(axis)
        return np.maximum(program.bucket_elements, per_replica)

    def number(self, n_elements: Array, axis: str, n_stages: Size, n_weights: Size) -> Array:
        """Return the number of buckets in which elements travel over an axis of replicas.

        A rank with several virtual stages has one bucket for each, and more for the first, whose
        communication few passes could hide (Megatron-LM at d98e8a64, disable_bucketing in
        training/training.py). No bucket ends within one of the `n_weights` weights. Gains and
        biases count among these elements, but are not in the buckets of weights that are stored in
        8 bits, and start none.
        """
        program = self.options.engine.megatron
        bucket_elements = self.least_elements(axis)
        if not (self.options.overlap_grad_reduce or program.buckets_without_overlap):
            bucket_elements = np.maximum(n_elements, 1.0)
        elif program.fills_buckets:
            bucket_elements = self._mean_elements(bucket_elements)
        n_buckets = n_elements / n_stages / bucket_elements
        n_whole = np.ceil(n_buckets)
        if program.fills_buckets and self.options.stores_low_weights(self.shapes.job):
            n_whole = np.where(n_elements > 0, np.maximum(np.rint(n_buckets), 1.0), 0.0)
            n_whole = np.minimum(n_whole, n_weights)
        return n_whole + (n_stages - 1.0)

    def waiting(self, layers: Sequence[int], axis: str, has_head: bool) -> Array:
        """Return how many elements of some blocks wait as their first one begins, shape (C,).

        The head comes before them, unless it has a buffer of its own since it is not in 8 bits.
        """
        job, head = self.shapes.job, self.shapes.model.head
        least_elements = self.least_elements(axis)
        is_among = has_head and not self.shapes.model.tied_embeddings and job.trains_head
        is_among &= not self.options.stores_low_weights(job)
        of_head = is_among * head.parameters / self.shapes.table.size("tensor")
        waiting = of_head = np.where(of_head >= least_elements, 0.0, of_head)
        for bucket, is_full in self._fill(layers[1:], of_head, least_elements):
            waiting = np.where(is_full, 0.0, bucket)
            of_head = np.where(is_full, 0.0, of_head)
        return waiting - of_head

    def _mean_elements(self, least_elements: Array) -> Array:
        """Return the mean number of elements of buckets that end with the weight that fills them.

        Without a full bucket it is the least number.
        """
        in_buckets = n_buckets = np.zeros(len(self.shapes.table))
        layers = range(self.shapes.model.n_layers)
        for bucket, is_full in self._fill(layers, np.zeros_like(in_buckets), least_elements):
            in_buckets = in_buckets + is_full * bucket
            n_buckets = n_buckets + is_full
        return np.where(n_buckets > 0, in_buckets / np.maximum(n_buckets, 1.0), least_elements)

    def _fill(
        self, layers: Sequence[int], n_elements: Array, least_elements: Array
    ) -> Iterator[tuple[Array, np.ndarray]]:
        """Yield what the open bucket holds after each weight of some blocks, and if it is full.

        It holds `n_elements` at first, and a full one is followed by an empty one.
        """
        model = self.shapes.model
        tensor = self.shapes.table.size("tensor")
        for layer in reversed(layers):
            for linear in reversed(model.linears_of(model.blocks[layer])):
                n_elements = n_elements + linear.elements_on_rank(tensor)
                is_full = n_elements >= least_elements
                yield n_elements, is_full
                n_elements = np.where(is_full, 0.0, n_elements)
