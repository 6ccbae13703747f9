"""Sharded data parallelism: ZeRO-3, FSDP and hybrid sharding, ZeRO++, three-level partitioning.

Rajbhandari et al., arXiv 1910.02054 (ZeRO); Zhao et al., arXiv 2304.11277 (FSDP, hybrid
sharding); Wang et al., arXiv 2306.10209 (ZeRO++); Xu et al., arXiv 2501.04266 (three levels).

Every rank computes whole layers on its share of the batch. What it stores of weights, gradients
and optimizer states differs in how far each is sharded: over the groups of `Sharding`. Weights
of a block are gathered before it is used, the next block's beside it; gradients are reduced as
soon as a block's backward pass is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from axonn_tune.spec.candidates import CandidateTable, Placements
from axonn_tune.spec.job import Job
from axonn_tune.spec.layout import Axes
from axonn_tune.spec.model import Model
from axonn_tune.spec.plan import Array, Phase, StepPlan
from axonn_tune.strategies.pipeline import step_plan
from axonn_tune.strategies.program import HostProgram
from axonn_tune.strategies.transformer import (
    FP32_BYTES,
    Transformer,
    Weight,
    has_master_copy,
    stage_parameters,
    state_bytes,
)

# Bytes of an element in quantised messages, with the fp16 scale of each group of 2048 elements
# (ZeRO++, sections 3.1 and 3.3: INT8 weights, INT4 gradients).
INT8_BYTES, INT4_BYTES = 1.0 + 2.0 / 2048, 0.5 + 2.0 / 2048


# By chain, the first weight of a block before which a kernel of that block has been issued.
_SECOND = {"forward": "qkv", "recompute": "qkv", "backward": "up"}


@dataclass(frozen=True)
class Sharding:
    """Groups over which things are sharded, or messages go; empty where there is none.

    weights, gradients, states: each rank holds one part of them. copy: ranks that hold a second
    copy of the weights together, from which they are gathered once it exists. reduced_over:
    groups over which gradients are reduced in every micro-step, one after the other.
    replicas: over which shards of gradients are summed once in a step; they are scattered over
    `outer`. updated_over: from which the weights of a rank come once they are updated.
    """

    weights: str
    gradients: str
    states: str
    reduced_over: tuple[str, ...]
    copy: str = ""
    replicas: str = ""
    outer: str = ""
    updated_over: str = ""


@dataclass(frozen=True)
class Zero:
    """A strategy of the family; see `zero3`, `zeropp` and `zero_topo` for its members.

    quantised_weights: INT8 gathers (qwZ), except from a second copy. quantised_gradients: INT4
    all-to-all instead of reduce-scatter (qgZ). calls_per_block: gathers of a block's
    parameters, 0 for one each (DeepSpeed), 1 for all together (FSDP2).
    """

    name: str
    axes: Axes
    sharding: Sharding
    quantised_weights: bool = False
    quantised_gradients: bool = False
    calls_per_block: int = 1
    n_virtual: Sequence[int] = (1,)

    @property
    def compute_key(self) -> tuple[str, ...]:
        """Kernels that pack messages work on shards."""
        return (*self.axes.names, "micro_batch")

    def rejections(self, model: Model, job: Job, placements: Placements) -> dict[str, np.ndarray]:
        """What the algorithm refuses, by reason, bool of shape (P,)."""
        ranks = placements.size("*".join(self.axes.names))
        return {"global batch not divisible by the ranks": job.global_batch % ranks != 0}

    def admits(self, model: Model, job: Job, table: CandidateTable) -> np.ndarray:
        """All of them: there is no pipeline."""
        return np.ones(len(table), dtype=bool)

    def plan(self, model: Model, job: Job, table: CandidateTable) -> StepPlan:
        """The operations of one rank in one training step, for every candidate of the table."""
        return step_plan(_Planner(self, model, job, table))

    def memory(self, model: Model, job: Job, table: CandidateTable) -> dict[str, Array]:
        """Peak bytes of one rank by term, each of shape (C,)."""
        return _Planner(self, model, job, table).memory()


def zero3(calls_per_block: int = 1) -> Zero:
    """ZeRO-3 and FSDP: all three over `shard`; with replicas of the shards, hybrid sharding."""
    axes = Axes(("shard", "replica"), ("shard", "replica"), ("shard", "replica"))
    sharding = Sharding("shard", "shard", "shard", ("shard",), replicas="replica")
    return Zero("zero3", axes, sharding, calls_per_block=calls_per_block)


def zeropp(
    quantised_weights: bool = True,
    secondary: bool = True,
    quantised_gradients: bool = True,
    calls_per_block: int = 1,
) -> Zero:
    """ZeRO++: ZeRO-3 over all ranks, with each of its three parts switchable (qwZ, hpZ, qgZ).

    `secondary` is the axis of the ranks that share the second copy of the weights, usually
    those of a node.
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
    return Zero("zeropp", axes, sharding, quantised_weights, quantised_gradients, calls_per_block)


