"""What PyTorch's caching allocator reserves beyond the tensors of a stage.

The allocator never returns a segment while there is room (c10/cuda/CUDACachingAllocator.cpp at
001074d2, alloc_block and release_cached_blocks). A tensor takes the smallest free block in which it
fits, and what it cuts out of a block is lost to any tensor that needs the whole one. The rules were
derived by replaying the allocations of nanotron's first steps (models/llama.py and optim/zero.py at
e24d2483) through a model of that allocator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.engine import MemoryForm
from axonn_tune.spec.facts import value_or
from axonn_tune.spec.plan import Array
from axonn_tune.strategies.shapes import FP32_BYTES, LinearShape, Shapes

# Bytes of torch's workspace for products on Hopper (aten/src/ATen/cuda/CublasHandlePool.cpp), where
# the replayed steps ran.
_WORKSPACE_BYTES = 32 * 2**20
# Sizes of c10/cuda/CUDACachingAllocator.cpp: the largest tensor of the pool of small ones
# (kSmallSize), the segment that larger tensors below 10 MiB (kMinLargeAlloc) take (kLargeBuffer),
# and the multiple to which the segments of all others are rounded up (kRoundLarge).
_SMALL_BYTES = 2**20
_SHARED_SEGMENT_BYTES = 20 * 2**20
_LEAST_OWN_BYTES = 10 * 2**20
_ROUND_BYTES = 2 * 2**20


@dataclass(frozen=True)
class Segments:
    """The blocks that the activations of a stage leave free between two steps.

    Attributes
    ----------
    shapes
        The sizes of a micro-step.
    n_layers
        Number of layers of the stage.
    held : array, shape (C,)
        Number of layers whose activations are held at once.
    last
        Whether the stage computes the logits.
    """

    shapes: Shapes
    n_layers: int
    held: Array
    last: bool

    @property
    def kept_bytes(self) -> Array | float:
        """The bytes of the buffers for the gathered residual stream; a single rank needs none."""
        streams = value_or(self._memory.kept_streams, 0.0) * self._has_group
        return streams * self.shapes.stream_bytes

    @property
    def uncounted_bytes(self) -> Array | float:
        """The bytes of what is reserved beside the terms where an engine counts segments.

        These are small tensors, and the input and the output of the final norm, which are saved
        beside the logits. Attention saves the logarithm of its scores' sum in fp32 for each query,
        and each layer has a cosine and a sine of its own for every position (flash-attention 2.7.3,
        layers/rotary.py). The rest of a segment that two weights leave is lost, too.
        """
        if not self._memory.counts_segments:
            return 0.0
        shapes, model = self.shapes, self.shapes.model
        sums = self.held * FP32_BYTES * shapes.tokens * model.n_heads / shapes.y
        angles = self.n_layers * shapes.job.seq_len * model.head_dim * shapes.element_bytes
        final_norm = self.last * 2.0 * shapes.residual_bytes
        return sums + angles + final_norm + self.n_layers * self._lost_beside_weights

    def rounded_bytes(self, bucket_bytes: float) -> Array | float:
        """Return the bytes that are lost where buckets are rounded up to whole segments.

        Weights are multiples of what segments are rounded to, and the gain of a norm is not. It is
        counted where the weights of attention, and those of the MLP, fill a bucket each, so that no
        bucket has two gains.
        """
        if not self._memory.counts_segments:
            return 0.0
        n_gains = self.n_layers * self.shapes.model.norms_per_block + self.last
        attention = [linear.name for linear in self.shapes.model.attention_linears]
        of_attention = sum(self.shapes.linears[name].weight_bytes for name in attention)
        of_layer = sum(x.weight_bytes for x in self._weights)
        are_whole = np.all([x.weight_bytes % _ROUND_BYTES == 0 for x in self._weights], axis=0)
        fill_buckets = np.minimum(of_attention, of_layer - of_attention) >= bucket_bytes
        return n_gains * _ROUND_BYTES * (are_whole & fill_buckets)

    def unsummed_bytes(self, matrices: Array, embedding: Array, of_one: Array) -> Array:
        """Return the bytes of gradients that stand between micro-steps of a pipeline, shape (C,).

        They take the blocks of the activations of their own micro-batch, which go as they come.

        Parameters
        ----------
        matrices, embedding : array, shape (C,) [bytes]
            Gradients of the layers' weights, and of the embedding (0 outside the first stage).
        of_one : array, shape (C,) [bytes]
            Activations of one micro-batch.
        """
        beyond = np.maximum(matrices - of_one, 0.0)
        return beyond + self.alone_bytes(embedding)

    def alone_bytes(self, embedding: Array) -> Array:
        """Return the bytes of the embedding's gradient if no block of a layer holds it, shape (C,).

        Torch's DistributedDataParallel copies gradients to its buckets, beside which they stand
        until then (gradient_as_bucket_view).
        """
        return embedding * (embedding > self._largest_of_layers)

    def held_back_bytes(
        self, states: Array, weights: Array, replicas: Array, n_micro: Array, queued: Array
    ) -> Array:
        """Return what stays reserved beside the tensors of the peak, shape (C,) [bytes].

        The optimizer's states, which the first step allocates last, share the segments that copies
        of a gather need. A replay of the allocator has them do so in a stage without logits and
        without a tensor group, too, but 78 runs of such stages are predicted better (an error of
        3.6 instead of 4.7 %) if they do not. Queued tensors cannot hold copies, whose parts are
        larger or which the GPU has yet to reach, but they fit in what a workspace has left of a
        block of logits.

        Parameters
        ----------
        states : array, shape (C,) [bytes]
            Moments of the optimizer.
        weights : array, shape (C,) [bytes]
            Updated weights that are gathered; 0 where states are not sharded.
        replicas, n_micro : array, shape (C,)
            Number of ranks among which states are sharded, and of micro-batches.
        queued : array, shape (C,) [bytes]
            Freed tensors that the GPU has yet to read.
        """
        states = states - np.where(weights > 0, self._small_states(replicas), 0.0)
        copies = self._copies_bytes(states, weights, replicas)
        if not self.last:
            return copies - np.minimum(copies, states) * self._has_group + queued
        lost = self._lost_to_workspace(n_micro)
        beyond_states = np.maximum(copies - states, 0.0)
        left = np.maximum(lost + copies - states, 0.0) - beyond_states
        gathers = beyond_states + np.maximum(left, queued)
        cut = np.maximum(lost, self._cut_by_states(states)) - states
        return np.where(weights > 0, gathers, np.maximum(cut, 0.0) + queued)

    @property
    def _memory(self) -> MemoryForm:
        return self.shapes.memory

    @property
    def _weights(self) -> list[LinearShape]:
        """The weights of a layer."""
        return [self.shapes.linears[linear.name] for linear in self.shapes.model.block_linears]

    @property
    def _lost_beside_weights(self) -> Array:
        """The bytes that a layer's weights leave of shared segments, shape (C,).

        Weights of one size alone are counted. Those of several sizes fill segments together, and
        what they leave is smaller.
        """
        lost, n_sharing = (np.zeros(len(self.shapes.table)) for _ in range(2))
        for shape in self._weights:
            shares = (shape.weight_bytes > _SMALL_BYTES) & (shape.weight_bytes < _LEAST_OWN_BYTES)
            n_in_segment = np.floor(_SHARED_SEGMENT_BYTES / np.maximum(shape.weight_bytes, 1.0))
            rest = _SHARED_SEGMENT_BYTES - n_in_segment * shape.weight_bytes
            lost = lost + shares * rest / np.maximum(n_in_segment, 1.0)
            n_sharing = n_sharing + shares
        return lost * (n_sharing == 1.0)

    def _small_states(self, replicas: Array) -> Array:
        """Return the bytes of moments that share no segment with large tensors, shape (C,).

        Each weight has two moments in fp32, whose parts lie in the pool of small tensors.
        """
        total = np.zeros(len(self.shapes.table))
        for shape in self._weights:
            part = shape.n_elements * FP32_BYTES / replicas
            total = total + 2.0 * part * (part <= _SMALL_BYTES)
        return self.n_layers * total

    @property
    def _has_group(self) -> np.ndarray:
        return np.asarray(self.shapes.residual_split) > 1.0

    @property
    def _logit_block(self) -> Array:
        """The bytes of the largest tensor at the loss."""
        return self.last * self.shapes.logits * value_or(self._memory.logit_block_bytes, 0.0)

    @property
    def _layer_blocks(self) -> list[Array]:
        """The bytes of the tensors that a layer saves.

        These are the MLP before, within and after its gate; q, k and v jointly, then k and v, and
        attention's output; inputs and outputs of two norms. No tensor of an MLP or of attention of
        another kind is counted.
        """
        shapes = self.shapes
        blocks = [shapes.linears["proj"].input_bytes, *[shapes.residual_bytes] * 4]
        if "up" in shapes.linears:
            blocks += [shapes.linears["up"].output_bytes, shapes.mlp_bytes, shapes.mlp_bytes]
        if "qkv" in shapes.linears:
            joint = shapes.linears["qkv"].output_bytes
            blocks += [joint, 2.0 / 3.0 * joint]
        return blocks

    @property
    def _largest_of_layers(self) -> Array:
        """The bytes of the largest tensor of a layer."""
        largest = np.max(self._layer_blocks, axis=0)
        return np.maximum(largest, self.shapes.stream_bytes * self._has_group)

    def _copies_bytes(self, states: Array, weights: Array, replicas: Array) -> Array:
        """Return the bytes of segments that only copies of gathered weights need.

        A flat copy of all weights needs one block, and each rank's part in another copy one, too.
        """
        largest = np.maximum(self._logit_block, self._largest_of_layers)
        flat = weights * (weights > largest)
        part = np.maximum(weights / replicas, 1.0)
        room = self.held * sum(np.floor(block / part) for block in self._layer_blocks) * part
        room = room + 3.0 * np.floor(self._logit_block / part) * part
        parts = np.maximum(weights + part - np.maximum(room - states, 0.0), 0.0)
        return (flat + parts) * (weights > 0) * (replicas > 1)

    def _lost_to_workspace(self, n_micro: Array) -> Array:
        """Return the bytes of the logits' block out of which a workspace is cut.

        The thread of the backward pass makes it in the first one. With a tensor group a free block
        of the whole residual stream holds it, if that is larger.
        """
        is_cut = ~self._has_group | (self.shapes.stream_bytes <= _WORKSPACE_BYTES)
        return self._logit_block * (is_cut & (n_micro > 1))

    def _cut_by_states(self, states: Array) -> Array:
        """Return the bytes of the logits' blocks that states take, all of which are then lost.

        States that fit in the block of the logits in 16 bits, which is free at the peak, take none.
        What remains of a block, and is no larger than a tensor of a layer, lies among these.
        """
        block = np.maximum(self._logit_block, 1.0)
        n_blocks = np.ceil(np.maximum(states - self._largest_of_layers, 0.0) / block)
        return np.where(states > block / 2.0, n_blocks * block, 0.0)
