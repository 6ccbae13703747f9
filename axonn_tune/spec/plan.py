"""The step plan: what one rank does in one training step, without any hardware.

The plan follows the host program of the runtime. Operations are issued in order, each on the
compute stream or on a communication stream, of which there is one for each lane of links
(`simulate.lanes`). An operation starts when its stream is free and everything that it waits for has
ended. A name in ``waits_for`` means the latest operation of that name issued so far, so a block
that repeats can wait for what the block before it prefetched. A collective over a group of one rank
is not issued at all. Copies between GPU and host have a stream for each direction.

Sizes are arrays of shape (C,), one entry per candidate, float64 for bytes and
FLOPs; numbers stand for arrays that hold the same value everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from axonn_tune.spec import names
from axonn_tune.spec.blocks import attended_keys
from axonn_tune.spec.candidates import CandidateTable, Ints
from axonn_tune.spec.layout import EXPERT
from axonn_tune.spec.schedule import DUALPIPE, ONE_F_ONE_B, ZB_H1

Array: TypeAlias = npt.NDArray[np.float64]
# An array of shape (C,); a number stands for an array that holds the same value everywhere.
Size: TypeAlias = Array | float

# How long two stages stand still while one hands forward, and backward, if nothing holds them up.
NO_HANDOVER = (0.0, 0.0)
MODES = ("NN", "NT", "TN")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
# Collectives that a ring carries out in steps, of which each passes one chunk on.
RING_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
# Libraries of fused attention. The first one is that of torch on GPUs before Blackwell. "cudnn" is
# the latest release that was measured; on Blackwell that of September 2025 is a quarter slower.
FLASH_ATTENTION = "flash-attention"
ATTENTION_LIBRARIES = (FLASH_ATTENTION, "cudnn", "cudnn-9.13")
# Kinds of kernels that memory bandwidth limits; each kind reaches a share of it.
MEMORY_KERNELS = (
    "copy",
    "strided",
    "lookup",
    "add",
    "scale",
    "reduce",
    "scatter_add",
    "optimizer",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
    "gelu",
    "gelu_backward",
    "swiglu",
    "swiglu_backward",
    "clamped_swiglu",
    "clamped_swiglu_backward",
    "expert_bias",
    "expert_bias_backward",
    "rotary",
    "scaled_rotary",
    "softmax",
    "softmax_backward",
    "routing",
    "routing_backward",
    "cast",
)
COMPUTE = "compute"
COMMUNICATION = "communication"
# The two directions of the link that joins a GPU to its host.
TO_HOST, FROM_HOST = HOST_DIRECTIONS = ("to_host", "from_host")
# AxoNN's backward pass lets this many weight gradients wait for their reduce-scatter while it
# forms another one. The plan derives its waits from it; the runtime holds that many buffers.
GRADIENTS_IN_FLIGHT = 2


@dataclass(frozen=True, eq=False)
class Gemm:
    """An (m x k) times (k x n) product; `mode` says which operand is stored transposed.

    `number_format` is the format of both operands: `TF32`, one of `FORMATS`, or empty for the job's
    type.
    """

    name: str
    m: Size
    n: Size
    k: Size
    mode: str
    waits_for: tuple[str, ...] = ()
    number_format: str = ""
    stream: ClassVar[str] = COMPUTE

    @property
    def flops(self) -> Size:
        """The FLOPs of the product, 2 m n k, shape (C,)."""
        return 2.0 * self.m * self.n * self.k

    @property
    def n_products(self) -> Size:
        """The number of products of these sizes, shape (C,)."""
        return 1.0


@dataclass(frozen=True, eq=False)
class GroupedGemm(Gemm):
    """Equal products with weights of their own, one for each expert that a rank holds.

    Sizes are those of one of the products.

    n_groups
        Number of products, shape (C,).
    n_at_once
        Number of products that run at the same time; infinite where one kernel forms all of them.
    sum_bytes
        Bytes of an element of the sums to which the results are added; 0 where they are not.
    n_issues
        Number of operations that the host issues for each of the products: 2 where its input is
        cast by itself.
    issue_seconds
        Time in which the host issues each of them, if it cannot run ahead of the device.
    """

    n_groups: Size = 1.0
    n_at_once: float = math.inf
    sum_bytes: float = 0.0
    n_issues: float = 1.0
    issue_seconds: float = 0.0

    @property
    def n_launches(self) -> Size:
        """The number of kernels, shape (C,)."""
        return 1.0 if math.isinf(self.n_at_once) else self.n_groups

    @property
    def flops(self) -> Size:
        """The FLOPs of all products, shape (C,)."""
        return super().flops * self.n_groups

    @property
    def n_products(self) -> Size:
        """The number of products, shape (C,)."""
        return self.n_groups


@dataclass(frozen=True, eq=False)
class RepeatedGemm(Gemm):
    """Equal products that run one after another, `n_times` of them, shape (C,)."""

    n_times: Size = 1.0

    @property
    def flops(self) -> Size:
        """The FLOPs of all products, shape (C,)."""
        return super().flops * self.n_times

    @property
    def n_products(self) -> Size:
        """The number of products, shape (C,)."""
        return self.n_times


@dataclass(frozen=True, eq=False)
class Attention:
    """Softmax attention over causal sequences with the rank's share of the heads.

    `rate` is the rate of the kernel over the rate that the machine reaches. With a `window` each
    query attends to that many tokens, its own included; with 0 it attends to all earlier ones.
    `n_launches` is the number of such kernels, which all have these sizes, and `library` names the
    library that they come from, one of `ATTENTION_LIBRARIES`. A kernel that is not `masked` does
    the work of a causal one of this length without a mask: its queries or its keys are half as
    many. `number_format` is that of its operands; empty for the job's type. With `dropout` its
    kernel drops scores at random.
    """

    name: str
    n_sequences: Size
    n_heads: Size
    seq_len: Size
    head_dim: int
    backward: bool
    fused: bool
    waits_for: tuple[str, ...] = ()
    rate: float = 1.0
    window: int = 0
    n_launches: Size = 1.0
    masked: bool = True
    library: str = FLASH_ATTENTION
    number_format: str = ""
    dropout: bool = False
    stream: ClassVar[str] = COMPUTE

    @property
    def attended_fraction(self) -> float:
        """The share of the score matrix's causal half that a window leaves; lengths are equal."""
        if not self.window:
            return 1.0
        seq_len = int(self.seq_len)
        return attended_keys(seq_len, self.window) / seq_len

    @property
    def flops(self) -> Size:
        """The FLOPs, by convention of the full score matrix, shape (C,).

        They are 4 b s^2 a d forward and twice that backward.
        """
        n_scores = self.attended_fraction * self.seq_len**2
        n_sequences = self.n_launches * self.n_sequences
        forward = 4.0 * n_sequences * self.n_heads * (n_scores * float(self.head_dim))
        return forward * 2.0 if self.backward else forward


