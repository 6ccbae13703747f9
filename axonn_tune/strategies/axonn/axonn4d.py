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

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.engine import IDEAL, Engine
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import AXES, AXONN_AXES, PIPELINE, Axes
from axonn_tune.spec.model import VOCABULARY_MULTIPLE, Model
from axonn_tune.spec.plan import Array, StepPlan
from axonn_tune.spec.programs import BUCKETS
from axonn_tune.spec.schedule import ONE_F_ONE_B
from axonn_tune.strategies.adapters import adapter_elements
from axonn_tune.strategies.axonn.communication import AxonnCommunication
from axonn_tune.strategies.axonn.memory import (
    GRADIENT_BYTES,
    BackwardPass,
    gradients_awaiting_data,
    held_parameters,
    saved_by_block,
    trained_parameters,
)
from axonn_tune.strategies.context import (
    ContextParallelism,
    WholeSequences,
    broken_context_rules,
    context_axes,
    context_parallelism,
)
from axonn_tune.strategies.optimizer import host_copies, sharded_text, states_of
from axonn_tune.strategies.pipeline import (
    admits_virtual,
    broken_frozen_rules,
    broken_gradient_rules,
    broken_pipeline_rules,
    memory_of_stages,
    neediest,
)
from axonn_tune.strategies.shapes import Shapes
from axonn_tune.strategies.step_plan import plan_key, step_plan
from axonn_tune.strategies.transformer import Transformer


def padded_vocabulary(model: Model, table: CandidateTable) -> Array:
    """Return the vocabulary as Megatron-AxoNN pads it for the tensor grid, shape (C,)."""
    multiple = VOCABULARY_MULTIPLE * table.size("x") * table.size("y") * table.size("z")
    return np.ceil(model.vocab_size / multiple) * multiple


