"""AxoNN's 4D algorithm: Agarwal's 3D matrix multiplication times data parallelism.

Singh et al., "A 4D Hybrid Algorithm to Scale Parallel Training to Thousands of GPUs",
arXiv 2305.13525; Singh et al., arXiv 2502.08145.

Layout of a linear layer with weight W (k x n) on a G_x x G_y x G_z x G_data grid:
Z and data split the tokens; X splits k, Y splits n; Z also splits each block of W for
storage. A transposed layer (proj, down) exchanges X and Y, so that it takes its input
as the layer before it left it. Between layers the residual stream is split over X and
replicated over Y; heads and the MLP's hidden units are split over Y and replicated
over X, so attention and the activation are computed once per X rank.

Beyond the paper's grid, layers may be cut into the stages of a pipeline (AxoNN's G_inter), and
optimizer states may be sharded over data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import AXES, AXONN_AXES, PIPELINE, Axes
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
    Transformer,
    Weight,
    has_master_copy,
    stage_parameters,
    state_bytes,
)

# Gradients are accumulated and reduced over data in fp32 (AxoNN's own model takes 4 bytes too).
GRADIENT_BYTES = FP32_BYTES
# Bytes of gradients that one data-parallel all-reduce carries: torch DDP's bucket_cap_mb default.
BUCKET_BYTES = 25.0 * 2**20
# As AxoNN numbers its ranks: stages between the ranks of a tensor group and the replicas.
_PIPELINED_NAMES = ("x", "y", "z", PIPELINE, "data")
_PIPELINED_AXES = Axes(_PIPELINED_NAMES, AXONN_AXES.batch, _PIPELINED_NAMES)


@dataclass(frozen=True)
class Axonn4D:
    """The strategy; `pipelined` adds the axis of pipeline stages."""

    pipelined: bool = False
    sharded_optimizer: bool = False
    compute_key: tuple[str, ...] = ("x", "y", "micro_batch")
    n_virtual: Sequence[int] = (1,)

    @property
    def name(self) -> str:
        """As users know it."""
        return "axonn-pipeline" if self.pipelined else "axonn"

    @property
    def axes(self) -> Axes:
        """The four axes, and the pipeline's."""
        return _PIPELINED_AXES if self.pipelined else AXONN_AXES

    def rejections(self, model: Model, job: Job, placements: Placements) -> dict[str, np.ndarray]:
        """The divisibility rules of the algorithm.

        Returns
        -------
        dict of str to bool arrays, shape (P,)
            For each rule, the placements that break it; the first rule broken names the reason.
        """
        x, y, z, data = (placements.size(axis) for axis in AXES)
        block = x * y * z
        linears = (*model.block_linears, model.head)
        broken = {
            "hidden size not divisible by G_x": model.hidden_size % x != 0,
            "attention heads not divisible by G_y": model.n_heads % y != 0,
            "KV heads not divisible by G_y": model.n_kv_heads % y != 0,
            "MLP size not divisible by G_y": model.ffn_hidden_size % y != 0,
            "vocabulary not divisible by G_y": model.padded_vocab_size % y != 0,
            "weights not divisible over G_x*G_y*G_z": np.logical_or.reduce(
                [(linear.n_in * linear.n_out) % block != 0 for linear in linears]
            ),
            "global batch not divisible by G_z*G_data": job.global_batch % (z * data) != 0,
        }
        return broken | broken_pipeline_rules(model, placements)

    def admits(self, model: Model, job: Job, table: CandidateTable) -> np.ndarray:
        """Which candidates admit so many virtual stages."""
        return admits_virtual(model, job, table)

    def plan(self, model: Model, job: Job, table: CandidateTable) -> StepPlan:
        """The operations of one rank in one training step, for every candidate of the table."""
        planner = _Planner(model, job, table, self.sharded_optimizer)
        return step_plan(planner)

    def memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Peak bytes of one rank by term, each of shape (C,).

        The peak is in the backward pass, where everything saved is still held (all layers'
        checkpoints, or all activations), one block's activations and gradients are in work,
        and two weights are gathered. The logits live only between forward and backward, so
        the larger of logits and one block's working set counts.
        """
        shapes = _Planner(model, job, table, self.sharded_optimizer)
        return stage_memory(
            shapes, lambda n, first, last, held: _memory(shapes, n, first, last, held)
        )


AXONN = Axonn4D()


def stored_parameters(
    model: Model,
    table: CandidateTable,
    n_layers: int | None = None,
    first: bool = True,
    last: bool = True,
) -> tuple[Array, Array]:
    """Parameters that one rank stores: in sharded matrices, and in norms, biases and positions.

    Parameters
    ----------
    n_layers, first, last
        Of the rank's stage of a pipeline: its layers, and whether it has embedding and head.

    Returns
    -------
    sharded, replicated : shape (C,)
        Matrices are split over X, Y and Z; vectors over X or Y only.
    """
    n_layers = model.n_layers if n_layers is None else n_layers
    matrices, over_x, over_y = stage_parameters(model, n_layers, first, last)
    x, y = table.size("x"), table.size("y")
    return matrices / (x * y * table.size("z")), over_x / x + over_y / y


# At most two weight gradients wait for their reduce-scatter: before the product that forms
# another one, the backward pass waits for that of the last but one.
_LAST_BUT_ONE = {
    "down": ("proj",),
    "up": ("qkv", "head"),
    "proj": ("down",),
    "qkv": ("up",),
    "embedding": ("proj",),
}


class _Planner(Transformer):
    """Weights come by all-gather over Z, their gradients go by reduce-scatter."""

    def __init__(self, model: Model, job: Job, table: CandidateTable, sharded: bool) -> None:
        tokens = table.sequences_at_once * job.seq_len
        x, y = table.size("x"), table.size("y")
        super().__init__(model, job, table, x, y, ("x", "y"), tokens)
        self.z, self._sharded_optimizer = table.size("z"), sharded

    # Weights -------------------------------------------------------------------

    def _gather(self, host: HostProgram, weight: Weight) -> None:
        nbytes = self.embedding_bytes
        if weight.name != "embedding":
            nbytes = self.shapes[weight.name].weight_bytes
        host.issue(f"{weight}.all_gather", "all_gather", nbytes, "z")

    def prefetch(self, host: HostProgram, weight: Weight) -> None:
        """With OAG a weight is gathered before it is used."""
        if self.overlap.oag and self._is_gathered(weight):
            self._gather(host, weight)

    def take_weight(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Have a weight at hand; with OAG, start to gather the one that follows."""
        if self._is_gathered(weight):
            if not self.overlap.oag:
                self._gather(host, weight)
            host.wait(f"{weight}.all_gather")
        if following is not None:
            self.prefetch(host, following)

    def _is_gathered(self, weight: Weight) -> bool:
        return weight.chain == "forward" or not self.job.keep_gathered_weights

    # Gradients -------------------------------------------------------------------

    def before_weight_gradient(self, host: HostProgram, name: str) -> None:
        """Wait for the last but one reduce-scatter."""
        if self.overlap.ors:
            for earlier in _LAST_BUT_ONE.get(name, ()):
                host.wait(f"backward.{earlier}.reduce_scatter")

    def send_gradient(self, host: HostProgram, name: str) -> None:
        """Scatter over Z."""
        scatter = f"backward.{name}.reduce_scatter"
        host.issue(scatter, "reduce_scatter", self.shapes[name].weight_bytes, "z")
        if not self.overlap.ors:
            host.wait(scatter)

    @property
    def is_embedding_cleared(self) -> Array | float:
        """Where Z does not split it, a shared weight has the head's gradient to add to."""
        return (self.z > 1).astype(np.float64) if self.model.tied_embeddings else 1.0

    def finish_embedding_gradient(self, host: HostProgram) -> None:
        """Scatter over Z."""
        name = "backward.embedding.reduce_scatter"
        host.issue(name, "reduce_scatter", self.embedding_bytes, "z")

    # Recomputation -----------------------------------------------------------------

    def recomputed_inputs(self) -> dict[str, Callable[[HostProgram], None]]:
        """Selective recomputation: what needs neither a weight nor a collective, where used."""
        if self.recompute != "selective":
            return {}
        norm, norm_bytes = self.norm_kernel, 2.0 * self.residual_bytes
        return {
            "down": lambda host: self.activation(host, "recompute.activation"),
            "up": lambda host: host.memory_bound("recompute.norm2", norm_bytes, norm),
            "qkv": lambda host: host.memory_bound("recompute.norm1", norm_bytes, norm),
        }

    # Once per micro-step and once per step, on what the rank stores ----------------------

    def _largest_stage(self) -> tuple[Array, Array]:
        """What the rank with most parameters stores: that of the first stage of a pipeline."""
        n_stages = self.table.n_stages
        if n_stages == 1:
            return stored_parameters(self.model, self.table)
        n_layers = sum(chunk_layers(self.model, n_stages, self.n_virtual, 0))
        return stored_parameters(self.model, self.table, n_layers, True, False)

    def accumulate(self, last_scatter: str) -> tuple[Phase, ...]:
        """Add the micro-step's gradients to the fp32 sums, once the last scatter has ended."""
        sharded, replicated = self._largest_stage()
        host = HostProgram()
        host.wait(f"backward.{last_scatter}.reduce_scatter")
        if self.model.tied_embeddings and self.table.n_stages == 1:
            shard_bytes = self.embedding_bytes / self.z
            host.memory_bound("gradient.tied", (self.z > 1) * 3.0 * shard_bytes, "add")
        nbytes = (sharded + replicated) * (self.element_bytes + 2.0 * GRADIENT_BYTES)
        host.memory_bound("gradient.accumulate", nbytes / self.n_virtual, "add")
        return (host.phase("accumulate", over_storage=True),)

    def step_end(self) -> tuple[Phase, ...]:
        """Reduce the gradients over data, clip them, update the weights."""
        sharded, replicated = self._largest_stage()
        stored = sharded + replicated
        gradient_bytes = stored * GRADIENT_BYTES
        host = HostProgram()
        if self.model.tied_embeddings and self.table.n_stages > 1:
            shard_bytes = self.model.head.parameters * GRADIENT_BYTES / (self.x * self.y * self.z)
            host.run("gradient.embedding.send_recv", "send_recv", shard_bytes, PIPELINE)
        vector_bytes = replicated * GRADIENT_BYTES
        host.run("gradient.vectors.all_reduce", "all_reduce", vector_bytes, "z")
        n_buckets = np.ceil(gradient_bytes / BUCKET_BYTES)
        kind = "reduce_scatter" if self._sharded_optimizer else "all_reduce"
        host.run(f"gradient.{kind}", kind, gradient_bytes, "data", n_buckets)
        kept = stored / self.table.size("data") if self._sharded_optimizer else stored
        kept_bytes = kept * GRADIENT_BYTES
        host.memory_bound("gradient.norm", kept_bytes, "reduce")
        summed_over = [axis for axis in self.table.placements.axes.groups if axis != "data"]
        summed_over += ["data"] if self._sharded_optimizer else []
        for axis in summed_over:
            host.run(f"gradient.norm.all_reduce_{axis}", "all_reduce", FP32_BYTES, axis)
        host.memory_bound("gradient.clip", 2.0 * kept_bytes, "scale")
        # Read and clear the gradient, read and write the states, write the weight; without
        # a master copy the weight is read too.
        weight_bytes = self.element_bytes * (1.0 if has_master_copy(self.job) else 2.0)
        nbytes = kept * (2.0 * GRADIENT_BYTES + 2.0 * state_bytes(self.job) + weight_bytes)
        host.memory_bound("optimizer.step", nbytes, "optimizer")
        if self._sharded_optimizer:
            host.issue("weights.all_gather", "all_gather", stored * self.element_bytes, "data")
        return (host.phase("step_end", over_storage=True),)