@dataclass(frozen=True, eq=False)
class MemoryBound:
    """A kernel that memory bandwidth limits.

    name
        Name of the operation.
    nbytes
        Bytes read plus bytes written, shape (C,).
    kernel
        Kind of kernel, one of `MEMORY_KERNELS`.
    waits_for
        Names of operations that end before it starts.
    n_launches
        Number of kernels of which it consists, shape (C,); each moves an equal share of the bytes.
    strided_bytes
        Part of the bytes that is moved by kernels which broadcast an operand or read a slice, and
        so handle one element at a time, shape (C,); such a kernel counts as a copy of its elements.
    n_issues
        Number of operations as which the host issues these kernels, shape (C,), if that is not the
        number of kernels: the times of an issue are fitted to plans that count them so.
    """

    name: str
    nbytes: Size
    kernel: str = "copy"
    waits_for: tuple[str, ...] = ()
    n_launches: Size = 1.0
    strided_bytes: Size = 0.0
    n_issues: Size | None = None
    stream: ClassVar[str] = COMPUTE


@dataclass(frozen=True, eq=False)
class HostWork:
    """Work of the host during which the device stands still.

    name
        Name of the operation.
    seconds
        Time of the work on the hosts on which engines were timed, shape (C,).
    waits_for
        Names of operations that end before it starts.
    """

    name: str
    seconds: Size
    waits_for: tuple[str, ...] = ()
    stream: ClassVar[str] = COMPUTE