@dataclass(frozen=True)
class Axonn4D:
    """The strategy with its options; `Strategy` describes the fields that are not listed here.

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
    recomputing_takes_time: bool = True
    schedule: str = ONE_F_ONE_B
    recomputed_modules: Sequence[str] = ()
    offload_modules: Sequence[str] = ()
    caveat: str = ""

    @property
    def name(self) -> str:
        """The name of the strategy for users and in results."""
        return "axonn-pipeline" if self.pipelined else "axonn"

    @property
    def sends_once(self) -> bool:
        """Whether a token is sent once: it is not, since a copy travels to each of its experts."""
        return False

    @property
    def sharded_by_choice(self) -> str:
        """What replicas shard, in words: nothing, optimizer states, or gradients, too."""
        return sharded_text(self.sharded_optimizer, self.sharded_gradients)

    @property
    def compute_key(self) -> tuple[str, ...]:
        """The columns on which the sizes of a micro-step's kernels depend."""
        vocabulary = ("z",) if self.engine.axonn.pads_vocabulary else ()
        return ("x", "y", *vocabulary, *self.context_axes, "micro_batch")

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
        head_is_padded = self.engine.axonn.pads_vocabulary
        linears = model.block_linears if head_is_padded else (*model.block_linears, model.head)
        broken = {
            "hidden size not divisible by G_x": model.hidden_size % x != 0,
            "attention heads not divisible by G_y": model.n_heads % y != 0,
            "KV heads not divisible by G_y": model.n_kv_heads % y != 0,
            "MLP size not divisible by G_y": model.ffn_hidden_size % y != 0,
            "vocabulary not divisible by G_y": (model.padded_vocab_size % y != 0)
            & (not head_is_padded),
            "weights not divisible over G_x*G_y*G_z": np.logical_or.reduce(
                [(linear.n_in * linear.n_out) % block != 0 for linear in linears]
            ),
            "global batch not divisible by G_z*G_data": job.global_batch % (z * data) != 0,
        }
        if self.sharded_gradients:
            broken |= broken_gradient_rules(placements)
        if self.context_kind:
            broken |= broken_context_rules(self.context_kind, model, job, placements, "y")
        broken |= broken_frozen_rules(job, placements)
        return broken | broken_pipeline_rules(model, placements)

    def admits(self, model: Model, job: Job, table: CandidateTable) -> np.ndarray:
        """Return which candidates can be cut into their virtual stages, shape (C,)."""
        return admits_virtual(model, job, table)

    def plan_key(self, model: Model, job: Job, table: CandidateTable) -> Hashable:
        """Return a key that is equal for tables whose candidates one plan can describe.

        What is recomputed changes nothing but the blocks' own backward passes, unless these find
        weights that recomputation has gathered, or there are stages or modules whose passes depend
        on it.
        """
        depends = (
            self.engine.axonn.reuses_recomputed_weights or table.is_pipelined or job.mtp_modules
        )
        return plan_key(self.shapes(model, job, table), joins_recomputations=not depends)

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
        checkpoints, or all activations), one block's activations and gradients are being formed,
        and two weights are gathered. The logits live only between forward and backward, so the
        larger of logits and one block's working set counts.
        """
        return neediest(self._memory_of_stages(model, job, table), self.engine.host_terms(job))

    def first_stage_memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Return the peak bytes of a rank in the first stage by term, each of shape (C,)."""
        return next(self._memory_of_stages(model, job, table))

    def _memory_of_stages(
        self, model: Model, job: Job, table: CandidateTable
    ) -> Iterator[dict[str, Array]]:
        """Yield the peak bytes by term of the stages that may need most, the first one leading."""
        shapes = self.shapes(model, job, table)
        return memory_of_stages(shapes, partial(self._stage_memory, shapes))

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
            leaves_out_last_product=self.engine.leaves_out_last_product(model, job),
            vocab_size=self._padded_vocabulary(model, table),
            memory=self.engine.memory,
        )

    def _padded_vocabulary(self, model: Model, table: CandidateTable) -> Array | None:
        """Return the vocabulary that the tensor ranks share evenly, if the program pads it so."""
        if not self.engine.axonn.pads_vocabulary:
            return None
        return padded_vocabulary(model, table)

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

    def overlap_of(self, job: Job) -> Overlap:
        """Return the job's overlaps; gradients are reduced early only if the engine does so."""
        return replace(job.overlap, grad_reduce=self.overlaps_reduction(job))

    def overlaps_reduction(self, job: Job) -> bool:
        """Return whether gradients are reduced over data during the last backward pass of a step.

        Only a program that reduces them in buckets can, and none does in a pipeline. Where
        gradients are sharded, every backward pass reduces them anyway. The gradients of adapters
        are few, and are reduced at the end of the step.
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

        The bundled runtime writes the fp32 gradients of a single micro-step directly into the sums.
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
        """Return the bytes by term of one stage, which holds `held` layers' activations at once."""
        job = shapes.job
        n_layers = len(layers)
        n_backward = len(shapes.backward_layers(layers))
        held = held * (n_backward / max(n_layers, 1))
        chunk = -(-n_backward // shapes.n_virtual)
        program = self.engine.axonn
        stored = sum(held_parameters(shapes, program, n_layers, first, last))
        adapters = adapter_elements(shapes, layers)
        sharded, replicated = trained_parameters(shapes, program, n_layers, first, last)
        trained = sharded + replicated
        n_replicas = shapes.table.size(self.replicas)
        owned = trained / n_replicas if self.sharded_optimizer else trained
        summed, under_way = trained, np.zeros(len(shapes.table))
        if self.shards_gradients(job):
            summed = sharded / n_replicas + replicated
            under_way = np.where(n_replicas > 1, gradients_awaiting_data(shapes, program), 0.0)
        context = self.context(shapes)
        everything, saved = saved_by_block(shapes, context)
        backward = BackwardPass(shapes, program, context, everything, saved, n_backward, last)
        return {
            "weights": (stored + adapters) * job.element_bytes,
            # The rank holds fp32 sums, and what the micro-step's reduce-scatters have brought.
            "gradients": summed
            * (GRADIENT_BYTES + job.element_bytes * self.adds_gradients(job, shapes.table))
            + under_way,
            "optimizer_states": owned * states_of(job).nbytes,
            **host_copies(job, self.engine.offload_in(job), owned),
            "activations": held * shapes.saved_by_layers(saved, chunk) + shapes.residual_bytes,
            **backward.largest_moment(),
        }


AXONN = Axonn4D()
