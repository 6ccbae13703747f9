"""The strategies by the names that users know, with their switches."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.spec.checks import require_choice
from axonn_tune.spec.strategy import Strategy
from axonn_tune.strategies.axonn4d import Axonn4D
from axonn_tune.strategies.megatron3d import Megatron3D
from axonn_tune.strategies.zero import zero3, zero_topo, zeropp

STRATEGIES = {
    "axonn": "AxoNN's 4D grid",
    "axonn-pipeline": "AxoNN's 4D grid on each stage of a pipeline",
    "megatron": "Megatron-LM: tensor, context, pipeline and data parallelism",
    "zero3": "ZeRO-3 and FSDP; with replicas of the shards, hybrid sharding (HSDP)",
    "zeropp": "ZeRO++: quantised messages and a second copy of the weights",
    "zero-topo": "three levels: weights in a package, gradients in a node, states over all",
}


@dataclass(frozen=True)
class Switches:
    """What a strategy may do; those that do not have a switch ignore it.

    sequence_parallel, overlap_grad_reduce: of Megatron-LM. distributed_optimizer: shard optimizer
    states over the replicas; None for the strategy's default, which is on for Megatron-LM and off
    for AxoNN. virtual_stages: of each rank of a Megatron-LM pipeline; None tries 1, 2 and 4.
    qwz, hpz, qgz: the three parts of ZeRO++.
    """

    sequence_parallel: bool = True
    overlap_grad_reduce: bool = True
    distributed_optimizer: bool | None = None
    virtual_stages: int | None = None
    qwz: bool = True
    hpz: bool = True
    qgz: bool = True


def strategy_named(name: str, switches: Switches | None = None) -> Strategy:
    """A strategy with its switches.

    Raises
    ------
    InputError
        No strategy of that name.
    """
    require_choice("search", "strategy", name, tuple(STRATEGIES))
    on = switches or Switches()
    if name in ("axonn", "axonn-pipeline"):
        return Axonn4D(name == "axonn-pipeline", bool(on.distributed_optimizer))
    if name == "megatron":
        return Megatron3D(
            on.sequence_parallel,
            on.distributed_optimizer is not False,
            on.overlap_grad_reduce,
            n_virtual=(1, 2, 4) if on.virtual_stages is None else (on.virtual_stages,),
        )
    if name == "zeropp":
        return zeropp(on.qwz, on.hpz, on.qgz)
    return zero3() if name == "zero3" else zero_topo(on.qwz, on.qgz)