@dataclass(frozen=True, eq=False)
class HostKernel:
    """A pass of the host's cores over the host's memory, which bounds it; the device waits.

    name
        Name of the operation.
    nbytes
        Bytes read plus bytes written for one rank, shape (C,).
    waits_for
        Names of operations that end before it starts.
    """

    name: str
    nbytes: Size
    waits_for: tuple[str, ...] = ()
    stream: ClassVar[str] = COMPUTE


@dataclass(frozen=True, eq=False)
class HostCopy:
    """A copy between the memories of the GPU and of the host.

    name
        Name of the operation.
    nbytes
        Bytes that move, shape (C,).
    direction
        One of `HOST_DIRECTIONS`; copies of both may run at the same time.
    waits_for
        Names of operations that end before it starts.
    """

    name: str
    nbytes: Size
    direction: str
    waits_for: tuple[str, ...] = ()
    stream: ClassVar[str] = COMMUNICATION


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective over the group of one axis, or of a product of axes.

    name
        Name of the operation.
    kind
        Kind of collective, one of `KINDS`.
    nbytes
        The full buffer, as nccl-tests counts: the gathered result of an all-gather, the input
        of a reduce-scatter, the buffer of an all-reduce. Shape (C,).
    axis
        The axis, or product of axes.
    n_calls
        Number of equal calls that move the buffer.
    waits_for
        Names of operations that end before it starts.
    gap_seconds
        Time for which the host keeps the device idle around each call.
    """

    name: str
    kind: str
    nbytes: Size
    axis: str
    n_calls: Size = 1.0
    waits_for: tuple[str, ...] = ()
    gap_seconds: Size = 0.0
    stream: ClassVar[str] = COMMUNICATION


Compute: TypeAlias = Gemm | Attention | MemoryBound | HostWork | HostKernel
# Operations that move bytes on a lane, while others compute.
Transfer: TypeAlias = Collective | HostCopy
Operation: TypeAlias = Compute | Transfer
Sized = TypeVar("Sized", bound=Operation)


def sized(operation: Sized, rows: Ints) -> Sized:
    """Return an operation with its sizes for some candidates only."""
    sizes: dict[str, Any] = {
        name: size[rows] for name, size in vars(operation).items() if isinstance(size, np.ndarray)
    }
    return replace(operation, **sizes)


def _entries(column: np.ndarray | float, rows: Ints) -> np.ndarray | float:
    """Return the entries of a column in some rows; one value stands for all."""
    return column[rows] if isinstance(column, np.ndarray) else column


def is_launched(operation: Operation, row: int = 0) -> bool:
    """Return whether an operation runs at all: what has nothing to do is not launched."""
    if isinstance(operation, MemoryBound | HostKernel | HostCopy | Collective):
        return number(operation.nbytes, row) > 0
    if isinstance(operation, Attention):
        return number(operation.n_launches, row) > 0
    if isinstance(operation, RepeatedGemm):
        return number(operation.n_times, row) > 0
    return True


def number(size: Size, row: int = 0) -> float:
    """Return the entry of a size in one row of the table; one entry alone stands for all rows."""
    entries = np.ravel(size)
    return float(entries[row if entries.size > 1 else 0])


@dataclass(frozen=True, eq=False)
class Phase:
    """A sequence of operations that is issued `repeats` times in a row.

    name
        Name of the phase.
    operations
        Operations in the order of issue.
    repeats
        Number of times that the sequence is issued; where candidates differ, an array of shape (C,)
        that may have zeros.
    """

    name: str
    operations: tuple[Operation, ...]
    repeats: int | Ints = 1

    @property
    def is_repeated(self) -> bool:
        """Whether some candidate issues the sequence more than once."""
        return bool(np.any(np.asarray(self.repeats) > 1))

    @property
    def is_optional(self) -> bool:
        """Whether some candidate does not issue the sequence at all."""
        return not np.all(self.repeats)

    @property
    def common_repeats(self) -> int:
        """The number of repeats, the same for all candidates."""
        assert isinstance(self.repeats, int), f"candidates differ in the repeats of {self.name}"
        return self.repeats


@dataclass(frozen=True, eq=False)
class Part:
    """Phases that are played one after another, from idle streams until all are idle again.

    name
        It is the same in the plans of all candidates of a strategy, and unique in each plan.
    is_of_last_stage
        Whether only the ranks of a pipeline's last stage run it. Other parts run at the pace of the
        slowest of all ranks, and this one at that of the slowest of these.
    """

    name: str
    phases: tuple[Phase, ...]
    is_of_last_stage: bool = False


@dataclass(frozen=True, eq=False)
class Stage:
    """What a rank does with one micro-batch for one (virtual) stage of a pipeline."""

    forward: Part
    backward: Part

    @property
    def passes(self) -> tuple[Part, Part]:
        """The forward and the backward pass."""
        return (self.forward, self.backward)

    @cached_property
    def split_backward(self) -> tuple[Part, Part]:
        """The backward pass in two: the gradients of inputs, and those of weights.

        All messages belong to the first. The second consists of kernels that need only what the
        rank holds.
        """
        return (
            _selected(self.backward, "input_gradients", lambda op: not _is_of_weights(op)),
            _selected(self.backward, "weight_gradients", _is_of_weights),
        )


def _is_of_weights(operation: Operation) -> bool:
    """Return whether an operation serves the gradients of weights only."""
    name = operation.name
    return names.forms_weight_gradient(name) or name == names.GRADIENT_ACCUMULATE


def _selected(part: Part, name: str, belongs: Callable[[Operation], bool]) -> Part:
    """Return some operations of a part, which do not wait for those that are left out."""
    taken = [[op for op in phase.operations if belongs(op)] for phase in part.phases]
    present = {op.name for operations in taken for op in operations} | {COMPUTE}
    phases = tuple(
        replace(
            phase,
            operations=tuple(
                replace(op, waits_for=tuple(each for each in op.waits_for if each in present))
                for op in operations
            ),
        )
        for phase, operations in zip(part.phases, taken, strict=True)
    )
    return replace(part, name=f"{part.name}.{name}", phases=phases)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Stages through which every micro-batch passes, with a transfer between neighbours.

    schedule
        In which order ranks run their passes, one of `SCHEDULES`.
    first, last
        The very first and the very last virtual stage.
    middle
        Any other virtual stage.
    sync
        The first stage, for the micro-batch during which collectives bring new weights and reduce
        gradients. Other ranks have time to reduce gradients while they wait for the last ranks to
        end.
    syncs_at_end
        Whether these collectives overlap with nothing, so that they belong to the end of the step,
        shape (C,). With `beside`, this holds for those of the first virtual stage of a rank only.
    beside
        The first stage, for a micro-batch beside which a part of the collectives of another virtual
        stage runs; None where there is no such pass.
    n_beside
        How often a step has its forward and its backward pass, shape (C,).
    transfer
        The transfer from one stage to the next.
    sends_beside
        Whether a rank computes while its results travel, once forward and backward passes
        alternate, shape (C,).
    handover_seconds
        How long the ranks of two neighbouring stages stand still together when one hands forward,
        or backward, what a pass has formed, besides `transfer`.
    aligns_gathers
        Whether the first stages of all ranks start to gather new weights when the step begins, if a
        rank has several stages. Otherwise each stage starts when the first micro-batch arrives.
    others
        Further virtual stages, where those in the middle differ.
    places
        For each virtual stage, counted through all ranks, its index in `stages`; empty where all
        but the first and the last are `middle`.
    alone
        The stages, in the order of `stages`, in passes beside which no other pass runs; empty where
        these are like all others.
    """

    first: Stage
    middle: Stage
    last: Stage
    sync: Stage
    transfer: Collective
    syncs_at_end: np.ndarray | float = False
    beside: Stage | None = None
    n_beside: np.ndarray | float = 0.0
    sends_beside: np.ndarray | float = False
    handover_seconds: tuple[float, float] = NO_HANDOVER
    aligns_gathers: bool = True
    schedule: str = ONE_F_ONE_B
    others: tuple[Stage, ...] = ()
    places: tuple[int, ...] = ()
    alone: tuple[Stage, ...] = ()

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The virtual stages that differ."""
        return (self.first, self.middle, self.last, *self.others)

    @property
    def without_sync(self) -> Stage:
        """The first stage in those of its passes that `sync` replaces where a step synchronises.

        These are the first forward and the last backward pass, beside which no other pass runs.
        """
        return self.alone[0] if self.alone else self.first

    def n_synchronised(self, candidates: CandidateTable) -> tuple[Size, Size]:
        """Return how often the collectives of `sync` delay a step, forward and backward.

        The first micro-batch waits in each stage that starts to gather when it arrives. With
        micro-batches from both ends, a rank serves two stages.
        """
        if self.schedule == DUALPIPE:
            return 2.0, 2.0
        starts_at_once = self.aligns_gathers & (candidates.n_virtual > 1)
        n_forward = np.where(starts_at_once, 1.0, candidates.stages * candidates.n_virtual)
        is_sync = np.where(self.syncs_at_end, 0.0, 1.0)
        return n_forward * is_sync, is_sync

    def n_in_lockstep(self, candidates: CandidateTable) -> Array:
        """Return how many ranks of a stage wait for one another in each of its passes, shape (C,).

        They are those of the groups of its collectives.
        """
        groups = {
            operation.axis
            for part in self.first.passes
            for phase in part.phases
            for operation in phase.operations
            if isinstance(operation, Collective)
        }
        axes = {axis for group in groups - {EXPERT} for axis in group.split("*")}
        of_axes = candidates.size("*".join(sorted(axes)))
        return np.maximum(of_axes, candidates.size(EXPERT)) if EXPERT in groups else of_axes

    def stage(self, number: int, n_chunks: int) -> Stage:
        """Return one of so many virtual stages, counted through all ranks."""
        if self.places:
            return self.stages[self.places[number]]
        if number == 0:
            return self.first
        return self.last if number == n_chunks - 1 else self.middle

    def passes_of(self, stage: Stage) -> tuple[Part, ...]:
        """Return the passes of a stage that its schedule runs, whole and in parts."""
        if self.schedule == ONE_F_ONE_B:
            return stage.passes
        return (*stage.passes, *stage.split_backward)

    @property
    def parts(self) -> Iterator[Part]:
        """Yield all parts of the stages, then one that holds the transfer."""
        for stage in self.stages:
            yield from self.passes_of(stage)
        for stage in self.alone:
            yield from stage.passes
        yield from self.sync.passes
        if self.beside is not None:
            yield from self.beside.passes
        yield Part("transfer", (Phase("transfer", (self.transfer,)),))


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One training step: the micro-step, `n_microsteps` times, then the step's end.

    Each operation is priced once by its name: in the whole plan, kernels of one name have the same
    sizes, and so have collectives of one name over one group. All streams are idle at the end of
    each micro-step.

    candidates
        Candidates that the plan describes.
    step_end
        What the rank does once, after all micro-steps.
    n_microsteps
        Number of micro-steps, shape (C,).
    whole_microstep
        What a rank that has all layers does for one micro-batch; None in a pipeline.
    sync_microstep
        The micro-step that replaces one of the others, if there is one: while it computes, it
        brings new weights and reduces gradients.
    pipeline
        The pipeline in which micro-batches overlap, if there is one.
    """

    candidates: CandidateTable
    step_end: Part
    n_microsteps: Array
    whole_microstep: Part | None = None
    sync_microstep: Part | None = None
    pipeline: Pipeline | None = None

    def of(self, candidates: CandidateTable, rows: Ints) -> StepPlan:
        """Return the plan of candidates that are like some rows of this plan's, shape (C,).

        They differ from these in their rank orders at most. The operations, and how often phases
        are repeated, stay those of this plan's candidates: who prices them takes `rows` of both.
        """
        pipeline = self.pipeline
        if pipeline is not None:
            pipeline = replace(
                pipeline,
                syncs_at_end=_entries(pipeline.syncs_at_end, rows),
                n_beside=_entries(pipeline.n_beside, rows),
                sends_beside=_entries(pipeline.sends_beside, rows),
            )
        n_microsteps = self.n_microsteps[rows]
        return replace(self, candidates=candidates, n_microsteps=n_microsteps, pipeline=pipeline)

    @cached_property
    def microstep(self) -> Part:
        """What a rank does for one micro-batch; in a pipeline, what one of the last stage does.

        It is the same for candidates that are alike.
        """
        if self.whole_microstep is not None:
            return self.whole_microstep
        stages = [parts for times, parts in self.last_passes for _ in range(int(np.max(times)))]
        phases = [phase for parts in stages for part in parts for phase in part.phases]
        return Part("microstep", tuple(phases))

    @property
    def all_passes(self) -> list[tuple[Part, ...]]:
        """The passes of a micro-batch through each kind of virtual stage, or through all layers."""
        if self.pipeline is None:
            return [parts for _, parts in self.last_passes]
        return [stage.passes for stage in self.pipeline.stages]

    @property
    def last_passes(self) -> list[tuple[Array, tuple[Part, ...]]]:
        """The passes of a micro-batch through the virtual stages of a rank of the last stage.

        They come with the number of virtual stages that have them, shape (C,). Without a pipeline
        there is one pass.
        """
        once = np.ones(len(self.candidates))
        if self.pipeline is None:
            assert self.whole_microstep is not None, "a step has micro-steps, or a pipeline"
            return [(once, (self.whole_microstep,))]
        stages = self.pipeline.stages
        places = self._places_of_last_rank(self.pipeline)
        return [(times, stages[place].passes) for times, place in places]

    def _places_of_last_rank(self, pipeline: Pipeline) -> list[tuple[Array, int]]:
        """Return the virtual stages of a rank of the last stage, with how many are alike.

        Each is given by its index in `Pipeline.stages`.
        """
        once = np.ones(len(self.candidates))
        if pipeline.places:
            n_stages = self.candidates.n_stages
            return [(once, place) for place in pipeline.places[n_stages - 1 :: n_stages]]
        n_middle = self.candidates.n_virtual - once
        middle, last = 1, 2
        return [(n_middle, middle), (once, last)]

    @property
    def work_of_last_rank(self) -> Sequence[tuple[Size, tuple[Part, ...]]]:
        """What a rank of the last stage computes in a step, as its schedule cuts it.

        The parts come with how often it runs them. With micro-batches from both ends the rank has
        the first stage, too, each for half of them.
        """
        pipeline, n_micro = self.pipeline, self.n_microsteps
        if pipeline is not None and pipeline.schedule == DUALPIPE:
            return [(0.5 * n_micro, (*pipeline.first.passes, *pipeline.last.passes))]
        if pipeline is not None and pipeline.schedule == ZB_H1:
            return [(n_micro, (pipeline.last.forward, *pipeline.last.split_backward))]
        if pipeline is not None and pipeline.alone:
            return list(self._work_with_lone_passes(pipeline))
        return [(n_micro * times, parts) for times, parts in self.last_passes]

    def _work_with_lone_passes(self, pipeline: Pipeline) -> Iterator[tuple[Size, tuple[Part, ...]]]:
        """Yield passes of a rank of the last stage with their number, those that run alone apart.

        Before its forward and backward passes alternate, such a rank runs a round of micro-batches
        in each of its virtual stages but the last. As many backward passes are left at the end.
        """
        table = self.candidates
        places = self._places_of_last_rank(pipeline)
        for number, (times, place) in enumerate(places):
            is_last = number == len(places) - 1
            n_alone = 0.0 if is_last else np.minimum(table.stages, self.n_microsteps)
            yield times * (self.n_microsteps - n_alone), pipeline.stages[place].passes
            yield times * n_alone, pipeline.alone[place].passes

    @property
    def parts(self) -> Iterator[Part]:
        """Yield all parts of the plan; the parts of a pipeline's stages come last."""
        if self.whole_microstep is not None:
            yield self.whole_microstep
        yield self.step_end
        if self.sync_microstep is not None:
            yield self.sync_microstep
        if self.pipeline is not None:
            yield from self.pipeline.parts

    @property
    def phases(self) -> Iterator[Phase]:
        """Yield all phases of all parts."""
        for part in self.parts:
            yield from part.phases

    @property
    def operations(self) -> Iterator[Operation]:
        """Yield all operations of all phases."""
        for phase in self.phases:
            yield from phase.operations
