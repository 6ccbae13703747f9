"""Megatron-LM: tensor, context, pipeline and data parallelism.

Shoeybi et al., arXiv 1909.08053 (tensor parallelism); Narayanan et al., SC21,
arXiv 2104.04473 (pipelines, interleaving); Korthikanti et al., arXiv 2205.05198 (sequence
parallelism, selective recomputation, activation memory); Megatron Core for what came later
(distributed optimizer, overlapped reductions, context parallelism).

The attention heads and the MLP's hidden units are split over the tensor group; between these
the residual stream is replicated, or with sequence parallelism split by tokens. Context
parallelism splits the sequence for everything, and brings keys and values together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.engine import IDEAL, Engine, value_or
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import PIPELINE, Axes
from axonn_tune.spec.model import Model
from axonn_tune.spec.names import BACKWARD, FORWARD
from axonn_tune.spec.plan import Array, StepPlan
from axonn_tune.strategies.communication import Weight
from axonn_tune.strategies.optimizer import clip_and_update, host_copies, state_bytes
from axonn_tune.strategies.pipeline import (
    admits_virtual,
    broken_pipeline_rules,
    chunk_layers,
    stage_memory,
    step_plan,
)
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.sequence_parallel import SequenceParallel, broken_tensor_rules
from axonn_tune.strategies.shapes import FP32_BYTES, MASK_BYTES, Shapes, stage_parameters
from axonn_tune.strategies.transformer import Transformer

# Tensor is the fastest axis of the rank number, pipeline the slowest (--use-tp-pp-dp-mapping off).
_REPLICAS = "context*data"
_AXES = Axes(
    ("tensor", "context", "data", PIPELINE),
    ("data",),
    ("tensor", "context", PIPELINE, _REPLICAS),
)
_UPDATED_BLOCK = "weights.block.all_gather"


@dataclass(frozen=True)
class Megatron3D:
    """The strategy with its options, which are Megatron-LM's flags.

    Attributes
    ----------
    sequence_parallel
        Whether the residual stream is split by tokens over the tensor group
        (--sequence-parallel).
    distributed_optimizer
        Whether optimizer states are sharded over the replicas (--use-distributed-optimizer).
    overlap_grad_reduce
        Whether gradients are reduced during the last backward pass, and updated weights gathered
        during the first forward pass (--overlap-grad-reduce, --overlap-param-gather).
    fused_accumulation
        Whether the product that forms dW adds to the fp32 gradient
        (--no-gradient-accumulation-fusion off).
    fp32_gradients
        Whether gradients are summed and reduced in fp32 (--accumulate-allreduce-grads-in-fp32,
        which bf16 implies), not in the weights' dtype.
    """

    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = True
    fused_accumulation: bool = True
    fp32_gradients: bool = True
    name: str = "megatron"
    n_virtual: Sequence[int] = (1, 2, 4)
    engine: Engine = IDEAL
    caveat: str = ""
    compute_key: tuple[str, ...] = ("tensor", "context", "micro_batch")

    @property
    def axes(self) -> Axes:
        """The axes tensor, context, data and pipeline."""
        return _AXES

    def rejections(self, model: Model, job: Job, placements: Placements) -> dict[str, np.ndarray]:
        """Return, for each of Megatron-LM's rules, the placements that break it, shape (P,)."""
        tensor = placements.size("tensor")
        context = placements.size("context")
        broken = {
            **broken_tensor_rules(model, tensor),
            "sequence not divisible by twice context": (context > 1)
            & (job.seq_len % (2 * context) != 0),
            "global batch not divisible by data": job.global_batch % placements.size("data") != 0,
        }
        if self.sequence_parallel:
            reason = "sequence not divisible by tensor*context"
            broken[reason] = job.seq_len % (tensor * context) != 0
        return broken | broken_pipeline_rules(
            model, placements, self.engine.megatron.balances_stages
        )

    def admits(self, model: Model, job: Job, table: CandidateTable) -> np.ndarray:
        """Return which candidates can be cut into their virtual stages, shape (C,)."""
        return admits_virtual(model, job, table)

    def plan(self, model: Model, job: Job, table: CandidateTable) -> StepPlan:
        """Return the operations of one rank in one training step, for all candidates."""
        shapes = self.shapes(model, job, table)
        usual = Transformer(shapes, self.communication(shapes, sync=False))
        if not self.overlap_grad_reduce:
            return step_plan(usual)
        return step_plan(usual, Transformer(shapes, self.communication(shapes, sync=True)))

    def memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Return the peak bytes of one rank by term, each of shape (C,)."""
        shapes = self.shapes(model, job, table)
        offload = self.engine.offload_in(job)
        return stage_memory(shapes, partial(self._stage_memory, shapes), offload)

    def shapes(self, model: Model, job: Job, table: CandidateTable) -> Shapes:
        """Return the sizes: tensor splits the inner widths, context and data split the tokens."""
        tensor = table.size("tensor")
        return Shapes(
            model,
            job,
            table,
            tokens=table.sequences_at_once * job.seq_len / table.size("context"),
            x=np.ones(len(table)),
            y=tensor,
            y_axis="tensor",
            residual_split=tensor if self.sequence_parallel else 1.0,
            balances_stages=self.engine.megatron.balances_stages,
            memory=self.engine.memory,
        )

    def communication(self, shapes: Shapes, sync: bool) -> MegatronCommunication:
        """Return the communication of a usual micro-step, or of the synchronising one."""
        return MegatronCommunication(shapes, sync, self)

    def gradient_bytes(self, job: Job) -> float:
        """Return the bytes of a gradient element as it is summed and reduced."""
        return FP32_BYTES if self.fp32_gradients else job.element_bytes

    def _stage_memory(
        self, shapes: Shapes, n_layers: int, first: bool, last: bool, held: Array
    ) -> dict[str, Array]:
        """Return the bytes by term of one stage, which holds `held` layers' activations at once."""
        job = shapes.job
        table = shapes.table
        chunk = -(-n_layers // shapes.n_virtual)
        stored = _stored_parameters(shapes, n_layers, first, last)
        replicas = table.size(_REPLICAS)
        owned = stored / replicas if self.distributed_optimizer else stored
        memory = self.engine.memory
        bucket_bytes = np.where(replicas > 1, value_or(memory.bucket_bytes, 0.0), 0.0)
        n_dummies = shapes.model.block_matmul_parameters + last * shapes.model.head.parameters
        dummy_bytes = value_or(memory.dummy_gradient_bytes, 0.0) * self.fused_accumulation
        without_scores = _saved_without_scores(shapes)
        everything = without_scores + _saved_scores(shapes)
        saved = {
            "none": everything,
            "selective": without_scores,
            "full": shapes.residual_bytes,
        }[shapes.recompute]
        return {
            "weights": stored * job.element_bytes,
            "gradients": stored * (self.gradient_bytes(job) + bucket_bytes),
            "optimizer_states": owned * state_bytes(job),
            **host_copies(job, self.engine.offload_in(job), owned),
            "activations": held * shapes.saved_by_layers(saved, chunk),
            "working_set": shapes.working_set(everything, saved, last)
            + n_dummies * dummy_bytes / table.size("tensor"),
        }


def megatron_of(
    engine: Engine, n_virtual: Sequence[int] = (1, 2, 4), **options: bool | None
) -> Megatron3D:
    """Return the strategy as an engine runs it, with the options that are given and not None."""
    given = {name: value for name, value in options.items() if value is not None}
    names = [item.name for item in fields(engine.megatron) if hasattr(Megatron3D, item.name)]
    usual = {name: getattr(engine.megatron, name) for name in names}
    return Megatron3D(**{**usual, **given}, n_virtual=n_virtual, engine=engine)


def _saved_without_scores(shapes: Shapes) -> Array:
    """Return the bytes that a block saves apart from attention's scores.

    These are inputs and outputs of the norms and two dropout masks of the residual stream; q, k,
    v, the input of proj, the MLP before and after its activation (Korthikanti et al., equations
    1 to 4).
    """
    n_masks = 2.0 * MASK_BYTES / shapes.element_bytes if shapes.job.dropout else 0.0
    norm_bytes = shapes.norm_input_bytes + shapes.norm_output_bytes
    return norm_bytes + n_masks * shapes.residual_bytes + shapes.inner_bytes


def _saved_scores(shapes: Shapes) -> Array | float:
    """Return the bytes that unfused attention saves of its scores.

    These are the softmax, the mask of its dropout and the result of the dropout (Korthikanti et
    al., equation 1).
    """
    mask = MASK_BYTES / shapes.element_bytes
    n_of_scores = 2.0 + mask if shapes.job.dropout else 1.0
    return n_of_scores * shapes.saved_score_bytes


def _stored_parameters(shapes: Shapes, n_layers: int, first: bool, last: bool) -> Array:
    """Return how many parameters a rank of a stage stores, shape (C,).

    Matrices and their biases are split over the tensor group, other vectors are not.
    """
    matrices, whole, split = stage_parameters(shapes.model, n_layers, first, last)
    return (matrices + split) / shapes.table.size("tensor") + whole


@dataclass(frozen=True, eq=False)
class MegatronCommunication(SequenceParallel):
    """The communication of Megatron-LM.

    Weights stay where they are, partial sums are reduced over the tensor group, and gradients are
    reduced over the replicas.
    """

    options: Megatron3D

    @property
    def _gradient_bytes(self) -> float:
        """The bytes of a gradient element."""
        return self.options.gradient_bytes(self.shapes.job)

    # Sums over the tensor group ------------------------------------------------------------

    @property
    def _splits_tokens(self) -> bool:
        """Whether there is sequence parallelism."""
        return self.options.sequence_parallel

    def gather_for_gradients(self, host: HostProgram, weight: Weight) -> None:
        """Gather dO, or start to gather the input for dW (sequence parallelism).

        The input is gathered while dI is formed (Korthikanti et al., section 4.2.2).
        """
        super().gather_for_gradients(host, weight)
        shape = self.shapes.linears[weight.layer]
        if self._splits_tokens and not shape.linear.transposed:
            name = names.all_gather(weight.name)
            host.issue(name, "all_gather", shape.input_bytes, "tensor")

    def before_weight_gradient(self, host: HostProgram, layer: str) -> None:
        """Wait for the gathered input."""
        shape = self.shapes.linears.get(layer)
        if self.options.sequence_parallel and shape is not None and not shape.linear.transposed:
            host.wait(names.all_gather(names.of_layer(BACKWARD, layer)))

    # Context and pipeline --------------------------------------------------------------------

    def begin_attention(self, host: HostProgram, chain: str) -> None:
        """Start to exchange keys and values within the context group (ring attention).

        In the backward chain their gradients travel too.
        """
        name = names.of_layer(chain, "attention")
        host.issue(names.all_gather(name), "all_gather", self._kv_bytes, "context")
        if chain == BACKWARD:
            host.issue(names.reduce_scatter(name), "reduce_scatter", self._kv_bytes, "context")

    def end_attention(self, host: HostProgram, chain: str) -> None:
        """Wait until all keys and values have come and all gradients have gone."""
        name = names.of_layer(chain, "attention")
        host.wait(names.all_gather(name))
        if chain == BACKWARD:
            host.wait(names.reduce_scatter(name))

    @property
    def _kv_bytes(self) -> Array:
        """The bytes of the keys and values of the whole sequence for the rank's heads."""
        shapes = self.shapes
        model = shapes.model
        table = shapes.table
        width = 2.0 * model.n_kv_heads * model.head_dim / table.size("tensor")
        return shapes.tokens * table.size("context") * (width * shapes.element_bytes)

    @property
    def transfer_bytes(self) -> Array:
        """The bytes that a rank sends to the next stage: its part of the residual stream.

        Without sequence parallelism every rank of a tensor group holds the whole stream and sends
        a part of it.
        """
        return self.shapes.stream_bytes / self.shapes.table.size("tensor")

    def receive(self, host: HostProgram, chain: str) -> None:
        """Without sequence parallelism, gather the received parts (SC21, section 4.1)."""
        if self.options.sequence_parallel:
            return
        name = names.of_layer(chain, "pipeline")
        nbytes = self.shapes.stream_bytes
        host.run(names.all_gather(name), "all_gather", nbytes, "tensor")
        host.memory_bound(f"{name}.copy", 2.0 * nbytes, "copy")

    # Gradients and updated weights over the replicas -----------------------------------------

    @property
    def _gathers_updated(self) -> bool:
        """Whether updated weights are gathered block by block during this micro-step."""
        return self.sync and self.options.distributed_optimizer

    def begin_block(self, host: HostProgram, chain: str) -> None:
        """Wait for the updated weights of the block."""
        if self._gathers_updated and chain == FORWARD:
            host.wait(_UPDATED_BLOCK)

    def take_weight(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Start to gather updated weights of the next block with a block's first weight.

        There are as many gathers as blocks: the gather in the last block stands for the gather of
        the first block's weights.
        """
        if self._gathers_updated and weight == Weight(FORWARD, "qkv"):
            element = self.shapes.element_bytes
            self._over_replicas(host, _UPDATED_BLOCK, "all_gather", self._block_parameters, element)

    def end_block(self, host: HostProgram) -> None:
        """Start to reduce the block's gradients, while earlier blocks form theirs."""
        if self.sync:
            name = "gradient.block.reduce"
            parameters = self._block_parameters
            self._over_replicas(host, name, self._reduce_kind, parameters, self._gradient_bytes)

    def _over_replicas(
        self,
        host: HostProgram,
        name: str,
        kind: str,
        n_elements: Array,
        element_bytes: float,
        after: tuple[str, ...] = (),
    ) -> None:
        """Start a collective over the replicas, in buckets, after some copies."""
        program = self.options.engine.megatron
        n_replicas = self.shapes.table.size(_REPLICAS)
        bucket_elements = np.maximum(
            program.bucket_elements, program.bucket_elements_per_replica * n_replicas
        )
        n_calls = np.ceil(n_elements / bucket_elements)
        host.issue(name, kind, n_elements * element_bytes, _REPLICAS, n_calls, after)

    @property
    def _reduce_kind(self) -> str:
        """The kind of collective that reduces gradients over the replicas."""
        return "reduce_scatter" if self.options.distributed_optimizer else "all_reduce"

    @property
    def _block_parameters(self) -> Array:
        """The number of parameters that a rank stores of each block."""
        return _stored_parameters(self.shapes, 1, False, False)

    # Once per micro-step and once per step -----------------------------------------------------

    def _largest_stage(self) -> tuple[int, Array]:
        """Return the numbers of layers and of stored parameters of the first stage.

        It has the embedding, so that no stage stores more.
        """
        n_stages = self.shapes.table.n_stages
        n_layers = sum(chunk_layers(self.shapes, 0))
        return n_layers, _stored_parameters(self.shapes, n_layers, True, n_stages == 1)

    def accumulate(self, host: HostProgram, last_layer: str) -> None:
        """Without fused accumulation, add the micro-step's gradients to the fp32 sums."""
        if self.options.fused_accumulation:
            return
        _, stored = self._largest_stage()
        nbytes = stored * (self.shapes.element_bytes + 2.0 * self._gradient_bytes)
        host.memory_bound(names.GRADIENT_ACCUMULATE, nbytes / self.shapes.n_virtual, "add")

    def step_end(self, host: HostProgram) -> None:
        """Reduce the gradients that no micro-step has reduced, clip, and update the weights.

        With overlap, these are the gradients of the parameters outside blocks.
        """
        shapes = self.shapes
        model = shapes.model
        options = self.options
        gradient_bytes = self._gradient_bytes
        n_layers, stored = self._largest_stage()
        if model.tied_embeddings and shapes.table.n_stages > 1:
            shared_bytes = model.head.parameters * gradient_bytes / shapes.y
            host.run(names.GRADIENT_EMBEDDING, "send_recv", shared_bytes, PIPELINE)
        if options.sequence_parallel:
            n_elements = float(model.norms_per_block * n_layers * model.norm_parameters)
            norm_bytes = np.full(len(shapes.table), n_elements * gradient_bytes)
            host.run("gradient.norms.all_reduce", "all_reduce", norm_bytes, "tensor")
        remaining = stored
        if options.overlap_grad_reduce:
            remaining = stored - n_layers * self._block_parameters
        self._over_replicas(
            host, names.GRADIENT_REDUCE, self._reduce_kind, remaining, gradient_bytes
        )
        host.wait(names.GRADIENT_REDUCE)
        owned = stored
        if options.distributed_optimizer:
            owned = stored / shapes.table.size(_REPLICAS)
        updated = clip_and_update(
            host,
            shapes.job,
            owned,
            gradient_bytes,
            norm_sums={names.norm_all_reduce(axis): axis for axis in ("tensor", PIPELINE)},
            cleared=stored,
            offload=options.engine.offload_in(shapes.job),
        )
        if options.distributed_optimizer:
            name = names.WEIGHTS_ALL_GATHER
            element = shapes.element_bytes
            self._over_replicas(host, name, "all_gather", remaining, element, updated)
            host.wait(names.WEIGHTS_ALL_GATHER)
            host.memory_bound("weights.copy", 2.0 * remaining * shapes.element_bytes, "copy")
