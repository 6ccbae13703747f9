"""How programs that carry out AxoNN's, Megatron-LM's or ZeRO's algorithm run: facts of engines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from axonn_tune.spec.checks import (
    LARGEST_AMOUNT,
    LONGEST_WAIT_SECONDS,
    require_amount,
    require_between,
    require_choice,
    require_count,
)
from axonn_tune.spec.facts import LARGEST_FACTOR, require_facts, value_or
from axonn_tune.spec.layout import CONTEXT, TENSOR
from axonn_tune.spec.quantity import Quantity

# Ways in which gradients are summed: in buckets of some bytes, all of them in one call, or with a
# call for each parameter.
BUCKETS, WHOLE, PARAMETERS = "buckets", "whole", "parameters"
# Layers whose outputs a tensor group sums.
SUMMED_LAYERS = ("proj", "down")
# Axes that an engine of Megatron-LM's algorithm may lack.
UNSPLIT_AXES = (TENSOR, CONTEXT)
# Kinds of context parallelism: keys and values travel around a ring, or are gathered; tokens are
# exchanged for heads; or they are exchanged within small groups, and a ring connects these.
RING, ALL_GATHER, ULYSSES, ULYSSES_RING = CONTEXT_KINDS = (
    "ring",
    "all_gather",
    "ulysses",
    "ulysses_ring",
)


@dataclass(frozen=True)
class AxonnProgram:
    """How an implementation of AxoNN runs; the defaults are what the algorithm says.

    late_gathers
        Prefixes of the names of weights that are gathered only when they are used, and not ahead.
    reuses_recomputed_weights
        Whether the backward pass uses the weights that recomputation has gathered.
    overlaps_backward
        Whether the overlaps of the job hold for the backward pass, too.
    awaits_scatters_at_end
        Whether the scatters of a micro-step are awaited at its end only.
    gathered_element_bytes
        Bytes of an element of a weight that is gathered; None for those of the job's type. A weight
        of another type is converted after it was gathered.
    shard_copies
        Ratio of the bytes that copies move, which join a weight that comes as a list of shards, to
        the bytes of the weight; None if no weight comes so.
    listed_gathers
        Prefixes of the names of weights that always come as a list of shards.
    lists_without_oag
        Whether, without OAG, every weight comes as a list of shards.
    reduction
        How gradients are summed: in `BUCKETS`, `WHOLE`, or by `PARAMETERS`.
    replicates_vocabulary
        Whether Z replicates the weights of the embedding and of the head, which X and Y split, and
        sums their gradients once in a step.
    pads_vocabulary
        Whether the vocabulary is a multiple of `VOCABULARY_MULTIPLE` times the ranks of X, Y and Z.
    sums_vectors_singly
        Whether Z sums the gradients of norms, biases and learned positions in a call for each.
    normalises_parts
        Whether a norm takes the mean and the variance of a rank's own features alone, so that the
        ranks of X exchange no sums for it.
    clips_in_optimizer
        Whether the optimizer's kernel clips the gradient as it reads it, instead of another kernel.
    forward_copies, backward_copies
        Ratio of the bytes that copies of queries, keys, values and the output of fused attention
        move in a forward, or in a backward pass, to the bytes of that output; None for no copies.
    """

    late_gathers: tuple[str, ...] = ()
    reuses_recomputed_weights: bool = False
    overlaps_backward: bool = True
    awaits_scatters_at_end: bool = False
    gathered_element_bytes: float | None = None
    shard_copies: Quantity | None = None
    listed_gathers: tuple[str, ...] = ()
    lists_without_oag: bool = False
    reduction: str = BUCKETS
    replicates_vocabulary: bool = False
    pads_vocabulary: bool = False
    sums_vectors_singly: bool = False
    normalises_parts: bool = False
    clips_in_optimizer: bool = False
    forward_copies: Quantity | None = None
    backward_copies: Quantity | None = None

    def __post_init__(self) -> None:
        require_choice("axonn", "reduction", self.reduction, (BUCKETS, WHOLE, PARAMETERS))
        copies = ("forward_copies", "backward_copies", "shard_copies")
        require_facts("axonn", self, copies, 0.0, LARGEST_FACTOR)
        if self.gathered_element_bytes is not None:
            require_between("axonn", "gathered_element_bytes", self.gathered_element_bytes, 0.5, 8)

    def splits_over_z(self, layer: str) -> bool:
        """Return whether Z splits the weight of a layer, and does not replicate it."""
        return not (self.replicates_vocabulary and layer in ("embedding", "head"))

    def gathers_late(self, name: str) -> bool:
        """Return whether the weight with this name is gathered only when it is used."""
        return name.startswith(self.late_gathers)

    def gathers_list(self, name: str, oag: bool) -> bool:
        """Return whether the weight with this name comes as a list, with or without OAG."""
        return name.startswith(self.listed_gathers) or (self.lists_without_oag and not oag)


@dataclass(frozen=True)
class SharedFacts:
    """Holds facts that implementations of Megatron's algorithm and of ZeRO may both state.

    scales_gradients
        Whether a kernel divides gradients by the number of replicas or shards before they are
        reduced (average_in_collective off).
    has_main_gradients
        Whether the optimizer of a mixed precision reads gradients of its own in fp32, into which
        those of another type are copied, which a kernel unscales in fp16, and whether another
        kernel copies updated weights to the model (Float16OptimizerWithFloat16Params, and
        DistributedOptimizer but for its precision-aware form).
    copies_heads
        Whether heads are copied out of the product that forms queries, keys and values group by
        group, and the gradients of the three joined for its backward pass. Values of latent
        attention are copied out of the product that forms them beside parts of keys.
    sends_once
        Whether a token is sent once to each rank that holds any of its experts, as DeepEP does, and
        not once for each expert. Between nodes it travels once for all ranks of a node.
    """

    scales_gradients: bool = False
    has_main_gradients: bool = False
    copies_heads: bool = False
    sends_once: bool = False


@dataclass(frozen=True)
class MegatronProgram(SharedFacts):
    """How an implementation of Megatron-LM's algorithm runs; the defaults are Megatron-Core's.

    `SharedFacts` describes the fields that are not listed here.

    A bucket of gradients, or of updated weights, holds the larger of two numbers of elements
    (Megatron-Core, DistributedDataParallelConfig, bucket_size).

    sequence_parallel, distributed_optimizer, overlap_grad_reduce, fused_accumulation, \
    fp32_gradients, low_weights, context_kind, overlaps_experts, overlaps_tensor
        Options of `Megatron3D` that hold unless a user says otherwise, as `sends_once` does.
    bucket_elements
        Least number of elements of a bucket.
    bucket_elements_per_replica
        Number of elements for each replica.
    buckets_without_overlap
        Whether there are several buckets even without overlap; Megatron-Core then has one
        (DistributedDataParallel, bucket_size).
    fills_buckets
        Whether a bucket ends with the weight that fills it, so that large weights make it larger.
        Megatron-Core's do, too, but few of its weights are larger than its buckets.
    coalesces_buckets
        Whether all buckets of a virtual stage are reduced, or gathered, by one launch, so that they
        hold up no kernel of one queue (apex, DistributedFusedAdam).
    copies_to_buckets
        Whether each gradient is copied into its bucket and back while a backward pass reduces
        gradients, as torch's DistributedDataParallel does unless gradients are views of buckets.
    checks_gradients
        Whether the norm of gradients is formed before they are reduced, to find NaN
        (check_for_nan_in_grad). The host waits for the norm of each bucket.
    overlaps_sharded
        Whether `overlap_grad_reduce` holds where optimizer states are sharded, too.
    sums_sharded
        Whether gradients are all-reduced even where optimizer states are sharded, so that each rank
        has all sums, forms the norm of all and clips all, and not only those of its shard.
    clips_shard
        Whether a rank that has all sums forms the norm of those of its shard only, and clips these.
    pads_shares
        Whether replicas that share whole matrices have shares of one size of each bucket, which
        they reduce and gather as any other. Otherwise each has all sums, and the weights that it
        has updated are gathered after the update (--no-use-layer-wise-param-layout, and before
        core_v0.18).
    launches_per_weight
        Whether each weight has kernels of its own that add up its gradient, form the norm of the
        sum, clip it and update the weight, instead of one for all weights.
    view_seconds
        Time of the host for each replica's part of a weight whose update is gathered, where the
        parts are copied one by one out of the buffer of each replica and the device stands still
        meanwhile; None where updated weights are gathered in place.
    scatters_transfers
        Whether each rank of a tensor group sends its part of the residual stream to the next stage,
        where these are gathered, if every rank holds the whole stream (SC21, section 4.1). Without
        it each rank sends the whole stream. With sequence parallelism a rank holds a part only.
    poll_seconds
        Time for which the host of a stage sleeps, at least once, until a message has passed that
        says which tensor a neighbour will send; None where no host sleeps.
    forward_messages, backward_messages
        Number of such messages for what one micro-batch hands to the next stage, and to the one
        before.
    reruns_attention
        Whether selective recomputation runs attention again even if one kernel computes it, which
        saves next to no memory.
    balances_stages
        Whether layers are spread over the stages of a pipeline so that the stages have equal
        products, the head's included, instead of equal numbers of layers.
    exceeds_shares
        Whether a stage with equal products takes one more layer if it has exactly its share.
    overlaps_experts
        Whether tokens travel to and from experts while another micro-batch computes.
    combined_issues
        Number of operations that the host issues in addition in each pass of a layer whose tokens
        travel while another micro-batch computes: it then runs both passes piece by piece
        (Megatron-LM at d98e8a64, core/pipeline_parallel/utils.py, ScheduleNode). None for none.
    overlaps_tensor
        Whether tokens travel within the tensor group while the products that read or form them run.
    experts_at_once
        Number of experts whose products run at the same time on a rank: Transformer Engine's
        GroupedLinear has four streams for cuBLAS (common/util/multi_stream.cpp at d0067d0d).
    orders_heads
        Whether heads are copied into the order that fused attention reads, and the output of
        attention into the order of the tokens, and whether the gradients of queries, keys and
        values are joined for the product that formed them.
    adds_qkv_bias
        Whether a kernel of its own adds the bias of queries, keys and values to their product.
    sums_bf16_in_fp32
        Whether gradients are summed and reduced in fp32 wherever weights are in bf16, even without
        `fp32_gradients`.
    biases_scores
        Whether each head adds a bias to its scores (ALiBi) where attention is not fused: torch
        copies the bias to all queries, and the product adds to these copies (pytorch at 002253ce,
        aten/src/ATen/native/cuda/Blas.cpp, baddbmm_out_cuda_impl).
    casts_in_activations
        Whether the kernels of an MLP's activation prepare the cast of what they form, as a norm's
        do: Transformer Engine's sequence of operations (csrc/extensions/activation.cpp at
        d0067d0d), which Megatron-Core takes with --use-transformer-engine-op-fuser.
    fuses_adapters
        Whether products themselves scale and add the adapters' outputs, where no tensor group
        splits layers: the same sequence of operations (NVIDIA-NeMo/Megatron-Bridge at 067f987d,
        peft/lora_layers.py, TEFusedLoRALinear; pytorch/ops/fused at d0067d0d).
    autocasts
        Whether weights and gradients are in fp32 around products of another type (torch.autocast),
        so that each micro-step casts all weights and all gradients.
    fuses_bias_gradient
        Whether the gradient of a bias that a product itself adds is formed by the product of its
        weight's gradient, or by the cast before that, instead of by another kernel.
    low_attention
        Whether attention runs in 8 bits where products are low (--fp8-dot-product-attention).
    low_head
        Whether the head's products run in the recipe's format, too (fp8_output_proj of
        Megatron-Core's TransformerConfig, d98e8a64, which demands MXFP8).
    fp32_router
        Whether the router's products run in fp32 (--moe-router-dtype fp32). The forward pass reads
        its operands in the job's type; the backward pass casts the input and the weight to fp32,
        and their gradients back.
    low_sums
        Layers whose outputs travel within the tensor group in the format of low products, if their
        sums overlap with these products (fp8_buf of --tp-comm-overlap-cfg).
    one_queue
        Whether all kernels wait in one queue where the GPU and the layout ask for it
        (`Gpu.one_queue`). The kernels of a CUDA graph wait only for what they need.
    has_graph
        Whether a CUDA graph holds a whole step (--cuda-graph-impl full_iteration).
    overlaps_gradient_sums
        Whether the gradient of a layer's input is summed within the tensor group while the gradient
        of the weight is formed, if the job's OAR lets it
        (LinearWithGradAccumulationAndAsyncCommunication). Without it nothing hides the sum.
    overlaps_transfers
        Whether a rank with several stages computes while its results travel to the next one
        (overlap_p2p_comm, schedules.py), unless all kernels of its GPU wait in one queue.
    lacks
        Axes over which it splits nothing, of `UNSPLIT_AXES`.
    aligns_gathers
        Whether ranks with several stages start to gather new weights when the step begins
        (align_param_gather, and param_sync_func in schedules.py). Without it, and in ranks of one
        stage, the first micro-batch starts the gathers of each stage when it arrives
        (param_and_grad_buffer.py, finish_param_sync).
    """

    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = True
    fused_accumulation: bool = True
    fp32_gradients: bool = True
    low_weights: bool = False
    context_kind: str = RING
    bucket_elements: float = 40e6
    bucket_elements_per_replica: float = 1e6
    buckets_without_overlap: bool = False
    fills_buckets: bool = False
    coalesces_buckets: bool = False
    copies_to_buckets: bool = False
    checks_gradients: bool = False
    overlaps_sharded: bool = True
    sums_sharded: bool = False
    clips_shard: bool = False
    pads_shares: bool = True
    launches_per_weight: bool = False
    view_seconds: Quantity | None = None
    scatters_transfers: bool = True
    poll_seconds: Quantity | None = None
    forward_messages: int = 0
    backward_messages: int = 0
    reruns_attention: bool = False
    balances_stages: bool = False
    exceeds_shares: bool = False
    overlaps_experts: bool = False
    combined_issues: Quantity | None = None
    overlaps_tensor: bool = False
    experts_at_once: int = 4
    orders_heads: bool = False
    adds_qkv_bias: bool = False
    sums_bf16_in_fp32: bool = False
    biases_scores: bool = False
    casts_in_activations: bool = False
    fuses_adapters: bool = False
    autocasts: bool = False
    fuses_bias_gradient: bool = False
    low_attention: bool = False
    low_head: bool = False
    fp32_router: bool = False
    low_sums: tuple[str, ...] = ()
    one_queue: bool = True
    has_graph: bool = False
    overlaps_gradient_sums: bool = True
    overlaps_transfers: bool = False
    lacks: tuple[str, ...] = ()
    aligns_gathers: bool = True

    def __post_init__(self) -> None:
        require_choice("megatron", "context_kind", self.context_kind, CONTEXT_KINDS)
        for axis in self.lacks:
            require_choice("megatron", "lacks", axis, UNSPLIT_AXES)
        for layer in self.low_sums:
            require_choice("megatron", "low_sums", layer, SUMMED_LAYERS)
        require_count("megatron", "experts_at_once", self.experts_at_once)
        for name in ("forward_messages", "backward_messages"):
            require_count("megatron", name, getattr(self, name), least=0)
        require_amount("megatron", "bucket_elements", self.bucket_elements)
        per_replica = self.bucket_elements_per_replica
        require_between("megatron", "bucket_elements_per_replica", per_replica, 0, LARGEST_AMOUNT)
        waits = ("view_seconds", "poll_seconds")
        require_facts("megatron", self, waits, 0.0, LONGEST_WAIT_SECONDS)
        require_facts("megatron", self, ("combined_issues",), 0.0, LARGEST_AMOUNT)

    @property
    def handover_seconds(self) -> tuple[float, float]:
        """How long two stages sleep while one hands forward, or backward, what a pass has formed.

        A look at a message that has just been posted finds it under way, so that each message costs
        both hosts a sleep.
        """
        seconds = value_or(self.poll_seconds, 0.0)
        return self.forward_messages * seconds, self.backward_messages * seconds


@dataclass(frozen=True)
class ZeroProgram(SharedFacts):
    """How an implementation of ZeRO communicates; the defaults are FSDP2's.

    `SharedFacts` describes the fields that are not listed here.

    gathers_blocks
        Whether the weights of a block are gathered together; otherwise matrices are gathered one by
        one.
    prefetch_elements
        Further matrices join a gather until it has so many elements; 0 where each matrix is
        gathered by itself.
    keeps_vectors
        Whether every rank keeps norms and biases whole. Each is gathered by itself after its
        update.
    live_elements
        Number of elements of gathered weights from which a rank gathers nothing ahead. The head and
        the last blocks that fit stay gathered until the backward pass; with 0 only the root does.
    forgets_embedding
        Whether the embedding does not count among these elements.
    activation_is_module
        Whether an MLP's activation is a module of the model, at which matrices are gathered ahead,
        too.
    reuse_elements
        Number of elements that are used between two uses of a matrix from which it is released
        after the first and gathered again for the second; 0 where what recomputation gathers stays
        for the gradients.
    gathers_each_use
        Whether each use of a matrix gathers it, however soon it follows another one.
    quantises_copy
        Whether weights that are quantised for gathers are so for those from their second copy, too.
    sends_scales_apart
        Whether the scales of quantised messages travel in messages of their own.
    exchanges_tensors
        Whether the gradient of each matrix is quantised and exchanged for itself, and that of each
        norm and bias reduced for itself in 16 bits.
    copy_serves_gradients
        Whether only gathers that start beside gradients are from the second copy of the weights;
        those that forward passes and recomputation start are from all ranks.
    bucket_elements
        Number of gradients that one reduction carries at most, unless a matrix is larger; 0 for as
        many reductions of a unit as it has gathers.
    overlaps
        Whether gathers and reductions overlap with kernels, if the job lets them.
    overlaps_gathers
        Whether gathers do, if reductions do.
    gathers_in_place
        Whether weights are gathered to where products read them, so that no kernel copies them.
    keeps_ends
        Whether embedding, final norm and head stay gathered from their first use in a step to its
        end. The gradients of the first one, and of the other two, are then reduced by themselves.
    wraps_ends
        Whether the embedding is a unit of its own, and final norm and head are another one, so that
        each is gathered and reduced next to the blocks that it is used with. The embedding is
        released after the forward pass and gathered again beside the last block of the backward
        pass, although no gradient reads it. Models whose ends share a weight have one unit of all.
        In a pipeline all ends of a stage count as one unit.
    head_chunks
        Number of pieces of a rank's tokens of which logits, loss and the gradients of both are
        formed one piece after another, while the head's gradients are added up in the type of the
        messages. The head is then gathered three times: before the final norm, before the first
        piece, and for the norm's gradient. Only the first gather has anything beside it, and the
        reduction of the head's gradient is awaited at once. The last stage of a pipeline does so
        for each micro-batch, with the last two of these gathers. Products are priced as if all
        tokens were one piece.
    stores_low
        Whether matrices of blocks are stored and gathered in the format of low products, if their
        recipe gathers low.
    keeps_transposed
        Whether transposed copies of such matrices stay, whole, from the first forward pass of a
        step to its end. Without it each forward and each backward pass forms them again.
    view_seconds
        Time of the host for each rank's part of a tensor that is gathered, in which the device
        stands still; None for none.
    slice_seconds
        Time of the host for each rank's part of a gradient that is reduced, in which the device
        stands still; None for none.
    is_fsdp1
        Whether this is torch's first FSDP, whose units are flat tensors.
    is_fsdp2
        Whether this is torch's FSDP2. Its shards of weights and gradients are in fp32, and it keeps
        the message with a unit's gradients until the next unit's is sent.
    runs_eagerly
        Whether there is no compiler, so that blocks also keep rotated queries and keys, attention's
        output in another order, and what a gate lets through.
    reduced_element_bytes
        Bytes of an element of a gradient as it is reduced; None for those of the job's type.
    keeps_last_block
        Whether the last block stays gathered from its forward to its backward pass.
    reshards_root
        Whether embedding, final norm and head are released after the forward pass, too, and
        gathered again for the backward pass. Stages of a pipeline keep them in any case.
    recomputes_products
        Whether selective recomputation keeps the outputs of every second product of a block and of
        attention, and forms everything else again.
    separates_products
        Whether query, key, value and an MLP's gate have weights of their own, and kernels sum the
        gradients of their common inputs.
    joins_queries
        Whether one weight forms query, key and value even where the gate has a weight of its own.
    scatters_by_product
        Whether the gradient of the input of each of these products is summed over the tensor group
        for itself.
    gathers_logits
        Whether each rank of a tensor group has all logits when it forms the loss.
    replicates_embedding
        Whether each rank of a tensor group has the whole embedding.
    has_stages
        Whether its layers can be cut into the stages of a pipeline. Each stage then gathers its
        weights once in a step, and reduces its gradients after its last backward pass.
    splits_layers
        Whether it can also split each layer over a tensor group, with the residual stream split by
        tokens. Each message within the group is awaited at once, unless it may overlap with the
        product that reads or forms it, and recomputation keeps what it has gathered for the
        gradients.
    orders_tokens
        Whether a copy brings tokens into the order of their ranks before they are summed over the
        tensor group, and another one out of it after they are gathered.
    reserves_by_stream
        Whether the memory of a rank is what torch's allocator has reserved: the largest amount of
        each stream, where weights are received and gradients reduced in streams of their own.
    context_kind
        Kind of context parallelism that it has, one of `CONTEXT_KINDS`; empty for none.
    repeats_kv_heads
        Whether KV heads are copied for each of their query heads before ranks share sequences.
    copies_kv_heads
        Whether more ranks than there are KV heads may share sequences by Ulysses.
    offloads_inputs
        Whether the inputs of recomputed layers can be in the host's memory between both passes.
    offloads_layers
        Whether all that some layers save can be in the host's memory between both passes.
    keeps_mixtures
        Whether the blocks of a model with experts stay gathered from their forward to their
        backward pass.
    syncs_mixtures_once
        Whether the first micro-step of a model with experts gathers weights for the whole step, and
        the last one reduces the gradients of all.
    keeps_replicas
        Whether several groups of ranks may each share one copy of all states (HSDP).
    sums_replicas_each_step
        Whether every micro-step sums the sharded gradients over these groups, and not the last one
        alone. Stages of a pipeline reduce once in any case.
    reduces_once
        Whether only the last micro-step reduces gradients, which stay whole until then. Weights are
        gathered in every micro-step.
    gathers_low
        Whether weights of low products can be cast before they are gathered. Their scales are found
        once in a step.
    experts_at_once
        Number of experts whose products run at the same time on a rank; infinite where one kernel
        forms all of them.
    """

    gathers_blocks: bool = True
    prefetch_elements: float = 0.0
    keeps_vectors: bool = False
    live_elements: float = 0.0
    forgets_embedding: bool = False
    activation_is_module: bool = False
    reuse_elements: float = 0.0
    gathers_each_use: bool = False
    quantises_copy: bool = False
    sends_scales_apart: bool = False
    exchanges_tensors: bool = False
    copy_serves_gradients: bool = False
    bucket_elements: float = 0.0
    overlaps: bool = True
    overlaps_gathers: bool = True
    gathers_in_place: bool = False
    keeps_ends: bool = False
    wraps_ends: bool = False
    head_chunks: int = 1
    stores_low: bool = False
    keeps_transposed: bool = False
    view_seconds: Quantity | None = None
    slice_seconds: Quantity | None = None
    is_fsdp1: bool = False
    is_fsdp2: bool = False
    runs_eagerly: bool = False
    reduced_element_bytes: float | None = None
    keeps_last_block: bool = False
    reshards_root: bool = False
    recomputes_products: bool = False
    separates_products: bool = False
    joins_queries: bool = False
    scatters_by_product: bool = False
    gathers_logits: bool = False
    replicates_embedding: bool = False
    has_stages: bool = False
    splits_layers: bool = False
    orders_tokens: bool = False
    reserves_by_stream: bool = False
    context_kind: str = ""
    repeats_kv_heads: bool = False
    copies_kv_heads: bool = False
    offloads_inputs: bool = False
    offloads_layers: bool = False
    keeps_mixtures: bool = False
    syncs_mixtures_once: bool = False
    keeps_replicas: bool = True
    sums_replicas_each_step: bool = False
    reduces_once: bool = False
    gathers_low: bool = False
    experts_at_once: float = math.inf

    def __post_init__(self) -> None:
        for name in ("prefetch_elements", "live_elements", "reuse_elements", "bucket_elements"):
            require_between("zero", name, getattr(self, name), 0, LARGEST_AMOUNT)
        require_choice("zero", "context_kind", self.context_kind, ("", *CONTEXT_KINDS))
        require_between("zero", "experts_at_once", self.experts_at_once, 1, math.inf)
        require_count("zero", "head_chunks", self.head_chunks)
        if self.reduced_element_bytes is not None:
            require_between("zero", "reduced_element_bytes", self.reduced_element_bytes, 0.5, 8)
        waits = ("view_seconds", "slice_seconds")
        require_facts("zero", self, waits, 0.0, LONGEST_WAIT_SECONDS)

    @property
    def is_of_torch(self) -> bool:
        """Whether this is one of torch's FSDPs, whose shards of trained weights are in fp32."""
        return self.is_fsdp1 or self.is_fsdp2

    def message_bytes(self, element_bytes: float) -> float:
        """Return the bytes of an element of a reduced gradient, from those of the job's type."""
        return element_bytes if self.reduced_element_bytes is None else self.reduced_element_bytes
