"""The groups of ranks over which a member of the ZeRO family shards its states."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """The groups over which states are sharded and messages sent; a group may be empty.

    Attributes
    ----------
    weights, gradients, states
        Groups whose ranks together hold the weights, the gradients and the optimizer states once.
        Where the first is empty, every rank keeps whole weights.
    reduced_over
        Groups over which gradients are reduced in a micro-step, one after the other.
    reduced_once
        Whether gradients are reduced only in the last micro-step of a step.
    copy
        Group whose ranks together hold a second copy of the weights, from which weights are
        gathered once the copy exists.
    replicas
        Group over which the shards of gradients are all-reduced: once in a step, or in every
        micro-step if the engine does so (`ZeroProgram.sums_replicas_each_step`).
    outer
        Group over which the shards of gradients are scattered once in a step.
    updated_over
        Group from which a rank gathers its weights once they are updated.
    """

    weights: str
    gradients: str
    states: str
    reduced_over: tuple[str, ...]
    reduced_once: bool = False
    copy: str = ""
    replicas: str = ""
    outer: str = ""
    updated_over: str = ""
