"""The kernels of a mixture of experts: router, permutation, exchange, and the experts' products.

Each token is copied once for each of its experts, the copies are sorted by expert and sent to the
ranks that hold these, the experts' products run as grouped products over all local experts, and
the results travel back and are added up (Megatron-Core, transformer/moe, token dispatcher
``alltoall``, and SimuMax at 4dcaae51, core/transformer/moe_module.py, for the bytes of each step).
Other dispatchers send a token once to each rank that holds any of its experts, and between nodes
once for all ranks of a node, which forward it to each other (deepseek-ai/DeepEP dd758ca,
docs/legacy.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.blocks import Block, Experts
from axonn_tune.spec.names import (
    BACKWARD,
    COMBINE,
    DISPATCH,
    FORWARD,
    PROBABILITIES,
    RECOMPUTE,
)
from axonn_tune.spec.plan import Array, GroupedGemm, Size
from axonn_tune.spec.precision import TF32
from axonn_tune.strategies.casts import Casts
from axonn_tune.strategies.communication import Communication
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES, Shapes, kernel_of

_UP, _DOWN, _ROUTER = "experts_up", "experts_down", "router"
COUNT_BYTES = 8.0  # bytes of a number of copies


@dataclass(frozen=True, eq=False)
class ExpertShapes:
    """The sizes of the routed experts of one layer on one rank, arrays of shape (C,).

    Attributes
    ----------
    shapes
        Sizes of everything else.
    experts
        The model's experts.
    """

    shapes: Shapes
    experts: Experts

    @cached_property
    def n_local(self) -> Array:
        """The number of experts that the rank holds."""
        n_experts = float(self.experts.n_experts)
        return n_experts / (self.shapes.expert_split * np.ones(len(self.shapes.table)))

    @property
    def own_bytes(self) -> Array:
        """The bytes of the residual stream of the tokens that the rank routes."""
        model = self.shapes.model
        return self.shapes.own_tokens * (model.hidden_size * self.shapes.element_bytes)

    @property
    def routed_tokens(self) -> Array:
        """The number of copies of tokens that the busiest rank's experts take.

        A rank that holds all experts takes the copies of its own tokens. No rank takes more than
        all copies of its group's tokens, nor more than one copy of each token for each local
        expert.
        """
        n_ranks = self.experts.n_experts / self.n_local
        largest = np.minimum(n_ranks, self.experts.n_experts / self.experts.top_k)
        imbalance = np.minimum(self.shapes.job.expert_imbalance, largest)
        return self.shapes.own_tokens * (self.experts.top_k * imbalance)

    @property
    def routed_bytes(self) -> Array:
        """The bytes of the copies that `routed_tokens` counts."""
        model = self.shapes.model
        return self.routed_tokens * (model.hidden_size * self.shapes.element_bytes)

    @property
    def sent_bytes(self) -> Array:
        """The bytes that a rank sends to the ranks of the experts, and receives from them."""
        if not self.shapes.sends_once:
            return self.routed_bytes
        n_reached = self.experts.n_reached(self.experts.n_experts / self.n_local)
        return self.routed_bytes * (n_reached / self.experts.top_k)

    @property
    def exchanged_bytes(self) -> Array:
        """The bytes of an all-to-all's full buffer that takes as long as the exchange of tokens.

        An all-to-all does not send the part for the own rank, but kernels that send each token once
        also move that part. Counted with it, their measured rates are those of an all-to-all: 534
        GB/s over 8 B200, and 462 to 557 over 8 to 36 GB200 (deepseek-ai/DeepEP 94a9f8f,
        README_Hybrid-EP.md, bf16 with the time of the call, means of dispatch and combine).
        """
        if not self.shapes.sends_once:
            return self.sent_bytes
        n_ranks = self.experts.n_experts / self.n_local
        return self.sent_bytes * (n_ranks / np.maximum(n_ranks - 1.0, 1.0))

    @property
    def probability_bytes(self) -> Array:
        """The bytes of the router's probabilities, which travel with the copies, in fp32."""
        return self.routed_tokens * FP32_BYTES

    @property
    def taken_tokens(self) -> Array:
        """The number of copies that the rank's experts, or its parts of experts, take.

        Ranks that share an expert all take what comes to any of them.
        """
        return self.routed_tokens * self.shapes.expert_tensor

    @property
    def taken_bytes(self) -> Array:
        """The bytes of the copies that `taken_tokens` counts."""
        return self.routed_bytes * self.shapes.expert_tensor

    @property
    def rows(self) -> Array:
        """The tokens that each local expert takes."""
        return self.taken_tokens / self.n_local

    @property
    def width(self) -> Array | float:
        """The number of inner features of an expert that the rank holds."""
        return self.experts.hidden_size / self.shapes.expert_tensor

    @property
    def up_bytes(self) -> Array:
        """The bytes of the local experts' inner features before the activation."""
        return self.activated_bytes * self.shapes.model.gate_factor

    @property
    def activated_bytes(self) -> Array:
        """The bytes of the local experts' inner features after the activation."""
        return self.taken_tokens * self.width * self.shapes.element_bytes

    @property
    def working_bytes(self) -> Array:
        """The bytes of the gradients before and after the activation, and of the experts' input."""
        return self.up_bytes + self.activated_bytes + self.taken_bytes

    @property
    def down_elements(self) -> Array:
        """The number of elements of the weights of the local experts' second products."""
        return self.n_local * self.width * self.shapes.model.hidden_size

    @property
    def saved_bytes(self) -> Array:
        """The bytes that a layer saves of its routed experts and of the router.

        These are the copies of tokens that the experts take, their inner features before and after
        the activation, and the router's probabilities in fp32. The shared experts save their inner
        features, too.
        """
        probability_bytes = self.shapes.own_tokens * (self.experts.n_experts * FP32_BYTES)
        inputs = self.saved_of_input(self.taken_bytes)
        saved = inputs + self._share_before_activation * self.up_bytes + probability_bytes
        return saved + self.activation_bytes + self.shared_bytes

    @property
    def activation_bytes(self) -> Array:
        """The bytes that the activation saves besides its input: its output and a clamped input."""
        clamped = self.shapes.saves_unclamped * self.up_bytes
        return self.saved_of_input(self.activated_bytes) + clamped

    @property
    def _share_before_activation(self) -> float:
        """The ratio of the saved bytes before the activation to their bytes in the job's type."""
        return self.shapes.share_as_saved(self.shapes.memory.activation_input_bytes)

    def saved_of_input(self, nbytes: Array) -> Array:
        """Return the bytes saved of an input of experts' products; frozen experts save none.

        Parameters
        ----------
        nbytes : array, shape (C,)
            Bytes of the input in the job's type.
        """
        return nbytes * (self.shapes.saved_share * self.shapes.job.trains_weights)

    @property
    def shared_bytes(self) -> Array | float:
        """The bytes of the shared experts' inner features before and after the activation."""
        shared = self.shapes.model.shared_linears
        if not shared:
            return 0.0
        up, down = (self.shapes.linears[linear.name] for linear in shared)
        before = self._share_before_activation * up.output_bytes
        return before + down.input_bytes * self.shapes.job.trains_weights


