"""Rehearsals: one rank's real program on fake tensors, held against the plan or priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from axonn_tune.api.searching import ModelLike, build_search, loaded, loaded_machine
from axonn_tune.errors import InputError
from axonn_tune.io.presets import load_engine
from axonn_tune.options import REHEARSAL, defaults
from axonn_tune.search.one_layout import best_of_layout
from axonn_tune.search.search import Search
from axonn_tune.spec.checks import require_choice, require_count
from axonn_tune.spec.engine import IDEAL, Engine
from axonn_tune.spec.layout import PIPELINE
from axonn_tune.step.predict import predict
from axonn_tune.step.prediction import Prediction
from axonn_tune.step.rehearsed import PricedRehearsal, price

if TYPE_CHECKING:
    from axonn_tune.validation.rehearsed import RehearsedStep

# Micro-steps that a rehearsal has, unless it is of the whole step: the last one may differ from
# the others, and these are alike. A pipeline has one for each stage, so that it fills.
MOST_MICROSTEPS = 2
# The strategies, as `validate` names them, that the runtime or a package carries out as an engine
# does.
_OF_ENGINE = {
    "bundled": ("axonn",),
    "fsdp2": ("zero3", "hsdp"),
    "fsdp2-eager": ("zero3", "hsdp"),
    "megatron-core": ("megatron",),
}
# Those that a search knows by a name, too, so that it can choose their engine.
_NAMED = {"axonn": "axonn", "zero3": "zero3", "hsdp": "zero3"}


def rehearse(
    model: ModelLike,
    gpus: int,
    grid: str,
    whole_step: bool = False,
    stage: int = 0,
    **options: Any,
) -> tuple[Search, RehearsedStep]:
    """Rehearse a step of a configuration, and compare it with its plan and the memory model.

    Without a micro-batch and a recomputation, the best ones for the grid are taken.

    Parameters
    ----------
    whole_step
        Whether to rehearse all micro-steps.
    stage
        The stage of a pipeline of which a rank is rehearsed, counted from 0.
    options
        The options of a search, of which `options.REHEARSAL` has the names.

    Returns
    -------
    The search whose layout was rehearsed, and the comparison.

    Raises
    ------
    AxonnTuneError
        An option is wrong, or the program does not run in this configuration.
    """
    from axonn_tune.runtime.rehearsal.run import rehearse as rehearsed
    from axonn_tune.runtime.request import RunRequest
    from axonn_tune.validation.rehearsed import compare
    from axonn_tune.validation.rehearsed_stage import first_rank

    search = _search(model, gpus, {**defaults(REHEARSAL), **options})
    whole = best_of_layout(search, grid)
    rank = first_rank(whole.layout, stage)
    prediction = whole if whole_step else shortened(whole)
    strategy = prediction.scenario.strategy
    request = RunRequest(
        model=prediction.scenario.model,
        job=prediction.scenario.job,
        configuration=prediction.configuration,
        n_steps=1,
        device="cpu",
        quiet=True,
        strategy=strategy.name,
        engine=strategy.engine if strategy.engine.package else IDEAL,
    )
    return search, compare(prediction, rehearsed(request, rank), whole.n_microsteps, stage)


def _search(model: ModelLike, gpus: int, given: Mapping[str, Any]) -> Search:
    """Return the search of a strategy that the runtime carries out, with what it can do."""
    from axonn_tune.runtime.released.packages import installed_package
    from axonn_tune.runtime.request import require_built
    from axonn_tune.validation.runnable import runnable

    options = dict(given)
    spec = loaded(model)
    engine, strategy = options["engine"], options["strategy"]
    if engine is not None:
        require_choice("rehearse", "engine", engine, tuple(_OF_ENGINE))
        strategy = strategy or _OF_ENGINE[engine][0]
        if strategy not in _OF_ENGINE[engine]:
            allowed = " and ".join(_OF_ENGINE[engine])
            raise InputError(f"engine {engine} carries out {allowed}, not {strategy}")
    strategy = strategy or "axonn"
    released = _released(engine)
    require_built(spec, options["seq_len"], released or IDEAL)
    chosen = runnable(strategy, released, not spec.is_dense)
    if released is not None:
        options["dtype"] = options["dtype"] or installed_package(released).dtypes[0]
    if engine is None and strategy in _OF_ENGINE["fsdp2-eager"]:
        options["engine"] = "fsdp2-eager"  # as the program runs
    fixed_axes = dict(chosen.fixed_axes)
    if released is not None and released.package == "megatron-core":
        del fixed_axes[PIPELINE]  # of which one stage is rehearsed
    options |= {
        "strategy": _NAMED.get(strategy, chosen.strategy),
        "fix": fixed_axes,
        "kernel_tuning": False,
    }
    return chosen.search_of(build_search(**options | {"model": spec, "gpus": gpus}))


def _released(name: str | None) -> Engine | None:
    """Return the engine of a name if it trains through a package of its own."""
    engine = IDEAL if name is None else load_engine(name)
    return engine if engine.package else None


def shortened(prediction: Prediction) -> Prediction:
    """Return the prediction of the same step with as few micro-steps as tell all of it."""
    job = prediction.scenario.job
    per_microstep = job.global_batch // prediction.n_microsteps
    n_microsteps = min(prediction.n_microsteps, max(MOST_MICROSTEPS, prediction.layout.n_stages))
    short = replace(job, global_batch=n_microsteps * per_microstep)
    return predict(replace(prediction.scenario, job=short), prediction.configuration)


def rehearse_script(
    path: str, n_ranks: int, machine: str | None = None, arguments: Sequence[str] = ()
) -> PricedRehearsal:
    """Rehearse a step of a user's own training script, and price it on a machine.

    Parameters
    ----------
    arguments : sequence of str
        What the script finds in ``sys.argv`` after its own name.

    Raises
    ------
    AxonnTuneError
        The script fails, or the machine has no price for what it does.
    """
    from axonn_tune.runtime.rehearsal.script import rehearse_script as rehearsed

    require_count("rehearse", "ranks", n_ranks)
    return price(rehearsed(path, n_ranks, arguments), loaded_machine(machine))
