"""AxoNN's 4D algorithm: Agarwal's 3D matrix multiplication times data parallelism.

Singh et al., "A 4D Hybrid Algorithm to Scale Parallel Training to Thousands of GPUs",
arXiv 2305.13525; Singh et al., arXiv 2502.08145.

Layout of a linear layer with weight W (k x n) on a G_x x G_y x G_z x G_data grid:
Z and data split the tokens; X splits k, Y splits n; Z also splits each block of W for
storage. A transposed layer (proj, down) exchanges X and Y, so that it takes its input
as the layer before it left it. Between layers the residual stream is split over X and
replicated over Y; heads and the MLP's hidden units are split over Y and replicated
over X, so attention and the activation are computed once per X rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.grid import CandidateTable, Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Linear, Model
from axonn_tune.spec.plan import Array, Phase, StepPlan
from axonn_tune.strategies.program import HostProgram

NAME = "axonn"
# Sizes of the computation of a micro-step depend on these columns only.
COMPUTE_KEY: tuple[str, ...] = ("x", "y", "micro_batch")

FP32_BYTES = 4.0
# Gradients are accumulated and reduced over data in fp32 (AxoNN's own model takes 4 bytes too).
GRADIENT_BYTES = FP32_BYTES
# AdamW keeps an fp32 master copy (mixed precision only) and two fp32 moments.
MOMENT_BYTES = 2 * FP32_BYTES
# Bytes of gradients that one data-parallel all-reduce carries: torch DDP's bucket_cap_mb default.
BUCKET_BYTES = 25.0 * 2**20


def rejections(model: Model, job: Job, placements: Placements) -> dict[str, np.ndarray]:
    """The divisibility rules of the algorithm.

    Returns
    -------
    dict of str to bool arrays, shape (P,)
        For each rule, the placements that break it; the first rule broken names the reason.
    """
    x, y, z, data = placements.sizes
    block = x * y * z
    linears = (*model.block_linears, model.head)
    return {
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


def stored_parameters(model: Model, table: CandidateTable) -> tuple[Array, Array]:
    """Parameters that one rank stores: in sharded matrices, and in norms, biases and positions.

    Returns
    -------
    sharded, replicated : shape (C,)
        Matrices are split over X, Y and Z; vectors over X or Y only.
    """
    x, y = table.size("x"), table.size("y")
    n_embeddings = 1 if model.tied_embeddings else 2
    matrices = model.n_layers * model.block_matmul_parameters
    sharded = (matrices + n_embeddings * model.head.parameters) / (x * y * table.size("z"))
    over_x = float(model.n_norms * model.norm_parameters + model.position_parameters)
    over_y = 0.0
    for linear in model.block_linears:
        if linear.bias and linear.transposed:
            over_x += model.n_layers * linear.n_out
        elif linear.bias:
            over_y += model.n_layers * linear.n_out
    return sharded, over_x / x + over_y / y


def _state_bytes(job: Job) -> float:
    """Optimizer states of one parameter: the moments, and a master copy in mixed precision."""
    return MOMENT_BYTES + (FP32_BYTES if _has_master_copy(job) else 0.0)


def _has_master_copy(job: Job) -> bool:
    return job.element_bytes < FP32_BYTES


@dataclass(frozen=True, eq=False)
class _Shape:
    """Sizes that one linear layer has on each candidate, shape (C,)."""

    linear: Linear
    k: Array  # rows of the local weight block
    n: Array  # columns of the local weight block
    weight_bytes: Array  # the gathered block
    input_bytes: Array
    output_bytes: Array
    input_axis: str  # splits k; sums the output
    output_axis: str  # splits n; sums the input's gradient
    modes: tuple[str, str, str]  # of the products that form the output, dI and dW


@dataclass(frozen=True)
class _Weight:
    """A use of a weight: in the forward, the recomputed or the backward chain."""

    chain: str
    name: str

    @property
    def gather(self) -> str:
        """Name of the all-gather that brings it."""
        return f"{self}.all_gather"

    def __str__(self) -> str:
        return f"{self.chain}.{self.name}"


# The weight is stored k x n; a head that shares the embedding's weight finds it n x k.
_MODES = ("NN", "NT", "TN")
_TIED_MODES = ("NT", "NN", "TN")
# At most two weight gradients wait for their reduce-scatter: before the product that forms
# another one, the backward pass waits for that of the last but one.
_LAST_BUT_ONE = {
    "down": ("proj",),
    "up": ("qkv", "head"),
    "proj": ("down",),
    "qkv": ("up",),
    "embedding": ("proj",),
}


class _Planner:
    """Emits the phases of a micro-step for all candidates of one table."""

    def __init__(self, model: Model, job: Job, recompute: str, table: CandidateTable) -> None:
        self.model, self.job, self.recompute, self.table = model, job, recompute, table
        self.overlap = job.overlap
        self.x, self.y, self.z = (table.size(axis) for axis in ("x", "y", "z"))
        self.element_bytes = job.element_bytes
        self.tokens: Array = table.sequences_at_once * job.seq_len
        self.residual_bytes: Array = self.tokens * (model.hidden_size * job.element_bytes) / self.x
        self.mlp_bytes: Array = self.tokens * (model.ffn_hidden_size * job.element_bytes) / self.y
        self.shapes = {
            linear.name: self._shape(linear) for linear in (*model.block_linears, model.head)
        }
        self.embedding_bytes = self.shapes["head"].weight_bytes
        self._norm_kernel = f"{model.norm}_norm"
        self._activation_kernel = "swiglu" if model.gated_mlp else "gelu"

    def _shape(self, linear: Linear) -> _Shape:
        over_in, over_out = (self.y, self.x) if linear.transposed else (self.x, self.y)
        axes = ("y", "x") if linear.transposed else ("x", "y")
        modes = _TIED_MODES if self._is_tied_head(linear) else _MODES
        k, n = linear.n_in / over_in, linear.n_out / over_out
        scale = self.tokens * self.element_bytes
        return _Shape(
            linear, k, n, k * n * self.element_bytes, scale * k, scale * n, axes[0], axes[1], modes
        )

    def _is_tied_head(self, linear: Linear) -> bool:
        return linear.name == "head" and self.model.tied_embeddings

    # Weights -------------------------------------------------------------------

    def _gather(self, host: HostProgram, weight: _Weight) -> None:
        nbytes = self.embedding_bytes
        if weight.name != "embedding":
            nbytes = self.shapes[weight.name].weight_bytes
        host.issue(weight.gather, "all_gather", nbytes, "z")

    def _take_weight(self, host: HostProgram, weight: _Weight, following: _Weight | None) -> None:
        """Have a weight at hand; with OAG, start to gather the one that follows."""
        if self._is_gathered(weight):
            if not self.overlap.oag:
                self._gather(host, weight)
            host.wait(weight.gather)
        if self.overlap.oag and following is not None and self._is_gathered(following):
            self._gather(host, following)

    def _is_gathered(self, weight: _Weight) -> bool:
        return weight.chain == "forward" or not self.job.keep_gathered_weights

    # Linear layers ---------------------------------------------------------------

    def linear_forward(self, host: HostProgram, weight: _Weight, following: _Weight | None) -> None:
        """Gather the weight, multiply, sum the output over the axis that splits k."""
        shape = self.shapes[weight.name]
        self._take_weight(host, weight, following)
        host.gemm(f"{weight}.gemm", self.tokens, shape.n, shape.k, shape.modes[0])
        host.run(f"{weight}.all_reduce", "all_reduce", shape.output_bytes, shape.input_axis)

    def linear_backward(
        self,
        host: HostProgram,
        name: str,
        following: _Weight | None,
        recompute_input: Callable[[HostProgram], None] | None = None,
    ) -> None:
        """Form dI = dO W^T, summed over the axis of n, and dW = I^T dO, scattered over Z."""
        shape = self.shapes[name]
        weight = _Weight("backward", name)
        reduce_input = f"{weight}.all_reduce"
        self._take_weight(host, weight, following)
        host.gemm(f"{weight}.gemm_input", self.tokens, shape.k, shape.n, shape.modes[1])
        host.issue(reduce_input, "all_reduce", shape.input_bytes, shape.output_axis)
        if not self.overlap.oar:
            host.wait(reduce_input)
        if recompute_input is not None:
            recompute_input(host)
        self._wait_for_last_but_one_scatter(host, name)
        rows, columns = shape.k, shape.n
        if self._is_tied_head(shape.linear):
            rows, columns = columns, rows
        host.gemm(f"{weight}.gemm_weight", rows, columns, self.tokens, shape.modes[2])
        if shape.linear.bias:
            host.memory_bound(f"{weight}.bias", shape.output_bytes, "reduce")
        self._scatter(host, name, shape.weight_bytes)
        if self.overlap.oar:
            host.wait(reduce_input)

    def _wait_for_last_but_one_scatter(self, host: HostProgram, name: str) -> None:
        if self.overlap.ors:
            for earlier in _LAST_BUT_ONE.get(name, ()):
                host.wait(f"backward.{earlier}.reduce_scatter")

    def _scatter(self, host: HostProgram, name: str, weight_bytes: Array) -> None:
        scatter = f"backward.{name}.reduce_scatter"
        host.issue(scatter, "reduce_scatter", weight_bytes, "z")
        if not self.overlap.ors:
            host.wait(scatter)

    # Kernels -----------------------------------------------------------------------

    def _norm(self, host: HostProgram, name: str) -> None:
        """Where X splits the hidden dimension, sums over it travel in fp32, in a pass before."""
        n_sums = 2.0 if self.model.norm == "layer" else 1.0
        residual, is_split = self.residual_bytes, self.x > 1
        forward = not name.startswith("backward")
        sums_bytes = is_split * (1.0 if forward else 2.0) * residual
        host.memory_bound(f"{name}.sums", sums_bytes, "reduce")
        host.run(f"{name}.all_reduce", "all_reduce", self.tokens * (n_sums * FP32_BYTES), "x")
        kernel = self._norm_kernel if forward else f"{self._norm_kernel}_backward"
        host.memory_bound(name, (2.0 if forward else 3.0) * residual, kernel)

    def _attention(self, host: HostProgram, name: str, backward: bool) -> None:
        host.attention(
            name,
            self.table.sequences_at_once,
            self.model.n_heads / self.y,
            self.job.seq_len,
            self.model.head_dim,
            backward,
            self.job.attention == "flash",
        )

    def _rotary(self, host: HostProgram, name: str) -> None:
        """Rotary position embedding of q and k, read and written."""
        if self.model.position == "rotary":
            rotated = (self.model.n_heads + self.model.n_kv_heads) * self.model.head_dim
            nbytes = self.tokens * (2.0 * rotated * self.element_bytes) / self.y
            host.memory_bound(name, nbytes, "rotary")

    def _activation(self, host: HostProgram, name: str) -> None:
        nbytes = self.shapes["up"].output_bytes + self.mlp_bytes
        host.memory_bound(name, nbytes, self._activation_kernel)

    # A block -------------------------------------------------------------------------

    def block_forward(self, host: HostProgram, chain: str, following: _Weight | None) -> None:
        """Attention and MLP; `following` is the weight that is used after the block."""
        qkv, proj, up, down = (_Weight(chain, linear.name) for linear in self.model.block_linears)
        self._norm(host, f"{chain}.norm1")
        self.linear_forward(host, qkv, proj)
        self._rotary(host, f"{chain}.rotary")
        self._attention(host, f"{chain}.attention", backward=False)
        self.linear_forward(host, proj, up)
        host.memory_bound(f"{chain}.residual1", 3.0 * self.residual_bytes, "add")
        self._norm(host, f"{chain}.norm2")
        self.linear_forward(host, up, down)
        self._activation(host, f"{chain}.activation")
        self.linear_forward(host, down, following)
        host.memory_bound(f"{chain}.residual2", 3.0 * self.residual_bytes, "add")

    def block_backward(self, host: HostProgram, following: _Weight | None) -> None:
        """What the job recomputes, then the gradients of the MLP and of attention."""
        if self.recompute == "full":
            self.block_forward(host, "recompute", _Weight("backward", "down"))
        again = self._recompute_inputs()
        up_bytes, residual_add = self.shapes["up"].output_bytes, 3.0 * self.residual_bytes
        self.linear_backward(host, "down", _Weight("backward", "up"), again.get("down"))
        kernel = f"{self._activation_kernel}_backward"
        host.memory_bound("backward.activation", 2.0 * up_bytes + self.mlp_bytes, kernel)
        self.linear_backward(host, "up", _Weight("backward", "proj"), again.get("up"))
        self._norm(host, "backward.norm2")
        host.memory_bound("backward.residual2", residual_add, "add")
        self.linear_backward(host, "proj", _Weight("backward", "qkv"))
        if self.recompute == "selective" and self.job.attention == "unfused":
            self._attention(host, "recompute.attention", backward=False)
        self._attention(host, "backward.attention", backward=True)
        self._rotary(host, "backward.rotary")
        self.linear_backward(host, "qkv", following, again.get("qkv"))
        self._norm(host, "backward.norm1")
        host.memory_bound("backward.residual1", residual_add, "add")

    def _recompute_inputs(self) -> dict[str, Callable[[HostProgram], None]]:
        """Selective recomputation: what needs neither a weight nor a collective, where used."""
        if self.recompute != "selective":
            return {}
        norm, norm_bytes = self._norm_kernel, 2.0 * self.residual_bytes
        return {
            "down": lambda host: self._activation(host, "recompute.activation"),
            "up": lambda host: host.memory_bound("recompute.norm2", norm_bytes, norm),
            "qkv": lambda host: host.memory_bound("recompute.norm1", norm_bytes, norm),
        }

    # Phases ----------------------------------------------------------------------------

    def embedding(self) -> Phase:
        """Look up each token's row; ranks along Y hold different parts of the vocabulary."""
        host = HostProgram()
        weight = _Weight("forward", "embedding")
        if self.overlap.oag:
            self._gather(host, weight)
        self._take_weight(host, weight, _Weight("forward", "qkv"))
        host.memory_bound(f"{weight}.lookup", 2.0 * self.residual_bytes, "lookup")
        host.issue(f"{weight}.all_reduce", "all_reduce", self.residual_bytes, "y")
        if self.model.position == "learned":
            host.wait(f"{weight}.all_reduce")
            host.memory_bound(f"{weight}.position", 2.0 * self.residual_bytes, "add")
        return host.phase("embedding")

    def forward(self, name: str, repeats: int, following: _Weight) -> Phase:
        """Blocks of the forward pass."""
        host = HostProgram()
        if self.model.position != "learned":
            host.wait("forward.embedding.all_reduce")
        self.block_forward(host, "forward", following)
        return host.phase(name, repeats)

    def head(self) -> Phase:
        """Final norm, logits, loss, and the backward pass of these."""
        host = HostProgram()
        logits = self.tokens * (self.model.head.n_out / self.y)
        per_token = self.tokens * FP32_BYTES
        self._norm(host, "forward.norm")
        self.linear_forward(host, _Weight("forward", "head"), _Weight("backward", "head"))
        # Softmax of the rank's part of the vocabulary, then of the parts: their largest
        # log-sum-exp, then the sum of exponentials with the target's logit.
        nbytes = logits * (2.0 * self.element_bytes + FP32_BYTES)
        host.memory_bound("loss.softmax", nbytes, "softmax")
        host.run("loss.maximum.all_reduce", "all_reduce", per_token, "y")
        host.run("loss.sum.all_reduce", "all_reduce", 2.0 * per_token, "y")
        nbytes = logits * (FP32_BYTES + self.element_bytes)
        host.memory_bound("loss.gradient", nbytes, "softmax_backward")
        self.linear_backward(host, "head", self._backward_entry)
        self._norm(host, "backward.norm")
        return host.phase("head")

    @property
    def _backward_entry(self) -> _Weight:
        """The weight that a block's backward pass uses first."""
        if self.recompute == "full":
            return _Weight("recompute", "qkv")
        return _Weight("backward", "down")

    def backward(self, name: str, repeats: int, following: _Weight | None) -> Phase:
        """Blocks of the backward pass."""
        host = HostProgram()
        self.block_backward(host, following)
        return host.phase(name, repeats)

    def embedding_backward(self) -> Phase:
        """Add rows to a dense gradient block and scatter it."""
        host = HostProgram()
        name = "backward.embedding"
        if self.model.position == "learned":
            host.memory_bound(f"{name}.position", self.residual_bytes, "reduce")
        self._wait_for_last_but_one_scatter(host, "embedding")
        # Where Z does not split it, a shared weight has the head's gradient to add to.
        is_cleared = (self.z > 1) if self.model.tied_embeddings else 1.0
        nbytes = is_cleared * self.embedding_bytes + 3.0 * self.residual_bytes
        host.memory_bound(f"{name}.scatter_add", nbytes, "scatter_add")
        host.issue(f"{name}.reduce_scatter", "reduce_scatter", self.embedding_bytes, "z")
        return host.phase("embedding_backward", over_storage=True)

    def microstep(self) -> tuple[Phase, ...]:
        """Forward and backward pass over one micro-batch."""
        n_layers = self.model.n_layers
        phases = (
            self.embedding(),
            self.forward("forward", n_layers - 1, _Weight("forward", "qkv")),
            self.forward("forward_last", 1, _Weight("forward", "head")),
            self.head(),
            self.backward("backward", n_layers - 1, self._backward_entry),
            self.backward("backward_last", 1, None),
            self.embedding_backward(),
            self._accumulate(),
        )
        return tuple(phase for phase in phases if phase.repeats > 0)

    # Once per micro-step and once per step, on what the rank stores ----------------------

    def _accumulate(self) -> Phase:
        """Add the micro-step's gradients to the fp32 sums, once the last scatter has ended."""
        sharded, replicated = stored_parameters(self.model, self.table)
        host = HostProgram()
        host.wait("backward.embedding.reduce_scatter")
        if self.model.tied_embeddings:
            shard_bytes = self.embedding_bytes / self.z
            host.memory_bound("gradient.tied", (self.z > 1) * 3.0 * shard_bytes, "add")
        nbytes = (sharded + replicated) * (self.element_bytes + 2.0 * GRADIENT_BYTES)
        host.memory_bound("gradient.accumulate", nbytes, "add")
        return host.phase("accumulate", over_storage=True)

    def step_end(self) -> tuple[Phase, ...]:
        """Reduce the gradients over data, clip them, update the weights."""
        sharded, replicated = stored_parameters(self.model, self.table)
        stored = sharded + replicated
        gradient_bytes = stored * GRADIENT_BYTES
        host = HostProgram()
        vector_bytes = replicated * GRADIENT_BYTES
        host.run("gradient.vectors.all_reduce", "all_reduce", vector_bytes, "z")
        n_buckets = np.ceil(gradient_bytes / BUCKET_BYTES)
        host.run("gradient.all_reduce", "all_reduce", gradient_bytes, "data", n_buckets)
        host.memory_bound("gradient.norm", gradient_bytes, "reduce")
        for axis in ("x", "y", "z"):
            host.run(f"gradient.norm.all_reduce_{axis}", "all_reduce", FP32_BYTES, axis)
        host.memory_bound("gradient.clip", 2.0 * gradient_bytes, "scale")
        # Read and clear the gradient, read and write the states, write the weight; without
        # a master copy the weight is read too.
        weight_bytes = self.element_bytes * (1.0 if _has_master_copy(self.job) else 2.0)
        nbytes = stored * (2.0 * GRADIENT_BYTES + 2.0 * _state_bytes(self.job) + weight_bytes)
        host.memory_bound("optimizer.step", nbytes, "optimizer")
        return (host.phase("step_end", over_storage=True),)


