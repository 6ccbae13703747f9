"""The strategies that can be validated here, each as it is executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from axonn_tune.errors import InputError
from axonn_tune.search.search import Search
from axonn_tune.spec.engine import IDEAL, Engine
from axonn_tune.spec.layout import Axes
from axonn_tune.spec.model import RECOMPUTES
from axonn_tune.spec.strategy import Strategy
from axonn_tune.strategies.axonn.axonn4d import AXONN, Axonn4D
from axonn_tune.strategies.megatron.megatron3d import Megatron3D
from axonn_tune.strategies.zero.zero import zero3

# Torch's checkpoints stop before a block's last product.
_STOPPING = replace(IDEAL, recomputes_last_product=False)
# More elements than any bucket of gradients has.
_ALL_ELEMENTS = 2.0**62


@dataclass(frozen=True)
class RunnableStrategy:
    """A strategy as it is executed here.

    fixed_axes
        Axes that have a fixed size.
    recomputes
        Kinds of recomputation that are executed.
    """

    strategy: Strategy | str
    fixed_axes: Mapping[str, int]
    recomputes: tuple[str, ...] = ("none", "full")

    @property
    def axes(self) -> Axes:
        """The axes of the strategy."""
        return AXONN.axes if isinstance(self.strategy, str) else self.strategy.axes

    def search_of(self, search: Search) -> Search:
        """Return a search without the recomputation that is not executed, unless one is given."""
        is_given = len(search.recomputes) == 1
        recomputes = search.recomputes if is_given else self.recomputes
        return replace(search, recomputes=recomputes, partial_recompute=False)


def runnable_strategies() -> dict[str, RunnableStrategy]:
    """Return what can be validated here: AxoNN's grid, and two strategies through torch."""
    return {
        "axonn": RunnableStrategy(AXONN.name, {}, RECOMPUTES),
        "zero3": RunnableStrategy(zero3(_STOPPING), {"replica": 1}),
        "hsdp": RunnableStrategy(zero3(_STOPPING), {}),
        "megatron-tp": RunnableStrategy(_blocking_megatron(), {"context": 1, "pipeline": 1}),
    }


def _blocking_megatron(engine: Engine = IDEAL, has_experts: bool = False) -> Megatron3D:
    """Return Megatron-LM's strategy as torch's DTensor and Megatron-Core's local layers run it.

    There is no distributed optimizer, and sequence parallelism only with experts, which need it;
    reductions are not overlapped, and the accumulation of gradients is not fused.
    """
    return Megatron3D(
        sequence_parallel=has_experts,
        has_experts=has_experts,
        distributed_optimizer=False,
        overlap_grad_reduce=False,
        fused_accumulation=False,
        n_virtual=(1,),
        engine=engine,
    )


def _in_one_bucket(engine: Engine) -> Engine:
    """Return Megatron-Core as it reduces gradients after the backward pass, in one message."""
    return replace(engine, megatron=replace(engine.megatron, bucket_elements=_ALL_ELEMENTS))


def _by_matrix(engine: Engine) -> Engine:
    """Return DeepSpeed as it gathers a small model, for which its thresholds are lowered here."""
    return replace(engine, zero=replace(engine.zero, prefetch_elements=0.0))


def released_strategies(engine: Engine, has_experts: bool) -> dict[str, RunnableStrategy]:
    """Return what can be validated here through the package of an engine."""
    runnable_with = {
        "axonn": {"axonn": RunnableStrategy(Axonn4D(engine=engine), {})},
        "megatron-core": {
            "megatron": RunnableStrategy(
                _blocking_megatron(_in_one_bucket(engine), has_experts),
                {"context": 1, "pipeline": 1},
                ("none",),
            )
        },
        "deepspeed": {"zero3": RunnableStrategy(zero3(_by_matrix(engine)), {"replica": 1})},
    }
    known = runnable_with.get(engine.package, {})
    return {name: strategy for name, strategy in known.items() if name in engine.strategies}


def runnable(
    name: str | None, engine: Engine | None = None, has_experts: bool = False
) -> RunnableStrategy:
    """Return a strategy that can be validated here, by the name that users give it.

    Parameters
    ----------
    name : str or None
        The name; None for the first strategy that can be validated.
    engine : Engine, optional
        A released engine with a package, which carries it out instead of the runtime and torch.
    has_experts : bool
        Whether the model has experts.

    Raises
    ------
    InputError
        It is not executed here.
    """
    known = runnable_strategies() if engine is None else released_strategies(engine, has_experts)
    name = name or next(iter(known))
    if name not in known:
        through = "" if engine is None else f" with --engine {engine.name}"
        raise InputError(
            f"--strategy {name} cannot be run here{through}; allowed: {', '.join(known)}"
        )
    return known[name]
