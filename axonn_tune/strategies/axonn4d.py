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
optimizer states may be sharded over data (ZeRO-1), with them the gradients (ZeRO-2; Rajbhandari et
al., arXiv 1910.02054). Sequences may be split over ranks that hold the same weights; `context` has
what attention then needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from axonn_tune.spec import names
from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.engine import BUCKETS, IDEAL, WHOLE, AxonnProgram, Engine, value_or
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import AXES, AXONN_AXES, PIPELINE, Axes
from axonn_tune.spec.model import Model
from axonn_tune.spec.names import BACKWARD, FORWARD
from axonn_tune.spec.plan import GRADIENTS_IN_FLIGHT, Array, Size, StepPlan
from axonn_tune.spec.schedule import ONE_F_ONE_B
from axonn_tune.strategies.adapters import adapter_elements
from axonn_tune.strategies.communication import Communication, Weight
from axonn_tune.strategies.context import (
    ContextParallelism,
    WholeSequences,
    broken_context_rules,
    context_axes,
    context_parallelism,
)
from axonn_tune.strategies.optimizer import (
    clip_and_update,
    host_copies,
    sharded_text,
    state_bytes,
)
from axonn_tune.strategies.pipeline import (
    admits_virtual,
    broken_gradient_rules,
    broken_pipeline_rules,
    chunk_layers,
    stage_memory,
    step_plan,
)
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.shapes import FP32_BYTES, Shapes, stage_parameters
from axonn_tune.strategies.transformer import Transformer

# Gradients are accumulated and reduced over data in fp32 (AxoNN's own model takes 4 bytes too).
GRADIENT_BYTES = FP32_BYTES
# Bytes of gradients that one data-parallel all-reduce carries: torch DDP's bucket_cap_mb default.
BUCKET_BYTES = 25.0 * 2**20
# Order in which the backward pass of a block forms the gradients of its weights.
_BACKWARD_ORDER = ("down", "up", "proj", "qkv")


