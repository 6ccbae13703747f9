"""What a comparison sets side by side: strategies, and the engines that carry them out.

Not every strategy says where the parts of every model lie.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from axonn_tune.errors import InputError
from axonn_tune.io.presets import list_engines, load_engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.model import Model
from axonn_tune.spec.scenario import Scenario
from axonn_tune.strategies.named import STRATEGIES, USUAL_ENGINES

# The strategies that say where experts and the products of latent attention lie.
_OF_ALL_MODELS = ("megatron", "zero3")
# The strategies that say where the parts lie that a job trains besides the model's layers.
_OF_ALL_JOBS = ("megatron",)
NOT_ASKED_FOR = (
    "which change the numerics or have no released implementation; --every-strategy compares "
    "them, too"
)


class Contender(NamedTuple):
    """A strategy, and the engine that carries it out; None for the usual one."""

    strategy: str
    engine: str | None

    @property
    def title(self) -> str:
        """The name under which a user knows it: the engine's, if one is named."""
        return self.engine or self.strategy


def strategies_of(model: Model, strategies: Sequence[str], is_special: bool = False) -> list[str]:
    """Return the given strategies without those that cannot predict a model or special parts."""
    placing = [name for name in strategies if name in _OF_ALL_MODELS or not model.placed_parts]
    return [name for name in placing if name in _OF_ALL_JOBS or not is_special]


def able_of(model: Model, contenders: Sequence[Contender], is_special: bool) -> list[Contender]:
    """Return the contenders without those whose strategy is known not to predict a model."""
    unable = set(STRATEGIES) - set(strategies_of(model, list(STRATEGIES), is_special))
    return [contender for contender in contenders if contender.strategy not in unable]


def with_precision(precision: str, strategies: Sequence[str]) -> list[str]:
    """Return the given strategies without those whose usual engine lacks a precision."""
    usual = {USUAL_ENGINES[name] for name in strategies}
    able = {engine for engine in usual if load_engine(engine).has_precision(precision)}
    return [name for name in strategies if USUAL_ENGINES[name] in able]


def left_out_of(
    scenario: Scenario, compared: Collection[str], wanted: Sequence[Contender]
) -> dict[str, list[str]]:
    """Return by reason the titles of the contenders whose strategies were not compared."""
    model, precision = scenario.model, scenario.job.precision
    missing = [contender for contender in wanted if contender.strategy not in compared]
    strategies = [contender.strategy for contender in missing]
    placing = strategies_of(model, strategies)
    special = scenario.job.special_parts
    training = strategies_of(model, placing, bool(special))
    able = with_precision(precision, training)
    parts, placers = " or ".join(model.placed_parts), ", ".join(_OF_ALL_MODELS)
    reasons = {
        NOT_ASKED_FOR: able,
        f"whose usual engine lacks products in {precision}": [n for n in training if n not in able],
        f"since {' and '.join(special)} is predicted for {', '.join(_OF_ALL_JOBS)} only": [
            name for name in placing if name not in training
        ],
        f"since models with {parts} are predicted for {placers} only": [
            name for name in strategies if name not in placing
        ],
    }
    return {
        reason: [contender.title for contender in missing if contender.strategy in names]
        for reason, names in reasons.items()
        if names
    }


def require_trained(job: Job, model: Model, strategy: str) -> None:
    """Raise InputError if a strategy does not predict what a job trains of a model."""
    if job.adapters is not None and model.latent_attention is not None:
        raise InputError(
            f"model {model.name} has latent attention; allowed with adapters: a model without"
        )
    is_beside_mlp = job.adapters is not None and job.adapters.n_beside(model.mlp_linears) > 0
    if model.experts is not None and is_beside_mlp:
        raise InputError(
            f"model {model.name} has experts, which have no adapters; allowed with --lora-rank: "
            "--lora-targets attention"
        )
    frozen = job.frozen
    if frozen.n_layers >= model.n_layers:
        raise InputError(
            f"--frozen {frozen}: model {model.name} has {model.n_layers} layers; allowed: fewer "
            "frozen layers"
        )
    if model.tied_embeddings and frozen.embedding != frozen.head:
        raise InputError(
            f"--frozen {frozen}: embedding and head of model {model.name} are one weight; allowed: "
            "both of them, or none"
        )
    if job.special_parts and strategy not in _OF_ALL_JOBS:
        raise InputError(
            f"--strategy {strategy} does not predict {' and '.join(job.special_parts)}; allowed: "
            f"{', '.join(_OF_ALL_JOBS)}"
        )


def require_predicted(model: Model, strategy: str) -> None:
    """Raise InputError if a strategy does not predict a model."""
    if not strategies_of(model, [strategy]):
        raise InputError(
            f"model {model.name} has {' and '.join(model.placed_parts)}: --strategy {strategy} "
            f"predicts only models without; allowed: {', '.join(_OF_ALL_MODELS)}"
        )


def contenders_of(
    strategies: Sequence[str], engines: str | None, is_named: bool
) -> tuple[list[Contender], dict[str, list[str]]]:
    """Return the strategies, or engines with the strategies that they carry out.

    Engines that carry out none of the strategies are returned besides, by the reason.

    Parameters
    ----------
    strategies : sequence of str
        Names of strategies.
    engines : str or None
        Names or files of engines with commas.
    is_named : bool
        Whether the user named the strategies. Otherwise an engine comes with the first strategy
        that it carries out.

    Raises
    ------
    InputError
        No engine carries out any of the strategies that the user named.
    """
    if engines is None:
        return [Contender(strategy, None) for strategy in strategies], {}
    contenders = []
    left_out: dict[str, list[str]] = {}
    for name in map(str.strip, engines.split(",")):
        carried_out = load_engine(name).strategies
        wanted = strategies if is_named else carried_out[:1]
        own = [strategy for strategy in carried_out if strategy in wanted]
        if not own:
            others = f"carries out {' and '.join(carried_out)}, not {' or '.join(wanted)}"
            left_out.setdefault(f"which {others}", []).append(name)
        contenders += [Contender(strategy, name) for strategy in own]
    if not contenders:
        refused = [
            f"engine {names[0]} {reason.removeprefix('which ')}"
            for reason, names in left_out.items()
        ]
        raise InputError("; ".join(refused))
    return contenders, left_out


def named_layout(text: str, usual: Contender) -> tuple[Contender, str]:
    """Return what carries out a layout, and the layout, of ``megatron:tensor=8,data=16``.

    In front of the colon stands a strategy or an engine; without one it is the usual contender.

    Raises
    ------
    InputError
        There is neither a strategy nor an engine of that name.
    """
    name, colon, layout = text.partition(":")
    if not colon:
        return usual, text
    name = name.strip()
    if name in STRATEGIES:
        return Contender(name, usual.engine), layout
    if name in list_engines():
        return Contender(load_engine(name).strategies[0], name), layout
    raise InputError(
        f"--grid {text[:40]}: strategy is '{name[:40]}'; allowed: {', '.join(STRATEGIES)}, "
        "or an engine that `engines list` shows"
    )
