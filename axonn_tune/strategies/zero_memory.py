"""The memory of a rank with sharded states, as DeepSpeed and torch's first FSDP hold them.

That of torch's FSDP2 is in `fsdp2`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import numpy as np

from axonn_tune.spec.engine import Engine
from axonn_tune.spec.plan import Array
from axonn_tune.strategies.context import ContextParallelism
from axonn_tune.strategies.moved import (
    host_activations,
    largest_moved,
    moved_by_layers,
    saved_by_kernels,
)
from axonn_tune.strategies.optimizer import host_copies, states_of
from axonn_tune.strategies.shapes import Shapes
from axonn_tune.strategies.sharding import Sharding
from axonn_tune.strategies.units import GatherUnit


def zero_memory(
    shapes: Shapes,
    units: Sequence[GatherUnit],
    ends: Iterable[GatherUnit],
    sharding: Sharding,
    engine: Engine,
    sharing: ContextParallelism,
    transposes: bool = False,
) -> dict[str, Array]:
    """Return the peak bytes of a rank by term, each of shape (C,).

    A block saves the inputs of its products and of the kernels between them, at whole widths;
    selective recomputation forms the softmax of unfused attention again.

    Parameters
    ----------
    units : sequence of GatherUnit
        The root (embedding, final norm and head), then the unit of a block.
    ends : iterable of GatherUnit
        The parts of the root whose gradients are reduced by themselves, so that only one of them is
        held at a time.
    sharing : ContextParallelism
        How ranks share sequences, if they do.
    transposes : bool
        Whether weights are gathered in a low format, and transposed for the backward pass.
    """
    job, table, program = shapes.job, shapes.table, engine.zero
    element = job.element_bytes
    offload = engine.offload_in(job)
    root, block = units
    parameters = block.count * block.parameters + root.parameters
    trained = block.all_trained + root.trained
    weights = parameters * element - block.count * block.saved_bytes(job)
    weights = weights / table.size(sharding.weights)
    if sharding.copy:
        weights = weights + parameters * element / table.size(sharding.copy)
    # The rank holds the whole gradients of two blocks and an end, and the whole weights of all
    # too where weights are gathered; or what the engine lets it hold.
    two_blocks = 2.0 * block.parameters + root.parameters
    gradients_of_two = 2.0 * block.trained + reduce(np.maximum, [end.trained for end in ends])
    held_gradients = np.maximum(gradients_of_two, np.minimum(program.bucket_elements, trained))
    if not sharding.weights:
        # Each gradient is copied to one of two buckets as soon as it is formed (DeepSpeed 0.19,
        # runtime/zero/stage_1_and_2.py, setup_buckets).
        held_gradients = np.full(len(table), 2.0 * program.bucket_elements)
    held_weights = np.maximum(two_blocks, np.minimum(program.live_elements, parameters))
    comes_from_host = offload is not None and offload.weights
    is_gathered = (table.size(sharding.weights) > 1) | comes_from_host
    held_weight_bytes = held_weights * element - 2.0 * block.saved_bytes(job)
    if transposes:
        n_transposed = block.count if program.keeps_transposed else 1
        held_weight_bytes = held_weight_bytes + n_transposed * block.low * job.operand_bytes
    held_weight_bytes = np.where(is_gathered, held_weight_bytes, 0.0)
    owned = trained / table.size(sharding.states)
    without_scores = saved_by_kernels(shapes) + sharing.saved_bytes
    everything = without_scores + shapes.saved_score_bytes
    saved = {
        "none": everything,
        "selective": without_scores,
        "full": shapes.residual_bytes,
    }[shapes.recompute]
    # When attention's gradients are formed, with its buffers, those of the MLP are done.
    in_attention = everything - shapes.saved_mlp_bytes + sharing.working_bytes
    layers = range(shapes.model.n_layers)
    moved = moved_by_layers(shapes, layers, shapes.n_backward)
    return {
        "weights": weights,
        "gradients": trained * element / table.size(sharding.gradients),
        "optimizer_states": owned * states_of(job, engine.low_states).nbytes,
        **host_copies(job, offload, owned),
        "gathered_weights": held_gradients * element + held_weight_bytes,
        **host_activations(job, shapes.n_backward * moved),
        "activations": shapes.n_backward
        * (shapes.saved_by_layers(saved, shapes.n_backward) - moved)
        + shapes.residual_bytes,
        "working_set": np.maximum(
            shapes.working_set(everything, saved, last=True), in_attention - saved
        )
        + largest_moved(shapes, layers),
    }