@dataclass(frozen=True)
class Axonn4D:
    """The strategy with its options.

    Attributes
    ----------
    pipelined
        Whether there is an axis of pipeline stages.
    sharded_optimizer
        Whether optimizer states are sharded over data.
    sharded_gradients
        Whether the sums of gradients are sharded over data, too: every micro-step scatters its
        gradients over Z and then over data. Optimizer states are sharded then.
    context_kind
        Kind of context parallelism, one of `CONTEXT_KINDS`; empty where sequences are whole.
    engine
        Engine that carries it out.
    """

    pipelined: bool = False
    sharded_optimizer: bool = False
    sharded_gradients: bool = False
    context_kind: str = ""
    engine: Engine = IDEAL
    n_virtual: Sequence[int] = (1,)
    schedule: str = ONE_F_ONE_B
    recomputed_modules: Sequence[str] = ()
    offload_modules: Sequence[str] = ()
    caveat: str = ""

    @property
    def name(self) -> str:
        """The name of the strategy for users and in results."""
        return "axonn-pipeline" if self.pipelined else "axonn"

    @property
    def sharded_by_choice(self) -> str:
        """What replicas share: nothing, optimizer states, or gradients, too."""
        return sharded_text(self.sharded_optimizer, self.sharded_gradients)

    @property
    def compute_key(self) -> tuple[str, ...]:
        """The columns on which the sizes of a micro-step's kernels depend."""
        return ("x", "y", *self.context_axes, "micro_batch")

    @property
    def axes(self) -> Axes:
        """The four axes of the grid, with those of the pipeline and of sequences if there are any.

        AxoNN numbers its ranks so that stages lie between the ranks of a tensor group and the
        replicas.
        """
        stages = (PIPELINE,) if self.pipelined else ()
        inner = ("x", "y", "z", *stages, *self.context_axes)
        return Axes((*inner, "data"), AXONN_AXES.batch, (*inner, self.replicas))

    @property
    def context_axes(self) -> tuple[str, ...]:
        """The axes whose ranks share a sequence; none where sequences are whole."""
        return context_axes(self.context_kind) if self.context_kind else ()

    @property
    def replicas(self) -> str:
        """The product of axes whose ranks hold the same weights."""
        return "*".join((*self.context_axes, "data"))

    def rejections(self, model: Model, job: Job, placements: Placements) -> dict[str, np.ndarray]:
        """Return, for each divisibility rule of the algorithm, the placements that break it.

        Returns
        -------
        dict of str to bool arrays, shape (P,)
            The placements by rule; the first rule that a placement breaks names the reason.
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
        if self.sharded_gradients:
            broken |= broken_gradient_rules(placements)
        if self.context_kind:
            broken |= broken_context_rules(self.context_kind, model, job, placements, "y")
        return broken | broken_pipeline_rules(model, placements)

    def admits(self, model: Model, job: Job, table: CandidateTable) -> np.ndarray:
        """Return which candidates can be cut into their virtual stages, shape (C,)."""
        return admits_virtual(model, job, table)

    def plan(self, model: Model, job: Job, table: CandidateTable) -> StepPlan:
        """Return the operations of one rank in one training step, for all candidates."""
        shapes = self.shapes(model, job, table)
        usual = Transformer(shapes, self.communication(shapes, sync=False))
        if not self.overlaps_reduction(job):
            return step_plan(usual)
        return step_plan(usual, Transformer(shapes, self.communication(shapes, sync=True)))

    def memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Return the peak bytes of one rank by term, each of shape (C,).

        The peak is in the backward pass, where everything saved is still held (all layers'
        checkpoints, or all activations), one block's activations and gradients are in work,
        and two weights are gathered. The logits live only between forward and backward, so
        the larger of logits and one block's working set counts.
        """
        shapes = self.shapes(model, job, table)
        memory_of = partial(self._stage_memory, shapes)
        return stage_memory(shapes, memory_of, self.engine.host_terms(job))

    def shapes(self, model: Model, job: Job, table: CandidateTable) -> Shapes:
        """Return the sizes: X splits input widths, Y output widths, and Z and data the tokens."""
        return Shapes(
            model,
            job,
            table,
            tokens=table.sequences_at_once * job.seq_len / self.n_sharing(table),
            x=table.size("x"),
            y=table.size("y"),
            x_axis="x",
            y_axis="y",
            recomputes_inputs=True,
            memory=self.engine.memory,
        )

    def n_sharing(self, table: CandidateTable) -> Array | float:
        """Return the number of ranks that share a sequence."""
        return table.size("*".join(self.context_axes)) if self.context_axes else 1.0

    def context(self, shapes: Shapes) -> ContextParallelism:
        """Return how ranks share sequences; unfused attention needs whole ones."""
        if not self.context_kind or shapes.job.attention == "unfused":
            return WholeSequences(shapes)
        return context_parallelism(self.context_kind, shapes)

    def communication(self, shapes: Shapes, sync: bool) -> AxonnCommunication:
        """Return the communication of a usual micro-step, or of the one that reduces gradients."""
        return AxonnCommunication(shapes, sync, self)

    def overlaps_reduction(self, job: Job) -> bool:
        """Return whether gradients are reduced over data during the last backward pass of a step.

        Only a program that reduces them in buckets can, and none does in a pipeline. Where
        gradients are sharded, every backward pass has reduced them; those of adapters are few.
        """
        in_buckets = self.engine.axonn.reduction == BUCKETS
        is_able = in_buckets and not (self.pipelined or self.sharded_gradients)
        return job.overlap.grad_reduce and is_able and job.trains_weights

    def shards_gradients(self, job: Job) -> bool:
        """Return whether every micro-step scatters gradients over data.

        Those of adapters are few: replicas sum them once in a step, as without sharding.
        """
        return self.sharded_gradients and job.trains_weights

    def adds_gradients(self, job: Job, table: CandidateTable) -> np.ndarray:
        """Return whether gradients of micro-steps are added to sums, shape (C,).

        The bundled runtime forms those of a single micro-step in fp32 where their sums belong.
        """
        is_fp32 = job.element_bytes == GRADIENT_BYTES
        forms_sums = (
            is_fp32
            and self.engine.axonn.reduction == BUCKETS
            and not (self.pipelined or self.sharded_gradients)
        )
        return (table.n_microsteps(job.global_batch) > 1) | (not forms_sums)

    def _stage_memory(
        self, shapes: Shapes, layers: Sequence[int], first: bool, last: bool, held: Array
    ) -> dict[str, Array]:
        """Return the bytes by term of one stage, which holds `held` layers' activations at once.

        A block saves the inputs of each product and what the kernels between them need: the
        block's input and the residual after attention (norms), both norms' outputs, q, k, v,
        the attention's output, the MLP before and after its activation. Unfused attention
        also keeps the softmax of its scores. Selective recomputation forms the norms' outputs,
        the activation and the softmax again.
        """
        job = shapes.job
        n_layers = len(layers)
        chunk = -(-n_layers // shapes.n_virtual)
        sharded, replicated = stored_parameters(shapes.model, shapes.table, n_layers, first, last)
        frozen = (sharded + replicated) * (not job.trains_weights)
        sharded, replicated = trained_parameters(shapes, n_layers, first, last)
        trained = sharded + replicated
        n_replicas = shapes.table.size(self.replicas)
        owned = trained / n_replicas if self.sharded_optimizer else trained
        summed, under_way = trained, np.zeros(len(shapes.table))
        if self.shards_gradients(job):
            summed = sharded / n_replicas + replicated
            under_way = np.where(n_replicas > 1, _gradients_awaiting_data(shapes), 0.0)
        norm_bytes = shapes.norm_input_bytes + shapes.norm_output_bytes
        context = self.context(shapes)
        inner_bytes = (
            shapes.inner_bytes
            + shapes.grouped_query_bytes
            + shapes.adapter_bytes
            + context.saved_bytes
        )
        everything = norm_bytes + inner_bytes + shapes.saved_score_bytes
        formed_again = shapes.saved_of_input("down", shapes.mlp_bytes)
        saved = {
            "none": everything,
            "selective": shapes.norm_input_bytes + inner_bytes - formed_again,
            "full": shapes.residual_bytes,
        }[shapes.recompute]
        return {
            "weights": (frozen + trained) * job.element_bytes,
            # The fp32 sums, and what the micro-step's reduce-scatters have brought.
            "gradients": summed
            * (GRADIENT_BYTES + job.element_bytes * self.adds_gradients(job, shapes.table))
            + under_way,
            "optimizer_states": owned * state_bytes(job),
            **host_copies(job, self.engine.offload_in(job), owned),
            "activations": held * shapes.saved_by_layers(saved, chunk) + shapes.residual_bytes,
            **_largest_moment(
                shapes, self.engine.axonn, context, everything, saved, n_layers, last
            ),
        }


AXONN = Axonn4D()


def stored_parameters(
    model: Model,
    table: CandidateTable,
    n_layers: int | None = None,
    first: bool = True,
    last: bool = True,
) -> tuple[Array, Array]:
    """Return how many parameters of matrices, and of norms, biases and positions, a rank stores.

    Parameters
    ----------
    n_layers : int, optional
        Number of layers of the rank's stage of a pipeline; by default all layers of the model.
    first, last : bool
        Whether the stage has the embedding, and whether it has the head.

    Returns
    -------
    sharded, replicated : array, shape (C,)
        Matrices are split over X, Y and Z; vectors over X or Y only.
    """
    n_layers = model.n_layers if n_layers is None else n_layers
    matrices, over_x, over_y = stage_parameters(model, range(n_layers), first, last)
    x = table.size("x")
    y = table.size("y")
    return matrices / (x * y * table.size("z")), over_x / x + over_y / y


def trained_parameters(
    shapes: Shapes, n_layers: int, first: bool, last: bool
) -> tuple[Array, Array]:
    """Return how many parameters a rank of a stage trains, as `stored_parameters` does.

    Beside frozen weights these are adapters, which Z does not split.
    """
    if shapes.job.trains_weights:
        return stored_parameters(shapes.model, shapes.table, n_layers, first, last)
    return np.zeros(len(shapes.table)), adapter_elements(shapes, range(n_layers))


class _Moment(NamedTuple):
    """What a rank holds at one point of its backward pass, in addition to what blocks have saved.

    gathered
        Bytes of gathered weights and of weight gradients that await their scatter.
    working
        Bytes of what is in work.
    """

    gathered: Array
    working: Array


def _largest_moment(
    shapes: Shapes,
    program: AxonnProgram,
    context: ContextParallelism,
    everything: Array,
    saved: Array,
    n_layers: int,
    last: bool,
) -> dict[str, Array]:
    """Return the terms of the moment in which gathered weights and what is in work take most."""
    moments = _block_moments(shapes, program, context, everything, saved, n_layers, last)
    if last:
        moments += _head_moments(shapes, program, n_layers)
    one_each = np.ones(len(shapes.table))
    gathered = np.stack([moment.gathered * one_each for moment in moments])
    working = np.stack([moment.working * one_each for moment in moments])
    largest = (gathered + working).argmax(axis=0), np.arange(len(shapes.table))
    return {"gathered_weights": gathered[largest], "working_set": working[largest]}


def _head_moments(shapes: Shapes, program: AxonnProgram, n_layers: int) -> list[_Moment]:
    """Return the moments of the loss and of the head's backward pass.

    The loss holds the logits, their copy in fp32 and the softmax, and the head's input has been
    saved. Then there are the gradients of the logits and of that input.
    """
    head = shapes.embedding_bytes
    first = "qkv" if shapes.recompute == "full" else "down"
    element = shapes.element_bytes
    copy_bytes = FP32_BYTES if element < FP32_BYTES else 0.0
    logit_bytes = value_or(shapes.memory.logit_bytes, element + copy_bytes + FP32_BYTES)
    of_loss = shapes.logits * logit_bytes + shapes.residual_bytes
    of_head = shapes.logits * element + 2.0 * shapes.residual_bytes
    return [
        _Moment(_held(shapes, program, n_layers, [head], []), of_loss),
        _Moment(
            _held(shapes, program, n_layers, [head, shapes.linears[first].weight_bytes], [head]),
            of_head,
        ),
    ]


def _block_moments(
    shapes: Shapes,
    program: AxonnProgram,
    context: ContextParallelism,
    everything: Array,
    saved: Array,
    n_layers: int,
    last: bool,
) -> list[_Moment]:
    """Return the moments of the backward pass of the block that comes first in it.

    They are the second MLP layer, whose input and its gradient are there; the activation, of which
    a gate makes seven tensors of the MLP's size; unfused attention with the gradients of its
    scores in fp32; and attention of split sequences with its buffers.
    """
    qkv, proj, up, down = (
        shapes.linears[linear.name].weight_bytes for linear in shapes.model.block_linears
    )
    before = shapes.embedding_bytes if last else qkv
    mlp = shapes.mlp_bytes
    is_kept = shapes.recompute != "selective"
    formed = everything - saved if is_kept else mlp + shapes.saved_score_bytes
    held = partial(_held, shapes, program, n_layers)
    moments = [_Moment(held([down, up], [before, down]), formed + mlp)]
    if shapes.model.gated_mlp:
        moments.append(_Moment(held([up], [before, down]), formed + 6.0 * mlp))
    if shapes.job.attention == "unfused":
        n_scores = 7.0 if shapes.element_bytes < FP32_BYTES else 3.0
        scores = n_scores * shapes.score_bytes - mlp - shapes.linears["up"].output_bytes
        moments.append(_Moment(held([qkv], [up, proj]), formed + scores))
    buffers = context.working_bytes
    of_attention = np.maximum(formed - mlp - shapes.linears["up"].output_bytes, 0.0)
    in_attention = held([qkv], [up, proj]), of_attention + buffers
    moments.append(_Moment(*(np.where(buffers > 0.0, nbytes, 0.0) for nbytes in in_attention)))
    return moments


def _held(
    shapes: Shapes,
    program: AxonnProgram,
    n_layers: int,
    weights: Sequence[Array],
    gradients: Sequence[Array],
) -> Array:
    """Return the bytes of a weight in use and the one gathered ahead, and of gradients under way.

    Both are held only where Z splits the weights. Without their overlaps, nothing is gathered
    ahead and each gradient has gone before the next one is formed. Frozen weights have none.
    """
    overlap = shapes.job.overlap
    blocks = [shapes.linears[linear.name].weight_bytes for linear in shapes.model.block_linears]
    if shapes.job.keep_gathered_weights:
        gathered = n_layers * sum(blocks) + 2.0 * shapes.embedding_bytes
    else:
        gathered = sum(weights if overlap.oag else weights[:1], start=np.zeros(1))
        if program.reuses_recomputed_weights and shapes.recompute == "full":
            gathered = np.maximum(gathered, sum(blocks) + weights[0])
        gathered = gathered * _gathered_element_ratio(shapes, program)
    if not shapes.job.trains_weights:
        gradients = ()
    under_way = sum(gradients if overlap.ors else gradients[-1:], start=np.zeros(1))
    return np.where(shapes.table.size("z") > 1, gathered + under_way, 0.0)


def _gradients_awaiting_data(shapes: Shapes) -> Array:
    """Return the bytes of gradients that Z has scattered and data has not, at most.

    These are two that follow one another in the backward pass (`GRADIENTS_IN_FLIGHT`).
    """
    order = ("head", *_BACKWARD_ORDER, *_BACKWARD_ORDER, "embedding")
    nbytes = [_weight_bytes(shapes, layer) for layer in order]
    largest = np.max([before + after for before, after in pairwise(nbytes)], axis=0)
    return np.asarray(largest / shapes.table.size("z"))


def _weight_bytes(shapes: Shapes, layer: str) -> Array:
    """Return the bytes of a layer's gathered weight in the job's type."""
    if layer == "embedding":
        return shapes.embedding_bytes
    return shapes.linears[layer].weight_bytes


def _gathered_element_ratio(shapes: Shapes, program: AxonnProgram) -> float:
    """Return the bytes of an element of a gathered weight over those of the job's type."""
    return (program.gathered_element_bytes or shapes.element_bytes) / shapes.element_bytes


def gradients_awaited_by(n_in_flight: int) -> dict[str, tuple[str, ...]]:
    """Return, for each layer, the layers whose gradients are scattered before its own is formed.

    At most `n_in_flight` weight gradients wait for their reduce-scatter, so that the gradient that
    was formed `n_in_flight` gradients ago must have gone. A layer can have two such predecessors:
    one in the first block of the backward pass, and one in all other blocks.
    """
    order = ("head", *(_BACKWARD_ORDER * (n_in_flight + 1)), "embedding")
    awaited: dict[str, tuple[str, ...]] = {}
    for earlier, layer in zip(order, order[n_in_flight:], strict=False):
        known = awaited.get(layer, ())
        if earlier not in known:
            awaited[layer] = (earlier, *known)
    return awaited


_GRADIENTS_AWAITED_BY = gradients_awaited_by(GRADIENTS_IN_FLIGHT)


@dataclass(frozen=True, eq=False)
class AxonnCommunication(Communication):
    """The communication of AxoNN: all-gathers and reduce-scatters over Z.

    Weights come by all-gather, and their gradients go by reduce-scatter.
    """

    options: Axonn4D

    @property
    def _z(self) -> Array:
        """The number of ranks along Z."""
        return self.shapes.table.size("z")

    # Weights -----------------------------------------------------------------------------

    @property
    def backward_overlap(self) -> Overlap:
        """The overlaps of the job, unless the program overlaps its forward pass alone."""
        if self.options.engine.axonn.overlaps_backward:
            return self.shapes.job.overlap
        return Overlap(False, False, False)

    @property
    def keeps_weights(self) -> bool:
        """Whether weights stay with the rank: they are gathered whenever they are used."""
        return False

    def prefetch_weight(self, host: HostProgram, weight: Weight) -> None:
        """Start to gather the weight, unless it is gathered when it is taken."""
        if self._is_gathered(weight) and not self._is_late(weight):
            self._gather(host, weight)

    def take_weight(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """Wait until the weight is gathered; with OAG, start to gather the one that follows."""
        if self._is_gathered(weight):
            if self._is_late(weight):
                self._gather(host, weight)
            host.wait(names.all_gather(weight.name))
            self._convert(host, weight)
        if following is not None:
            self.prefetch_weight(host, following)

    def _is_gathered(self, weight: Weight) -> bool:
        """Return whether this use of a weight gathers it, and not an earlier one."""
        if weight.chain == FORWARD:
            return True
        program = self.options.engine.axonn
        is_at_hand = (
            program.reuses_recomputed_weights
            and self.shapes.recompute == "full"
            and weight.chain == BACKWARD
            and weight.layer != "head"
        )
        return not (is_at_hand or self.shapes.job.keep_gathered_weights)

    def _is_late(self, weight: Weight) -> bool:
        """Return whether a weight is gathered when it is used, and not ahead: without OAG, all."""
        forward = weight.chain == FORWARD
        overlap = self.shapes.job.overlap if forward else self.backward_overlap
        return not overlap.oag or self.options.engine.axonn.gathers_late(weight.name)

    def _gather(self, host: HostProgram, weight: Weight) -> None:
        """Start to gather a weight."""
        ratio = _gathered_element_ratio(self.shapes, self.options.engine.axonn)
        nbytes = ratio * _weight_bytes(self.shapes, weight.layer)
        host.issue(names.all_gather(weight.name), "all_gather", nbytes, "z")

    def _convert(self, host: HostProgram, weight: Weight) -> None:
        """Convert a gathered weight to the job's type, if it was gathered in another one."""
        ratio = _gathered_element_ratio(self.shapes, self.options.engine.axonn)
        if ratio != 1.0:
            nbytes = (1.0 + ratio) * _weight_bytes(self.shapes, weight.layer)
            host.memory_bound(names.convert(weight.name), nbytes, "copy")

    # Attention ---------------------------------------------------------------------------

    def attend(self, host: HostProgram, chain: str, window: int) -> None:
        """Run attention, over sequences that ranks share if any do."""
        self.options.context(self.shapes).attend(host, chain, window)

    # Gradients ---------------------------------------------------------------------------

    def before_weight_gradient(self, host: HostProgram, layer: str) -> None:
        """Wait, with ORS, until at most `GRADIENTS_IN_FLIGHT` gradients will be under way."""
        if self.backward_overlap.ors and not self.options.engine.axonn.awaits_scatters_at_end:
            for earlier in _GRADIENTS_AWAITED_BY.get(layer, ()):
                host.wait(self._last_scatter(earlier))

    def send_gradient(self, host: HostProgram, layer: str) -> None:
        """Start to scatter the gradient over Z, and over data; without ORS, wait for it."""
        nbytes = _weight_bytes(self.shapes, layer)
        scattered = _scatter(layer)
        host.issue(scattered, "reduce_scatter", nbytes, "z")
        if self._shards_gradients:
            name, replicas = self._last_scatter(layer), self.options.replicas
            host.issue(name, "reduce_scatter", nbytes / self._z, replicas, after=(scattered,))
        if layer != "embedding" and not self.backward_overlap.ors:
            host.wait(self._last_scatter(layer))

    def _last_scatter(self, layer: str) -> str:
        """Return the name of the message that brings a layer's gradient to where it is summed."""
        name = _scatter(layer)
        return names.over(name, "data") if self._shards_gradients else name

    @property
    def embedding_starts_from_zero(self) -> Array | float:
        """1 where the embedding's gradient begins from zero, 0 where it adds to the head's.

        The gradient of a shared weight can add to the head's where nothing has scattered that.
        """
        return self._is_scattered if self.shapes.model.tied_embeddings else 1.0

    @property
    def _is_scattered(self) -> Array:
        """1 where the ranks of some group scatter each gradient that is formed, else 0."""
        return (self._z * self._gradient_shards > 1).astype(np.float64)

    @property
    def _shards_gradients(self) -> bool:
        """Whether the micro-step scatters gradients over data, too."""
        return self.options.shards_gradients(self.shapes.job)

    @property
    def _gradient_shards(self) -> Array:
        """The number of replicas that share the sums of a matrix's gradients."""
        if not self._shards_gradients:
            return np.ones(len(self.shapes.table))
        return self.shapes.table.size(self.options.replicas)

    # Gradients that are reduced over data during the backward pass ---------------------------

    @property
    def reduces_later(self) -> bool:
        """Whether this micro-step reduces gradients of matrices, each block's one block later.

        By then all of them have been scattered over Z, so that nothing waits.
        """
        return self.sync

    def end_block(self, host: HostProgram, is_first: bool) -> None:
        """Add up and start to reduce the gradients of the matrices of the block before this one.

        Before the first block there is the head, unless it shares its weight with the embedding.
        """
        if not self.sync:
            return
        unit = "head" if is_first else "block"
        elements = self._head_matrix if is_first else self._block_matrices
        if elements is None:
            return
        owner = names.gradient(unit)
        self._accumulate(host, names.accumulate(owner), elements)
        nbytes = elements * GRADIENT_BYTES
        n_calls = np.ceil(nbytes / BUCKET_BYTES)
        name = names.collective(owner, self._reduction_kind)
        host.issue(name, self._reduction_kind, nbytes, self.options.replicas, n_calls)

    @property
    def _block_matrices(self) -> Array:
        """The number of elements that a rank stores of the matrices of a block."""
        shapes = self.shapes
        return stored_parameters(shapes.model, shapes.table, 1, False, False)[0]

    @property
    def _head_matrix(self) -> Array | None:
        """The number of elements that a rank stores of the head; None if it shares its weight."""
        shapes = self.shapes
        if shapes.model.tied_embeddings:
            return None
        return shapes.model.head.parameters / (shapes.x * shapes.y * self._z)

    @property
    def _reduced_in_backward(self) -> Array | float:
        """The number of gradients that the last backward pass reduces; all others come later."""
        if not self.options.overlaps_reduction(self.shapes.job):
            return 0.0
        of_blocks = (self.shapes.model.n_layers - 1) * self._block_matrices
        head = self._head_matrix
        return of_blocks if head is None else of_blocks + head

    @property
    def _reduction_kind(self) -> str:
        """The kind of collective that sums gradients over data."""
        return "reduce_scatter" if self.options.sharded_optimizer else "all_reduce"

    def _accumulate(self, host: HostProgram, name: str, n_elements: Array) -> None:
        """Add gradients of a micro-step to their fp32 sums, unless they were formed there."""
        element_bytes = self.shapes.element_bytes + 2.0 * GRADIENT_BYTES
        host.memory_bound(name, self._adds_gradients * n_elements * element_bytes, "add")

    @property
    def _adds_gradients(self) -> np.ndarray:
        """Whether gradients of micro-steps are added to sums, shape (C,)."""
        return self.options.adds_gradients(self.shapes.job, self.shapes.table)

    # Once per micro-step and once per step, on what the rank stores ------------------------

    def _largest_stage(self) -> tuple[Array, Array]:
        """Return `trained_parameters` of the first stage, which has most due to the embedding."""
        n_layers = sum(chunk_layers(self.shapes, 0))
        return trained_parameters(self.shapes, n_layers, True, self.shapes.table.n_stages == 1)

    def accumulate(self, host: HostProgram, last_layer: str) -> None:
        """Add the micro-step's gradients to the fp32 sums, once the last scatter has ended."""
        shapes = self.shapes
        sharded, replicated = self._largest_stage()
        n_shards = self._gradient_shards
        trains_weights = shapes.job.trains_weights
        if trains_weights:
            host.wait(self._last_scatter(last_layer))
        if trains_weights and shapes.model.tied_embeddings and shapes.table.n_stages == 1:
            shard_bytes = shapes.embedding_bytes / (self._z * n_shards)
            host.memory_bound(names.GRADIENT_TIED, self._is_scattered * 3.0 * shard_bytes, "add")
        rest = (sharded / n_shards + replicated) / shapes.n_virtual
        if self.sync:
            owner = names.gradient("rest")
            self._accumulate(host, names.accumulate(owner), rest - self._reduced_in_backward)
        else:
            self._accumulate(host, names.GRADIENT_ACCUMULATE, rest)

    def step_end(self, host: HostProgram) -> None:
        """Reduce the gradients over data, clip them and update the weights.

        Those that a backward pass has reduced are left out; where gradients are sharded, only those
        of vectors remain. With a sharded optimizer each replica receives its part of the gradients,
        and the updated weights are gathered.
        """
        shapes = self.shapes
        model = shapes.model
        table = shapes.table
        is_sharded = self.options.sharded_optimizer
        replicas = self.options.replicas
        sharded, replicated = self._largest_stage()
        stored = sharded + replicated
        if shapes.job.trains_weights and model.tied_embeddings and table.n_stages > 1:
            shard_bytes = model.head.parameters * GRADIENT_BYTES / (shapes.x * shapes.y * self._z)
            host.run(names.GRADIENT_EMBEDDING, "send_recv", shard_bytes, PIPELINE)
        remaining = stored - self._reduced_in_backward
        if self._shards_gradients:
            remaining = replicated
        gradient_bytes = remaining * GRADIENT_BYTES
        calls = self._reduction_calls(gradient_bytes)
        vector_bytes = replicated * GRADIENT_BYTES
        host.run(names.GRADIENT_VECTORS, "all_reduce", vector_bytes, "z", calls.norms)
        if calls.vectors:
            gradient_bytes = sharded * GRADIENT_BYTES
            name = names.GRADIENT_VECTORS_OVER_DATA
            host.run(name, "all_reduce", vector_bytes, replicas, calls.vectors)
        kind = self._reduction_kind
        name = names.GRADIENT_REDUCE_SCATTER if is_sharded else names.GRADIENT_ALL_REDUCE
        host.run(name, kind, gradient_bytes, replicas, calls.matrices)
        alike = (replicas, *self.options.context_axes)
        summed_over = [axis for axis in table.placements.axes.groups if axis not in alike]
        if is_sharded:
            summed_over.append(replicas)
        owned = stored / table.size(replicas) if is_sharded else stored
        updated = clip_and_update(
            host,
            shapes.job,
            owned=owned,
            cleared=np.where(self._adds_gradients, owned, replicated),
            gradient_bytes=GRADIENT_BYTES,
            norm_sums={names.norm_all_reduce(axis): axis for axis in summed_over},
            offload=self.options.engine.offload_in(shapes.job),
        )
        if is_sharded:
            nbytes = stored * shapes.element_bytes
            host.issue(names.WEIGHTS_ALL_GATHER, "all_gather", nbytes, replicas, after=updated)

    def _reduction_calls(self, gradient_bytes: Array) -> _ReductionCalls:
        """Return the number of calls that sum gradients, where all have these bytes."""
        model = self.shapes.model
        reduction = self.options.engine.axonn.reduction
        if reduction == BUCKETS:
            return _ReductionCalls(np.ceil(gradient_bytes / BUCKET_BYTES))
        if reduction == WHOLE:
            return _ReductionCalls(1.0)
        if not self.shapes.job.trains_weights:
            n_products = float(2 * model.n_layers * self.shapes.n_adapters)
            return _ReductionCalls(n_products, norms=n_products)
        n_matrices = model.n_layers * len(model.block_linears) + 2
        n_norms = model.n_norms * (2 if model.norm == "layer" else 1)
        n_biases = model.n_layers * sum(linear.bias for linear in model.block_linears)
        return _ReductionCalls(float(n_matrices), float(n_norms + n_biases), float(n_norms))


class _ReductionCalls(NamedTuple):
    """Numbers of calls that sum gradients.

    matrices
        Calls over data for the matrices.
    vectors
        Calls over data for norms and biases; 0 where they go with the matrices.
    norms
        Calls over Z for the norms, or for adapters.
    """

    matrices: Size
    vectors: float = 0.0
    norms: float = 1.0


def _scatter(layer: str) -> str:
    """Return the name of the reduce-scatter of a layer's gradient."""
    return names.reduce_scatter(names.of_layer(BACKWARD, layer))
