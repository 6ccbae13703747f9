"""The sizes of what one rank computes and holds, for all candidates of one table.

Layout: the input width k of a linear layer is split over X, its output width n over Y; a
transposed layer (proj, down) exchanges the two, so that it takes its input as the layer before
it left it. A strategy that does not split a width sets the size to one and the axis to "".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.engine import IDEAL, MemoryForm, value_or
from axonn_tune.spec.job import BYTES_PER_ELEMENT, Job
from axonn_tune.spec.model import Linear, Model
from axonn_tune.spec.plan import Array
from axonn_tune.spec.recomputation import is_partial, n_recomputed_layers

FP32_BYTES = BYTES_PER_ELEMENT["fp32"]
# A dropout mask holds one byte for each element.
MASK_BYTES = 1.0

# A weight is stored k x n; a head that shares the embedding's weight finds it stored n x k.
_MODES = ("NN", "NT", "TN")
_TRANSPOSED_MODES = ("NT", "NN", "TN")


@dataclass(frozen=True, eq=False)
class LinearShape:
    """The sizes that one linear layer has on one rank, shape (C,).

    Attributes
    ----------
    linear
        The layer.
    k, n
        Rows and columns of the gathered weight block.
    weight_bytes, input_bytes, output_bytes
        Sizes of the gathered weight block, of the layer's input and of its output.
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
    k: Array
    n: Array
    weight_bytes: Array
    input_bytes: Array
    output_bytes: Array
    input_axis: str
    output_axis: str
    is_stored_transposed: bool
    products: tuple[tuple[str, Array], ...]

    @property
    def modes(self) -> tuple[str, str, str]:
        """The modes of the products that form the output, dI and dW."""
        return _TRANSPOSED_MODES if self.is_stored_transposed else _MODES

    def stored_sides(self, n: Array) -> tuple[Array, Array]:
        """Return the rows and columns of n columns of the block as it is stored, as dW has them."""
        return (n, self.k) if self.is_stored_transposed else (self.k, n)


