"""What one rank's program did in a step that was rehearsed on fake tensors, and how often."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

# What holds memory. Tensors that belong to none of the others, such as tokens, are activations.
WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER_STATES = "optimizer_states"
GATHERED_WEIGHTS = "gathered_weights"
ACTIVATIONS = "activations"
HOLDERS = (WEIGHTS, GRADIENTS, OPTIMIZER_STATES, GATHERED_WEIGHTS, ACTIVATIONS)


@dataclass(frozen=True)
class Product:
    """A matrix product, or a batch of equal ones; `mode` is NN, NT or TN as in a step plan."""

    m: int
    n: int
    k: int
    mode: str
    dtype: str
    batch: int = 1

    @property
    def flops(self) -> float:
        """The FLOPs, 2 m n k for each product."""
        return 2.0 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True)
class FusedAttention:
    """A fused attention kernel over some sequences, of all heads of the rank."""

    n_sequences: int
    n_heads: int
    seq_len: int
    head_dim: int
    backward: bool
    causal: bool
    dtype: str

    @property
    def flops(self) -> float:
        """The FLOPs, by convention of the full score matrix, as in a step plan."""
        forward = 4.0 * self.n_sequences * self.n_heads * self.seq_len**2 * self.head_dim
        return forward * 2.0 if self.backward else forward


@dataclass(frozen=True)
class OtherKernel:
    """A kernel that is neither a product nor attention.

    name
        Torch's name of the operator.
    nbytes
        Bytes read plus bytes written.
    is_strided
        Whether it handles one element at a time, since it broadcasts an operand or reads a slice.
    """

    name: str
    nbytes: int
    dtype: str
    is_strided: bool = False


@dataclass(frozen=True)
class Message:
    """A collective.

    kind
        One of `spec.plan.KINDS`, or ``broadcast``.
    nbytes
        The full buffer, as nccl-tests counts.
    ranks
        The ranks of the group in ascending order.
    """

    kind: str
    nbytes: int
    dtype: str
    ranks: tuple[int, ...]

    @property
    def stride(self) -> int:
        """The distance in rank numbers between neighbours of the group, on average."""
        steps = max(len(self.ranks) - 1, 1)
        return max(math.floor((self.ranks[-1] - self.ranks[0]) / steps), 1)

    @property
    def ranks_text(self) -> str:
        """The ranks of the group in a few words."""
        if len(self.ranks) <= 3:
            return "ranks " + ", ".join(map(str, self.ranks))
        return f"{len(self.ranks)} ranks {self.ranks[0]}, {self.ranks[1]} .. {self.ranks[-1]}"


Rehearsed: TypeAlias = Product | FusedAttention | OtherKernel | Message


@dataclass(frozen=True)
class Rehearsal:
    """One step of one rank, or all that its script did.

    counts
        How often each operation was issued, in the order of the first issue.
    peak_bytes
        The most memory that tensors held at once during the step.
    held_bytes
        What held it then, by `HOLDERS`.
    n_ranks
        Number of ranks of the job.
    seconds
        How long the rehearsal took.
    is_one_step
        Whether one step alone was recorded, and not a whole script with its initialisation.
    """

    counts: Mapping[Rehearsed, int]
    peak_bytes: float
    held_bytes: Mapping[str, float]
    n_ranks: int
    seconds: float
    is_one_step: bool = True
