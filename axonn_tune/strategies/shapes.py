"""The sizes of what one rank computes and holds, for all candidates of one table.

Layout: the input width k of a linear layer is split over X, its output width n over Y; a
transposed layer (proj, down) exchanges the two, so that it takes its input as the layer before
it left it. A strategy that does not split a width sets the size to one and the axis to "".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from axonn_tune.spec.blocks import Linear
from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.engine import IDEAL, MemoryForm
from axonn_tune.spec.facts import value_or
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model, Product
from axonn_tune.spec.names import BACKWARD
from axonn_tune.spec.plan import Array
from axonn_tune.spec.precision import BYTES_PER_ELEMENT, operand_bytes
from axonn_tune.spec.quantity import Quantity
from axonn_tune.spec.recomputation import (
    extent,
    is_partial,
    n_recomputed_layers,
    recomputed_modules,
    runs_attention_again,
)

FP32_BYTES = BYTES_PER_ELEMENT["fp32"]
# A dropout mask holds one byte for each element.
MASK_BYTES = 1.0

# A weight is stored k x n; a head that shares the embedding's weight finds it stored n x k.
_MODES = ("NN", "NT", "TN")
_TRANSPOSED_MODES = ("NT", "NN", "TN")


class LinearShape(NamedTuple):
    """The sizes that one linear layer has on one rank, shape (C,).

    Attributes
    ----------
    linear
        The layer.
    tokens
        Tokens that the layer takes: those of the micro-batch, or where the weight is not split the
        rank's own part of them.
    k, n
        Rows and columns of the gathered weight block.
    weight_bytes, input_bytes, output_bytes
        Sizes of the gathered weight block, of the layer's input and of its output.
    gathered_input_bytes, gathered_gradient_bytes
        Sizes of the layer's input and of the gradient of its output in the format in which ranks
        gather them, which is that of the operands.
    gathers_uncast
        Whether the input is gathered in the job's type instead, since an adapter reads it, too, and
        is cast after that (Transformer Engine d0067d0d, pytorch/module/layernorm_linear.py,
        `return_layernorm_output_gathered`).
    input_axis
        Axis that splits k; outputs are summed over it. It is empty where k is not split.
    output_axis
        Axis that splits n; gradients of inputs are summed over it. It is empty where n is not
        split.
    is_stored_transposed
        Whether the weight is stored n x k.
    products
        Names of the products that form the output, each with its columns.
    """

    linear: Linear
    tokens: Array
    k: Array
    n: Array
    weight_bytes: Array
    input_bytes: Array
    output_bytes: Array
    gathered_input_bytes: Array
    gathered_gradient_bytes: Array
    gathers_uncast: bool
    input_axis: str
    output_axis: str
    is_stored_transposed: bool
    products: tuple[tuple[str, Array], ...]

    @property
    def n_elements(self) -> Array:
        """The number of elements of the gathered weight block."""
        return self.k * self.n

    @property
    def modes(self) -> tuple[str, str, str]:
        """The modes of the products that form the output, dI and dW."""
        return _TRANSPOSED_MODES if self.is_stored_transposed else _MODES

    def stored_sides(self, n: Array) -> tuple[Array, Array]:
        """Return the rows and columns of n columns of the block as it is stored, as dW has them."""
        return (n, self.k) if self.is_stored_transposed else (self.k, n)


@dataclass(frozen=True, eq=False)
class Shapes:
    """Holds all sizes that follow from a model, a job and how a strategy splits tokens and widths.

    Attributes
    ----------
    tokens : array, shape (C,)
        Tokens of a micro-batch on one rank.
    x, y : array, shape (C,)
        Number of ranks over which input widths and output widths are split.
    x_axis, y_axis : str
        Groups over which the widths are split; empty where they are not.
    residual_split : array, shape (C,), or float
        Number of ranks over which the residual stream is split by tokens (Megatron's sequence
        parallelism), in addition to `x`.
    recomputes_inputs : bool
        Whether selective recomputation repeats the kernels that form inputs of products without
        a weight or a collective (norms, activation), in addition to unfused attention.
    reruns_attention : bool
        Whether selective recomputation repeats fused attention, too.
    recomputes_products : bool
        Whether selective recomputation repeats all but attention and every second product.
    leaves_out_last_product : bool
        Whether full recomputation leaves out a block's last product.
    leaves_out_combine : bool
        Whether full recomputation leaves out what comes after the experts' products.
    separates_products : bool
        Whether query, key, value and an MLP's gate have weights of their own.
    joins_queries : bool
        Whether one weight forms query, key and value even where the gate has a weight of its own.
    gathers_logits : bool
        Whether each rank of a tensor group gathers all logits and forms the whole loss.
    stage_layout : tuple of int
        Number of layers of each virtual stage; empty where they follow from their number.
    balances_stages : bool
        Whether the stages of a pipeline have equal products and not equal numbers of layers.
    exceeds_shares : bool
        Whether a stage with equal products takes one more layer if it has exactly its share.
    expert_split : array, shape (C,), or float
        Number of ranks over which the experts of a layer are spread.
    expert_tensor : array, shape (C,), or float
        Number of ranks over which the inner features of each expert are split.
    sends_once : bool
        Whether a token is sent once to each rank that holds any of its experts, and not once for
        each expert.
    experts_at_once : float
        Number of experts whose products run at the same time on a rank.
    adds_expert_biases : bool
        Whether kernels add the biases of the experts' first products, and not the products.
    exchanges_adapters : bool
        Whether an all-to-all exchanges columns of an adapter's output for tokens, instead of a
        gather.
    fuses_adapters : bool
        Whether products themselves scale and add the adapters' outputs, where no tensor group
        splits layers.
    sums_adapters : bool
        Whether the output of an adapter is summed over ranks together with the output of its layer,
        if the latter is summed.
    gradient_sum_bytes : float
        Bytes of an element of the sums to which the products that form the experts' dW add; 0
        where they do not add.
    casts_in_activations : bool
        Whether the kernels of an MLP's activation prepare the cast of what they form.
    fp32_router : bool
        Whether the products that form the gradients of a router run in fp32, whatever the job's
        type.
    copies_heads : bool
        Whether heads are copied out of the products that form them, where attention cannot read
        them in place.
    attention_format : str
        Format of the operands of attention; empty for the job's type.
    low_head : bool
        Whether the head's products run in the format of the recipe, if there is one.
    vocab_size : array, shape (C,), or None
        Rows of the embedding if the layout pads them; None for the model's own number.
    memory : MemoryForm
        Ways in which the engine holds other amounts of memory than one of fused kernels would.
    block_recompute : str
        The recomputation of blocks, "none" or "selective", where candidates of the table differ in
        it; empty where they do not.
    """

    model: Model
    job: Job
    table: CandidateTable
    tokens: Array
    x: Array
    y: Array
    x_axis: str = ""
    y_axis: str = ""
    residual_split: Array | float = 1.0
    recomputes_inputs: bool = False
    reruns_attention: bool = False
    recomputes_products: bool = False
    leaves_out_last_product: bool = False
    leaves_out_combine: bool = False
    separates_products: bool = False
    joins_queries: bool = False
    gathers_logits: bool = False
    stage_layout: tuple[int, ...] = ()
    balances_stages: bool = False
    exceeds_shares: bool = False
    expert_split: Array | float = 1.0
    expert_tensor: Array | float = 1.0
    sends_once: bool = False
    experts_at_once: float = math.inf
    adds_expert_biases: bool = False
    exchanges_adapters: bool = False
    fuses_adapters: bool = False
    sums_adapters: bool = False
    gradient_sum_bytes: float = 0.0
    casts_in_activations: bool = False
    fp32_router: bool = False
    copies_heads: bool = False
    attention_format: str = ""
    low_head: bool = False
    vocab_size: Array | None = None
    memory: MemoryForm = IDEAL.memory
    block_recompute: str = ""

    @property
    def recompute(self) -> str:
        """The recomputation of the blocks that are not recomputed as a whole: none or selective.

        It is full if there are no such blocks, and none where single modules are recomputed.
        """
        if self.block_recompute:
            return self.block_recompute
        one = self._one_candidate
        recompute = one.common_recompute
        if self.recomputed_modules:
            return "none"
        if not is_partial(recompute):
            return recompute
        n_layers = math.ceil(self.model.n_layers / one.n_chunks)
        return "full" if n_recomputed_layers(recompute, n_layers) == n_layers else "none"

    @cached_property
    def _one_candidate(self) -> CandidateTable:
        """A candidate that recomputes the fewest layers; those of one plan may differ in that."""
        return self.table.take(np.argsort(extent(self.table.recompute), kind="stable")[:1])

    @cached_property
    def recomputed_modules(self) -> frozenset[str]:
        """The modules that are recomputed by themselves."""
        return recomputed_modules(self._one_candidate.common_recompute)

    def backward_layers(self, layers: Sequence[int]) -> Sequence[int]:
        """Return the given layers that have a backward pass: all above the frozen ones."""
        return self.job.frozen.layers_above(layers)

    @cached_property
    def n_backward(self) -> int:
        """The number of layers of the model that have a backward pass."""
        return self.model.n_layers - self.job.frozen.n_layers

    def n_recomputed(self, n_layers: int) -> int:
        """Return how many of a stage's layers, the first ones, are recomputed as a whole."""
        return n_recomputed_layers(self.table.common_recompute, n_layers)

    def saved_by_layers(self, saved: Array, n_layers: int) -> Array:
        """Return the bytes that a layer of a virtual stage saves on average, shape (C,).

        Parameters
        ----------
        saved : array, shape (C,)
            Bytes that a layer saves if it is not recomputed as a whole; other layers save their
            input.
        n_layers : int
            Number of layers of the virtual stage.
        """
        share = self.n_recomputed(n_layers) / max(n_layers, 1)
        return saved + share * (self.residual_bytes - saved)

    @property
    def n_virtual(self) -> int:
        """The number of virtual stages of each rank of a pipeline."""
        return self.table.common_n_virtual

    @property
    def element_bytes(self) -> float:
        """The number of bytes of a weight or activation element."""
        return self.job.element_bytes

    @cached_property
    def linears(self) -> dict[str, LinearShape]:
        """The shapes of the linear layers of a block and of the head, by name."""
        model = self.model
        linears = (*model.block_linears, *model.shared_linears, model.head, model.mtp_projection)
        return {linear.name: self._linear_shape(linear) for linear in linears}

    def _linear_shape(self, linear: Linear) -> LinearShape:
        """Return the shape of one linear layer, which every rank may hold whole."""
        tokens, sides = self.tokens, [(self.x, self.x_axis), (self.y, self.y_axis)]
        if linear.transposed:
            sides.reverse()
        if not linear.is_split:
            alone = np.ones(len(self.table))
            tokens, sides = self.own_tokens, [(alone, ""), (alone, "")]
        (input_split, input_axis), (output_split, output_axis) = sides
        is_head = linear.name == "head"
        k = linear.n_in / input_split
        n = linear.n_out / output_split
        if is_head and self.vocab_size is not None:
            n = self.vocab_size / output_split
        column_bytes = tokens * self.element_bytes
        is_high = is_head and not self.low_head
        gathered_bytes = tokens * (self.element_bytes if is_high else self.job.operand_bytes)
        gathers_uncast = self.job.has_adapter(linear.name) and not linear.transposed
        return LinearShape(
            linear,
            tokens,
            k,
            n,
            weight_bytes=k * n * self.element_bytes,
            input_bytes=column_bytes * k,
            output_bytes=column_bytes * n,
            gathered_input_bytes=(column_bytes if gathers_uncast else gathered_bytes) * k,
            gathered_gradient_bytes=gathered_bytes * n,
            gathers_uncast=gathers_uncast,
            input_axis=input_axis,
            output_axis=output_axis,
            is_stored_transposed=is_head and self.model.tied_embeddings,
            products=self._products(linear, n),
        )

    @property
    def attention_element_bytes(self) -> float:
        """The bytes of an element of the operands of attention."""
        return operand_bytes(self.attention_format) if self.attention_format else self.element_bytes

    @property
    def residual_is_split(self) -> bool:
        """Whether ranks split the residual stream by tokens, for some candidate at least."""
        return bool(np.any(np.asarray(self.residual_split) > 1.0))

    @property
    def own_tokens(self) -> Array:
        """The tokens of a micro-batch that the rank holds between blocks."""
        return self.tokens / self.residual_split

    @property
    def n_heads(self) -> Array:
        """The rank's share of the attention heads."""
        return self.model.n_heads / self.y

    @property
    def attention_dim(self) -> int:
        """The mean number of features of a head's query and value."""
        return round(self.model.attention_dim)

    @property
    def block_products(self) -> tuple[Product, ...]:
        """The products of a block in forward order, as far as the engine separates them."""
        return self.model.block_products(self.joins_queries)

    @property
    def recomputed_shares(self) -> dict[str, float]:
        """The share of each layer that recomputation of every second product forms again."""
        return self.model.recomputed_shares(self.joins_queries)

    def _products(self, linear: Linear, n: Array) -> tuple[tuple[str, Array], ...]:
        """Return the names of a layer's products with the columns of each."""
        products = self.block_products if self.separates_products else ()
        parts = tuple((each.name, each.share * n) for each in products if each.layer == linear.name)
        return parts or ((linear.name, n),)

    @property
    def embedding_bytes(self) -> Array:
        """The bytes of the gathered block of the embedding, which is as large as the head's."""
        return self.linears["head"].weight_bytes

    @property
    def vocabulary_parameters(self) -> Array | float:
        """The number of elements of the embedding's weight, or of the head's, on all ranks."""
        if self.vocab_size is None:
            return self.model.head.parameters
        return self.vocab_size * self.model.hidden_size

    # Activations ---------------------------------------------------------------------

    @cached_property
    def stream_bytes(self) -> Array:
        """The bytes of the residual stream of all `tokens`."""
        return self.tokens * (self.model.hidden_size * self.element_bytes) / self.x

    @cached_property
    def residual_bytes(self) -> Array:
        """The bytes of the part of the residual stream that one rank holds between layers."""
        return self.stream_bytes / self.residual_split

    @property
    def norm_input_bytes(self) -> Array:
        """The bytes that a block saves of its norms' inputs; parallel branches share theirs."""
        n_inputs = 1 if self.model.parallel_block else self.model.norms_per_block
        return n_inputs * self.residual_bytes

    @property
    def norm_output_bytes(self) -> Array | float:
        """The bytes that a block saves of its norms' outputs, which are inputs of products.

        An adapter saves the tokens of all ranks.
        """
        held = self.residual_bytes if self.job.trains_weights else self.stream_bytes
        of_qkv, of_up = (
            self.saved_of_input(layer, held) + self._saved_beside_adapter(layer)
            for layer in ("qkv", "up")
        )
        return np.maximum(of_qkv, of_up) if self.model.shares_norm else of_qkv + of_up

    def _saved_beside_adapter(self, layer: str) -> Array | float:
        """Return the bytes that a layer with a frozen weight saves of its norm's output.

        They are those of the rank's own tokens. Without a cast, a gather or dropout, the adapter
        saves the same tensor.
        """
        if not (self.memory.saves_frozen_inputs and self.job.has_adapter(layer)):
            return 0.0
        is_gathered = np.asarray(self.residual_split) > 1.0
        drops = self.job.adapters is not None and self.job.adapters.dropout
        is_apart = (self.job.recipe is not None) | drops | is_gathered
        saves = is_apart & ~self.adapters_are_fused
        return saves * self.saved_share * self.residual_bytes

    @property
    def norm_output_of_one(self) -> Array:
        """The bytes that a block saves of the output of one norm."""
        return self.residual_bytes * self.saved_share

    def saved_of_input(self, layer: str, nbytes: Array) -> Array | float:
        """Return the bytes that a block saves of a layer's input for the gradient of a weight.

        The gradient of a frozen weight is never formed. The adapter beside it saves its own input
        uncast, with the mask of its dropout.

        Parameters
        ----------
        nbytes : array, shape (C,)
            Bytes of the input in the job's type.
        """
        adapters = self.job.adapters
        if adapters is None:
            return nbytes * self.saved_share
        if not self.job.has_adapter(layer):
            return 0.0
        return nbytes * (1.0 + adapters.dropout * MASK_BYTES / self.element_bytes)

    @property
    def saved_share(self) -> float:
        """The ratio of the saved bytes of a product's input to its bytes in the job's type."""
        return 1.0 if self.memory.saves_uncast else self.job.operand_bytes / self.element_bytes

    def share_as_saved(self, element_bytes: Quantity | None) -> float:
        """Return the ratio of saved bytes to those in the job's type, where products are low."""
        if element_bytes is None or self.job.recipe is None:
            return 1.0
        return element_bytes.value / self.element_bytes

    @cached_property
    def mlp_bytes(self) -> Array:
        """The bytes of the output of the MLP's activation."""
        return self.tokens * (self.model.ffn_hidden_size * self.element_bytes) / self.y

    @cached_property
    def inner_bytes(self) -> Array:
        """The bytes that the layers of a block without experts save at its inner widths.

        These are q, k and v, the attention's output, and the MLP before and after its activation.
        Inputs of low products are saved cast. Attention saves its output for itself, too, which
        some recipes use for the product.
        """
        return self.attention_bytes + self.saved_mlp_bytes

    @property
    def saved_mlp_bytes(self) -> Array | float:
        """The bytes that an MLP saves around its activation; none if it is computed in tiles."""
        if self.memory.tiles_mlp:
            return 0.0
        mlp = self.linears["up"].output_bytes + self.saved_of_input("down", self.mlp_bytes)
        return mlp * value_or(self.memory.mlp_factor, 1.0)

    @cached_property
    def attention_bytes(self) -> Array:
        """The bytes that attention saves at its inner widths: q, k, v and its output.

        Queries and keys that have norms are saved before these and after their rotation, by torch's
        compiler, too (2.13, min_cut_rematerialization_partition). Latent attention also saves the
        latent vectors before and after their norms, and the keys and values that are formed from
        them.
        """
        share = self.share_as_saved(self.memory.attention_output_bytes)
        saved = share * self.linears["proj"].input_bytes + self._saved_after_attention
        latent = self.model.latent_attention
        if latent is None:
            saved = saved + self.linears["qkv"].output_bytes
            saved = saved + self.head_norm_bytes
        else:
            saved = saved + self.latent_bytes + self.up_projected_bytes
        return saved * self.attention_factor

    @property
    def attention_factor(self) -> float:
        """The ratio of the bytes that attention saves to those that fused kernels save."""
        factor = self.memory.attention_factor
        if self.model.n_kv_heads < self.model.n_heads:
            factor = self.memory.grouped_attention_factor or factor
        return value_or(factor, 1.0)

    @property
    def _saved_after_attention(self) -> Array | float:
        """The bytes of another copy of attention's output, cast or after dropout, for dW."""
        shape = self.linears["proj"]
        adapters = self.job.adapters
        if adapters is not None:
            return self.saved_of_input("proj", shape.input_bytes) if adapters.dropout else 0.0
        if self.job.saves_attention_cast:
            return shape.gathered_input_bytes
        return 0.0

    @property
    def adapter_bytes(self) -> Array | float:
        """The bytes that a block saves of the hidden features of its adapters."""
        adapters = self.job.adapters
        if adapters is None:
            return 0.0
        return self.tokens * (self.n_adapters * adapters.rank * self.element_bytes)

    @property
    def adapters_are_fused(self) -> np.ndarray:
        """Whether products themselves scale and add the adapters' outputs, shape (C,)."""
        return self.fuses_adapters & (np.asarray(self.y) == 1.0)

    @property
    def n_adapters(self) -> int:
        """The number of adapters of a block."""
        adapters = self.job.adapters
        return 0 if adapters is None else adapters.n_beside(self.model.block_linears)

    @property
    def up_projected_bytes(self) -> Array | float:
        """The bytes of all that latent attention forms from its latent vectors before attention.

        These are the vectors after their norms, queries, whole keys, in which the part that carries
        the position is repeated for each head, and values. Values that are a part of what one
        product forms keep all of it, the content of keys included, unless they are copied out of it
        (Megatron-LM d98e8a64, core/transformer/multi_latent_attention.py,
        `qkv_up_proj_and_rope_apply`; core/fusions/fused_mla_yarn_rope_apply.py saves angles only).
        """
        latent = self.model.latent_attention
        if latent is None:
            return 0.0
        heads_bytes = self.tokens * (self.model.n_heads * self.element_bytes) / self.y
        queries = self.linears["q_up"].output_bytes
        with_values = self.linears["kv_up"].output_bytes
        if self.copies_heads:
            with_values = heads_bytes * latent.value_dim
        return self.latent_bytes + queries + heads_bytes * latent.query_dim + with_values

    @cached_property
    def latent_bytes(self) -> Array | float:
        """The bytes of the latent vectors of the rank's own tokens, 0 without latent attention."""
        latent = self.model.latent_attention
        if latent is None:
            return 0.0
        width = latent.q_rank + latent.kv_rank + latent.position_dim
        return self.own_tokens * (width * self.element_bytes)

    @property
    def grouped_query_bytes(self) -> Array | float:
        """The bytes of the copy of q that attention saves where query heads share keys and values.

        Their columns lie group by group, with the group's key and value between them.
        """
        model = self.model
        if model.n_heads == model.n_kv_heads:
            return 0.0
        return self.tokens * (model.n_heads * model.head_dim * self.element_bytes) / self.y

    @property
    def copied_heads_bytes(self) -> Array | float:
        """The bytes of the heads that one product forms group by group, and that are then copied.

        These are queries, if a rank has several groups with several of them, and whatever the
        rotary kernel does not write anew: values, or keys and values (Megatron-LM d98e8a64,
        core/transformer/attention.py, get_query_key_value_tensors; Transformer Engine d0067d0d,
        dot_product_attention/utils.py, get_qkv_layout).
        """
        model = self.model
        if not self._heads_are_apart:
            return 0.0
        n_copied = 1.0 if model.position == "rotary" else 2.0
        has_groups = np.asarray(model.n_kv_heads / self.y > 1.0)
        values = self.tokens * (model.n_kv_heads * model.head_dim * self.element_bytes) / self.y
        return self.grouped_query_bytes * has_groups + n_copied * values

    @property
    def joined_heads_bytes(self) -> Array | float:
        """The bytes of the gradients of queries, keys and values that are joined in one tensor."""
        return self.linears["qkv"].output_bytes if self._heads_are_apart else 0.0

    @property
    def _heads_are_apart(self) -> bool:
        """Whether attention takes queries, keys and values that are not parts of one tensor."""
        model = self.model
        is_grouped = model.n_heads != model.n_kv_heads
        return model.latent_attention is None and (is_grouped or model.position == "rotary")

    @cached_property
    def score_bytes(self) -> Array:
        """The bytes of the scores of unfused attention, or of their softmax."""
        scores = self.tokens * (float(self.job.seq_len) * self.model.n_heads) / self.y
        return scores * self.element_bytes

    @property
    def saved_score_bytes(self) -> Array | float:
        """The bytes that attention saves of its scores: unfused attention keeps their softmax."""
        return self.score_bytes if self.job.attention == "unfused" else 0.0

    @cached_property
    def logits(self) -> Array:
        """The number of logits: tokens times the rank's part of the vocabulary."""
        return self.tokens * self.linears["head"].n

    @property
    def loss_logits(self) -> Array:
        """The number of logits of which a rank forms the loss."""
        return self.logits * self.y if self.gathers_logits else self.logits

    @cached_property
    def rotary_bytes(self) -> Array:
        """The bytes that rotary position embedding reads and writes of q and k.

        Latent attention writes whole queries and keys, of which a part is rotated.
        """
        model = self.model
        rotated = (model.n_heads + model.n_kv_heads) * model.head_dim
        if model.latent_attention is not None:
            rotated = 2 * model.n_heads * model.latent_attention.query_dim
        return self.tokens * (2.0 * rotated * self.element_bytes) / self.y

    @property
    def head_norm_bytes(self) -> Array | float:
        """The bytes of the queries and keys, or of the latent vectors, that have norms."""
        model = self.model
        if model.latent_attention is not None:
            return self.latent_bytes
        if not model.qk_norm:
            return 0.0
        width = (model.n_heads + model.n_kv_heads) * model.head_dim
        return self.tokens * (width * self.element_bytes) / self.y

    @property
    def gated_bytes(self) -> Array:
        """The bytes of the gradients before and after the activation of an MLP without experts.

        Where the MLP is computed in tiles, they are the gradients of its input and its output.
        """
        if self.memory.tiles_mlp:
            return 2.0 * self.residual_bytes
        if self.memory.overwrites_gates:
            return self.mlp_bytes
        return self.linears["up"].output_bytes + self.mlp_bytes

    def working_set(
        self,
        everything: Array,
        saved: Array,
        last: bool,
        mlp_bytes: Array | None = None,
        head_bytes: Array | float = 0.0,
    ) -> Array:
        """Return the bytes of the working set at the peak, besides what each block has saved.

        These are one block's activations and gradients or, if larger, the logits in all their
        copies.

        Parameters
        ----------
        everything : array, shape (C,)
            Bytes that a block would save without recomputation.
        saved : array, shape (C,)
            Bytes that a block saves.
        last : bool
            Whether the rank computes the logits.
        mlp_bytes : array, shape (C,), optional
            Bytes of the MLP before and after its activation; by default of a block without experts.
        head_bytes : array, shape (C,), or float
            Bytes that are held beside the gradient of the logits when the gradient of the head's
            input is formed.
        """
        mlp_bytes = self.gated_bytes if mlp_bytes is None else mlp_bytes
        working = everything - saved + mlp_bytes
        if last and not self.memory.tiles_logits:
            logit_bytes = value_or(self.memory.logit_bytes, self.element_bytes + FP32_BYTES)
            n_predicted = 1.0 + self.job.mtp_modules
            working = np.maximum(working, n_predicted * self.logits * logit_bytes)
            working = np.maximum(working, self.logits * self.element_bytes + head_bytes)
        return working

    # Kernels ---------------------------------------------------------------------------

    @property
    def norm_kernel(self) -> str:
        """The memory-bound kernel of a norm's forward pass."""
        return f"{self.model.norm}_norm"

    @property
    def activation_kernel(self) -> str:
        """The memory-bound kernel of the activation's forward pass."""
        if not self.model.gated_mlp:
            return "gelu"
        return "clamped_swiglu" if self.model.clamped_gate else "swiglu"

    @property
    def saves_unclamped(self) -> bool:
        """Whether a block saves the inputs of a clamped gate before and after they are clamped."""
        return self.model.clamped_gate and self.memory.saves_unclamped

    @property
    def rotary_kernel(self) -> str:
        """The memory-bound kernel that rotates queries and keys by their positions."""
        return "scaled_rotary" if self.model.scaled_rotary else "rotary"

    @property
    def recomputes_attention(self) -> bool:
        """Whether the backward pass of a block runs attention again."""
        again = runs_attention_again(self.recompute, self.job.attention, self.reruns_attention)
        return again or "core_attn" in self.recomputed_modules

    @property
    def recomputes_by_product(self) -> bool:
        """Whether the backward pass of a block forms every second product again."""
        return self.recompute == "selective" and self.recomputes_products


def kernel_of(forward_kernel: str, chain: str) -> str:
    """Return the memory-bound kernel of a pass, one of `MEMORY_KERNELS`."""
    return f"{forward_kernel}_backward" if chain == BACKWARD else forward_kernel