def plan(model: Model, job: Job, recompute: str, table: CandidateTable) -> StepPlan:
    """The operations of one rank in one training step, for every candidate of the table."""
    planner = _Planner(model, job, recompute, table)
    return StepPlan(
        table, planner.microstep(), planner.step_end(), table.n_microsteps(job.global_batch)
    )


def memory(model: Model, job: Job, recompute: str, table: CandidateTable) -> dict[str, Array]:
    """Peak bytes of one rank by term, each of shape (C,).

    The peak is in the backward pass, where everything saved is still held (all layers'
    checkpoints, or all activations), one block's activations and gradients are in work,
    and two weights are gathered. The logits live only between forward and backward, so
    the larger of logits and one block's working set counts.
    """
    shapes = _Planner(model, job, recompute, table)
    sharded, replicated = stored_parameters(model, table)
    stored = sharded + replicated
    saved_all, saved_selective = _saved_by_block(shapes)
    per_layer = {
        "none": saved_all,
        "selective": saved_selective,
        "full": shapes.residual_bytes,
    }[recompute]
    working = saved_all - per_layer + shapes.shapes["up"].output_bytes + shapes.mlp_bytes
    logits = shapes.tokens * (model.head.n_out / shapes.y) * (job.element_bytes + FP32_BYTES)
    return {
        "weights": stored * job.element_bytes,
        # The fp32 sums, and what the micro-step's reduce-scatters have brought.
        "gradients": stored * (GRADIENT_BYTES + job.element_bytes),
        "optimizer_states": stored * _state_bytes(job),
        "gathered_weights": _gathered_bytes(shapes),
        "activations": model.n_layers * per_layer + shapes.residual_bytes,
        "working_set": np.maximum(working, logits),
    }


