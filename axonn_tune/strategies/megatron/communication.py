"""The messages of a micro-step of Megatron-LM: in the tensor group, to experts, to other stages."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.spec import names
from axonn_tune.spec.facts import value_or
from axonn_tune.spec.job import Overlap
from axonn_tune.spec.layout import EXPERT
from axonn_tune.spec.names import BACKWARD, COMBINE, DISPATCH, PROBABILITIES, RECOMPUTE
from axonn_tune.spec.plan import Array, Size
from axonn_tune.strategies.attention import (
    add_qkv_bias,
    bias_scores,
    copied_heads,
    ordered_heads,
)
from axonn_tune.strategies.communication import Weight
from axonn_tune.strategies.context import context_parallelism
from axonn_tune.strategies.megatron.replicas import (
    BLOCK_GRADIENTS,
    EXPERT_GRADIENTS,
    ReplicaCommunication,
)
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES

# The exchanges that must end before another one begins; probabilities travel with a dispatch.
_EXCHANGED_BEFORE = {
    DISPATCH: (COMBINE,),
    PROBABILITIES: (COMBINE,),
    COMBINE: (DISPATCH, PROBABILITIES),
}


@dataclass(frozen=True, eq=False)
class MegatronCommunication(ReplicaCommunication):
    """The communication of Megatron-LM.

    Weights stay where they are, partial sums are reduced over the tensor group, tokens travel to
    experts and to the next stage, and gradients are reduced over the replicas.

    Attributes
    ----------
    runs_alone
        Whether no other micro-batch runs beside this micro-step, even if exchanges of experts
        overlap with another one elsewhere.
    """

    runs_alone: bool = False

    # Sums over the tensor group ------------------------------------------------------------

    @property
    def backward_overlap(self) -> Overlap:
        """The overlaps of the job that the engine has."""
        return self.options.overlap_of(self.shapes.job)

    @property
    def _splits_tokens(self) -> bool:
        """Whether there is sequence parallelism."""
        return self.options.sequence_parallel

    @property
    def _overlaps_products(self) -> bool:
        """Whether products begin as soon as the first part of their message has come."""
        return self.options.overlaps_tensor and self._splits_tokens

    def _awaits_all_tokens(self, layer: str) -> bool:
        """Return whether an adapter beside a product reads all tokens, too.

        All tokens are then gathered before both products (tp_comm_overlap_disable_qkv of NVIDIA's
        LoRA in MLPerf v4.1 to v5.1; without it, the adapter gathers them itself: Megatron-Bridge
        067f987d, peft/utils.py).
        """
        return self.shapes.job.has_adapter(layer)

    def _sum_bytes(self, layer: str) -> Size:
        """Return the bytes of a layer's output, which may travel in the format of low products."""
        nbytes = super()._sum_bytes(layer)
        if layer in self.options.engine.megatron.low_sums:
            return nbytes * (self.shapes.job.operand_bytes / self.shapes.element_bytes)
        return nbytes

    def gather_input(self, host: HostProgram, weight: Weight) -> None:
        """Gather all tokens; what travels beside a product is copied to a buffer before.

        Transformer Engine d0067d0d (csrc/extensions/comm_gemm_overlap.cpp, CommOverlapP2P's
        copy_into_buffer) copies on the stream of the product. What it gathers beside other
        products, for dW, it copies on the stream of the messages. The head is not its layer.
        """
        shape = self.shapes.linears[weight.layer]
        is_beside = self._overlaps_products and not self._awaits_all_tokens(weight.layer)
        if is_beside and self._gathers_tokens(shape) and weight.layer != "head":
            name = names.all_gather(weight.name)
            self._copy_own_part(host, name, shape.gathered_input_bytes, n_issues=0.0)
        super().gather_input(host, weight)

    def sum_output(self, host: HostProgram, weight: Weight) -> None:
        """Sum the output; the bias of queries, keys and values may be added in a kernel after it.

        Selective recomputation repeats attention, but not this kernel before it.
        """
        super().sum_output(host, weight)
        if weight.layer == "qkv" and self.options.engine.megatron.adds_qkv_bias:
            add_qkv_bias(host, self.shapes, weight.chain)

    def gather_for_gradients(self, host: HostProgram, weight: Weight) -> None:
        """Gather dO, or start to gather the input for dW (sequence parallelism).

        The input is gathered while dI is formed (Korthikanti et al., section 4.2.2).
        """
        shape = self.shapes.linears[weight.layer]
        if self._overlaps_products and shape.linear.transposed:
            name = names.all_gather(weight.name)
            self._copy_own_part(host, name, shape.gathered_gradient_bytes, n_issues=0.0)
        super().gather_for_gradients(host, weight)
        if self._gathers_tokens(shape) and self.shapes.job.trains(weight.layer):
            name = names.all_gather(weight.name)
            host.issue(name, "all_gather", shape.gathered_input_bytes, "tensor")

    def before_weight_gradient(self, host: HostProgram, layer: str) -> None:
        """Wait for the gathered input and, if gradients are sharded, for the last reduction.

        A rank thus holds the whole gradients of at most two blocks. Before the gradient of the
        embedding, start to reduce what waited for the first block.
        """
        if layer == "embedding":
            self._reduce_pending(host)
        shape = self.shapes.linears.get(layer)
        if shape is not None and self._gathers_tokens(shape):
            host.wait(names.all_gather(names.of_layer(BACKWARD, layer)))
        is_last_of_block = layer == self.shapes.model.attention_linears[0].name
        if self.options.shards_gradients and is_last_of_block:
            host.wait(BLOCK_GRADIENTS)
            self._await_experts(host, EXPERT_GRADIENTS)

    def bias_bytes(self, layer: str) -> Size:
        """Return the bytes that a kernel reads to form the gradient of a layer's bias.

        The bias of a sum over the tensor group is added after it, to the rank's own tokens
        (Megatron-LM at d98e8a64, core/fusions/fused_bias_dropout.py). Only the product of queries,
        keys and values adds its bias itself (skip_bias_add in core/transformer/attention.py).
        """
        if layer == "qkv" and self.options.engine.megatron.fuses_bias_gradient:
            return 0.0
        shape = self.shapes.linears[layer]
        return shape.output_bytes / (self.shapes.residual_split if shape.linear.transposed else 1.0)

    # Experts ---------------------------------------------------------------------------------

    def send_to_experts(self, host: HostProgram, chain: str, message: str, nbytes: Array) -> None:
        """Exchange tokens in the group of experts, then gather them for the parts of an expert."""
        self._exchange(host, chain, message, nbytes)
        if self.options.splits_experts:
            self._share(host, chain, message, nbytes, "all_gather")

    def bring_from_experts(
        self, host: HostProgram, chain: str, message: str, nbytes: Array
    ) -> None:
        """Sum the results of an expert's parts, then exchange in the group of experts."""
        if self.options.splits_experts:
            self._share(host, chain, message, nbytes, "reduce_scatter")
        self._exchange(host, chain, message, nbytes)

    def _share(self, host: HostProgram, chain: str, message: str, nbytes: Array, kind: str) -> None:
        """Gather tokens over ranks that share an expert, or sum what these have formed.

        Results are summed in the type of the router's probabilities, which is fp32, and their
        gradients are gathered in it (moe/token_dispatcher.py at d98e8a64, combine_preprocess).
        """
        name = names.of_layer(chain, message)
        of_all = nbytes * self.shapes.expert_tensor
        if message != COMBINE:
            host.run(names.collective(name, kind), kind, of_all, "tensor")
            return
        ratio = FP32_BYTES / self.shapes.element_bytes
        before, after = (of_all, nbytes) if kind == "reduce_scatter" else (nbytes, of_all)
        host.memory_bound(f"{name}.to_fp32", before * (1.0 + ratio), "copy")
        host.run(names.collective(name, kind), kind, of_all * ratio, "tensor")
        host.memory_bound(f"{name}.from_fp32", after * (1.0 + ratio), "copy")

    def _exchange(self, host: HostProgram, chain: str, message: str, nbytes: Array) -> None:
        """Exchange tokens within the group of experts, and wait for them.

        With overlap, two micro-batches run together, one in its forward and one in its backward
        pass: while one exchanges tokens, the other computes attention or experts (Megatron-Core,
        core/models/common/model_chunk_schedule_plan.py at 01cf4fb5; DualPipe does the same, arXiv
        2412.19437, section 3.2.1). Both passes exchange equally much. So the computation of the
        same pass up to its next exchange stands here for the computation of the other micro-batch.
        Exchanges that are recomputed do not overlap.
        """
        if not self.options.has_experts:
            return
        name = names.of_layer(chain, message)
        is_beside = self.pairs_micro_batches and chain != RECOMPUTE
        if is_beside:
            for earlier in _EXCHANGED_BEFORE[message]:
                host.wait(names.of_layer(chain, earlier))
        host.issue(name, "all_to_all", nbytes, EXPERT)
        is_last = chain == BACKWARD and message != COMBINE
        is_awaited_later = self.delays_expert_gradients and is_last
        if not (is_beside or is_awaited_later):
            host.wait(name)

    @property
    def pairs_micro_batches(self) -> bool:
        """Whether exchanges of experts run beside the computation of another micro-batch."""
        return self.options.overlaps_experts and not self.runs_alone

    @property
    def combined_issues(self) -> float:
        """The number of operations that the host issues in a layer to pair it with another one."""
        program = self.options.engine.megatron
        return value_or(program.combined_issues, 0.0) if self.pairs_micro_batches else 0.0

    @property
    def delays_expert_gradients(self) -> bool:
        """Whether a pass that runs alone forms the gradients of experts' weights last.

        It does with --delay-wgrad-compute, which is taken to come with the overlap (Megatron-Bridge
        at 067f987d, scripts/performance/utils/overrides.py, _set_moe_a2a_overlap_overrides).
        Nothing else waits for these products (Megatron-LM at d98e8a64, core/models/common/utils.py,
        TransformerLayerNode.backward_dw). Those of attention would hide a part of the exchange
        before, which does not count.
        """
        return self.options.overlaps_experts and self.runs_alone

    @property
    def sends_probabilities(self) -> bool:
        """Whether the probabilities of a token's experts travel with it: they do.

        The ranks of the experts multiply by them (Megatron-Core 0.16, token_dispatcher.py).
        """
        return True

    @property
    def sorts_all_copies(self) -> bool:
        """Whether a rank sorts its copies of tokens as soon as it holds several experts: it does.

        The code is that of dispatch_postprocess in moe/token_dispatcher.py.
        """
        return True

    @property
    def pads_experts(self) -> bool:
        """Whether kernels pad the rows of each expert (moe/experts.py at d98e8a64): they do.

        They do not where messages bring the rows padded, or where the router pads. It does so with
        --moe-router-padding-for-quantization, which is off unless stated.
        """
        return True

    def gather_counts(self, host: HostProgram, name: str, nbytes: Size) -> None:
        """Gather each rank's numbers within the group that holds all experts."""
        if self.options.has_experts:
            gathered_bytes = nbytes * self.shapes.table.size(EXPERT)
            host.run(names.all_gather(name), "all_gather", gathered_bytes, EXPERT)

    # Context and pipeline --------------------------------------------------------------------

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Run attention over sequences that the context group shares, if it is fused."""
        program = self.options.engine.megatron
        with ordered_heads(host, self.shapes, chain, program.orders_heads):
            if self.shapes.job.attention == "unfused":
                if program.biases_scores:
                    bias_scores(host, self.shapes, chain)
                super().attend(host, chain, window)
                return
            context = context_parallelism(self.options.context_kind, self.shapes)
            with copied_heads(host, self.shapes, chain, program.copies_heads):
                context.attend(host, chain, window)

    @property
    def transfer_bytes(self) -> Array:
        """The bytes that a rank sends to the next stage: its part of the residual stream.

        Without sequence parallelism every rank of a tensor group holds the whole stream, and sends
        a part of it or all of it, as the engine does.
        """
        if not (self.options.sequence_parallel or self._scatters_transfers):
            return self.shapes.stream_bytes
        return self.shapes.stream_bytes / self.shapes.table.size("tensor")

    @property
    def handover_seconds(self) -> tuple[float, float]:
        """How long stages sleep over the messages that announce tensors to each other."""
        return self.options.engine.megatron.handover_seconds

    @property
    def _scatters_transfers(self) -> bool:
        """Whether each rank of a tensor group sends a part of what all of them hold."""
        return self.options.engine.megatron.scatters_transfers

    def receive(self, host: HostProgram, chain: str) -> None:
        """Gather the received parts if there is no sequence parallelism (SC21, section 4.1)."""
        if self.options.sequence_parallel or not self._scatters_transfers:
            return
        name = names.of_layer(chain, "pipeline")
        nbytes = self.shapes.stream_bytes
        host.run(names.all_gather(name), "all_gather", nbytes, "tensor")
        host.memory_bound(f"{name}.copy", 2.0 * nbytes, "copy")
