"""The switches of strategies, and which strategies have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import require_count
from axonn_tune.spec.schedule import ONE_F_ONE_B

_GRIDS = ("axonn", "axonn-pipeline")
_QUANTISING = ("zeropp", "zero-topo")
_GATHERING = ("zero3", *_QUANTISING)
# The strategies that have each switch.
_OWNERS: Mapping[str, tuple[str, ...]] = {
    "sequence_parallel": ("megatron",),
    "overlap_grad_reduce": (*_GRIDS, "megatron"),
    "oar": (*_GRIDS, "megatron"),
    "ors": (*_GRIDS, "zero1", "zero2", *_GATHERING),
    "oag": (*_GRIDS, *_GATHERING),
    "keep_gathered_weights": _GRIDS,
    "low_weights": ("megatron", "zero3"),
    "sends_once": ("megatron",),
    "overlaps_experts": ("megatron",),
    "overlaps_tensor": ("megatron", "zero3"),
    "distributed_optimizer": (*_GRIDS, "megatron"),
    "shard_gradients": (*_GRIDS, "megatron"),
    "reduces_once": ("zero3",),
    "split_experts": ("megatron",),
    "context_kind": (*_GRIDS, "megatron", "zero3"),
    "schedule": ("megatron",),
    "stage_layout": ("megatron",),
    "virtual_stages": ("megatron", "zero3"),
    "qwz": _QUANTISING,
    "hpz": ("zeropp",),
    "qgz": _QUANTISING,
}
# The switches that change nothing for a model without experts.
_OF_EXPERTS = ("sends_once", "overlaps_experts", "split_experts")


@dataclass(frozen=True)
class Switches:
    """The options of all strategies; a strategy ignores those that it does not have.

    Attributes
    ----------
    sequence_parallel, overlap_grad_reduce, low_weights, sends_once, overlaps_experts, \
    overlaps_tensor
        Flags of Megatron-LM, see `Megatron3D`; None for those of the engine.
    oar, ors, oag
        The overlaps of a job (`Overlap`); None for what its option ``overlap`` says.
    keep_gathered_weights
        Whether the backward pass reuses the weights that the forward pass gathered (`Job`).
    distributed_optimizer
        Whether optimizer states are sharded over the replicas; None for what the engine does, which
        is off for AxoNN.
    shard_gradients
        Whether gradients are sharded over the replicas, too, with optimizer states (ZeRO-2).
    reduces_once
        Whether only the last micro-step reduces gradients, for ZeRO-3; None for the engine's way.
    split_experts
        Whether each expert is split over the tensor group, and not whole; for Megatron-LM.
    context_kind
        Kind of context parallelism, one of `CONTEXT_KINDS`; None for that of the engine, which with
        AxoNN and with ZeRO-3 is none.
    schedule
        In which order the ranks of a Megatron-LM pipeline run their passes, one of `SCHEDULES`.
    stage_layout
        Layers of each virtual stage of a Megatron-LM pipeline; empty for as many in each.
    virtual_stages
        Number of virtual stages of each rank of a pipeline of Megatron-LM or torchtitan; None tries
        1, 2 and 4.
    qwz, hpz, qgz
        The three parts of ZeRO++: quantised weights, a second copy of the weights, quantised
        gradients.
    """

    sequence_parallel: bool | None = None
    overlap_grad_reduce: bool | None = None
    low_weights: bool | None = None
    sends_once: bool | None = None
    overlaps_experts: bool | None = None
    overlaps_tensor: bool | None = None
    oar: bool | None = None
    ors: bool | None = None
    oag: bool | None = None
    keep_gathered_weights: bool = False
    distributed_optimizer: bool | None = None
    shard_gradients: bool = False
    reduces_once: bool | None = None
    split_experts: bool = False
    context_kind: str | None = None
    schedule: str = ONE_F_ONE_B
    stage_layout: str = ""
    virtual_stages: int | None = None
    qwz: bool = True
    hpz: bool = True
    qgz: bool = True

    def __post_init__(self) -> None:
        if self.virtual_stages is not None:
            require_count("search", "virtual_stages", self.virtual_stages)


def foreign_switches(switches: Switches, strategy: str) -> list[str]:
    """Return the names of the switches that are set and that a strategy does not have.

    One virtual stage does not count, since it is what a rank without interleaving has.
    """
    return [
        field.name
        for field in fields(Switches)
        if getattr(switches, field.name) != field.default
        and strategy not in _OWNERS[field.name]
        and (field.name, getattr(switches, field.name)) != ("virtual_stages", 1)
    ]


def require_own(switches: Switches, strategies: Sequence[str]) -> None:
    """Raise InputError if a switch is set that none of some strategies has."""
    foreign = [foreign_switches(switches, strategy) for strategy in strategies]
    for name in foreign[0]:
        if all(name in of_strategy for of_strategy in foreign):
            raise InputError(
                f"{name} is {getattr(switches, name)}, which strategy {' or '.join(strategies)} "
                f"does not have; allowed with it: {', '.join(_OWNERS[name])}"
            )


def require_without_experts(model: str, switches: Switches, expert_imbalance: float) -> None:
    """Raise InputError if something is asked of experts, of which a model has none."""
    asked: dict[str, float] = {name: True for name in _OF_EXPERTS if getattr(switches, name)}
    if expert_imbalance != 1.0:
        asked["expert_imbalance"] = expert_imbalance
    for name, value in asked.items():
        raise InputError(
            f"{name} is {value}, and model {model} has no experts; allowed with it: a model with "
            "experts"
        )
