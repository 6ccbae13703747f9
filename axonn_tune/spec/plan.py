"""The step plan: what one rank does in one training step, in the words of the whole project.

The plan follows the host program of the runtime. Operations are issued in order on
one of two streams; an operation starts when its stream is free and everything that
it waits for has ended. A name in ``waits_for`` means the latest operation of that
name issued so far, so a block that repeats can wait for what the block before it
prefetched. A collective over a group of one rank is not issued at all.

Sizes are arrays of shape (C,), one entry per candidate, float64 for bytes and
FLOPs; numbers stand for arrays that hold the same value everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from axonn_tune.spec.candidates import CandidateTable

Array: TypeAlias = npt.NDArray[np.float64]
# An array of shape (C,); a number stands for an array that holds the same value everywhere.
Size: TypeAlias = Array | float

MODES = ("NN", "NT", "TN")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
# Kernels limited by memory bandwidth, told apart by how much of it they reach.
MEMORY_KERNELS = (
    "copy",
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
    "rotary",
    "softmax",
    "softmax_backward",
)
COMPUTE, COMMUNICATION = "compute", "communication"


@dataclass(frozen=True, eq=False)
class Gemm:
    """An (m x k) times (k x n) product; `mode` says which operand is stored transposed."""

    name: str
    m: Size
    n: Size
    k: Size
    mode: str
    waits_for: tuple[str, ...] = ()
    stream: ClassVar[str] = COMPUTE

    @property
    def flops(self) -> Size:
        """2 m n k, shape (C,)."""
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True, eq=False)
class Attention:
    """Softmax attention over whole causal sequences with the rank's share of the heads."""

    name: str
    n_sequences: Size
    n_heads: Size
    seq_len: int
    head_dim: int
    backward: bool
    fused: bool
    waits_for: tuple[str, ...] = ()
    stream: ClassVar[str] = COMPUTE

    @property
    def flops(self) -> Size:
        """FLOPs by convention (full score matrix): 4 b s^2 a d forward, twice that backward."""
        forward = 4.0 * self.n_sequences * self.n_heads * (float(self.seq_len) ** 2 * self.head_dim)
        return forward * 2.0 if self.backward else forward


@dataclass(frozen=True, eq=False)
class MemoryBound:
    """A kernel limited by memory bandwidth; `kernel` says which of `MEMORY_KERNELS`."""

    name: str
    nbytes: Size  # read plus written
    kernel: str = "copy"
    waits_for: tuple[str, ...] = ()
    stream: ClassVar[str] = COMPUTE


@dataclass(frozen=True, eq=False)
class Collective:
    """A collective over the group of one grid axis.

    ``nbytes`` is the full buffer, as nccl-tests counts: the gathered result of an
    all-gather, the input of a reduce-scatter, the buffer of an all-reduce. It is moved
    in ``n_calls`` equal calls.
    """

    name: str
    kind: str
    nbytes: Size
    axis: str
    n_calls: Size = 1.0
    waits_for: tuple[str, ...] = ()
    stream: ClassVar[str] = COMMUNICATION


Operation: TypeAlias = Gemm | Attention | MemoryBound | Collective
Compute: TypeAlias = Gemm | Attention | MemoryBound


@dataclass(frozen=True, eq=False)
class Phase:
    """A sequence of operations that is issued `repeats` times in a row.

    `over_storage`: its kernels run, some at least, over what the rank stores (weights, gradients,
    optimizer states), not over the activations of a micro-batch.
    """

    name: str
    operations: tuple[Operation, ...]
    repeats: int = 1
    over_storage: bool = False


@dataclass(frozen=True, eq=False)
class Part:
    """Phases that are played one after another, from idle streams until all are idle again.

    The name is the same in the plans of all candidates of a strategy, and unique in each plan.
    """

    name: str
    phases: tuple[Phase, ...]


@dataclass(frozen=True, eq=False)
class Stage:
    """What a rank does with one micro-batch for one (virtual) stage of a pipeline."""

    forward: Part
    backward: Part

    @property
    def passes(self) -> tuple[Part, Part]:
        """The forward and the backward pass."""
        return (self.forward, self.backward)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Stages through which every micro-batch passes, with a transfer between neighbours.

    The very first and the very last virtual stage are `first` and `last`, all others are like
    `middle`. `sync` is the first stage once more, for a micro-batch next to which collectives
    bring new weights and reduce gradients; other ranks have time for their collectives while
    they wait for the first micro-batch, or for the last ranks to end.
    """

    n_stages: int
    n_virtual: int
    first: Stage
    middle: Stage
    last: Stage
    sync: Stage
    transfer: Collective

    @property
    def parts(self) -> Iterator[Part]:
        """Every part, that of the transfer last."""
        for stage in (self.first, self.middle, self.last, self.sync):
            yield from stage.passes
        yield Part("transfer", (Phase("transfer", (self.transfer,)),))


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One training step: the micro-step, `n_microsteps` times, then the step's end.

    Operations of one name are alike in the whole plan, so that each is priced once: kernels of one
    name have the same sizes, and so have collectives of one name over one group.

    All streams are idle at the end of each micro-step. If there is a `sync_microstep`, one
    micro-step of the step is replaced by it: it brings new weights and reduces gradients next to
    its computation. In a `pipeline` micro-batches overlap as its schedule says, and `microstep` is
    what the rank of the last stage does for one of them.
    """

    candidates: CandidateTable
    microstep: Part
    step_end: Part
    n_microsteps: Array  # shape (C,)
    sync_microstep: Part | None = None
    pipeline: Pipeline | None = None

    @property
    def parts(self) -> Iterator[Part]:
        """Every part of the plan; those of the stages of a pipeline come last."""
        yield self.microstep
        yield self.step_end
        if self.sync_microstep is not None:
            yield self.sync_microstep
        if self.pipeline is not None:
            yield from self.pipeline.parts

    @property
    def phases(self) -> Iterator[Phase]:
        """Every phase of every part."""
        for part in self.parts:
            yield from part.phases

    @property
    def operations(self) -> Iterator[Operation]:
        """Every operation of every phase."""
        for phase in self.phases:
            yield from phase.operations