def _saved_by_block(shapes: _Planner) -> tuple[Array, Array]:
    """Bytes that one block saves for its backward pass: everything; without the cheap parts.

    Saved are the inputs of each product and what the kernels between them need: the
    block's input and the residual after attention (norms), both norms' outputs, q, k, v,
    the attention's output, the MLP before and after its activation. Unfused attention
    also keeps the softmax of its scores.
    """
    model, job = shapes.model, shapes.job
    residual = shapes.residual_bytes
    attention_out = shapes.shapes["proj"].input_bytes
    kept = 2.0 * residual + shapes.shapes["qkv"].output_bytes + attention_out
    kept = kept + shapes.shapes["up"].output_bytes
    cheap = 2.0 * residual + shapes.mlp_bytes
    if job.attention == "unfused":
        scores = shapes.tokens * (float(job.seq_len) * model.n_heads) / shapes.y
        cheap = cheap + scores * job.element_bytes
    return kept + cheap, kept


def _gathered_bytes(shapes: _Planner) -> Array:
    """Gathered weights and unscattered weight gradients in flight, where Z splits the weights."""
    blocks = [shapes.shapes[linear.name].weight_bytes for linear in shapes.model.block_linears]
    head, overlap = shapes.embedding_bytes, shapes.job.overlap
    one = np.maximum.reduce([*blocks, head])
    pairs = [a + b for a, b in zip(blocks, blocks[1:] + blocks[:1], strict=True)]
    two = np.maximum.reduce([*pairs, head + blocks[-1]])
    in_flight = two if overlap.oag else one
    if shapes.job.keep_gathered_weights:
        in_flight = shapes.model.n_layers * sum(blocks) + 2.0 * head
    gradients = two if overlap.ors else one
    held: Array = np.where(shapes.table.size("z") > 1, in_flight + gradients, 0.0)
    return held