@dataclass(frozen=True, eq=False)
class Shapes:
    """All sizes that follow from a model, a job and how a strategy splits tokens and widths.

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
    recomputes_products : bool
        Whether selective recomputation repeats all but attention and every second product.
    separates_products : bool
        Whether query, key, value and an MLP's gate have weights of their own.
    balances_stages : bool
        Whether the stages of a pipeline have equal products and not equal numbers of layers.
    memory : MemoryForm
        What the engine holds where that is not what fused kernels hold.
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
    recomputes_products: bool = False
    separates_products: bool = False
    balances_stages: bool = False
    memory: MemoryForm = IDEAL.memory

    @property
    def recompute(self) -> str:
        """The recomputation of blocks that keep more than their input: none or selective.

        It is full if there are no such blocks.
        """
        recompute = self.table.common_recompute
        if not is_partial(recompute):
            return recompute
        n_layers = math.ceil(self.model.n_layers / (self.table.n_stages * self.n_virtual))
        return "full" if self.n_recomputed(n_layers) == n_layers else "none"

    def n_recomputed(self, n_layers: int) -> int:
        """Return how many of a stage's layers, the first ones, are recomputed as a whole."""
        return n_recomputed_layers(self.table.common_recompute, n_layers)

    def saved_by_layers(self, saved: Array, n_layers: int) -> Array:
        """Return what a layer of a virtual stage saves on the average.

        Parameters
        ----------
        saved : array, shape (C,)
            Bytes that a layer saves which is not recomputed as a whole; others save their input.
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
        linears = (*self.model.block_linears, self.model.head)
        return {linear.name: self._linear_shape(linear) for linear in linears}

    def _linear_shape(self, linear: Linear) -> LinearShape:
        """Return the shape of one linear layer."""
        input_split = self.x
        input_axis = self.x_axis
        output_split = self.y
        output_axis = self.y_axis
        if linear.transposed:
            input_split, output_split = output_split, input_split
            input_axis, output_axis = output_axis, input_axis
        k = linear.n_in / input_split
        n = linear.n_out / output_split
        column_bytes = self.tokens * self.element_bytes
        return LinearShape(
            linear,
            k,
            n,
            weight_bytes=k * n * self.element_bytes,
            input_bytes=column_bytes * k,
            output_bytes=column_bytes * n,
            input_axis=input_axis,
            output_axis=output_axis,
            is_stored_transposed=linear.name == "head" and self.model.tied_embeddings,
            products=self._products(linear, n),
        )

    def _products(self, linear: Linear, n: Array) -> tuple[tuple[str, Array], ...]:
        """Return the names of a layer's products with the columns of each."""
        products = self.model.block_products if self.separates_products else ()
        parts = tuple((each.name, each.share * n) for each in products if each.layer == linear.name)
        return parts or ((linear.name, n),)

    @property
    def embedding_bytes(self) -> Array:
        """The bytes of the gathered block of the embedding, which is as large as the head's."""
        return self.linears["head"].weight_bytes

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
    def norm_output_bytes(self) -> Array:
        """The bytes that a block saves of its norms' outputs, which are inputs of products."""
        return min(self.model.norms_per_block, 2) * self.residual_bytes

    @cached_property
    def mlp_bytes(self) -> Array:
        """The bytes of the output of the MLP's activation."""
        return self.tokens * (self.model.ffn_hidden_size * self.element_bytes) / self.y

    @cached_property
    def inner_bytes(self) -> Array:
        """The bytes that a block's layers save at its inner widths.

        These are q, k and v, the attention's output, and the MLP before and after its
        activation.
        """
        attention = self.linears["qkv"].output_bytes + self.linears["proj"].input_bytes
        mlp = self.linears["up"].output_bytes + self.mlp_bytes
        attention_factor, mlp_factor = self.memory.attention_factor, self.memory.mlp_factor
        return attention * value_or(attention_factor, 1.0) + mlp * value_or(mlp_factor, 1.0)

    @property
    def grouped_query_bytes(self) -> Array | float:
        """The bytes of the copy of q that attention saves where query heads share keys and values.

        Their columns lie group by group, with the group's key and value between them.
        """
        model = self.model
        if model.n_heads == model.n_kv_heads:
            return 0.0
        return self.tokens * (model.n_heads * model.head_dim * self.element_bytes) / self.y

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

    @cached_property
    def rotary_bytes(self) -> Array:
        """The bytes that rotary position embedding reads and writes of q and k."""
        rotated = (self.model.n_heads + self.model.n_kv_heads) * self.model.head_dim
        return self.tokens * (2.0 * rotated * self.element_bytes) / self.y

    def working_set(self, everything: Array, saved: Array, last: bool) -> Array:
        """Return the bytes in work at the peak, in addition to what each block has saved.

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
        """
        working = everything - saved + self.linears["up"].output_bytes + self.mlp_bytes
        if last:
            logit_bytes = value_or(self.memory.logit_bytes, self.element_bytes + FP32_BYTES)
            working = np.maximum(working, self.logits * logit_bytes)
        return working

    # Kernels ---------------------------------------------------------------------------

    @property
    def norm_kernel(self) -> str:
        """The memory-bound kernel of a norm's forward pass."""
        return f"{self.model.norm}_norm"

    @property
    def activation_kernel(self) -> str:
        """The memory-bound kernel of the activation's forward pass."""
        return "swiglu" if self.model.gated_mlp else "gelu"

    @property
    def recomputes_attention(self) -> bool:
        """Whether the backward pass of a block forms unfused attention again."""
        return self.recompute == "selective" and self.job.attention == "unfused"

    @property
    def recomputes_by_product(self) -> bool:
        """Whether the backward pass of a block forms every second product again."""
        return self.recompute == "selective" and self.recomputes_products


def stage_parameters(
    model: Model, n_layers: int, first: bool, last: bool
) -> tuple[float, float, float]:
    """Return the number of parameters of one stage of a pipeline, or of parts of a model.

    Parameters
    ----------
    n_layers : int
        Number of its layers.
    first, last : bool
        Whether it has the embedding, and whether it has the final norm and the head.

    Returns
    -------
    matrices, over_x, over_y : float
        Elements of matrices, of vectors along the residual stream, which X splits, and of vectors
        along the widths that Y splits.
    """
    is_shared = model.tied_embeddings and first and last
    n_embeddings = first + last - is_shared
    matrices = n_layers * model.block_matmul_parameters + n_embeddings * model.head.parameters
    n_norms = model.norms_per_block * n_layers + last
    over_x = float(n_norms * model.norm_parameters + first * model.position_parameters)
    over_y = 0.0
    for linear in model.block_linears:
        if linear.bias and linear.transposed:
            over_x += n_layers * linear.n_out
        elif linear.bias:
            over_y += n_layers * linear.n_out
    return matrices, over_x, over_y