def zero_topo(
    quantised_weights: bool = True, quantised_gradients: bool = True, calls_per_block: int = 1
) -> Zero:
    """Three levels: weights over a package, gradients over a node, states over all ranks.

    The groups nest: `weights` ranks hold a copy of the weights, `weights*gradients` one of the
    gradients, all together one of the optimizer states.
    """
    names = ("weights", "gradients", "states")
    inner = "weights*gradients"
    everyone = "weights*gradients*states"
    outer = "gradients*states"
    axes = Axes(names, names, ("weights", inner, "states", outer, everyone))
    sharding = Sharding("weights", inner, everyone, (inner,), outer="states", updated_over=outer)
    return Zero(
        "zero-topo", axes, sharding, quantised_weights, quantised_gradients, calls_per_block
    )


class _Planner(Transformer):
    """Weights are gathered block by block, gradients are reduced block by block."""

    def __init__(self, options: Zero, model: Model, job: Job, table: CandidateTable) -> None:
        self.options, self.sharding = options, options.sharding
        one = np.ones(len(table))
        tokens = table.sequences_at_once * job.seq_len
        super().__init__(model, job, table, one, one, ("", ""), tokens)
        self.block = sum(stage_parameters(model, 1, False, False))
        self.root = sum(stage_parameters(model, 0, True, True))
        self.parameters = model.n_layers * self.block + self.root
        n_biases = sum(linear.bias for linear in model.block_linears)
        n_norms = 2 * (2 if model.norm == "layer" else 1)
        self.n_tensors = len(model.block_linears) + n_biases + n_norms

    # Weights ---------------------------------------------------------------------------

    def _source(self, chain: str) -> tuple[str, bool]:
        """The group from which a pass gathers weights, and whether they are quantised.

        The second copy comes to be in the first forward pass after an update.
        """
        sharding = self.sharding
        if sharding.copy and not (chain == "forward" and self.is_sync):
            return sharding.copy, False
        return sharding.weights, self.options.quantised_weights

    def _gather(self, host: HostProgram, chain: str, unit: str, parameters: float) -> None:
        """Gather a block's weights, or those outside blocks; quantised, from INT8."""
        group, quantised = self._source(chain)
        size = self.table.size(group)
        name, nbytes = f"{chain}.{unit}", parameters * self.element_bytes
        if quantised:
            packed = parameters * INT8_BYTES
            host.memory_bound(f"{name}.quantise", (size > 1) * (nbytes + packed) / size, "scale")
            nbytes = packed
        full = np.full(len(self.table), nbytes)
        host.issue(f"{name}.all_gather", "all_gather", full, group, self._n_calls(unit))

    def _n_calls(self, unit: str) -> float:
        if self.options.calls_per_block or unit == "root":
            return 1.0
        return float(self.n_tensors)

    def _have(self, host: HostProgram, chain: str, unit: str, parameters: float) -> None:
        """Wait for a gather, and copy or unpack what came to where it is used."""
        if not self.overlap.oag:
            self._gather(host, chain, unit, parameters)
        group, quantised = self._source(chain)
        host.wait(f"{chain}.{unit}.all_gather")
        came = (self.table.size(group) > 1) * parameters
        if quantised:
            nbytes = came * (INT8_BYTES + self.element_bytes)
            host.memory_bound(f"{chain}.{unit}.dequantise", nbytes, "scale")
        else:
            host.memory_bound(f"{chain}.{unit}.copy", came * (2.0 * self.element_bytes), "copy")

    def _prefetch(self, host: HostProgram, chain: str) -> None:
        """Gather the next block's weights beside this one."""
        if self.overlap.oag:
            self._gather(host, chain, "block", self.block)

    def prefetch(self, host: HostProgram, weight: Weight) -> None:
        """The embedding and the head before all else."""
        if weight.name == "embedding" and self.overlap.oag:
            self._gather(host, "forward", "root", self.root)

    def take_weight(self, host: HostProgram, weight: Weight, following: Weight | None) -> None:
        """The first kernel of a block once issued, the weights of the next are gathered."""
        chain = weight.chain
        if weight.name == "embedding":
            self._have(host, "forward", "root", self.root)
            self._prefetch(host, "forward")
        elif str(weight) == "backward.head":
            self._prefetch(host, self.backward_entry.chain)
        elif self._has_next and weight.name == _SECOND.get(chain) and not self._is_kept(chain):
            self._prefetch(host, chain)

    _has_next = True

    def begin_block(self, host: HostProgram, chain: str) -> None:
        """All weights of a block come together."""
        if not self._is_kept(chain):
            self._have(host, chain, "block", self.block)

    def _is_kept(self, chain: str) -> bool:
        """After recomputation the block's weights are still at hand."""
        return chain == "backward" and self.recompute == "full"

    def forward(self, name: str, repeats: int, following: Weight | None) -> Phase:
        """The last block has no next one to gather."""
        self._has_next = following is None or following.name != "head"
        return super().forward(name, repeats, following)

    def backward(self, name: str, repeats: int, following: Weight | None) -> Phase:
        """The last block has no next one to gather."""
        self._has_next = following is not None
        return super().backward(name, repeats, following)

    # Gradients ---------------------------------------------------------------------------

    def before_weight_gradient(self, host: HostProgram, name: str) -> None:
        """Before a block's last product the gradients of the block before have been reduced."""
        if name in ("qkv", "embedding") and self.overlap.ors:
            self._have_reduced(host, "block", self.block)

    def end_block_backward(self, host: HostProgram) -> None:
        """Start to reduce this block's gradients; without overlap, wait."""
        self._reduce(host, "block", self.block)
        if not self.overlap.ors:
            self._have_reduced(host, "block", self.block)

    def finish_embedding_gradient(self, host: HostProgram) -> None:
        """Embedding, head and final norm."""
        self._reduce(host, "root", self.root)

    def accumulate(self, last_scatter: str) -> tuple[Phase, ...]:
        """The micro-step ends when the last gradients have been reduced."""
        host = HostProgram()
        self._have_reduced(host, "root", self.root)
        return (host.phase("accumulate", over_storage=True),)

    def _reduce(self, host: HostProgram, unit: str, parameters: float) -> None:
        """Over each group in turn; what is left of a message shrinks by the group's size.

        Packing for a group counts as done before the message over the first one.
        """
        left = np.full(len(self.table), float(parameters))
        before: tuple[str, ...] = ()
        kind = "all_to_all" if self.options.quantised_gradients else "reduce_scatter"
        element = np.where(self._packs_gradients, INT4_BYTES, self.element_bytes)
        for group in self.sharding.reduced_over:
            name, size = f"gradient.{unit}.{group}", self.table.size(group)
            sent = (size > 1) * left
            host.memory_bound(f"{name}.pack", sent * (self.element_bytes + element), "copy")
            n_calls = self._n_calls(unit)
            host.issue(f"{name}.reduce", kind, left * element, group, n_calls, before)
            left, before = left / size, (f"{name}.reduce",)
        if self.is_sync and self.sharding.replicas:
            name, nbytes = f"gradient.{unit}.all_reduce", left * self.element_bytes
            host.issue(name, "all_reduce", nbytes, self.sharding.replicas, 1.0, before)

    @property
    def _packs_gradients(self) -> np.ndarray:
        """Whether gradients are quantised: DeepSpeed does so across nodes only, shape (C,)."""
        groups = self.sharding.reduced_over
        across = np.ones(len(self.table), dtype=bool)
        if len(groups) > 1:
            across = self.table.size(groups[-1]) > 1
        return across & self.options.quantised_gradients

    def _have_reduced(self, host: HostProgram, unit: str, parameters: float) -> None:
        """Wait, unpack, and add what came to the sums."""
        left = np.full(len(self.table), float(parameters))
        for group in self.sharding.reduced_over:
            name, size = f"gradient.{unit}.{group}", self.table.size(group)
            host.wait(f"{name}.reduce")
            if self.options.quantised_gradients:
                moved = (size > 1) * left * (INT4_BYTES + self.element_bytes / size)
                moved = np.where(self._packs_gradients, moved, 0.0)
                host.memory_bound(f"{name}.dequantise", moved, "reduce")
            left = left / size
        if self.is_sync and self.sharding.replicas:
            host.wait(f"gradient.{unit}.all_reduce")
        host.memory_bound(f"gradient.{unit}.accumulate", left * (3.0 * self.element_bytes), "add")

    @property
    def has_sync(self) -> bool:
        """Once in a step replicas are summed, and a second copy of the weights comes to be."""
        return bool(self.sharding.replicas or self.sharding.copy)

    def step_end(self) -> tuple[Phase, ...]:
        """Reduce what is not yet, clip, update the shard, have the weights where they are kept."""
        host, sharding, element = HostProgram(), self.sharding, self.element_bytes
        if sharding.outer:
            shard = self.parameters / self.table.size(sharding.gradients)
            name = "gradient.states.reduce_scatter"
            host.run(name, "reduce_scatter", shard * element, sharding.outer)
        own = self.parameters / self.table.size(sharding.states)
        host.memory_bound("gradient.norm", own * element, "reduce")
        host.run("gradient.norm.all_reduce", "all_reduce", FP32_BYTES, sharding.states)
        host.memory_bound("gradient.clip", 2.0 * own * element, "scale")
        weight_bytes = element * (1.0 if has_master_copy(self.job) else 2.0)
        nbytes = own * (2.0 * element + 2.0 * state_bytes(self.job) + weight_bytes)
        host.memory_bound("optimizer.step", nbytes, "optimizer")
        if sharding.updated_over:
            part = self.parameters / self.table.size(sharding.weights)
            host.issue("weights.all_gather", "all_gather", part * element, sharding.updated_over)
        return (host.phase("step_end", over_storage=True),)

    # Memory ---------------------------------------------------------------------------------

    def memory(self) -> dict[str, Array]:
        """Bytes by term: what is sharded, what is gathered, and activations of whole layers."""
        job, table, sharding = self.job, self.table, self.sharding
        element, model = job.element_bytes, self.model
        weights = self.parameters * element / table.size(sharding.weights)
        if sharding.copy:
            weights = weights + self.parameters * element / table.size(sharding.copy)
        saved_all = self._saved_by_block()
        saved = {
            "none": saved_all,
            "selective": saved_all - self._scores,
            "full": self.residual_bytes,
        }[self.recompute]
        # Two blocks and the root: their weights where they are gathered, and their gradients.
        at_once = (2.0 * self.block + self.root) * element
        gathered: Array = at_once * np.where(table.size(sharding.weights) > 1, 2.0, 1.0)
        return {
            "weights": weights,
            "gradients": self.parameters * element / table.size(sharding.gradients),
            "optimizer_states": self.parameters * state_bytes(job) / table.size(sharding.states),
            "gathered_weights": gathered,
            "activations": model.n_layers * saved + self.residual_bytes,
            "working_set": self.working_set(saved_all, saved, last=True),
        }

    @property
    def _scores(self) -> Array | float:
        return self.score_bytes if self.job.attention == "unfused" else 0.0

    def _saved_by_block(self) -> Array:
        """Inputs of products and of the kernels between them, whole widths."""
        split = self.shapes["qkv"].output_bytes + self.shapes["proj"].input_bytes
        split = split + self.shapes["up"].output_bytes + self.mlp_bytes
        saved: Array = 4.0 * self.residual_bytes + split + self._scores
        return saved