def _memory(
    shapes: _Planner, n_layers: int, first: bool, last: bool, held: Array
) -> dict[str, Array]:
    """Of a stage with so many layers; `held`: layers' activations that are held at once."""
    model, job, table = shapes.model, shapes.job, shapes.table
    sharded, replicated = stored_parameters(model, table, n_layers, first, last)
    stored = sharded + replicated
    states = stored / table.size("data") if shapes._sharded_optimizer else stored
    saved_all, saved_selective = _saved_by_block(shapes)
    per_layer = {
        "none": saved_all,
        "selective": saved_selective,
        "full": shapes.residual_bytes,
    }[shapes.recompute]
    return {
        "weights": stored * job.element_bytes,
        # The fp32 sums, and what the micro-step's reduce-scatters have brought.
        "gradients": stored * (GRADIENT_BYTES + job.element_bytes),
        "optimizer_states": states * state_bytes(job),
        "gathered_weights": _gathered_bytes(shapes, n_layers),
        "activations": held * per_layer + shapes.residual_bytes,
        "working_set": shapes.working_set(saved_all, per_layer, last),
    }


def _saved_by_block(shapes: _Planner) -> tuple[Array, Array]:
    """Bytes that one block saves for its backward pass: everything; without the cheap parts.

    Saved are the inputs of each product and what the kernels between them need: the
    block's input and the residual after attention (norms), both norms' outputs, q, k, v,
    the attention's output, the MLP before and after its activation. Unfused attention
    also keeps the softmax of its scores.
    """
    residual = shapes.residual_bytes
    attention_out = shapes.shapes["proj"].input_bytes
    kept = 2.0 * residual + shapes.shapes["qkv"].output_bytes + attention_out
    kept = kept + shapes.shapes["up"].output_bytes
    cheap = 2.0 * residual + shapes.mlp_bytes
    if shapes.job.attention == "unfused":
        cheap = cheap + shapes.score_bytes
    return kept + cheap, kept


def _gathered_bytes(shapes: _Planner, n_layers: int) -> Array:
    """Gathered weights and unscattered weight gradients in flight, where Z splits the weights."""
    blocks = [shapes.shapes[linear.name].weight_bytes for linear in shapes.model.block_linears]
    head, overlap = shapes.embedding_bytes, shapes.job.overlap
    one = np.maximum.reduce([*blocks, head])
    pairs = [a + b for a, b in zip(blocks, blocks[1:] + blocks[:1], strict=True)]
    two = np.maximum.reduce([*pairs, head + blocks[-1]])
    in_flight = two if overlap.oag else one
    if shapes.job.keep_gathered_weights:
        in_flight = n_layers * sum(blocks) + 2.0 * head
    gradients = two if overlap.ors else one
    held: Array = np.where(shapes.table.size("z") > 1, in_flight + gradients, 0.0)
    return held
