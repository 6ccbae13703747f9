"""The strategies by the names that users know, with their switches."""

from __future__ import annotations

from dataclasses import replace

from axonn_tune.errors import InputError
from axonn_tune.spec.checks import require_choice
from axonn_tune.spec.engine import IDEAL, Engine
from axonn_tune.spec.layout import ALIASES, EXPERT
from axonn_tune.spec.programs import BUCKETS, CONTEXT_KINDS
from axonn_tune.spec.schedule import DUALPIPE, ONE_F_ONE_B, SCHEDULES, ZB_H1
from axonn_tune.spec.stage_layout import layers_of_stages
from axonn_tune.spec.strategy import Strategy
from axonn_tune.strategies.axonn.axonn4d import Axonn4D
from axonn_tune.strategies.switches import Switches

STRATEGIES = {
    "axonn": "AxoNN's 4D grid",
    "axonn-pipeline": "AxoNN's 4D grid on each stage of a pipeline",
    "megatron": "Megatron-LM: tensor, context, pipeline and data parallelism",
    "zero1": "ZeRO-1: optimizer states over all ranks, as DeepSpeed's stage 1",
    "zero2": "ZeRO-2: gradients, too, as DeepSpeed's stage 2",
    "zero3": "ZeRO-3 and FSDP; with replicas of the shards, hybrid sharding (HSDP)",
    "zeropp": "ZeRO++: quantised messages and a second copy of the weights",
    "zero-topo": "three levels: weights in a package, gradients in a node, states over all",
}


# The engine that people usually run a strategy with.
USUAL_ENGINES = {
    "axonn": "bundled",
    "axonn-pipeline": "bundled",
    "megatron": "megatron-core",
    "zero1": "deepspeed",
    "zero2": "deepspeed",
    "zero3": "fsdp2",
    "zeropp": "deepspeed",
    "zero-topo": "deepspeed",
}


# The caveats of schedules that Megatron-Core does not have.
_CAVEATS = {
    ZB_H1: "Megatron-Core has no ZB-H1; sail-sg's fork of Megatron-LM does.",
    DUALPIPE: "Megatron-Core has no DualPipe; DeepSeek's own framework does.",
}
# The caveat of AxoNN's grids in a job that trains adapters.
_ADAPTERS_CAVEAT = "No release of AxoNN has adapters; its layers are predicted as if they had them."
# The strategies that can keep gradients and weights in the host's memory, as ZeRO does.
_ZERO_FAMILY = ("zero1", "zero2", "zero3", "zeropp", "zero-topo")


def names_of_all(switches: Switches, every: bool, has_adapters: bool = False) -> list[str]:
    """Return the strategies that ``all`` stands for: those without a caveat, or every one."""
    # Caveats depend on these switches only. An engine, which is not known here, might refuse
    # others.
    told = Switches(
        schedule=switches.schedule, qwz=switches.qwz, hpz=switches.hpz, qgz=switches.qgz
    )
    return [
        name
        for name in STRATEGIES
        if every or not with_caveat(strategy_named(name, told), has_adapters).caveat
    ]


def with_caveat(strategy: Strategy, has_adapters: bool) -> Strategy:
    """Return a strategy that says so if a job trains adapters, and no release of it can."""
    if has_adapters and isinstance(strategy, Axonn4D):
        return replace(strategy, caveat=_ADAPTERS_CAVEAT)
    return strategy


def names_of_axes() -> tuple[str, ...]:
    """Return the axes of all strategies, and the short names that users give to some of them."""
    axes = (axis for name in STRATEGIES for axis in strategy_named(name).axes.names)
    return tuple(dict.fromkeys((*axes, EXPERT, *ALIASES)))


def strategy_named(
    name: str,
    switches: Switches | None = None,
    engine: Engine = IDEAL,
    has_experts: bool = False,
) -> Strategy:
    """Return the strategy with the given name and switches, as an engine carries it out.

    With experts in the model, layouts of megatron and zero3 have an axis for them.

    Raises
    ------
    InputError
        No strategy has the name, or the engine carries out another one.
    """
    require_choice("search", "strategy", name, tuple(STRATEGIES))
    if engine is not IDEAL and name not in engine.strategies:
        carried_out = " and ".join(engine.strategies)
        raise InputError(f"engine {engine.name} carries out {carried_out}, not {name}")
    _check_offload(name, engine)
    switches = switches or Switches()
    _check_sharding(switches, engine)
    if switches.context_kind is not None:
        require_choice("search", "context_kind", switches.context_kind, CONTEXT_KINDS)
    require_choice("search", "schedule", switches.schedule, SCHEDULES)
    if name in ("axonn", "axonn-pipeline"):
        return Axonn4D(
            pipelined=name == "axonn-pipeline",
            sharded_optimizer=bool(switches.distributed_optimizer) or switches.shard_gradients,
            sharded_gradients=switches.shard_gradients,
            context_kind=switches.context_kind or "",
            engine=engine,
        )
    if name == "megatron":
        return _megatron(switches, engine, has_experts)
    return _zero_named(name, switches, engine, has_experts)


