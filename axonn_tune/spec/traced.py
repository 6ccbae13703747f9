"""What a profiler recorded of one rank: kernels and collectives, one by one."""

from __future__ import annotations

from dataclasses import dataclass

# Kinds of kernels; a collective has its own kind.
PRODUCT = "product"
ATTENTION = "attention"
ATTENTION_BACKWARD = "attention, backward"
OPTIMIZER = "optimizer"
MEMORY_BOUND = "memory-bound"
KERNELS = (PRODUCT, ATTENTION, ATTENTION_BACKWARD, OPTIMIZER, MEMORY_BOUND)
# A collective whose name does not say its kind.
UNKNOWN_COLLECTIVE = "collective"


@dataclass(frozen=True)
class TracedOperation:
    """A kernel or a collective that ran.

    name
        Name of the kernel, or of the operation where there are no kernels.
    kind
        One of the kinds of kernels of this module, or the kind of a collective.
    seconds
        Time from its start to its end; that of a collective includes the wait for other ranks.
    shape
        Sizes m, n and k of a product; empty where the trace does not say them.
    nbytes
        Full buffer of a collective, as a plan counts it. [bytes]
    n_ranks
        Number of ranks of a collective's group; 0 where the trace does not say it.
    group
        Description of a collective's group, such as ``mesh_tp``.
    """

    name: str
    kind: str
    seconds: float
    shape: tuple[int, ...] = ()
    nbytes: float = 0.0
    n_ranks: int = 0
    group: str = ""

    @property
    def is_collective(self) -> bool:
        """Whether ranks exchanged data."""
        return self.kind not in KERNELS


@dataclass(frozen=True)
class Trace:
    """The operations of one rank in some steps.

    operations
        All kernels and collectives of the trace.
    n_steps
        Number of steps that it covers.
    """

    operations: tuple[TracedOperation, ...]
    n_steps: int
