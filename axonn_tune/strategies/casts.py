"""Casts of low precisions: what is cast, what is transposed, and the bytes of the copies.

The operands of the products of a block's linear layers are cast to the recipe's format
(`spec.precision.Recipe`): a layer's input and the gradient of its output in every micro-step, its
weight whenever it has changed or was gathered. Activations are cast before they are gathered. Other
products and all other kernels stay in the job's type.

The backward pass needs copies along the columns. Either the kernel that casts the copies along the
rows casts these, too, from the original tensor, or they are transposed from the copies along the
rows: by the same kernel or, where ranks have gathered the tensor since, by a kernel of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.job import Job
from axonn_tune.spec.names import BACKWARD
from axonn_tune.spec.plan import Array, Size
from axonn_tune.spec.precision import Recipe
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES, Shapes

_ATTENTION = "attention"
# Layers whose input a norm has written.
_AFTER_NORM = ("qkv", "q_up", "kv_up", "up")


def kept_weight_bytes(job: Job) -> float:
    """Return the bytes per element of the low-format copies that a rank keeps of a weight."""
    recipe = job.recipe
    return 0.0 if recipe is None else _n_weight_copies(job, recipe) * job.operand_bytes


def _n_weight_copies(job: Job, recipe: Recipe) -> float:
    """Return how many copies of a weight are kept.

    Fine-tuning transposes a frozen weight whenever it needs to (Megatron-Bridge 067f987d and NeMo
    24.09, disable_parameter_transpose_cache).
    """
    if job.trains_weights or recipe.quantises_columns:
        return _n_copies(job, recipe)
    return 1.0


def _n_copies(job: Job, recipe: Recipe) -> float:
    """Return 2 where the backward pass needs copies of its own, and else 1."""
    return 2.0 if recipe.quantises_columns or job.transposes_operands else 1.0


@dataclass(frozen=True, eq=False)
class Casts:
    """The casts of a step; without a recipe there are none."""

    shapes: Shapes

    def number_format(self, layer: str) -> str:
        """Return the format of the operands of a layer's products; empty for the job's type."""
        recipe = self._recipe(layer)
        return "" if recipe is None else recipe.number_format

    def n_issues_of_expert(self, layer: str, mode: str) -> float:
        """Return how many operations the host issues for an expert's product, its cast included.

        The gradient that is cast for dI is used for dW, too.
        """
        recipe = self._recipe(layer)
        is_cast_apart = recipe is not None and recipe.casts_experts_apart and mode != "TN"
        return 2.0 if is_cast_apart else 1.0

    def cast_input(self, host: HostProgram, chain: str, layer: str) -> None:
        """Cast a layer's input; the copy along its columns is saved for the backward pass."""
        recipe = self._recipe(layer)
        if recipe is None:
            return
        shape = self.shapes.linears[layer]
        is_gathered_after = shape.linear.is_split and not shape.linear.transposed
        split = self._split(is_gathered_after and not shape.gathers_uncast)
        n_elements = shape.tokens * shape.k / split
        n_copies = self._n_activation_copies(recipe, split)
        if self._is_cast_again(layer, recipe):
            n_copies = 1.0
        name = names.cast(names.of_layer(chain, layer))
        n_reads = np.where(self._is_prepared(layer), recipe.reads_after_norm, recipe.reads)
        self._agree_on_scale(host, name, recipe, is_gathered_after)
        self._cast(host, name, n_elements, n_reads, n_copies)

    def cast_gradient(self, host: HostProgram, layer: str) -> None:
        """Cast the gradient of a layer's output."""
        recipe = self._recipe(layer)
        if recipe is None:
            return
        shape = self.shapes.linears[layer]
        split = self._split(shape.linear.transposed)
        n_copies = self._n_gradient_copies(layer, recipe, split)
        name = names.cast(names.of_layer(BACKWARD, layer))
        is_prepared = layer == "up" and self.shapes.casts_in_activations
        n_reads = recipe.reads_after_norm if is_prepared else recipe.reads
        self._agree_on_scale(host, name, recipe, shape.linear.transposed)
        self._cast(host, name, shape.tokens * shape.n / split, n_reads, n_copies)

    def form_columns(self, host: HostProgram, layer: str) -> None:
        """Form the copies along the columns that dW still lacks.

        These are transposed copies of what was gathered, and a copy of an input that was saved
        uncast.
        """
        recipe = self._recipe(layer)
        if recipe is None:
            return
        shape = self.shapes.linears[layer]
        owner = names.of_layer(BACKWARD, layer)
        tokens = shape.tokens
        width = shape.n if shape.linear.transposed else shape.k
        missing = _n_copies(self.shapes.job, recipe) - self._n_copies_at_once(
            recipe, self._split(shape.linear.is_split)
        )
        self._transpose(host, names.transposed(owner), tokens * width * missing)
        if self._is_cast_again(layer, recipe):
            self._cast(host, names.cast_again(owner), tokens * shape.k, recipe.reads, 1.0)

    def transpose_frozen(self, host: HostProgram, layer: str, n_elements: Size) -> None:
        """Transpose elements of frozen weights that stay with a rank, if dI needs them so."""
        recipe = self._recipe(layer)
        if recipe is None or recipe.quantises_columns or not self.shapes.job.transposes_operands:
            return
        self._transpose(host, names.transposed(names.of_layer(BACKWARD, layer)), n_elements)

    def cast_for_attention(self, host: HostProgram, chain: str) -> None:
        """Cast the inputs of attention, or its output's gradient, where it runs in a low format.

        One copy of each is enough for attention (Transformer Engine, FusedAttnFunc).
        """
        recipe = self.shapes.job.recipe
        if recipe is not None and self.shapes.attention_format:
            n_elements = self._n_outputs if chain == BACKWARD else self._n_inputs
            name = names.cast(names.of_layer(chain, _ATTENTION))
            self._cast(host, name, n_elements, recipe.reads, 1.0)

    def convert_from_attention(self, host: HostProgram, chain: str) -> None:
        """Convert the results of low-format attention to the job's type, if it wrote 8 bits.

        It does so where the recipe knows the scales beforehand.
        """
        recipe = self.shapes.job.recipe
        if recipe is not None and self.shapes.attention_format and recipe.knows_scales:
            n_elements = self._n_inputs if chain == BACKWARD else self._n_outputs
            name = names.convert(names.of_layer(chain, _ATTENTION))
            self._cast(host, name, n_elements, 1.0, 1.0)

    @property
    def _n_inputs(self) -> Array:
        """The number of elements of the rank's queries, keys and values."""
        model = self.shapes.model
        width = model.query_width + model.key_width + model.value_width
        return self.shapes.tokens * width / self.shapes.y

    @property
    def _n_outputs(self) -> Array:
        """The number of elements of attention's output for the rank's queries."""
        return self.shapes.linears["proj"].input_bytes / self.shapes.element_bytes

    def cast_of_experts(self, host: HostProgram, chain: str, layer: str, n_elements: Size) -> None:
        """Cast the input of experts' products, or in the backward chain the gradient of a result.

        All copies are formed at once; those along the columns are for dW.
        """
        recipe = self._recipe(layer)
        if recipe is not None:
            name = names.cast(names.of_layer(chain, layer))
            n_copies = _n_copies(self.shapes.job, recipe) if self.shapes.job.trains_weights else 1.0
            self._cast(host, name, n_elements, recipe.reads, n_copies)

    def cast_gathered(self, host: HostProgram, chain: str, layer: str, n_elements: Size) -> None:
        """Cast elements of weights that have just been gathered, as the chain needs them."""
        recipe = self._recipe(layer)
        if recipe is not None:
            name = names.cast_weight(names.of_layer(chain, layer))
            self._cast(host, name, n_elements, recipe.reads, 1.0)

    def transpose_gathered(self, host: HostProgram, chain: str, layer: str, share: Size) -> None:
        """Transpose a weight that was gathered in the recipe's format, if dI needs it so.

        `share` is the share of a chain's passes that do so.
        """
        recipe = self._recipe(layer)
        if recipe is not None and not recipe.quantises_columns:
            name = names.transposed_weight(names.of_layer(chain, layer))
            missing = _n_copies(self.shapes.job, recipe) - 1.0
            self._transpose(host, name, share * missing * self.shapes.linears[layer].n_elements)

    def cast_kept_weights(self, host: HostProgram, name: str, n_elements: Array) -> None:
        """Cast weights that stay where they are, once they are updated."""
        job = self.shapes.job
        if job.recipe is not None:
            n_copies = _n_copies(job, job.recipe)
            self._cast(host, name, n_elements, job.recipe.reads, n_copies)

    def transpose_kept_weights(self, host: HostProgram, name: str, n_elements: Array) -> None:
        """Transpose weights that were gathered in the recipe's format."""
        job = self.shapes.job
        if job.recipe is not None and not job.recipe.quantises_columns:
            n_missing = _n_copies(job, job.recipe) - 1.0
            self._transpose(host, name, n_elements * n_missing)

    def _recipe(self, layer: str) -> Recipe | None:
        """Return the recipe of a layer's products; None where they run in the job's type.

        The head's products do, unless the engine says otherwise.
        """
        is_high = layer == "head" and not self.shapes.low_head
        return None if is_high else self.shapes.job.recipe

    def _agree_on_scale(
        self, host: HostProgram, name: str, recipe: Recipe, is_gathered: bool
    ) -> None:
        """Find the largest value of a tensor that is gathered, if the recipe has one scale for it.

        Each rank holds a part of its tokens (Transformer Engine d0067d0d, csrc/quantizer.cpp,
        `amax_reduction_group`; torchao's casts of a DTensor do so, too). The kernel that finds the
        largest value of the part is counted with the cast that follows.
        """
        is_split = is_gathered and self.shapes.residual_is_split
        if recipe.finds_scale_of_tensor and is_split:
            host.run(names.all_reduce(name), "all_reduce", FP32_BYTES, self.shapes.y_axis)

    def _is_prepared(self, layer: str) -> np.ndarray | bool:
        """Return whether the kernel that forms a layer's input prepares the cast of it, shape (C,).

        A norm does not if an adapter reads its output, too, which is then in the job's type
        (Transformer Engine d0067d0d, pytorch/module/layernorm_linear.py, `with_quantized_norm`).
        In a sequence of operations it does, and the adapter reads the cast.
        """
        if layer == "down":
            return self.shapes.casts_in_activations
        if layer in _AFTER_NORM and self.shapes.job.has_adapter(layer):
            return self.shapes.adapters_are_fused
        return layer in _AFTER_NORM

    def _split(self, is_gathered: bool) -> Size:
        """Return over how many ranks a tensor is split by tokens when it is cast."""
        return self.shapes.residual_split if is_gathered else 1.0

    def _n_activation_copies(self, recipe: Recipe, split: Size) -> Size:
        """Return how many copies of an input are formed at once.

        Copies along the columns are for dW, which frozen weights do not have.
        """
        if not self.shapes.job.trains_weights:
            return 1.0
        return self._n_copies_at_once(recipe, split)

    def _n_gradient_copies(self, layer: str, recipe: Recipe, split: Size) -> Size:
        """Return how many copies of the gradient of an output are formed at once.

        A layer with a norm forms those along the columns of a frozen weight's gradient, too,
        although no product reads them (Transformer Engine d0067d0d, module/layernorm_linear.py,
        `backward`). A layer without a norm does not, nor does one in a sequence of operations.
        """
        if self.shapes.job.trains_weights:
            return self._n_copies_at_once(recipe, split)
        if layer not in _AFTER_NORM or self.shapes.memory.saves_uncast:
            return 1.0
        is_in_sequence: np.ndarray | bool = self.shapes.casts_in_activations
        if layer != "up":
            is_in_sequence = self.shapes.job.has_adapter(layer) & self.shapes.adapters_are_fused
        return np.where(is_in_sequence, 1.0, self._n_copies_at_once(recipe, split))

    def _n_copies_at_once(self, recipe: Recipe, split: Size) -> Size:
        """Return how many copies the kernel that casts forms, for each candidate.

        Transposed copies are formed only once all tokens are there.
        """
        n_copies = _n_copies(self.shapes.job, recipe)
        if recipe.quantises_columns:
            return n_copies
        return np.where(np.asarray(split) > 1, 1.0, n_copies)

    def _is_cast_again(self, layer: str, recipe: Recipe) -> bool:
        """Return whether the backward pass casts a layer's input again."""
        is_saved_by_attention = layer == "proj" and not recipe.saves_attention_cast
        return is_saved_by_attention or self.shapes.memory.saves_uncast

    def _cast(
        self, host: HostProgram, name: str, n_elements: Size, n_reads: Size, n_copies: Size
    ) -> None:
        """Read elements in the job's type, and write some copies in the recipe's format.

        If the recipe needs no read, another kernel has written one copy, from which the others are
        transposed.
        """
        job = self.shapes.job
        of_reading = n_reads * job.element_bytes + n_copies * job.operand_bytes
        of_transposing = (n_copies - 1.0) * (2.0 * job.operand_bytes)
        nbytes = n_elements * np.where(np.asarray(n_reads) > 0, of_reading, of_transposing)
        if np.any(nbytes > 0):
            host.memory_bound(name, nbytes, "cast")

    def _transpose(self, host: HostProgram, name: str, n_elements: Size) -> None:
        """Read and write elements in the recipe's format, if there are any."""
        if np.any(n_elements > 0):
            host.memory_bound(name, n_elements * (2.0 * self.shapes.job.operand_bytes), "cast")