def _megatron(switches: Switches, engine: Engine, has_experts: bool) -> Strategy:
    """Return Megatron-LM's strategy; see `strategy_named`."""
    _check_low_weights(switches)
    # Only strategies other than AxoNN's need this import, which takes 8 ms.
    from axonn_tune.strategies.megatron.megatron3d import megatron_of

    return megatron_of(
        engine,
        _numbers_of_virtual_stages(switches),
        has_experts=has_experts,
        splits_experts=has_experts and switches.split_experts,
        sequence_parallel=switches.sequence_parallel,
        distributed_optimizer=switches.shard_gradients or switches.distributed_optimizer,
        shards_gradients=switches.shard_gradients,
        overlap_grad_reduce=switches.overlap_grad_reduce,
        low_weights=switches.low_weights,
        sends_once=switches.sends_once,
        overlaps_experts=switches.overlaps_experts,
        overlaps_tensor=switches.overlaps_tensor,
        context_kind=switches.context_kind,
        schedule=switches.schedule,
        stage_layout=switches.stage_layout,
        caveat=_CAVEATS.get(switches.schedule, ""),
    )


def _zero_named(name: str, switches: Switches, engine: Engine, has_experts: bool) -> Strategy:
    """Return one of the strategies that shard what a rank keeps; see `strategy_named`."""
    from axonn_tune.strategies.zero.zero import zero1, zero2, zero3, zero_topo, zeropp

    if name == "zero1":
        return zero1(engine)
    if name == "zero2":
        return zero2(engine)
    if name == "zeropp":
        return zeropp(switches.qwz, switches.hpz, switches.qgz, engine)
    if name == "zero-topo":
        return zero_topo(switches.qwz, switches.qgz, engine)
    if has_experts and not engine.zero.is_fsdp2:
        raise InputError(
            f"engine {engine.name} does not spread experts over ranks; allowed for a model with "
            "experts: an engine of FSDP2, or --strategy megatron"
        )
    if switches.reduces_once is not None:
        engine = _reducing_once(engine, switches.reduces_once)
    context_kind = _context_kind_of_zero3(switches, engine)
    if switches.overlaps_tensor and not engine.zero.splits_layers:
        raise InputError(
            f"engine {engine.name or 'ideal'} splits no layers; allowed with --overlaps-tensor: an "
            "engine of torchtitan, or --strategy megatron"
        )
    if switches.low_weights and (has_experts or not engine.zero.gathers_low):
        raise InputError(
            f"engine {engine.name or 'ideal'} gathers weights in the job's type; allowed with "
            "--low-weights: torchtitan-2024 or torchtitan-2025 and a model without experts, or "
            "--strategy megatron"
        )
    return zero3(
        engine,
        has_experts,
        context_kind,
        bool(switches.overlaps_tensor),
        _numbers_with_1f1b(switches.virtual_stages),
        bool(switches.low_weights),
    )


def _reducing_once(engine: Engine, reduces_once: bool) -> Engine:
    """Return the engine with gradients that are reduced once in a step, or in every micro-step."""
    if reduces_once and not engine.zero.is_fsdp2:
        raise InputError(
            f"engine {engine.name or 'ideal'} reduces gradients in every micro-step; allowed with "
            "--reduces-once: an engine of FSDP2"
        )
    return replace(engine, zero=replace(engine.zero, reduces_once=reduces_once))


def _context_kind_of_zero3(switches: Switches, engine: Engine) -> str:
    """Return the kind of context parallelism that the switches ask for; empty for none."""
    wanted = switches.context_kind or ""
    if wanted not in ("", engine.zero.context_kind):
        allowed = engine.zero.context_kind or "none, or --strategy megatron"
        raise InputError(
            f"context_kind is '{wanted}'; allowed with engine {engine.name or 'ideal'}: {allowed}"
        )
    return wanted


def _numbers_of_virtual_stages(switches: Switches) -> tuple[int, ...]:
    """Return the numbers of virtual stages that a search tries; only 1F1B has more than one."""
    stages = switches.virtual_stages
    n_parts = len(layers_of_stages(switches.stage_layout))
    if switches.schedule == ONE_F_ONE_B and stages is None and n_parts:
        return tuple(number for number in range(1, n_parts + 1) if n_parts % number == 0)
    if switches.schedule == ONE_F_ONE_B:
        return _numbers_with_1f1b(stages)
    if stages not in (None, 1):
        raise InputError(
            f"virtual_stages is {stages}; allowed with --schedule {switches.schedule}: 1"
        )
    return (1,)


def _numbers_with_1f1b(stages: int | None) -> tuple[int, ...]:
    """Return the numbers of virtual stages that a search with 1F1B tries."""
    return (1, 2, 4) if stages is None else (stages,)


def _check_sharding(switches: Switches, engine: Engine) -> None:
    """Raise InputError if gradients cannot be sharded as the switches and the engine want."""
    if not switches.shard_gradients:
        return
    if switches.distributed_optimizer is False:
        raise InputError(
            "--shard-gradients shards optimizer states, too; leave out --no-distributed-optimizer"
        )
    if engine.axonn.reduction != BUCKETS:
        raise InputError(
            f"--shard-gradients: engine {engine.name} reduces whole gradients at the end of a "
            "step; allowed: --engine bundled"
        )


def _check_low_weights(switches: Switches) -> None:
    """Raise InputError if Megatron-Core would not store weights in a low format only."""
    if switches.low_weights and switches.distributed_optimizer is False:
        raise InputError(
            "--low-weights stores weights in a low format with the distributed optimizer only; "
            "leave out --no-distributed-optimizer"
        )


def _check_offload(name: str, engine: Engine) -> None:
    """Raise InputError if a strategy cannot keep in the host's memory what its engine does."""
    if engine.offload is not None and engine.offload.gradients and name not in _ZERO_FAMILY:
        raise InputError(
            f"engine {engine.name}: offload.gradients is true; allowed: only for "
            f"{', '.join(_ZERO_FAMILY)}"
        )