def experts_of(shapes: Shapes, block: Block) -> ExpertShapes | None:
    """Return the sizes of the routed experts of a kind of block; None if it has none."""
    experts = shapes.model.experts
    return ExpertShapes(shapes, experts) if block.has_experts and experts is not None else None


def saved_at_inner_widths(shapes: Shapes, block: Block) -> Array:
    """Return the bytes that the layers of a block, or its experts, save at their inner widths."""
    experts = experts_of(shapes, block)
    if experts is None:
        return shapes.inner_bytes
    return shapes.attention_bytes + experts.saved_bytes


def stored_experts(shapes: Shapes, layers: Sequence[int]) -> Array | float:
    """Return how many parameters of routed experts a rank stores in some layers, shape (C,)."""
    model = shapes.model
    if model.experts is None:
        return 0.0
    counts = model.counts(layers)
    n_layers = sum(count for block, count in counts.items() if block.has_experts)
    of_layer = model.experts.n_experts * model.expert_parameters
    return n_layers * of_layer / (shapes.expert_split * shapes.expert_tensor)


@dataclass(frozen=True, eq=False)
class Mixture:
    """The passes over the routed experts of one layer."""

    sizes: ExpertShapes
    communication: Communication
    casts: Casts

    def begin_block(self, host: HostProgram, chain: str) -> None:
        """Start the exchange that runs beside attention, if another micro-batch hides it.

        It ends the block before in its own micro-batch. The last one of a pass runs beside the
        attention of the other micro-batch, for which that of the first block stands here.
        """
        if chain == FORWARD and self.communication.pairs_micro_batches:
            self._bring(host, chain, COMBINE)

    def forward(self, host: HostProgram, chain: str) -> None:
        """Route each token, send its copies to their experts, and bring the results back."""
        self._route(host, chain)
        self._count(host, chain)
        self._permute(host, chain, "permute")
        self._send(host, chain, DISPATCH)
        self._send_probabilities(host, chain)
        self._sort(host, chain, "sort")
        self._pad(host, chain, "pad")
        self._product_forward(host, chain, _UP, *self._up)
        self._add_first_bias(host, chain)
        self._activate(host, chain)
        self._product_forward(host, chain, _DOWN, *self._down)
        self._add_bias(host, chain)
        self._pad(host, chain, "unpad")
        self._sort(host, chain, "unsort")
        if chain == RECOMPUTE and self.sizes.shapes.leaves_out_combine:
            return
        if not (chain == FORWARD and self.communication.pairs_micro_batches):
            self._bring(host, chain, COMBINE)
        self._permute(host, chain, "unpermute")

    def backward(self, host: HostProgram) -> None:
        """Send the results' gradients to the experts, and bring those of the tokens back."""
        self._permute(host, BACKWARD, "unpermute")
        self._send(host, BACKWARD, COMBINE)
        self._sort(host, BACKWARD, "unsort")
        self._pad(host, BACKWARD, "unpad")
        self._add_bias(host, BACKWARD)
        self._product_backward(host, _DOWN, *self._down)
        self._activate(host, BACKWARD)
        self._add_first_bias(host, BACKWARD)
        self._reduce_bias(host)
        self._product_backward(host, _UP, *self._up)
        self._pad(host, BACKWARD, "pad")
        self._sort(host, BACKWARD, "sort")
        self._bring_probabilities(host)
        self._bring(host, BACKWARD, DISPATCH)
        if self.communication.delays_expert_gradients:
            self._weight_gradient(host, _DOWN, *self._down)
            self._weight_gradient(host, _UP, *self._up)
            host.wait(names.of_layer(BACKWARD, PROBABILITIES))
            host.wait(names.of_layer(BACKWARD, DISPATCH))
        self._permute(host, BACKWARD, "permute")
        self._route(host, BACKWARD)

    @property
    def _up(self) -> tuple[Size, Size]:
        """The rows and columns of the weight of each expert's first product."""
        model = self.sizes.shapes.model
        return float(model.hidden_size), model.gate_factor * self.sizes.width

    @property
    def _down(self) -> tuple[Size, Size]:
        """The rows and columns of the weight of each expert's second product."""
        return self.sizes.width, float(self.sizes.shapes.model.hidden_size)

    def _product_forward(self, host: HostProgram, chain: str, layer: str, k: Size, n: Size) -> None:
        """Multiply the tokens of each local expert by its weight."""
        self._cast_weights(host, chain, layer, k * n)
        self.casts.cast_of_experts(host, chain, layer, self.sizes.taken_tokens * k)
        name = names.gemm(names.of_layer(chain, layer))
        host.launch(self._grouped(layer, name, self.sizes.rows, n, k, "NN"))

    def _cast_weights(self, host: HostProgram, chain: str, layer: str, n_elements: Size) -> None:
        """Cast the local experts' weights if they have just been gathered."""
        if not self.communication.keeps_weights:
            self.casts.cast_gathered(host, chain, layer, self.sizes.n_local * n_elements)

    def _grouped(
        self, layer: str, name: str, m: Size, n: Size, k: Size, mode: str, sum_bytes: float = 0.0
    ) -> GroupedGemm:
        """Return the products of all local experts, each with these sizes."""
        return GroupedGemm(
            name,
            m,
            n,
            k,
            mode,
            number_format=self.casts.number_format(layer),
            n_groups=self.sizes.n_local,
            n_at_once=self.sizes.shapes.experts_at_once,
            sum_bytes=sum_bytes,
            n_issues=self.casts.n_issues_of_expert(layer, mode),
        )

    def _product_backward(self, host: HostProgram, layer: str, k: Size, n: Size) -> None:
        """Form the gradients of the inputs and, unless delayed, of the weights of all experts."""
        owner = names.of_layer(BACKWARD, layer)
        rows = self.sizes.rows
        self._cast_weights(host, BACKWARD, layer, k * n)
        trains_weights = self.sizes.shapes.job.trains_weights
        if self.communication.keeps_weights and not trains_weights:
            self.casts.transpose_frozen(host, layer, self.sizes.n_local * (k * n))
        self.casts.cast_of_experts(host, BACKWARD, layer, self.sizes.taken_tokens * n)
        host.launch(self._grouped(layer, names.gemm_input(owner), rows, k, n, "NT"))
        if not self.communication.delays_expert_gradients:
            self._weight_gradient(host, layer, k, n)

    def _weight_gradient(self, host: HostProgram, layer: str, k: Size, n: Size) -> None:
        """Form the gradients of the weights of all experts, unless they are frozen."""
        if not self.sizes.shapes.job.trains_weights:
            return
        sum_bytes = self.sizes.shapes.gradient_sum_bytes
        name = names.gemm_weight(names.of_layer(BACKWARD, layer))
        host.launch(self._grouped(layer, name, k, n, self.sizes.rows, "TN", sum_bytes))

    def _route(self, host: HostProgram, chain: str) -> None:
        """Score all experts for each token and choose the top-k, or form the gradients of this.

        The gate of shared experts is one column more. The gradient of the router's input is added
        to that of the copies.
        """
        shapes = self.sizes.shapes
        tokens = shapes.own_tokens
        n_columns = float(self.sizes.experts.n_experts + self.sizes.experts.shared_gate)
        width = float(shapes.model.hidden_size)
        owner = names.of_layer(chain, _ROUTER)
        score_bytes = 2.0 * FP32_BYTES * tokens * n_columns
        if chain != BACKWARD:
            host.gemm(names.gemm(owner), tokens, n_columns, width, "NN")
            self._choose(host, chain, score_bytes, "routing")
            return
        self._choose(host, chain, score_bytes, "routing_backward")
        self._cast_router(host, f"{owner}.to_fp32", (tokens + n_columns) * width)
        host.gemm(names.gemm_input(owner), tokens, width, n_columns, "NT", self._router_format)
        if shapes.job.trains_weights:
            name = names.gemm_weight(owner)
            host.gemm(name, width, n_columns, tokens, "TN", self._router_format)
        self._cast_router(host, f"{owner}.from_fp32", (tokens + n_columns) * width)
        host.memory_bound(names.input_gradient(owner), 3.0 * self.sizes.own_bytes, "add")

    def _choose(self, host: HostProgram, chain: str, nbytes: Size, kernel: str) -> None:
        """Choose the top-k experts, or form the gradients of this, in a kernel.

        What the host issues to pair the layer with one of another micro-batch counts here.
        """
        extra = 0.0 if chain == RECOMPUTE else self.communication.combined_issues
        n_issues = 1.0 + extra if extra else None
        host.memory_bound(names.of_layer(chain, "choice"), nbytes, kernel, n_issues=n_issues)

    @property
    def _router_format(self) -> str:
        """The format of the products that form the router's gradients; empty for the job's type."""
        shapes = self.sizes.shapes
        is_wider = shapes.fp32_router and shapes.element_bytes < FP32_BYTES
        return TF32 if is_wider else ""

    def _cast_router(self, host: HostProgram, name: str, n_elements: Size) -> None:
        """Cast the router's input and weight to fp32, or their gradients from it, if it is wider.

        The forward pass casts nothing: its product reads the job's type and writes fp32
        (Megatron-LM d98e8a64, core/transformer/moe/moe_utils.py, `RouterGatingLinearFunction`).
        """
        if self._router_format:
            element_bytes = self.sizes.shapes.element_bytes + FP32_BYTES
            host.memory_bound(name, n_elements * element_bytes, "copy", n_launches=2.0)

    def _permute(self, host: HostProgram, chain: str, action: str) -> None:
        """Copy each token once for each of its experts, or add the copies up.

        A kernel that sends tokens once does so itself.
        """
        if not self.sizes.shapes.sends_once:
            nbytes = self.sizes.own_bytes * (1.0 + self.sizes.experts.top_k)
            host.memory_bound(names.of_layer(chain, action), nbytes, "copy")

    def _sort(self, host: HostProgram, chain: str, action: str) -> None:
        """Bring copies from several ranks into the order of the local experts, or back.

        Tokens that came once are copied for each of their local experts. Copies that have not
        travelled are in this order; some programs copy them nevertheless.
        """
        sizes = self.sizes
        if sizes.shapes.sends_once:
            nbytes = sizes.sent_bytes * sizes.shapes.expert_tensor + sizes.taken_bytes
        else:
            has_travelled = sizes.n_local < sizes.experts.n_experts
            is_sorted = (sizes.n_local > 1) & (has_travelled | self.communication.sorts_all_copies)
            nbytes = np.where(is_sorted, 2.0 * sizes.taken_bytes, 0.0)
        host.memory_bound(names.of_layer(chain, action), nbytes, "copy")

    def _pad(self, host: HostProgram, chain: str, action: str) -> None:
        """Copy the rows of each local expert to where low products find them, or back.

        These take rows by 16 or more. The few rows that are added do not count.
        """
        sizes = self.sizes
        is_padded = self.communication.pads_experts and not sizes.shapes.sends_once
        if is_padded and self.casts.number_format(_UP):
            host.memory_bound(names.of_layer(chain, action), 2.0 * sizes.taken_bytes, "copy")

    def _send(self, host: HostProgram, chain: str, message: str) -> None:
        """Send what the rank has for each expert to the ranks that hold it."""
        self.communication.send_to_experts(host, chain, message, self.sizes.exchanged_bytes)

    def _bring(self, host: HostProgram, chain: str, message: str) -> None:
        """Send the experts' results back to the ranks of their tokens."""
        self.communication.bring_from_experts(host, chain, message, self.sizes.exchanged_bytes)

    def _count(self, host: HostProgram, chain: str) -> None:
        """Tell the experts' ranks how many copies come, unless the kernel that sends does so."""
        if not self.sizes.shapes.sends_once:
            nbytes = self.sizes.experts.n_experts * COUNT_BYTES
            self.communication.gather_counts(host, names.of_layer(chain, "counts"), nbytes)

    def _send_probabilities(self, host: HostProgram, chain: str) -> None:
        """Send the copies' probabilities to the experts, unless a kernel sends them with tokens."""
        if self._sends_probabilities:
            nbytes = self.sizes.probability_bytes
            self.communication.send_to_experts(host, chain, PROBABILITIES, nbytes)

    def _bring_probabilities(self, host: HostProgram) -> None:
        """Bring the gradients of the copies' probabilities back."""
        if self._sends_probabilities:
            nbytes = self.sizes.probability_bytes
            self.communication.bring_from_experts(host, BACKWARD, PROBABILITIES, nbytes)

    @property
    def _sends_probabilities(self) -> bool:
        """Whether probabilities travel in messages of their own."""
        return self.communication.sends_probabilities and not self.sizes.shapes.sends_once

    def _add_bias(self, host: HostProgram, chain: str) -> None:
        """Add the biases of the experts' second products, or form the gradients of these.

        A product cannot add them itself, since the router's weights multiply the biases, too. Where
        tokens are sent once, these weights are in fp32, and so are the sums.
        """
        sizes = self.sizes
        if not sizes.experts.bias:
            return
        outputs_bytes = sizes.taken_bytes
        if sizes.shapes.sends_once:
            outputs_bytes = outputs_bytes * (FP32_BYTES / sizes.shapes.element_bytes)
        is_backward = chain == BACKWARD
        n_passes = 1.0 if is_backward else 2.0
        kernel = kernel_of("expert_bias", chain)
        name = names.of_layer(chain, "experts_bias")
        host.memory_bound(name, n_passes * outputs_bytes, kernel, sizes.n_local)

    def _add_first_bias(self, host: HostProgram, chain: str) -> None:
        """Add the biases of the experts' first products where these do not do so themselves.

        One kernel for each expert adds its bias, and another one joins the results; the backward
        pass joins the gradients of the results.
        """
        sizes = self.sizes
        if not (sizes.experts.bias and sizes.shapes.adds_expert_biases):
            return
        name = names.of_layer(chain, "experts_first_bias")
        joined_bytes = 2.0 * sizes.up_bytes
        if chain == BACKWARD:
            host.memory_bound(name, joined_bytes, "copy")
        else:
            host.memory_bound(name, 2.0 * joined_bytes, "add", sizes.n_local + 1.0)

    def _reduce_bias(self, host: HostProgram) -> None:
        """Form the gradients of the biases of the experts' first products."""
        if self.sizes.experts.bias and self.sizes.shapes.job.trains_weights:
            name = names.bias(names.of_layer(BACKWARD, _UP))
            host.memory_bound(name, self.sizes.up_bytes, "reduce")

    def activate_again(self, host: HostProgram) -> None:
        """Form the input of the experts' second product again, which has not been saved.

        Frozen experts do not need it.
        """
        if not self.sizes.shapes.job.trains_weights:
            return
        self._activate(host, RECOMPUTE)
        k, _ = self._down
        self.casts.cast_of_experts(host, RECOMPUTE, _DOWN, self.sizes.taken_tokens * k)

    def _activate(self, host: HostProgram, chain: str) -> None:
        """Apply the experts' nonlinearity with the router's weights, or form its gradient."""
        sizes = self.sizes
        kernel = kernel_of(sizes.shapes.activation_kernel, chain)
        n_passes = 2.0 if chain == BACKWARD else 1.0
        nbytes = n_passes * sizes.up_bytes + sizes.activated_bytes
        host.memory_bound(names.of_layer(chain, "experts_activation"), nbytes, kernel)
