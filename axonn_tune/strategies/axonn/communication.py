"""The messages of AxoNN's grid: those of a micro-step, and those at the end of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.job import Overlap
from axonn_tune.spec.layout import PIPELINE
from axonn_tune.spec.names import BACKWARD, FORWARD
from axonn_tune.spec.plan import GRADIENTS_IN_FLIGHT, Array, Size
from axonn_tune.spec.programs import BUCKETS, WHOLE
from axonn_tune.strategies.axonn.memory import (
    BACKWARD_ORDER,
    GRADIENT_BYTES,
    gathered_element_ratio,
    stored_parameters,
    trained_parameters,
    weight_bytes,
)
from axonn_tune.strategies.communication import Communication, Weight
from axonn_tune.strategies.optimizer import Gradients, Optimizer, clip_and_update, states_of
from axonn_tune.strategies.parameters import vocabulary_matrices
from axonn_tune.strategies.pipeline import layers_of_stage
from axonn_tune.strategies.program import HostProgram

if TYPE_CHECKING:
    from axonn_tune.strategies.axonn.axonn4d import Axonn4D

# Bytes of gradients that one data-parallel all-reduce carries: torch DDP's bucket_cap_mb default.
BUCKET_BYTES = 25.0 * 2**20


def gradients_awaited_by(n_in_flight: int) -> dict[str, tuple[str, ...]]:
    """Return, for each layer, the layers whose gradients are scattered before its own is formed.

    At most `n_in_flight` weight gradients wait for their reduce-scatter, so that the gradient that
    was formed `n_in_flight` gradients ago must have gone. A layer can have two such predecessors:
    one in the first block of the backward pass, and one in all other blocks.
    """
    order = ("head", *(BACKWARD_ORDER * (n_in_flight + 1)), "embedding")
    awaited: dict[str, tuple[str, ...]] = {}
    for earlier, layer in zip(order, order[n_in_flight:], strict=False):
        known = awaited.get(layer, ())
        if earlier not in known:
            awaited[layer] = (earlier, *known)
    return awaited


_GRADIENTS_AWAITED_BY = gradients_awaited_by(GRADIENTS_IN_FLIGHT)


@dataclass(frozen=True, eq=False)
class AxonnCommunication(Communication):
    """The communication of AxoNN: all-gathers and reduce-scatters over Z.

    Weights come by all-gather, and their gradients go by reduce-scatter.
    """

    options: Axonn4D

    @property
    def _z(self) -> Array:
        """The number of ranks along Z."""
        return self.shapes.table.size("z")

    @property
    def norm_axis(self) -> str:
        """The axis whose ranks add the sums of a norm, unless each normalises its own features."""
        return "" if self.options.engine.axonn.normalises_parts else self.shapes.x_axis

    # Weights -----------------------------------------------------------------------------

    @property
    def backward_overlap(self) -> Overlap:
        """The overlaps of the job, unless the program overlaps its forward pass alone."""
        if self.options.engine.axonn.overlaps_backward:
            return self.shapes.job.overlap
        return Overlap(False, False, False)

    @property
    def keeps_weights(self) -> bool:
        """Whether weights stay with the rank: they are gathered whenever they are used."""
        return False

    def prefetch_weight(self, host: HostProgram, weight: Weight) -> None:
        """Start to gather the weight, unless it is gathered when it is taken."""
        if self._is_gathered(weight) and not self._is_late(weight):
            self._gather(host, weight)

    def take_weight(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Wait until the weight is gathered; with OAG, start to gather the one that follows."""
        if self._is_gathered(weight):
            if self._is_late(weight):
                self._gather(host, weight)
            host.wait(names.all_gather(weight.name))
            self._join(host, weight)
            self._convert(host, weight)
        if following is not None:
            self.prefetch_weight(host, following)

    def _is_gathered(self, weight: Weight) -> bool:
        """Return whether this use of a weight gathers it; if not, the rank has it already."""
        program = self.options.engine.axonn
        if not program.splits_over_z(weight.layer):
            return False
        if weight.chain == FORWARD:
            return True
        is_at_hand = (
            program.reuses_recomputed_weights
            and self.shapes.recompute == "full"
            and weight.chain == BACKWARD
            and weight.layer != "head"
        )
        return not (is_at_hand or self.shapes.job.keep_gathered_weights)

    def _is_late(self, weight: Weight) -> bool:
        """Return whether a weight is gathered only when it is used; without OAG every weight is."""
        return not self._has_oag(weight) or self.options.engine.axonn.gathers_late(weight.name)

    def _has_oag(self, weight: Weight) -> bool:
        """Return whether the pass that uses a weight gathers weights ahead."""
        forward = weight.chain == FORWARD
        return (self.shapes.job.overlap if forward else self.backward_overlap).oag

    def _gather(self, host: HostProgram, weight: Weight) -> None:
        """Start to gather a weight."""
        host.issue(names.all_gather(weight.name), "all_gather", self._gathered_bytes(weight), "z")

    def _gathered_bytes(self, weight: Weight) -> Array:
        """Return the bytes of a weight as it is gathered."""
        ratio = gathered_element_ratio(self.shapes, self.options.engine.axonn)
        return ratio * weight_bytes(self.shapes, weight.layer)

    def _join(self, host: HostProgram, weight: Weight) -> None:
        """Copy the shards of a weight that came as a list to one tensor, where Z splits it."""
        program = self.options.engine.axonn
        if program.shard_copies is not None and program.gathers_list(
            weight.name, self._has_oag(weight)
        ):
            nbytes = program.shard_copies.value * self._gathered_bytes(weight) * (self._z > 1)
            host.memory_bound(names.join(weight.name), nbytes, "copy")

    def _convert(self, host: HostProgram, weight: Weight) -> None:
        """Convert a gathered weight to the job's type, if it was gathered in another one."""
        ratio = gathered_element_ratio(self.shapes, self.options.engine.axonn)
        if ratio != 1.0:
            nbytes = (1.0 + ratio) * weight_bytes(self.shapes, weight.layer)
            host.memory_bound(names.convert(weight.name), nbytes, "copy")

    # Attention ---------------------------------------------------------------------------

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Run attention, over shared sequences if ranks share any, and the copies around it."""
        self.options.context(self.shapes).attend(host, chain, window)
        program = self.options.engine.axonn
        copies = program.backward_copies if chain == BACKWARD else program.forward_copies
        if copies is not None and self.shapes.job.attention == "flash":
            nbytes = copies.value * self.shapes.linears["proj"].input_bytes
            host.memory_bound(names.of_layer(chain, "attention_copies"), nbytes, "copy")

    # Gradients ---------------------------------------------------------------------------

    def before_weight_gradient(self, host: HostProgram, layer: str) -> None:
        """Wait until at most `GRADIENTS_IN_FLIGHT` gradients are under way, if ORS is on."""
        if self.backward_overlap.ors and not self.options.engine.axonn.awaits_scatters_at_end:
            for earlier in _GRADIENTS_AWAITED_BY.get(layer, ()):
                if self._is_split(earlier):
                    host.wait(self._last_scatter(earlier))

    def send_gradient(self, host: HostProgram, layer: str) -> None:
        """Start to scatter the gradient over Z, and over data; without ORS, wait for it.

        The gradient of a weight that Z does not split stays until the end of the step.
        """
        if not self._is_split(layer):
            return
        nbytes = weight_bytes(self.shapes, layer)
        scattered = _scatter(layer)
        host.issue(scattered, "reduce_scatter", nbytes, "z")
        if self._shards_gradients:
            name, replicas = self._last_scatter(layer), self.options.replicas
            host.issue(name, "reduce_scatter", nbytes / self._z, replicas, after=(scattered,))
        if layer != "embedding" and not self.backward_overlap.ors:
            host.wait(self._last_scatter(layer))

    def _is_split(self, layer: str) -> bool:
        """Return whether Z splits the weight of a layer."""
        return self.options.engine.axonn.splits_over_z(layer)

    @property
    def _vocabulary_shards(self) -> Array | float:
        """The number of ranks along Z that share the weight of the embedding, or of the head."""
        return self._z if self._is_split("embedding") else 1.0

    def _last_scatter(self, layer: str) -> str:
        """Return the name of the message that brings a layer's gradient to where it is summed."""
        name = _scatter(layer)
        return names.over(name, "data") if self._shards_gradients else name

    @property
    def embedding_starts_from_zero(self) -> Array | float:
        """Whether the embedding's gradient begins from zero (1) or adds to the head's (0).

        With tied embeddings, it can add to the head's gradient where this has not been scattered.
        """
        return self._is_scattered if self.shapes.model.tied_embeddings else 1.0

    @property
    def _is_scattered(self) -> Array:
        """Whether the embedding's gradient is formed apart from the head's (1) or not (0).

        It is formed apart where a group of ranks scatters each gradient as soon as it is formed,
        and where Z does not split the weight, since autograd then adds the two gradients.
        """
        if not self._is_split("embedding"):
            return np.ones(len(self.shapes.table))
        return (self._z * self._gradient_shards > 1).astype(np.float64)

    @property
    def _shards_gradients(self) -> bool:
        """Whether the micro-step scatters gradients over data, too."""
        return self.options.shards_gradients(self.shapes.job)

    @property
    def _gradient_shards(self) -> Array:
        """The number of replicas that share the sums of a matrix's gradients."""
        if not self._shards_gradients:
            return np.ones(len(self.shapes.table))
        return self.shapes.table.size(self.options.replicas)

    # Gradients that are reduced over data during the backward pass ---------------------------

    @property
    def reduces_later(self) -> bool:
        """Whether this micro-step reduces gradients of matrices, each block's one block later.

        By then all of them have been scattered over Z, so that nothing waits.
        """
        return self.sync

    def end_block(self, host: HostProgram, is_first: bool) -> None:
        """Add up and start to reduce the gradients of the matrices of the block before this one.

        Before the first block there is the head, unless it shares its weight with the embedding.
        """
        if not self.sync:
            return
        unit = "head" if is_first else "block"
        elements = self._head_matrix if is_first else self._block_matrices
        if elements is None:
            return
        owner = names.gradient(unit)
        self._accumulate(host, names.accumulate(owner), elements)
        nbytes = elements * GRADIENT_BYTES
        n_calls = np.ceil(nbytes / BUCKET_BYTES)
        name = names.collective(owner, self._reduction_kind)
        host.issue(name, self._reduction_kind, nbytes, self.options.replicas, n_calls)

    @property
    def _block_matrices(self) -> Array:
        """The number of elements that a rank stores of the matrices of a block."""
        shapes = self.shapes
        return stored_parameters(shapes.model, shapes.table, 1, False, False)[0]

    @property
    def _head_matrix(self) -> Array | None:
        """The number of a rank's elements of the head; None if it is shared with the embedding.

        It is None, too, if the head is frozen.
        """
        shapes = self.shapes
        if shapes.model.tied_embeddings or not shapes.job.trains_head:
            return None
        return shapes.vocabulary_parameters / (shapes.x * shapes.y * self._vocabulary_shards)

    @property
    def _reduced_in_backward(self) -> Array | float:
        """The number of gradient elements that the last backward pass reduces."""
        if not self.options.overlaps_reduction(self.shapes.job):
            return 0.0
        of_blocks = (self.shapes.n_backward - 1) * self._block_matrices
        head = self._head_matrix
        return of_blocks if head is None else of_blocks + head

    @property
    def _reduction_kind(self) -> str:
        """The kind of collective that sums gradients over data."""
        return "reduce_scatter" if self.options.sharded_optimizer else "all_reduce"

    def _accumulate(self, host: HostProgram, name: str, n_elements: Array) -> None:
        """Add gradients of a micro-step to their fp32 sums, unless they were formed there."""
        element_bytes = self.shapes.element_bytes + 2.0 * GRADIENT_BYTES
        host.memory_bound(name, self._adds_gradients * n_elements * element_bytes, "add")

    @property
    def _adds_gradients(self) -> np.ndarray:
        """Whether gradients of micro-steps are added to sums, shape (C,)."""
        return self.options.adds_gradients(self.shapes.job, self.shapes.table)

    # Once per micro-step and once per step, on what the rank stores ------------------------

    def _largest_stage(self) -> tuple[Array, Array]:
        """Return `trained_parameters` of the first stage; with the embedding it has the most."""
        n_layers = len(layers_of_stage(self.shapes, 0, self.shapes.table))
        is_last = self.shapes.table.n_stages == 1
        program = self.options.engine.axonn
        return trained_parameters(self.shapes, program, n_layers, True, is_last)

    def accumulate(self, host: HostProgram, last_layer: str) -> None:
        """Add the micro-step's gradients to the fp32 sums, once the last scatter has ended."""
        shapes = self.shapes
        sharded, replicated = self._largest_stage()
        n_shards = self._gradient_shards
        trains_weights = shapes.job.trains_weights
        if not self._is_split(last_layer):
            last_layer = shapes.model.block_linears[0].name
        if trains_weights and (shapes.n_backward or self._is_split("embedding")):
            host.wait(self._last_scatter(last_layer))
        has_copy = shapes.model.tied_embeddings and shapes.table.n_stages == 1
        if shapes.job.trains_embedding and has_copy:
            shard_bytes = shapes.embedding_bytes / (self._vocabulary_shards * n_shards)
            host.memory_bound(names.GRADIENT_TIED, self._is_scattered * 3.0 * shard_bytes, "add")
        rest = (sharded / n_shards + replicated) / shapes.n_virtual
        if self.sync:
            owner = names.gradient("rest")
            self._accumulate(host, names.accumulate(owner), rest - self._reduced_in_backward)
        else:
            self._accumulate(host, names.GRADIENT_ACCUMULATE, rest)

    def step_end(self, host: HostProgram) -> None:
        """Reduce the gradients over data, clip them and update the weights.

        Gradients that a backward pass has reduced are left out; where gradients are sharded, only
        those of vectors remain. With a sharded optimizer each replica receives its part of the
        gradients, and the updated weights are gathered.
        """
        sharded, replicated = self._largest_stage()
        stored = sharded + replicated
        self._sum_tied_embedding(host)
        self._reduce(host, sharded, replicated)
        updated = self._update(host, stored, replicated)
        if self.options.sharded_optimizer:
            name, nbytes = names.WEIGHTS_ALL_GATHER, stored * self.shapes.element_bytes
            host.issue(name, "all_gather", nbytes, self.options.replicas, after=updated)

    def _sum_tied_embedding(self, host: HostProgram) -> None:
        """Sum the gradients of the copies of a tied embedding in the first and the last stage."""
        shapes = self.shapes
        is_tied = shapes.job.trains_weights and shapes.model.tied_embeddings
        if is_tied and shapes.table.n_stages > 1:
            n_shards = shapes.x * shapes.y * self._vocabulary_shards
            shard_bytes = shapes.vocabulary_parameters * GRADIENT_BYTES / n_shards
            host.run(names.GRADIENT_EMBEDDING, "send_recv", shard_bytes, PIPELINE)

    def _reduce(self, host: HostProgram, sharded: Array, replicated: Array) -> None:
        """Reduce over Z what its ranks hold whole, and over data what no backward pass reduced."""
        shapes, replicas = self.shapes, self.options.replicas
        remaining = sharded + replicated - self._reduced_in_backward
        if self._shards_gradients:
            remaining = replicated
        gradient_bytes = remaining * GRADIENT_BYTES
        calls = self._reduction_calls(gradient_bytes)
        vector_bytes = replicated * GRADIENT_BYTES
        vocabulary_bytes: Array | float = 0.0
        if self._n_replicated:
            of_each = shapes.vocabulary_parameters / (shapes.x * shapes.y)
            vocabulary_bytes = self._n_replicated * of_each * GRADIENT_BYTES
            name, n_calls = names.GRADIENT_VOCABULARY, float(self._n_replicated)
            host.run(name, "all_reduce", vocabulary_bytes, "z", n_calls)
        of_vectors = vector_bytes - vocabulary_bytes
        host.run(names.GRADIENT_VECTORS, "all_reduce", of_vectors, "z", calls.norms)
        if calls.vectors:
            gradient_bytes = sharded * GRADIENT_BYTES
            name = names.GRADIENT_VECTORS_OVER_DATA
            host.run(name, "all_reduce", vector_bytes, replicas, calls.vectors)
        is_sharded = self.options.sharded_optimizer
        name = names.GRADIENT_REDUCE_SCATTER if is_sharded else names.GRADIENT_ALL_REDUCE
        host.run(name, self._reduction_kind, gradient_bytes, replicas, calls.matrices)

    def _update(self, host: HostProgram, stored: Array, replicated: Array) -> tuple[str, ...]:
        """Clip the gradients and update the weights; return what the gathers wait for."""
        table, replicas = self.shapes.table, self.options.replicas
        is_sharded = self.options.sharded_optimizer
        same_weights = (replicas, *self.options.context_axes)
        summed_over = [axis for axis in table.placements.axes.groups if axis not in same_weights]
        if is_sharded:
            summed_over.append(replicas)
        owned = stored / table.size(replicas) if is_sharded else stored
        job, engine = self.shapes.job, self.options.engine
        cleared = np.where(self._adds_gradients, owned, replicated)
        return clip_and_update(
            host,
            job,
            Gradients(owned, owned, cleared, GRADIENT_BYTES),
            {names.norm_all_reduce(axis): axis for axis in summed_over},
            Optimizer(states_of(job), engine.offload_in(job), engine.axonn.clips_in_optimizer),
        )

    @property
    def _n_replicated(self) -> int:
        """The number of trained weight matrices of the largest stage that Z replicates."""
        job = self.shapes.job
        if self._is_split("embedding") or not job.trains_weights:
            return 0
        has_head = job.trains_head and self.shapes.table.n_stages == 1
        return vocabulary_matrices(self.shapes.model, job.trains_embedding, has_head)

    def _reduction_calls(self, gradient_bytes: Array) -> _ReductionCalls:
        """Return the numbers of calls that sum gradients, which take `gradient_bytes` in all."""
        model = self.shapes.model
        reduction = self.options.engine.axonn.reduction
        if reduction == BUCKETS:
            return _ReductionCalls(np.ceil(gradient_bytes / BUCKET_BYTES))
        job, n_layers = self.shapes.job, self.shapes.n_backward
        n_norms = n_layers * model.norms_per_block + job.trains_head
        n_norms *= model.vectors_per_norm
        n_biases = n_layers * sum(linear.bias for linear in model.block_linears)
        if reduction == WHOLE:
            n_positions = job.trains_embedding * (model.position == "learned")
            n_vectors = float(n_norms + n_biases + n_positions)
            is_single = self.options.engine.axonn.sums_vectors_singly and job.trains_weights
            return _ReductionCalls(1.0, norms=n_vectors if is_single else 1.0)
        if not self.shapes.job.trains_weights:
            n_products = float(2 * model.n_layers * self.shapes.n_adapters)
            return _ReductionCalls(n_products, norms=n_products)
        n_matrices = n_layers * len(model.block_linears) + job.trains_embedding + job.trains_head
        return _ReductionCalls(float(n_matrices), float(n_norms + n_biases), float(n_norms))


class _ReductionCalls(NamedTuple):
    """Counts the calls that sum gradients.

    matrices
        Calls over data for the matrices.
    vectors
        Calls over data for norms and biases; 0 where they go with the matrices.
    norms
        Calls over Z for the norms, or for adapters.
    """

    matrices: Size
    vectors: float = 0.0
    norms: float = 1.0


def _scatter(layer: str) -> str:
    """Return the name of the reduce-scatter of a layer's gradient."""
    return names.reduce_scatter(names.of_layer(BACKWARD, layer))
