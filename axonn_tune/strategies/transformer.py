"""What every rank computes of a transformer, whatever the strategy.

The kernels of a training step follow from the model and from how widths are split; where
weights come from, how partial sums travel and where gradients go is the strategy's, which
overrides the methods of `Transformer` that say so.

Layout: the input width k of a linear layer is split over `x`, its output width n over `y`; a
transposed layer (proj, down) exchanges the two, so that it takes its input as the layer before
it left it. A strategy that does not split a width sets the size to one and the axis to "".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Linear, Model
from axonn_tune.spec.plan import Array, Phase
from axonn_tune.strategies.program import HostProgram

FP32_BYTES = 4.0
# AdamW keeps an fp32 master copy (mixed precision only) and two fp32 moments.
MOMENT_BYTES = 2 * FP32_BYTES
# A dropout mask holds one byte for each element.
MASK_BYTES = 1.0


def has_master_copy(job: Job) -> bool:
    """Whether the optimizer keeps an fp32 copy of each weight."""
    return job.element_bytes < FP32_BYTES


def state_bytes(job: Job) -> float:
    """Optimizer states of one parameter: the moments, and a master copy in mixed precision."""
    return MOMENT_BYTES + (FP32_BYTES if has_master_copy(job) else 0.0)


def stage_parameters(
    model: Model, n_layers: int, first: bool, last: bool
) -> tuple[float, float, float]:
    """Parameters of so many layers, with embedding (`first`) and final norm and head (`last`).

    Returns
    -------
    matrices, over_x, over_y
        Vectors lie along the residual stream, which X splits, or along what Y splits.
    """
    is_shared = model.tied_embeddings and first and last
    n_embeddings = first + last - is_shared
    matrices = n_layers * model.block_matmul_parameters + n_embeddings * model.head.parameters
    n_norms = 2 * n_layers + last
    over_x = float(n_norms * model.norm_parameters + first * model.position_parameters)
    over_y = 0.0
    for linear in model.block_linears:
        if linear.bias and linear.transposed:
            over_x += n_layers * linear.n_out
        elif linear.bias:
            over_y += n_layers * linear.n_out
    return matrices, over_x, over_y


@dataclass(frozen=True, eq=False)
class Shape:
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
class Weight:
    """A use of a weight: in the forward, the recomputed or the backward chain."""

    chain: str
    name: str

    def __str__(self) -> str:
        return f"{self.chain}.{self.name}"


# The weight is stored k x n; a head that shares the embedding's weight finds it n x k.
_MODES = ("NN", "NT", "TN")
_TIED_MODES = ("NT", "NN", "TN")


class Transformer:
    """Emits the phases of a micro-step for all candidates of one table.

    Parameters
    ----------
    x, y : arrays, shape (C,)
        Over how many ranks input and output widths are split.
    x_axis, y_axis : str
        The groups over which they are; empty where they are not.
    tokens : array, shape (C,)
        Tokens of a micro-batch on one rank.
    """

    def __init__(
        self,
        model: Model,
        job: Job,
        table: CandidateTable,
        x: Array,
        y: Array,
        axes: tuple[str, str],
        tokens: Array,
    ) -> None:
        self.model, self.job, self.table = model, job, table
        self.recompute, self.n_virtual = table.common_recompute, table.common_n_virtual
        self.overlap, self.element_bytes = job.overlap, job.element_bytes
        self.x, self.y, self.x_axis, self.y_axis = x, y, *axes
        self.tokens = tokens
        self.residual_bytes: Array = tokens * (model.hidden_size * job.element_bytes) / x
        self.mlp_bytes: Array = tokens * (model.ffn_hidden_size * job.element_bytes) / y
        self.shapes = {
            linear.name: self._shape(linear) for linear in (*model.block_linears, model.head)
        }
        self.embedding_bytes = self.shapes["head"].weight_bytes
        self.is_sync = False
        self.norm_kernel = f"{model.norm}_norm"
        self.activation_kernel = "swiglu" if model.gated_mlp else "gelu"

    def _shape(self, linear: Linear) -> Shape:
        over_in, over_out = (self.y, self.x) if linear.transposed else (self.x, self.y)
        axes = (self.x_axis, self.y_axis)
        axes = axes[::-1] if linear.transposed else axes
        modes = _TIED_MODES if self._is_tied_head(linear) else _MODES
        k, n = linear.n_in / over_in, linear.n_out / over_out
        scale = self.tokens * self.element_bytes
        return Shape(
            linear, k, n, k * n * self.element_bytes, scale * k, scale * n, axes[0], axes[1], modes
        )

    def _is_tied_head(self, linear: Linear) -> bool:
        return linear.name == "head" and self.model.tied_embeddings

    # What a strategy decides -------------------------------------------------------

    def prefetch(self, host: HostProgram, weight: Weight) -> None:
        """Start to bring the first weight of a phase."""

    def take_weight(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Have a weight at hand; `following` is the one that is used next."""

    def before_product(self, host: HostProgram, weight: Weight) -> None:
        """Bring the input together."""

    def sum_output(self, host: HostProgram, weight: Weight) -> None:
        """Sum the output over the axis that splits k."""
        shape = self.shapes[weight.name]
        self.run(host, f"{weight}.all_reduce", "all_reduce", shape.output_bytes, shape.input_axis)

    def before_gradients(self, host: HostProgram, weight: Weight) -> None:
        """Bring the gradient of the output together, and start what dW needs."""

    def sum_input_gradient(self, host: HostProgram, weight: Weight) -> str:
        """Start to sum dI over the axis that splits n; the name to wait for, or none."""
        shape = self.shapes[weight.name]
        if not shape.output_axis:
            return ""
        name = f"{weight}.all_reduce"
        host.issue(name, "all_reduce", shape.input_bytes, shape.output_axis)
        return name

    def before_weight_gradient(self, host: HostProgram, name: str) -> None:
        """Wait for what dW needs."""

    def send_gradient(self, host: HostProgram, name: str) -> None:
        """Have the gradient of one weight where it is stored."""

    def begin_attention(self, host: HostProgram, chain: str) -> None:
        """Start to exchange keys and values."""

    def end_attention(self, host: HostProgram, chain: str) -> None:
        """Wait for what `begin_attention` has started."""

    def begin_block(self, host: HostProgram, chain: str) -> None:
        """Before the first kernel of a block in the forward, recomputed or backward chain."""

    def end_block_backward(self, host: HostProgram) -> None:
        """After the last kernel of a block's backward pass."""

    def finish_embedding_gradient(self, host: HostProgram) -> None:
        """Have the embedding's gradient where it is stored."""

    def recomputed_inputs(self) -> dict[str, Callable[[HostProgram], None]]:
        """What selective recomputation forms again before a product, by the weight's name."""
        return {}

    @property
    def is_embedding_cleared(self) -> Array | float:
        """1 where the embedding's gradient begins from zero, 0 where it adds to the head's."""
        return 0.0 if self.model.tied_embeddings else 1.0

    @property
    def has_sync(self) -> bool:
        """Whether a synchronising micro-step differs from the others."""
        return False

    @property
    def recomputes_attention(self) -> bool:
        """Whether the backward pass of a block forms unfused attention again."""
        return self.recompute == "selective" and self.job.attention == "unfused"

    def accumulate(self, last_scatter: str) -> tuple[Phase, ...]:
        """Add the micro-step's gradients to those before."""
        return ()

    def step_end(self) -> tuple[Phase, ...]:
        """Reduce the gradients, update the weights."""
        raise NotImplementedError

    @staticmethod
    def run(host: HostProgram, name: str, kind: str, nbytes: Array, axis: str) -> None:
        """A collective that is waited for; none where nothing is split."""
        if axis:
            host.run(name, kind, nbytes, axis)

    # Linear layers ---------------------------------------------------------------

    def linear_forward(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Have the weight, multiply, sum the output over the axis that splits k."""
        shape = self.shapes[weight.name]
        self.take_weight(host, weight, following)
        self.before_product(host, weight)
        host.gemm(f"{weight}.gemm", self.tokens, shape.n, shape.k, shape.modes[0])
        self.sum_output(host, weight)

    def linear_backward(
        self,
        host: HostProgram,
        name: str,
        following: Weight | None,
        recompute_input: Callable[[HostProgram], None] | None = None,
    ) -> None:
        """Form dI = dO W^T, summed over the axis of n, and dW = I^T dO."""
        shape = self.shapes[name]
        weight = Weight("backward", name)
        self.take_weight(host, weight, following)
        self.before_gradients(host, weight)
        host.gemm(f"{weight}.gemm_input", self.tokens, shape.k, shape.n, shape.modes[1])
        input_sum = self.sum_input_gradient(host, weight)
        if input_sum and not self.overlap.oar:
            host.wait(input_sum)
        if recompute_input is not None:
            recompute_input(host)
        self.before_weight_gradient(host, name)
        rows, columns = shape.k, shape.n
        if self._is_tied_head(shape.linear):
            rows, columns = columns, rows
        host.gemm(f"{weight}.gemm_weight", rows, columns, self.tokens, shape.modes[2])
        if shape.linear.bias:
            host.memory_bound(f"{weight}.bias", shape.output_bytes, "reduce")
        self.send_gradient(host, name)
        if input_sum and self.overlap.oar:
            host.wait(input_sum)

    # Kernels -----------------------------------------------------------------------

    def norm(self, host: HostProgram, name: str) -> None:
        """Where X splits the hidden dimension, sums over it travel in fp32, in a pass before."""
        forward = not name.startswith("backward")
        residual = self.residual_bytes
        if self.x_axis:
            n_sums = 2.0 if self.model.norm == "layer" else 1.0
            sums_bytes = (self.x > 1) * (1.0 if forward else 2.0) * residual
            host.memory_bound(f"{name}.sums", sums_bytes, "reduce")
            sums = self.tokens * (n_sums * FP32_BYTES)
            self.run(host, f"{name}.all_reduce", "all_reduce", sums, self.x_axis)
        kernel = self.norm_kernel if forward else f"{self.norm_kernel}_backward"
        host.memory_bound(name, (2.0 if forward else 3.0) * residual, kernel)

    def attention(self, host: HostProgram, chain: str, backward: bool) -> None:
        """Attention with the rank's heads, over its share of the queries."""
        self.begin_attention(host, chain)
        host.attention(
            f"{chain}.attention",
            self.tokens / self.job.seq_len,
            self.model.n_heads / self.y,
            self.job.seq_len,
            self.model.head_dim,
            backward,
            self.job.attention == "flash",
        )
        if self.job.dropout and self.job.attention == "unfused":
            mask = MASK_BYTES / self.element_bytes
            host.memory_bound(
                f"{chain}.attention_dropout", self.score_bytes * (2.0 + mask), "scale"
            )
        self.end_attention(host, chain)

    @property
    def score_bytes(self) -> Array:
        """The scores of unfused attention, or the softmax of them."""
        scores = self.tokens * (float(self.job.seq_len) * self.model.n_heads) / self.y
        return scores * self.element_bytes

    def working_set(self, everything: Array, saved: Array, last: bool) -> Array:
        """Bytes in work beside what is saved of each block (`saved` of `everything`).

        One block's activations and gradients, or the logits, once in fp32.
        """
        working: Array = everything - saved + self.shapes["up"].output_bytes + self.mlp_bytes
        if last:
            logits = self.tokens * (self.model.head.n_out / self.y)
            working = np.maximum(working, logits * (self.element_bytes + FP32_BYTES))
        return working

    @property
    def transfer_bytes(self) -> Array:
        """What a rank sends to the next stage of a pipeline."""
        return self.residual_bytes

    def _rotary(self, host: HostProgram, name: str) -> None:
        """Rotary position embedding of q and k, read and written."""
        if self.model.position == "rotary":
            rotated = (self.model.n_heads + self.model.n_kv_heads) * self.model.head_dim
            nbytes = self.tokens * (2.0 * rotated * self.element_bytes) / self.y
            host.memory_bound(name, nbytes, "rotary")

    def activation(self, host: HostProgram, name: str) -> None:
        """The MLP's nonlinearity."""
        nbytes = self.shapes["up"].output_bytes + self.mlp_bytes
        host.memory_bound(name, nbytes, self.activation_kernel)

    def _residual(self, host: HostProgram, name: str) -> None:
        """Add to the residual stream; with dropout, draw and keep a mask, or apply it again."""
        forward, passes = not name.startswith("backward"), 3.0
        if self.job.dropout:
            passes += MASK_BYTES / self.element_bytes + (0.0 if forward else 2.0)
        host.memory_bound(name, passes * self.residual_bytes, "add")

    # A block -------------------------------------------------------------------------

    def block_forward(self, host: HostProgram, chain: str, following: Weight | None) -> None:
        """Attention and MLP; `following` is the weight that is used after the block."""
        qkv, proj, up, down = (Weight(chain, linear.name) for linear in self.model.block_linears)
        self.begin_block(host, chain)
        self.norm(host, f"{chain}.norm1")
        self.linear_forward(host, qkv, proj)
        self._rotary(host, f"{chain}.rotary")
        self.attention(host, chain, backward=False)
        self.linear_forward(host, proj, up)
        self._residual(host, f"{chain}.residual1")
        self.norm(host, f"{chain}.norm2")
        self.linear_forward(host, up, down)
        self.activation(host, f"{chain}.activation")
        self.linear_forward(host, down, following)
        self._residual(host, f"{chain}.residual2")

    def block_backward(self, host: HostProgram, following: Weight | None) -> None:
        """What the job recomputes, then the gradients of the MLP and of attention."""
        if self.recompute == "full":
            self.block_forward(host, "recompute", Weight("backward", "down"))
        else:
            self.begin_block(host, "backward")
        again = self.recomputed_inputs()
        up_bytes = self.shapes["up"].output_bytes
        self.linear_backward(host, "down", Weight("backward", "up"), again.get("down"))
        kernel = f"{self.activation_kernel}_backward"
        host.memory_bound("backward.activation", 2.0 * up_bytes + self.mlp_bytes, kernel)
        self.linear_backward(host, "up", Weight("backward", "proj"), again.get("up"))
        self.norm(host, "backward.norm2")
        self._residual(host, "backward.residual2")
        self.linear_backward(host, "proj", Weight("backward", "qkv"))
        if self.recomputes_attention:
            self.attention(host, "recompute", backward=False)
        self.attention(host, "backward", backward=True)
        self._rotary(host, "backward.rotary")
        self.linear_backward(host, "qkv", following, again.get("qkv"))
        self.norm(host, "backward.norm1")
        self._residual(host, "backward.residual1")
        self.end_block_backward(host)

    # Phases ----------------------------------------------------------------------------

    def embedding(self) -> Phase:
        """Look up each token's row; ranks along Y hold different parts of the vocabulary."""
        host = HostProgram()
        weight = Weight("forward", "embedding")
        self.prefetch(host, weight)
        self.take_weight(host, weight, Weight("forward", "qkv"))
        host.memory_bound(f"{weight}.lookup", 2.0 * self.residual_bytes, "lookup")
        self.sum_embedding(host, weight)
        if self.model.position == "learned":
            self.wait_for_embedding(host)
            host.memory_bound(f"{weight}.position", 2.0 * self.residual_bytes, "add")
        return host.phase("embedding")

    def sum_embedding(self, host: HostProgram, weight: Weight) -> None:
        """Start to sum the rows that ranks along Y have found."""
        if self.y_axis:
            host.issue(f"{weight}.all_reduce", "all_reduce", self.residual_bytes, self.y_axis)

    def wait_for_embedding(self, host: HostProgram) -> None:
        """Wait for `sum_embedding`."""
        if self.y_axis:
            host.wait("forward.embedding.all_reduce")

    def start(self, weight: Weight) -> Phase:
        """Start a pass that does not follow another: of a stage of a pipeline."""
        host = HostProgram()
        self.prefetch(host, weight)
        return host.phase("start")

    def forward(self, name: str, repeats: int, following: Weight | None) -> Phase:
        """Blocks of the forward pass."""
        host = HostProgram()
        if self.model.position != "learned":
            self.wait_for_embedding(host)
        self.block_forward(host, "forward", following)
        return host.phase(name, repeats)

    def head(self) -> Phase:
        """Final norm, logits, loss, and the backward pass of these."""
        host = HostProgram()
        logits = self.tokens * (self.model.head.n_out / self.y)
        per_token = self.tokens * FP32_BYTES
        self.norm(host, "forward.norm")
        self.linear_forward(host, Weight("forward", "head"), Weight("backward", "head"))
        # Softmax of the rank's part of the vocabulary, then of the parts: their largest
        # log-sum-exp, then the sum of exponentials with the target's logit.
        nbytes = logits * (2.0 * self.element_bytes + FP32_BYTES)
        host.memory_bound("loss.softmax", nbytes, "softmax")
        self.run(host, "loss.maximum.all_reduce", "all_reduce", per_token, self.y_axis)
        self.run(host, "loss.sum.all_reduce", "all_reduce", 2.0 * per_token, self.y_axis)
        nbytes = logits * (FP32_BYTES + self.element_bytes)
        host.memory_bound("loss.gradient", nbytes, "softmax_backward")
        self.linear_backward(host, "head", self.backward_entry)
        self.norm(host, "backward.norm")
        return host.phase("head")

    @property
    def backward_entry(self) -> Weight:
        """The weight that a block's backward pass uses first."""
        if self.recompute == "full":
            return Weight("recompute", "qkv")
        return Weight("backward", "down")

    def backward(self, name: str, repeats: int, following: Weight | None) -> Phase:
        """Blocks of the backward pass."""
        host = HostProgram()
        self.block_backward(host, following)
        return host.phase(name, repeats)

    def embedding_backward(self) -> Phase:
        """Add rows to a dense gradient block, and send it."""
        host = HostProgram()
        name = "backward.embedding"
        if self.model.position == "learned":
            host.memory_bound(f"{name}.position", self.residual_bytes, "reduce")
        self.before_weight_gradient(host, "embedding")
        nbytes = self.is_embedding_cleared * self.embedding_bytes + 3.0 * self.residual_bytes
        host.memory_bound(f"{name}.scatter_add", nbytes, "scatter_add")
        self.finish_embedding_gradient(host)
        return host.phase("embedding_backward", over_storage=True)

    def forward_pass(self, n_layers: int, first: bool, last: bool) -> tuple[Phase, ...]:
        """So many blocks, with the embedding before or the head after them."""
        entry, after = Weight("forward", "qkv"), Weight("forward", "head") if last else None
        start = self.embedding() if first else self.start(entry)
        phases = (
            start,
            self.forward("forward", n_layers - 1, entry),
            self.forward("forward_last", min(n_layers, 1), after),
            *([self.head()] if last else []),
        )
        return _issued(phases)

    def backward_pass(self, n_layers: int, first: bool, last: bool) -> tuple[Phase, ...]:
        """The gradients of so many blocks, and of the embedding; then they are added up."""
        phases = (
            *([] if last else [self.start(self.backward_entry)]),
            self.backward("backward", n_layers - 1, self.backward_entry),
            self.backward("backward_last", min(n_layers, 1), None),
            *([self.embedding_backward()] if first else []),
            *self.accumulate("embedding" if first else "qkv"),
        )
        return _issued(phases)

    def microstep(self) -> tuple[Phase, ...]:
        """Forward and backward pass over one micro-batch."""
        n_layers = self.model.n_layers
        return self.forward_pass(n_layers, True, True) + self.backward_pass(n_layers, True, True)


def _issued(phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
    return tuple(phase for phase in phases if phase.repeats > 0 and phase.operations)
