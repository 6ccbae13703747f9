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

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from axonn_tune.spec.grid import CandidateTable

Array: TypeAlias = npt.NDArray[np.float64]
Size: TypeAlias = Any  # a float, or an array of shape (C,)

MODES = ("NN", "NT", "TN")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
# Kernels limited by memory bandwidth, told apart by how much of it they reach.
MEMORY_KERNELS = (
    *("copy", "lookup", "add", "scale", "reduce", "scatter_add", "optimizer"),
    *("layer_norm", "layer_norm_backward", "rms_norm", "rms_norm_backward"),
    *("gelu", "gelu_backward", "swiglu", "swiglu_backward"),
    *("rotary", "softmax", "softmax_backward"),
)
COMPUTE, COMMUNICATION = "compute", "communication"
# AxoNN's backward pass lets this many weight gradients wait for their reduce-scatter while it
# forms another one. The plan derives its waits from it; the runtime holds that many buffers.
GRADIENTS_IN_FLIGHT = 2


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
class Stage:
    """What a rank does with one micro-batch for one (virtual) stage of a pipeline."""

    forward: tuple[Phase, ...]
    backward: tuple[Phase, ...]

    @property
    def parts(self) -> tuple[tuple[Phase, ...], ...]:
        """Forward and backward."""
        return (self.forward, self.backward)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Stages through which every micro-batch passes, with a transfer between neighbours.

    Of a rank's `n_virtual` stages all are `middle`, but the very first and the very last.
    sync: the first stage once more, for a micro-batch with the collectives that bring new
    weights and reduce gradients beside it. Other ranks have time for theirs while they wait
    for the first micro-batch, or for the last ranks to end.
    """

    n_stages: int
    n_virtual: int
    first: Stage
    middle: Stage
    last: Stage
    sync: Stage
    transfer: Collective


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One training step: the micro-step, `n_microsteps` times, then the step's end.

    Kernels of one name have the same sizes in all phases that are not `over_storage`.

    All streams are idle at the end of each micro-step. One of them is `sync_microstep`, if
    there is one: it brings new weights and reduces gradients beside its computation. In a
    `pipeline` micro-batches overlap as its schedule says, and `microstep` is what the rank of
    the last stage does for one of them.
    """

    candidates: CandidateTable
    microstep: tuple[Phase, ...]
    step_end: tuple[Phase, ...]
    n_microsteps: Array  # shape (C,)
    sync_microstep: tuple[Phase, ...] = ()
    pipeline: Pipeline | None = None

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """All phases in the order of issue; those of other stages come last."""
        return self.microstep + self.step_end + self.sync_microstep + self._of_stages

    @property
    def _of_stages(self) -> tuple[Phase, ...]:
        if self.pipeline is None:
            return ()
        p = self.pipeline
        stages = (p.first, p.middle, p.last, p.sync)
        transfer = Phase("transfer", (self.pipeline.transfer,))
        return (*(phase for stage in stages for part in stage.parts for phase in part), transfer)
