"""What a rank of AxoNN's grid stores, and what it holds at the peak of its backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from axonn_tune.spec.candidates import CandidateTable
from axonn_tune.spec.facts import value_or
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array
from axonn_tune.spec.programs import AxonnProgram
from axonn_tune.strategies.adapters import adapter_elements
from axonn_tune.strategies.context import ContextParallelism
from axonn_tune.strategies.parameters import stage_parameters, vocabulary_matrices
from axonn_tune.strategies.shapes import FP32_BYTES, Shapes

# Gradients are accumulated and reduced over data in fp32 (AxoNN's own model takes 4 bytes too).
GRADIENT_BYTES = FP32_BYTES
# Order in which the backward pass of a block forms the gradients of its weights.
BACKWARD_ORDER = ("down", "up", "proj", "qkv")


def stored_parameters(
    model: Model,
    table: CandidateTable,
    n_layers: int,
    first: bool,
    last: bool,
) -> tuple[Array, Array]:
    """Return how many parameters of matrices, and of norms, biases and positions, a rank stores.

    Parameters
    ----------
    n_layers : int
        Number of layers of the rank's stage of a pipeline.
    first, last : bool
        Whether the stage has the embedding, and whether it has the head.

    Returns
    -------
    sharded, replicated : array, shape (C,)
        Matrices are split over X, Y and Z; vectors over X or Y only.
    """
    matrices, over_x, over_y = stage_parameters(model, range(n_layers), first, last)
    x = table.size("x")
    y = table.size("y")
    return matrices / (x * y * table.size("z")), over_x / x + over_y / y


def held_parameters(
    shapes: Shapes, program: AxonnProgram, n_layers: int, first: bool, last: bool
) -> tuple[Array, Array]:
    """Return what `stored_parameters` does, with the vocabulary as the program holds it.

    Where Z replicates the weights of the embedding and of the head, they count as replicated.
    """
    model, table = shapes.model, shapes.table
    sharded, replicated = stored_parameters(model, table, n_layers, first, last)
    if program.replicates_vocabulary or program.pads_vocabulary:
        n_ranks, z = shapes.x * shapes.y, table.size("z")
        n_matrices = vocabulary_matrices(model, first, last)
        sharded = sharded - n_matrices * model.head.parameters / (n_ranks * z)
        vocabulary = n_matrices * shapes.vocabulary_parameters / n_ranks
        if program.replicates_vocabulary:
            return sharded, replicated + vocabulary
        sharded = sharded + vocabulary / z
    return sharded, replicated


def trained_parameters(
    shapes: Shapes, program: AxonnProgram, n_layers: int, first: bool, last: bool
) -> tuple[Array, Array]:
    """Return how many parameters a rank of a stage trains, as `held_parameters` does.

    Where all weights are frozen these are adapters, which Z does not split.
    """
    job = shapes.job
    if job.trains_weights:
        first, last = first and job.trains_embedding, last and job.trains_head
        n_trained = n_layers - job.frozen.n_layers
        return held_parameters(shapes, program, n_trained, first, last)
    return np.zeros(len(shapes.table)), adapter_elements(shapes, range(n_layers))


def saved_by_block(shapes: Shapes, context: ContextParallelism) -> tuple[Array, Array]:
    """Return the bytes that a block saves without and with recomputation, shape (C,) each.

    A block saves the inputs of each product and what the kernels between them need: the block's
    input and the residual after attention (norms), both norms' outputs, q, k, v, the attention's
    output, the MLP before and after its activation. Unfused attention also keeps the softmax of its
    scores. Selective recomputation forms the norms' outputs, the activation and the softmax again.
    """
    norm_bytes = shapes.norm_input_bytes + shapes.norm_output_bytes
    inner_bytes = (
        shapes.inner_bytes + shapes.grouped_query_bytes + shapes.adapter_bytes + context.saved_bytes
    )
    everything = norm_bytes + inner_bytes + shapes.saved_score_bytes
    formed_again = shapes.saved_of_input("down", shapes.mlp_bytes)
    saved = {
        "none": everything,
        "selective": shapes.norm_input_bytes + inner_bytes - formed_again,
        "full": shapes.residual_bytes,
    }[shapes.recompute]
    return everything, saved


class _Moment(NamedTuple):
    """What a rank holds at one point of its backward pass, in addition to what blocks have saved.

    gathered
        Bytes of gathered weights and of weight gradients that await their scatter.
    working
        Bytes of the tensors that are being formed.
    """

    gathered: Array
    working: Array


class BackwardPass(NamedTuple):
    """The backward pass of a stage: what a rank holds besides what its blocks have saved.

    Attributes
    ----------
    shapes, program, context
        Sizes of the candidates, facts of the implementation, and how ranks share sequences.
    everything, saved
        Bytes of all that a block could save, and of what it has saved.
    n_layers
        Number of layers of the stage that have a backward pass.
    last
        Whether the stage has the head.
    """

    shapes: Shapes
    program: AxonnProgram
    context: ContextParallelism
    everything: Array
    saved: Array
    n_layers: int
    last: bool

    def largest_moment(self) -> dict[str, Array]:
        """Return the terms of the moment at which gathered weights and working set take most."""
        moments = [*self._block_moments(), *(self._head_moments() if self.last else ())]
        one_each = np.ones(len(self.shapes.table))
        gathered = np.stack([moment.gathered * one_each for moment in moments])
        working = np.stack([moment.working * one_each for moment in moments])
        largest = (gathered + working).argmax(axis=0), np.arange(len(self.shapes.table))
        return {"gathered_weights": gathered[largest], "working_set": working[largest]}

    def _head_moments(self) -> list[_Moment]:
        """Return the moments of the loss and of the head's backward pass.

        The loss holds the logits, their copy in fp32 and the softmax, and the head's input has been
        saved. Then there are the gradients of the logits and of that input.
        """
        shapes = self.shapes
        head = self._vocabulary_bytes
        gradient = head * shapes.job.trains_head
        first = "qkv" if shapes.recompute == "full" else "down"
        element = shapes.element_bytes
        copy_bytes = FP32_BYTES if element < FP32_BYTES else 0.0
        logit_bytes = value_or(shapes.memory.logit_bytes, element + copy_bytes + FP32_BYTES)
        of_loss = shapes.logits * logit_bytes + shapes.residual_bytes
        of_head = shapes.logits * element + 2.0 * shapes.residual_bytes
        return [
            _Moment(self._held([head], []), of_loss),
            _Moment(self._held([head, shapes.linears[first].weight_bytes], [gradient]), of_head),
        ]

    def _block_moments(self) -> list[_Moment]:
        """Return the moments of the backward pass of the block that comes first in it.

        They are the second MLP layer, with its input and the gradient of that; a gated activation,
        with seven tensors of the MLP's size; unfused attention, with the gradients of its scores in
        fp32; and attention over split sequences, with its buffers.
        """
        shapes = self.shapes
        qkv, proj, up, down = (
            shapes.linears[linear.name].weight_bytes for linear in shapes.model.block_linears
        )
        before = self._vocabulary_bytes if self.last and shapes.job.trains_head else qkv
        mlp = shapes.mlp_bytes
        is_kept = shapes.recompute != "selective"
        formed = self.everything - self.saved if is_kept else mlp + shapes.saved_score_bytes
        held = self._held
        moments = [_Moment(held([down, up], [before, down]), formed + mlp)]
        if shapes.model.gated_mlp:
            moments.append(_Moment(held([up], [before, down]), formed + 6.0 * mlp))
        if shapes.job.attention == "unfused":
            n_scores = 7.0 if shapes.element_bytes < FP32_BYTES else 3.0
            scores = n_scores * shapes.score_bytes - mlp - shapes.linears["up"].output_bytes
            moments.append(_Moment(held([qkv], [up, proj]), formed + scores))
        buffers = self.context.working_bytes
        of_attention = np.maximum(formed - mlp - shapes.linears["up"].output_bytes, 0.0)
        in_attention = held([qkv], [up, proj]), of_attention + buffers
        moments.append(_Moment(*(np.where(buffers > 0.0, nbytes, 0.0) for nbytes in in_attention)))
        return moments

    @property
    def _vocabulary_bytes(self) -> Array:
        """The bytes of the head that a rank gathers: none where Z does not split it."""
        nbytes = self.shapes.embedding_bytes
        return nbytes if self.program.splits_over_z("head") else np.zeros_like(nbytes)

    def _held(self, weights: Sequence[Array], gradients: Sequence[Array]) -> Array:
        """Return the bytes of a weight in use, of the one gathered ahead, and of sent gradients.

        They are held only where Z splits the weights. Without OAG nothing is gathered ahead, and
        without ORS each gradient has gone before the next one is formed. Frozen weights have no
        gradients.
        """
        shapes, program = self.shapes, self.program
        overlap = shapes.job.overlap
        blocks = [shapes.linears[linear.name].weight_bytes for linear in shapes.model.block_linears]
        if shapes.job.keep_gathered_weights:
            gathered = self.n_layers * sum(blocks) + 2.0 * self._vocabulary_bytes
        else:
            gathered = sum(weights if overlap.oag else weights[:1], start=np.zeros(1))
            if program.reuses_recomputed_weights and shapes.recompute == "full":
                gathered = np.maximum(gathered, sum(blocks) + weights[0])
            gathered = gathered * gathered_element_ratio(shapes, program)
        if not shapes.job.trains_weights:
            gradients = ()
        under_way = sum(gradients if overlap.ors else gradients[-1:], start=np.zeros(1))
        return np.where(shapes.table.size("z") > 1, gathered + under_way, 0.0)


def gradients_awaiting_data(shapes: Shapes, program: AxonnProgram) -> Array:
    """Return the most bytes of gradients that are scattered over Z and not yet over data.

    These are two that follow one another in the backward pass (`GRADIENTS_IN_FLIGHT`).
    """
    job = shapes.job
    of_blocks = (*BACKWARD_ORDER, *BACKWARD_ORDER)
    order = [*["head"] * job.trains_head, *of_blocks, *["embedding"] * job.trains_embedding]
    nbytes = [weight_bytes(shapes, layer) for layer in order if program.splits_over_z(layer)]
    largest = np.max([before + after for before, after in pairwise(nbytes)], axis=0)
    return np.asarray(largest / shapes.table.size("z"))


def weight_bytes(shapes: Shapes, layer: str) -> Array:
    """Return the bytes of a layer's gathered weight in the job's type."""
    if layer == "embedding":
        return shapes.embedding_bytes
    return shapes.linears[layer].weight_bytes


def gathered_element_ratio(shapes: Shapes, program: AxonnProgram) -> float:
    """Return the bytes of an element of a gathered weight over those of the job's type."""
    return (program.gathered_element_bytes or shapes.element_bytes) / shapes.element_bytes
