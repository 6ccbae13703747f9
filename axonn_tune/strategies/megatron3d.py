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
from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import PIPELINE, Axes
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array, Phase, StepPlan
from axonn_tune.strategies.pipeline import (
    admits_virtual,
    broken_pipeline_rules,
    chunk_layers,
    stage_memory,
    step_plan,
)
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.transformer import (
    FP32_BYTES,
    MASK_BYTES,
    Transformer,
    Weight,
    has_master_copy,
    stage_parameters,
    state_bytes,
)

# Elements of a bucket of gradients: Megatron Core's default for --ddp-bucket-size.
BUCKET_ELEMENTS = 40e6
# Tensor is the fastest axis of the rank number, pipeline the slowest (--use-tp-pp-dp-mapping off).
_REPLICAS = "context*data"
_AXES = Axes(
    ("tensor", "context", "data", PIPELINE),
    ("data",),
    ("tensor", "context", PIPELINE, _REPLICAS),
)


@dataclass(frozen=True)
class Megatron3D:
    """The strategy with its switches, which are Megatron-LM's flags.

    overlap_grad_reduce: reduce gradients beside the last backward pass, and gather updated
    weights beside the first forward pass (--overlap-grad-reduce, --overlap-param-gather).
    fused_accumulation: the product that forms dW adds to the fp32 gradient
    (--no-gradient-accumulation-fusion off). fp32_gradients: sum and reduce them in fp32
    (--accumulate-allreduce-grads-in-fp32, which bf16 implies), not in the weights' dtype.
    """

    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = True
    fused_accumulation: bool = True
    fp32_gradients: bool = True
    name: str = "megatron"
    n_virtual: Sequence[int] = (1, 2, 4)
    compute_key: tuple[str, ...] = ("tensor", "context", "micro_batch")

    @property
    def axes(self) -> Axes:
        """Tensor, context, data, pipeline."""
        return _AXES

    def rejections(self, model: Model, job: Job, placements: Placements) -> dict[str, np.ndarray]:
        """What Megatron-LM refuses, by reason, bool of shape (P,)."""
        tensor, context = placements.size("tensor"), placements.size("context")
        broken = {
            "attention heads not divisible by tensor": model.n_heads % tensor != 0,
            "KV heads not divisible by tensor": model.n_kv_heads % tensor != 0,
            "MLP size not divisible by tensor": model.ffn_hidden_size % tensor != 0,
            "vocabulary not divisible by tensor": model.padded_vocab_size % tensor != 0,
            "sequence not divisible by twice context": (context > 1)
            & (job.seq_len % (2 * context) != 0),
            "global batch not divisible by data": job.global_batch % placements.size("data") != 0,
        }
        if self.sequence_parallel:
            reason = "sequence not divisible by tensor*context"
            broken[reason] = job.seq_len % (tensor * context) != 0
        return broken | broken_pipeline_rules(model, placements)

    def admits(self, model: Model, job: Job, table: CandidateTable) -> np.ndarray:
        """Which candidates admit so many virtual stages."""
        return admits_virtual(model, job, table)

    def plan(self, model: Model, job: Job, table: CandidateTable) -> StepPlan:
        """The operations of one rank in one training step, for every candidate of the table."""
        planner = _Planner(self, model, job, table)
        return step_plan(planner)

    def memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Peak bytes of one rank by term, each of shape (C,)."""
        planner = _Planner(self, model, job, table)
        return stage_memory(planner, planner.memory)


class _Planner(Transformer):
    """Weights stay; sums go over the tensor group, gradients over the replicas."""

    def __init__(self, options: Megatron3D, model: Model, job: Job, table: CandidateTable) -> None:
        self.options, self.tensor = options, table.size("tensor")
        self.context = table.size("context")
        tokens = table.sequences_at_once * job.seq_len / self.context
        one = np.ones(len(table))
        super().__init__(model, job, table, one, self.tensor, ("", "tensor"), tokens)
        self.gradient_bytes = FP32_BYTES if options.fp32_gradients else job.element_bytes
        self.stream_bytes = self.residual_bytes  # of all tokens of the tensor group
        if options.sequence_parallel:
            self.residual_bytes = self.stream_bytes / self.tensor

    # Sums over the tensor group ---------------------------------------------------

    def before_product(self, host: HostProgram, weight: Weight) -> None:
        """With sequence parallelism all tokens are brought together before their columns."""
        shape = self.shapes[weight.name]
        if self._gathers_updated and str(weight) == "forward.qkv":
            nbytes = self._block_parameters * self.element_bytes
            self._over_replicas(host, "weights.block.all_gather", "all_gather", nbytes)
        if self.options.sequence_parallel and not shape.linear.transposed:
            self.run(host, f"{weight}.all_gather", "all_gather", shape.input_bytes, "tensor")

    @property
    def _gathers_updated(self) -> bool:
        """Updated weights of the next block are gathered beside this one."""
        return self.is_sync and self.options.distributed_optimizer

    def sum_output(self, host: HostProgram, weight: Weight) -> None:
        """All-reduce, or with sequence parallelism reduce-scatter by tokens."""
        shape = self.shapes[weight.name]
        if not shape.linear.transposed:
            return
        kind = self._sum_kind
        self.run(host, f"{weight}.{kind}", kind, shape.output_bytes, "tensor")

    def before_gradients(self, host: HostProgram, weight: Weight) -> None:
        """With sequence parallelism dO is gathered, or the input for dW, beside the dI product."""
        if not self.options.sequence_parallel:
            return
        shape = self.shapes[weight.name]
        if shape.linear.transposed:
            self.run(host, f"{weight}.all_gather", "all_gather", shape.output_bytes, "tensor")
        else:
            host.issue(f"{weight}.all_gather", "all_gather", shape.input_bytes, "tensor")

    def sum_input_gradient(self, host: HostProgram, weight: Weight) -> str:
        """All-reduce or reduce-scatter dI beside the dW product."""
        shape = self.shapes[weight.name]
        if shape.linear.transposed:
            return ""
        kind = self._sum_kind
        host.issue(f"{weight}.{kind}", kind, shape.input_bytes, "tensor")
        return f"{weight}.{kind}"

    def before_weight_gradient(self, host: HostProgram, name: str) -> None:
        """Wait for the gathered input."""
        shape = self.shapes.get(name)
        if self.options.sequence_parallel and shape is not None and not shape.linear.transposed:
            host.wait(f"backward.{name}.all_gather")

    def sum_embedding(self, host: HostProgram, weight: Weight) -> None:
        """Sum the rows that ranks of the tensor group have found."""
        host.issue(f"{weight}.sum", self._sum_kind, self.stream_bytes, "tensor")

    def wait_for_embedding(self, host: HostProgram) -> None:
        """Wait for `sum_embedding`."""
        host.wait("forward.embedding.sum")

    @property
    def _sum_kind(self) -> str:
        """How partial sums over the tensor group become the residual stream."""
        return "reduce_scatter" if self.options.sequence_parallel else "all_reduce"

    # Context and pipeline ----------------------------------------------------------

    def begin_attention(self, host: HostProgram, chain: str) -> None:
        """Keys and values come from the context group, beside attention (ring attention)."""
        host.issue(f"{chain}.attention.all_gather", "all_gather", self._kv_bytes, "context")
        if chain == "backward":
            name = "backward.attention.reduce_scatter"
            host.issue(name, "reduce_scatter", self._kv_bytes, "context")

    def end_attention(self, host: HostProgram, chain: str) -> None:
        """All of them have come, and the gradients have gone."""
        host.wait(f"{chain}.attention.all_gather")
        if chain == "backward":
            host.wait("backward.attention.reduce_scatter")

    @property
    def _kv_bytes(self) -> Array:
        """Keys and values of the whole sequence for the rank's heads."""
        width = 2.0 * self.model.n_kv_heads * self.model.head_dim / self.tensor
        return self.tokens * self.context * (width * self.element_bytes)

    @property
    def transfer_bytes(self) -> Array:
        """Between stages: each rank of the tensor group sends its part of the stream."""
        return self.stream_bytes / self.tensor

    def start(self, weight: Weight) -> Phase:
        """Without sequence parallelism the parts that came are gathered (SC21, section 4.1)."""
        host = HostProgram()
        if not self.options.sequence_parallel:
            name = f"{weight.chain}.pipeline.all_gather"
            self.run(host, name, "all_gather", self.stream_bytes, "tensor")
            host.memory_bound(f"{weight.chain}.pipeline.copy", 2.0 * self.stream_bytes, "copy")
        return host.phase("start")

    # Gradients over the replicas ---------------------------------------------------------

    @property
    def has_sync(self) -> bool:
        """With overlap the reductions run beside one of the micro-steps."""
        return self.options.overlap_grad_reduce

    def begin_block(self, host: HostProgram, chain: str) -> None:
        """Updated weights of the block are there."""
        if self._gathers_updated and chain == "forward":
            host.wait("weights.block.all_gather")

    def end_block_backward(self, host: HostProgram) -> None:
        """The block's gradients are reduced beside what follows."""
        if self.is_sync:
            nbytes = self._block_parameters * self.gradient_bytes
            self._over_replicas(host, "gradient.block.reduce", self._reduce_kind, nbytes)

    def _over_replicas(self, host: HostProgram, name: str, kind: str, nbytes: Array) -> None:
        n_calls = np.ceil(nbytes / (BUCKET_ELEMENTS * self.element_bytes))
        host.issue(name, kind, nbytes, _REPLICAS, n_calls)

    @property
    def _reduce_kind(self) -> str:
        return "reduce_scatter" if self.options.distributed_optimizer else "all_reduce"

    @property
    def _block_parameters(self) -> Array:
        return _stored(self.model, self.tensor, 1, False, False)

    def _largest_stage(self) -> tuple[int, Array]:
        """Layers and parameters of the first stage, which with the embedding has most."""
        n_stages = self.table.n_stages
        n_layers = sum(chunk_layers(self.model, n_stages, self.n_virtual, 0))
        return n_layers, _stored(self.model, self.tensor, n_layers, True, n_stages == 1)

    def accumulate(self, last_scatter: str) -> tuple[Phase, ...]:
        """Without fusion the micro-step's gradients are added to the fp32 sums."""
        if self.options.fused_accumulation:
            return ()
        _, stored = self._largest_stage()
        host = HostProgram()
        nbytes = stored * (self.element_bytes + 2.0 * self.gradient_bytes) / self.n_virtual
        host.memory_bound("gradient.accumulate", nbytes, "add")
        return (host.phase("accumulate", over_storage=True),)

    def step_end(self) -> tuple[Phase, ...]:
        """Reduce what is not yet, clip, update the weights."""
        host, options = HostProgram(), self.options
        n_layers, stored = self._largest_stage()
        if self.model.tied_embeddings and self.table.n_stages > 1:
            shared_bytes = self.model.head.parameters * self.gradient_bytes / self.tensor
            host.run("gradient.embedding.send_recv", "send_recv", shared_bytes, PIPELINE)
        if options.sequence_parallel:
            norm_bytes = np.full(
                len(self.table), 2.0 * n_layers * self.model.norm_parameters * self.gradient_bytes
            )
            host.run("gradient.norms.all_reduce", "all_reduce", norm_bytes, "tensor")
        left = stored - n_layers * self._block_parameters if self.has_sync else stored
        self._over_replicas(host, "gradient.reduce", self._reduce_kind, left * self.gradient_bytes)
        host.wait("gradient.reduce")
        owned = stored / self.table.size(_REPLICAS) if options.distributed_optimizer else stored
        host.memory_bound("gradient.norm", owned * self.gradient_bytes, "reduce")
        for axis in ("tensor", PIPELINE):
            host.run(f"gradient.norm.all_reduce_{axis}", "all_reduce", FP32_BYTES, axis)
        host.memory_bound("gradient.clip", 2.0 * owned * self.gradient_bytes, "scale")
        weight_bytes = self.element_bytes * (1.0 if has_master_copy(self.job) else 2.0)
        nbytes = owned * (self.gradient_bytes + 2.0 * state_bytes(self.job) + weight_bytes)
        nbytes = nbytes + stored * self.gradient_bytes  # cleared
        host.memory_bound("optimizer.step", nbytes, "optimizer")
        if options.distributed_optimizer:
            self._over_replicas(host, "weights.all_gather", "all_gather", left * self.element_bytes)
            host.wait("weights.all_gather")
            host.memory_bound("weights.copy", 2.0 * left * self.element_bytes, "copy")
        return (host.phase("step_end", over_storage=True),)

    # Memory ---------------------------------------------------------------------------------

    def memory(self, n_layers: int, first: bool, last: bool, held: Array) -> dict[str, Array]:
        """Of a stage with so many layers; `held`: layers' activations that are held at once."""
        job, model = self.job, self.model
        stored = _stored(model, self.tensor, n_layers, first, last)
        owned = stored
        if self.options.distributed_optimizer:
            owned = stored / self.table.size(_REPLICAS)
        everything, without_scores = self._saved_by_block()
        saved = {
            "none": everything,
            "selective": without_scores,
            "full": self.residual_bytes,
        }[self.recompute]
        return {
            "weights": stored * job.element_bytes,
            "gradients": stored * self.gradient_bytes,
            "optimizer_states": owned * state_bytes(job),
            "activations": held * saved,
            "working_set": self.working_set(everything, saved, last),
        }

    def _saved_by_block(self) -> tuple[Array, Array]:
        """Korthikanti et al., equations 1 to 4: all a block saves, and without the scores.

        Inputs and outputs of both norms and two dropout masks of the residual stream; q, k, v,
        the input of proj, the MLP before and after its activation; and of unfused attention
        the softmax, its mask and what dropout leaves of it.
        """
        mask = MASK_BYTES / self.element_bytes
        stream = (4.0 + (2.0 * mask if self.job.dropout else 0.0)) * self.residual_bytes
        split = self.shapes["qkv"].output_bytes + self.shapes["proj"].input_bytes
        split = split + self.shapes["up"].output_bytes + self.mlp_bytes
        without_scores = stream + split
        if self.job.attention == "flash":
            return without_scores, without_scores
        kept = 2.0 + mask if self.job.dropout else 1.0
        return without_scores + kept * self.score_bytes, without_scores


def _stored(model: Model, tensor: Array, n_layers: int, first: bool, last: bool) -> Array:
    """Parameters of one rank of a stage: matrices and their biases split, vectors not."""
    matrices, whole, split = stage_parameters(model, n_layers, first, last)
    stored: Array = (matrices + split) / tensor + whole
    return stored
