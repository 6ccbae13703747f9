"""Sharded data parallelism: ZeRO's stages, FSDP and hybrid sharding, ZeRO++, three levels.

Rajbhandari et al., arXiv 1910.02054 (ZeRO); Zhao et al., arXiv 2304.11277 (FSDP, hybrid
sharding); Wang et al., arXiv 2306.10209 (ZeRO++); Xu et al., arXiv 2501.04266 (three levels).

Every rank computes whole layers on its share of the batch. The members of the family differ in
how far they shard weights, gradients and optimizer states: over the groups of `Sharding`. Sharded
weights of a block are gathered while the block before it computes; its gradients are reduced as
soon as its backward pass is done.

An engine may also split each layer over a tensor group, with the residual stream split by tokens,
and cut the layers into the stages of a pipeline; then all of this happens to a rank's part of the
weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.engine import IDEAL, Engine
from axonn_tune.spec.job import Job, Overlap
from axonn_tune.spec.layout import CONTEXT, EXPERT, EXPERT_REPLICAS, PIPELINE, TENSOR, Axes
from axonn_tune.spec.model import Model
from axonn_tune.spec.offload import LAYER_INPUTS, LAYERS
from axonn_tune.spec.plan import Array, StepPlan
from axonn_tune.spec.programs import ALL_GATHER, RING, ULYSSES
from axonn_tune.spec.schedule import ONE_F_ONE_B
from axonn_tune.strategies.context import (
    ContextParallelism,
    UlyssesInTurn,
    broken_context_rules,
    context_parallelism,
)
from axonn_tune.strategies.pipeline import (
    admits_virtual,
    broken_frozen_rules,
    broken_pipeline_rules,
    layers_of_stage,
    memory_of_stages,
    neediest,
)
from axonn_tune.strategies.sequence_parallel import broken_tensor_rules
from axonn_tune.strategies.shapes import FP32_BYTES, Shapes
from axonn_tune.strategies.step_plan import plan_key, step_plan
from axonn_tune.strategies.transformer import Transformer
from axonn_tune.strategies.zero.communication import ZeroCommunication
from axonn_tune.strategies.zero.fsdp2 import Fsdp2Memory, Kept
from axonn_tune.strategies.zero.memory import ZeroMemory
from axonn_tune.strategies.zero.sharding import Sharding
from axonn_tune.strategies.zero.staged_communication import StagedCommunication
from axonn_tune.strategies.zero.torch_context import CompiledRing, FlexGather, TorchRing
from axonn_tune.strategies.zero.units import trained_share
from axonn_tune.strategies.zero.zero_units import ZeroUnits


@dataclass(frozen=True)
class Zero:
    """A strategy of the family; the functions of this module return its members.

    `Strategy` describes the fields that are not listed here.

    Attributes
    ----------
    name, axes
        Name of the strategy, and the axes along which it arranges ranks.
    sharding
        Groups over which states are sharded.
    quantised_weights
        Whether weights are gathered in INT8 (qwZ), except from a second copy.
    quantised_gradients
        Whether gradients travel in INT4 by all-to-all instead of by reduce-scatter (qgZ).
    is_released
        Whether an implementation is released.
    has_experts
        Whether the model has experts, so that layouts have an axis for them.
    context_kind
        Kind of context parallelism, one of `CONTEXT_KINDS`; empty where sequences are whole.
    overlaps_tensor
        Whether tokens travel within the tensor group while the products that read or form them run,
        in as many parts as the group has ranks (torch's asynchronous tensor parallelism).
    low_weights
        Whether weights of low products are cast before they are gathered.
    engine
        Engine that carries it out.
    """

    name: str
    axes: Axes
    sharding: Sharding
    quantised_weights: bool = False
    quantised_gradients: bool = False
    n_virtual: Sequence[int] = (1,)
    recomputing_takes_time: bool = False
    schedule: str = ONE_F_ONE_B
    recomputed_modules: Sequence[str] = ()
    offload_modules: Sequence[str] = ()
    is_released: bool = True
    has_experts: bool = False
    context_kind: str = ""
    overlaps_tensor: bool = False
    low_weights: bool = False
    engine: Engine = IDEAL

    @property
    def caveat(self) -> str:
        """A sentence on quantised messages and on a missing implementation, or an empty text."""
        quantised = [
            *(["INT8 weights"] if self.quantised_weights else []),
            *(["INT4 gradients"] if self.quantised_gradients else []),
        ]
        remarks = []
        if quantised:
            remarks.append(
                f"quantises messages ({', '.join(quantised)}): the loss may change, and not every "
                "GPU has the kernels"
            )
        if not self.is_released:
            remarks.append("has no released implementation that is known")
        return f"{self.name} {'; it '.join(remarks)}." if remarks else ""

    @property
    def sends_once(self) -> bool:
        """Whether a token travels once to each rank that holds any of its experts."""
        return self.engine.zero.sends_once

    @property
    def syncs_once(self) -> bool:
        """Whether weights are gathered, and gradients reduced, once in a step."""
        return self.has_experts and self.engine.zero.syncs_mixtures_once

    @property
    def keeps_blocks(self) -> bool:
        """Whether every block stays gathered until its backward pass."""
        return self.syncs_once or (self.has_experts and self.engine.zero.keeps_mixtures)

    @property
    def sharded_by_choice(self) -> str:
        """An empty text: replicas shard no more than the strategy says."""
        return ""

    @property
    def tensor_axis(self) -> str:
        """The axis over which layers are split; empty if there is none."""
        return TENSOR if TENSOR in self.axes.names else ""

    @property
    def context_axis(self) -> str:
        """The axis whose ranks share a sequence; empty if there is none."""
        return CONTEXT if self.context_kind else ""

    @property
    def compute_key(self) -> tuple[str, ...]:
        """The columns on which kernels depend: the micro-batch, and all axes.

        Kernels that pack messages work on shards, whose sizes depend on every axis.
        """
        return (*self.axes.sized, "micro_batch")

    def overlap_of(self, job: Job) -> Overlap:
        """Return whether gathers and reductions overlap with kernels: OAG and ORS."""
        program = self.engine.zero
        gathers = program.overlaps and program.overlaps_gathers
        return Overlap(False, job.overlap.ors and program.overlaps, job.overlap.oag and gathers)

    def rejections(self, model: Model, job: Job, placements: Placements) -> dict[str, np.ndarray]:
        """Return, for each rule of the algorithm, the placements that break it, shape (P,)."""
        ranks = placements.size("*".join(self.axes.batch))
        broken = {"global batch not divisible by the ranks": job.global_batch % ranks != 0}
        broken |= self._broken_stage_rules(model, job, placements)
        if job.offloads_optimizer and self.sharding.reduced_once:
            reason = "offload beside gradients that are reduced once, which is not predicted"
            broken[reason] = ranks > 0
        if self.sharding.replicas and not self.engine.zero.keeps_replicas:
            reason = f"replicas of all states, which {self.engine.title} does not keep"
            broken[reason] = placements.size(self.sharding.replicas) > 1
        if self.context_kind:
            broken |= broken_context_rules(
                self.context_kind,
                model,
                job,
                placements,
                self.tensor_axis,
                self.engine.zero.copies_kv_heads,
            )
        if not self.tensor_axis:
            return broken
        tensor = placements.size(self.tensor_axis)
        if job.adapters is not None:
            broken["rank of adapters not divisible by tensor"] = job.adapters.rank % tensor != 0
        if self.has_experts:
            broken["expert not divisible by tensor"] = placements.size(EXPERT) % tensor != 0
        return {
            **broken_tensor_rules(model, tensor),
            "sequence not divisible by tensor": job.seq_len % tensor != 0,
            **broken,
        }

    def _broken_stage_rules(
        self, model: Model, job: Job, placements: Placements
    ) -> dict[str, np.ndarray]:
        """Return, for each rule of a pipeline, the placements that break it, shape (P,)."""
        if PIPELINE not in self.axes.names:
            return {}
        has_stages = placements.size(PIPELINE) > 1
        broken = broken_frozen_rules(job, placements) | broken_pipeline_rules(model, placements)
        if job.offloads_optimizer:
            broken["offload in a pipeline, which is not predicted"] = has_stages
        if job.adapters is not None:
            broken["adapters in a pipeline, which are not predicted"] = has_stages
        return broken

    def admits(self, model: Model, job: Job, table: CandidateTable) -> np.ndarray:
        """Return which candidates can be cut into their virtual stages, shape (C,).

        Selective recomputation of every second product admits no models with experts or latent
        attention: which of their products an engine forms again is not known.
        """
        is_unknown = (
            bool(model.placed_parts)
            and self.engine.zero.recomputes_products
            and table.common_recompute == "selective"
        )
        return admits_virtual(model, job, table) & (not is_unknown)

    def plan_key(self, model: Model, job: Job, table: CandidateTable) -> Hashable:
        """Return a key that is equal for tables whose candidates one plan can describe."""
        return plan_key(self.shapes(model, job, table))

    def plan(self, model: Model, job: Job, table: CandidateTable) -> StepPlan:
        """Return the operations of one rank in one training step, for all candidates.

        One micro-step of a step differs if gradients are reduced, or summed over replicas, or a
        second copy of the weights is made, or weights are gathered that stay.
        """
        shapes = self.shapes(model, job, table)
        communication = self.communication(shapes, sync=False)
        usual = Transformer(shapes, communication)
        sharding = self.sharding
        differs = sharding.replicas or sharding.copy or sharding.reduced_once
        differs = differs or self.engine.zero.keeps_ends
        if not (differs or table.is_pipelined):
            return step_plan(usual)
        synchronising = Transformer(shapes, replace(communication, sync=True))
        return step_plan(usual, synchronising, aligns_gathers=False)

    def memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Return the peak bytes of one rank by term, each of shape (C,).

        The terms are the sharded states, the gathered weights, and activations of whole layers.
        """
        shapes = self.shapes(model, job, table)
        if table.is_pipelined:
            return neediest(self._memory_of_stages(shapes))
        sharding = self.sharding
        offload = self.engine.offload_in(job)
        units = self.units(shapes)
        if self.engine.zero.is_fsdp2:
            terms = self._fsdp2_memory(shapes, units).peak()
            if offload is not None:
                # When the step ends, the host holds all gradients, and the GPU holds none.
                owned = trained_share(units.all, table, sharding.gradients)
                terms["gradients"] = owned * FP32_BYTES
            return terms
        transposes = self.gathers_low(job) and job.transposes_operands
        sharing = self.shared_sequences(shapes)
        memory = ZeroMemory(
            shapes,
            units,
            sharding,
            self.engine,
            sharing,
            transposes,
            self.quantised_weights,
            self.quantised_gradients,
        )
        return memory.peak()

    def first_stage_memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Return the peak bytes of a rank in the first stage by term, each of shape (C,)."""
        if not table.is_pipelined:
            return self.memory(model, job, table)
        return next(self._memory_of_stages(self.shapes(model, job, table)))

    def _memory_of_stages(self, shapes: Shapes) -> Iterator[dict[str, Array]]:
        """Yield the peak bytes by term of the stages that may need most, the first one leading."""
        return memory_of_stages(shapes, partial(self._stage_memory, shapes))

    def _stage_memory(
        self, shapes: Shapes, layers: Sequence[int], first: bool, last: bool, held: Array
    ) -> dict[str, Array]:
        """Return the bytes by term of one stage, which holds `held` layers' activations at once."""
        units = self._units_of(shapes, layers, first, last)
        return self._fsdp2_memory(shapes, units).peak_of_stage(held, last)

    def _fsdp2_memory(self, shapes: Shapes, units: ZeroUnits) -> Fsdp2Memory:
        """Return the memory of a rank of FSDP2 that has these units."""
        sharding, element_bytes = self.sharding, self.kept_element_bytes(shapes.job)
        kept = Kept(sharding.weights, element_bytes, self.keeps_blocks, sharding.reduced_once)
        sharing = self.shared_sequences(shapes)
        return Fsdp2Memory(shapes, units, self.engine.zero, kept, sharing)

    def kept_element_bytes(self, job: Job) -> float:
        """Return the bytes of an element of the shards of gradients: torch's are in fp32."""
        is_whole = self.engine.zero.is_of_torch and not self.engine.low_states
        return FP32_BYTES if is_whole else job.element_bytes

    def gathers_low(self, job: Job) -> bool:
        """Return whether the weights of a job's low products are gathered in their format."""
        recipe = job.recipe
        if recipe is None:
            return False
        is_stored_low = self.engine.zero.stores_low and recipe.gathers_low
        return is_stored_low or (self.low_weights and job.trains_weights)

    def shared_sequences(self, shapes: Shapes) -> ContextParallelism:
        """Return how ranks share sequences, if they do, which depends on the engine."""
        program, model = self.engine.zero, shapes.model
        if self.context_kind == ULYSSES and not program.is_fsdp2:
            return UlyssesInTurn(shapes)
        if self.context_kind == RING and program.is_fsdp2:
            n_copies = model.n_heads / model.n_kv_heads if program.repeats_kv_heads else 1.0
            ring = TorchRing if program.runs_eagerly else CompiledRing
            return ring(shapes, key_copies=n_copies)
        if self.context_kind == ALL_GATHER and program.is_fsdp2:
            return FlexGather(shapes)
        return context_parallelism(self.context_kind, shapes)

    def shapes(self, model: Model, job: Job, table: CandidateTable) -> Shapes:
        """Return the sizes: tokens are split over all ranks, widths over a tensor axis only."""
        program, whole = self.engine.zero, np.ones(len(table))
        tensor = table.size(self.tensor_axis) if self.tensor_axis else whole
        return Shapes(
            model,
            job,
            table,
            tokens=table.sequences_at_once * job.seq_len / table.size(self.context_axis),
            x=whole,
            y=tensor,
            y_axis=self.tensor_axis,
            residual_split=tensor,
            recomputes_products=program.recomputes_products,
            leaves_out_last_product=self.engine.leaves_out_last_product(model, job),
            leaves_out_combine=not self.engine.recomputes_combine,
            separates_products=program.separates_products,
            joins_queries=program.joins_queries,
            gathers_logits=program.gathers_logits,
            expert_split=table.size(EXPERT) if self.has_experts else 1.0,
            sends_once=self.sends_once,
            experts_at_once=program.experts_at_once,
            adds_expert_biases=self.engine.adds_expert_biases,
            sums_adapters=True,
            memory=self.engine.memory,
        )

    def communication(self, shapes: Shapes, sync: bool) -> ZeroCommunication:
        """Return the communication of a usual micro-step, or of the synchronising one."""
        has_stages = shapes.table.is_pipelined
        kind = StagedCommunication if has_stages else ZeroCommunication
        return kind(shapes, sync, self, self.units(shapes))

    def units(self, shapes: Shapes) -> ZeroUnits:
        """Return the units of a rank; in a pipeline those of the first stage, which has no head."""
        layers = layers_of_stage(shapes, 0, shapes.table)
        return self._units_of(shapes, layers, True, not shapes.table.is_pipelined)

    def _units_of(
        self, shapes: Shapes, layers: Sequence[int], first: bool, last: bool
    ) -> ZeroUnits:
        """Return the units of some layers, with or without the ends of the model."""
        return ZeroUnits(
            shapes,
            self.engine.zero,
            layers,
            first,
            last,
            spreads_experts=self.has_experts,
            gathers_low=self.gathers_low(shapes.job),
        )


def zero3(
    engine: Engine = IDEAL,
    has_experts: bool = False,
    context_kind: str = "",
    overlaps_tensor: bool = False,
    n_virtual: Sequence[int] = (1, 2, 4),
    low_weights: bool = False,
) -> Zero:
    """Return ZeRO-3, which is FSDP: weights, gradients and states are sharded over `shard`.

    With replicas of the shards it is hybrid sharding (HSDP). An engine may add a tensor axis and
    the stages of a pipeline, of which each rank has one of the numbers `n_virtual`; no stages are
    predicted for models with experts. With a kind of context parallelism, neighbours share
    sequences, and the states are sharded over these ranks, too (torchtitan 05a6cb38,
    distributed/parallel_dims.py, dp_shard_cp).

    Experts are spread over neighbours among the ranks of tensor group and shards, and each is
    sharded over those of these ranks that hold the same experts (torchtitan 05a6cb38,
    models/llama4/infra/parallelize.py, apply_fsdp, and distributed/parallel_dims.py).
    """
    batch = ("shard", "replica")
    split = (TENSOR,) if engine.zero.splits_layers else ()
    context = (CONTEXT,) if context_kind else ()
    stages = (PIPELINE,) if engine.zero.has_stages and not has_experts else ()
    names = (*split, *context, *batch, *stages)
    shards = "*".join((*context, "shard"))
    groups = tuple(dict.fromkeys((*names, shards)))
    axes = Axes(names, batch, groups)
    if has_experts:
        groups = (*groups, EXPERT, EXPERT_REPLICAS)
        axes = replace(axes, groups=groups, folded="*".join(names[:-1]))
    sharding = Sharding(shards, shards, shards, (shards,), replicas="replica")
    if engine.zero.reduces_once or (has_experts and engine.zero.syncs_mixtures_once):
        sharding = replace(sharding, gradients="", reduced_once=True)
    return Zero(
        "zero3",
        axes,
        sharding,
        n_virtual=n_virtual if stages else (1,),
        has_experts=has_experts,
        context_kind=context_kind,
        overlaps_tensor=overlaps_tensor,
        low_weights=low_weights,
        offload_modules=(
            *((LAYER_INPUTS,) if engine.zero.offloads_inputs else ()),
            *((LAYERS,) if engine.zero.offloads_layers else ()),
        ),
        engine=engine,
    )


def zero1(engine: Engine = IDEAL) -> Zero:
    """Return DeepSpeed's stage 1: optimizer states are sharded over all ranks.

    The last micro-step of a step all-reduces gradients (DeepSpeed 0.19, use_multi_rank_bucket_
    allreduce in runtime/zero/stage_1_and_2.py), and updated weights are gathered.
    """
    return _with_whole_weights("zero1", "", True, engine)


def zero2(engine: Engine = IDEAL) -> Zero:
    """Return DeepSpeed's stage 2: gradients are sharded, too, and reduced in every micro-step."""
    return _with_whole_weights("zero2", "data", False, engine)


def _with_whole_weights(name: str, gradients: str, reduced_once: bool, engine: Engine) -> Zero:
    """Return a member whose ranks keep whole weights, and gather them after each update."""
    axes = Axes(("data",), ("data",), ("data",))
    sharding = Sharding("", gradients, "data", ("data",), reduced_once, updated_over="data")
    return Zero(name, axes, sharding, engine=engine)


def zeropp(
    quantised_weights: bool = True,
    secondary: bool = True,
    quantised_gradients: bool = True,
    engine: Engine = IDEAL,
) -> Zero:
    """Return ZeRO++: ZeRO-3 over all ranks with three parts (qwZ, hpZ, qgZ), each switchable.

    The ranks along the axis `secondary`, usually the ranks of a node, share the second copy of the
    weights.
    """
    everyone = "secondary*across"
    axes = Axes(("secondary", "across"), ("secondary", "across"), ("secondary", "across", everyone))
    sharding = Sharding(
        everyone,
        everyone,
        everyone,
        reduced_over=("secondary", "across") if quantised_gradients else (everyone,),
        copy="secondary" if secondary else "",
    )
    return Zero("zeropp", axes, sharding, quantised_weights, quantised_gradients, engine=engine)


def zero_topo(
    quantised_weights: bool = True, quantised_gradients: bool = True, engine: Engine = IDEAL
) -> Zero:
    """Return ZeRO-topo: weights over a package, gradients over a node, states over all ranks.

    The groups nest: `weights` ranks hold a copy of the weights, `weights*gradients` ranks one of
    the gradients, all ranks together one of the optimizer states.
    """
    names = ("weights", "gradients", "states")
    inner = "weights*gradients"
    everyone = "weights*gradients*states"
    outer = "gradients*states"
    axes = Axes(names, names, ("weights", inner, "states", outer, everyone))
    sharding = Sharding("weights", inner, everyone, (inner,), outer="states", updated_over=outer)
    return Zero(
        "zero-topo",
        axes,
        sharding,
        quantised_weights,
        quantised_gradients,
        is_released=False,
        engine=engine,
    )
