"""The strategies by the names that users know, with their switches."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.spec.checks import require_choice
from axonn_tune.spec.strategy import Strategy
from axonn_tune.strategies.axonn4d import Axonn4D
from axonn_tune.strategies.axonn_engine import ENGINES
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
    """The options of all strategies; a strategy ignores options that it does not have.

    Attributes
    ----------
    sequence_parallel, overlap_grad_reduce
        Flags of Megatron-LM; see `Megatron3D`.
    distributed_optimizer
        Whether optimizer states are sharded over the replicas; None for the strategy's default,
        which is on for Megatron-LM and off for AxoNN.
    virtual_stages
        Number of virtual stages of each rank of a Megatron-LM pipeline; None tries 1, 2 and 4.
    engine
        Implementation of AxoNN's algorithm, a key of `axonn_engine.ENGINES`.
    qwz, hpz, qgz
        The three parts of ZeRO++: quantised weights, a second copy of the weights, quantised
        gradients.
    """

    sequence_parallel: bool = True
    overlap_grad_reduce: bool = True
    distributed_optimizer: bool | None = None
    virtual_stages: int | None = None
    engine: str = "bundled"
    qwz: bool = True
    hpz: bool = True
    qgz: bool = True


def names_of_all(switches: Switches, every: bool) -> list[str]:
    """Return the strategies that ``all`` stands for: those without a caveat, or every one."""
    return [name for name in STRATEGIES if every or not strategy_named(name, switches).caveat]


def strategy_named(name: str, switches: Switches | None = None) -> Strategy:
    """Return the strategy with the given name and switches.

    Raises
    ------
    InputError
        No strategy, or no engine, has the name.
    """
    require_choice("search", "strategy", name, tuple(STRATEGIES))
    switches = switches or Switches()
    require_choice("search", "engine", switches.engine, tuple(ENGINES))
    if name in ("axonn", "axonn-pipeline"):
        return Axonn4D(
            pipelined=name == "axonn-pipeline",
            sharded_optimizer=bool(switches.distributed_optimizer),
            engine=ENGINES[switches.engine],
        )
    if name == "megatron":
        stages = switches.virtual_stages
        return Megatron3D(
            sequence_parallel=switches.sequence_parallel,
            distributed_optimizer=switches.distributed_optimizer is not False,
            overlap_grad_reduce=switches.overlap_grad_reduce,
            n_virtual=(1, 2, 4) if stages is None else (stages,),
        )
    if name == "zeropp":
        return zeropp(switches.qwz, switches.hpz, switches.qgz)
    if name == "zero-topo":
        return zero_topo(switches.qwz, switches.qgz)
    return zero3()
