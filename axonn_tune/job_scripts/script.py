"""Write all files that start a configuration, by its framework."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from axonn_tune.errors import InputError
from axonn_tune.job_scripts import (
    axonn,
    deepspeed,
    fsdp2,
    megatron,
    megatron_fsdp,
    rank,
    sbatch,
    torchtitan,
)
from axonn_tune.job_scripts.differences import model_differences
from axonn_tune.job_scripts.framework import Start
from axonn_tune.spec.engine import Engine
from axonn_tune.spec.job import Job
from axonn_tune.spec.precision import FULL
from axonn_tune.spec.scenario import Scenario
from axonn_tune.spec.strategy import Strategy
from axonn_tune.step.prediction import Prediction

# Frameworks that run each strategy, the usual one first.
FRAMEWORKS = {
    "axonn": ("axonn",),
    "axonn-pipeline": ("axonn",),
    "megatron": ("megatron",),
    "zero1": ("deepspeed",),
    "zero2": ("deepspeed",),
    "zero3": ("fsdp2", "torchtitan", "deepspeed", "megatron-fsdp"),
    "zeropp": ("deepspeed",),
    "zero-topo": (),
}
_STARTS: dict[str, Callable[[Prediction, str | None], Start]] = {
    "axonn": axonn.start,
    "deepspeed": deepspeed.start,
    "fsdp2": fsdp2.start,
    "megatron": megatron.start,
    "megatron-fsdp": megatron_fsdp.start,
    "torchtitan": torchtitan.start,
}
# Frameworks that are not the usual ones of their strategies. The engine with the facts of each has
# its name.
_WITH_OWN_ENGINES = ("deepspeed", "torchtitan", "megatron-fsdp")
# Frameworks that build models with experts, latent attention, windows and norms of their own.
_WITH_OWN_MODELS = ("megatron", "megatron-fsdp", "torchtitan")
# Frameworks whose scripts train with products in low precisions.
_WITH_LOW_PRODUCTS = ("megatron", "megatron-fsdp")
# Frameworks whose scripts keep what modules save in the host's memory.
_WITH_OFFLOADED_MODULES = ("megatron", "megatron-fsdp")

# What trains adapters; no job script starts it.
_OF_ADAPTERS = "NeMo and Megatron-Bridge train adapters, from scripts of their own"


def engine_of(framework: str | None) -> str | None:
    """Return the engine by which layouts are chosen for a framework; None for the usual one."""
    return framework if framework in _WITH_OWN_ENGINES else None


def framework_of(strategy: Strategy, framework: str | None) -> str:
    """Return the framework that runs a strategy: the given one, its engine's, or the usual one.

    Raises
    ------
    InputError
        No released framework runs the strategy, or this one does not run it.
    """
    allowed = FRAMEWORKS.get(strategy.name, ())
    if not allowed:
        raise InputError(f"strategy {strategy.name} has no released implementation to launch")
    if framework is None:
        own = (each for each in allowed if _is_of(strategy.engine, each))
        return next(own, allowed[0])
    if framework not in allowed:
        raise InputError(
            f"--framework is '{framework}'; allowed with strategy {strategy.name}: "
            f"{', '.join(allowed)}"
        )
    return framework


def _is_of(engine: Engine, framework: str) -> bool:
    """Return whether an engine is a version of a framework, as its name begins with it."""
    return framework in (engine.name, engine.name.split("-")[0])


def _is_earlier(engine: Engine, framework: str) -> bool:
    """Return whether an engine is a version that the framework's script is too new for.

    Scripts for Megatron-LM need a release of 2026; its engines of earlier years name their year.
    """
    return framework == "megatron" and re.match(r"megatron-20\d\d\b", engine.name) is not None


def recomputes_in_part(strategy: Strategy, framework: str | None) -> bool:
    """Return whether what is started can recompute some layers only: torchtitan cannot."""
    return framework_of(strategy, framework) != "torchtitan"


def engine_warning(prediction: Prediction, framework: str | None) -> list[str]:
    """Return a sentence about times that are not those of what the script starts, or none."""
    strategy = prediction.scenario.strategy
    started = framework_of(strategy, framework)
    engine = strategy.engine
    is_earlier = _is_earlier(engine, started)
    if not engine.name or (_is_of(engine, started) and not is_earlier):
        return []
    program = "a Megatron-LM of 2026" if is_earlier else started
    return [f"The times are those of the engine {engine.name}; the script starts {program}."]


def model_warning(prediction: Prediction, framework: str | None, train: str | None) -> list[str]:
    """Return sentences about what is left out of the prediction, or trained otherwise."""
    started = framework_of(prediction.scenario.strategy, framework)
    return model_differences(prediction.scenario.model, started, train)


def launch_files(
    prediction: Prediction,
    framework: str | None = None,
    train: str | None = None,
    sbatch_options: Sequence[str] = (),
) -> dict[str, str]:
    """Return the text of every file by its name: the job script and what the framework reads.

    Parameters
    ----------
    framework : str or None
        See `framework_of`.
    train : str or None
        A training program that is started in place of the framework's own.
    sbatch_options : sequence of str
        Further options of sbatch, such as ``--account=abc``.

    Raises
    ------
    InputError
        No released framework runs the strategy, or this one does not run it.
    """
    framework = framework_of(prediction.scenario.strategy, framework)
    _require_built(prediction.scenario, framework)
    _require_started(prediction.scenario.job, framework)
    start = _STARTS[framework](prediction, train)
    differences = model_differences(prediction.scenario.model, framework, train)
    start = replace(start, remarks=(*start.remarks, *differences))
    return {
        sbatch.NAME: sbatch.job_script(prediction, start, sbatch_options),
        rank.NAME: rank.rank_script(start.rank_lines),
        **start.files,
    }


def _require_started(job: Job, framework: str) -> None:
    """Raise InputError if a framework has no options for what a job trains."""
    if job.recipe is not None and framework not in _WITH_LOW_PRODUCTS:
        raise InputError(
            f"job: precision is {job.precision}; allowed where a script of {framework} is written: "
            f"{FULL}"
        )
    if job.adapters is not None:
        raise InputError(
            f"--lora-rank {job.adapters.rank}: no job script is written for adapters, since "
            f"{framework} has no options for them; allowed where a script is written: a job that "
            f"trains all weights ({_OF_ADAPTERS})"
        )
    if job.frozen:
        raise InputError(
            f"--frozen {job.frozen}: {framework} has no options for frozen parts; allowed where a "
            "script is written: a job that trains all weights"
        )
    if job.offload_modules and framework not in _WITH_OFFLOADED_MODULES:
        raise InputError(
            f"--offload-modules {job.offload_modules}: {framework} has no options for it; allowed "
            "where a script is written: a job without"
        )
    if job.samples_per_sequence != 1.0:
        raise InputError(
            f"job: samples_per_sequence is {job.samples_per_sequence:g}; allowed where a script is "
            "written: 1"
        )


def _require_built(scenario: Scenario, framework: str) -> None:
    """Raise InputError if the program of a framework does not build the model.

    All have one norm before attention and one before the MLP. The programs that are written here
    have neither sliding windows nor norms of queries and keys.
    """
    model = scenario.model
    if model.norms_per_block != 2:
        raise InputError(
            f"model {model.name} has {model.norms_per_block} norms in each block; allowed where a "
            "script is written: 2"
        )
    engine = scenario.strategy.engine
    if engine.memory.tiles_mlp:
        raise InputError(
            f"engine {engine.name} computes MLPs in tiles, and the programs that are written here "
            f"do not; allowed: --engine {framework}"
        )
    special = model.special_parts(scenario.job.seq_len)
    if special and framework not in _WITH_OWN_MODELS:
        raise InputError(
            f"model {model.name} has {' and '.join(special)}; allowed where a script of "
            f"{framework} is written: a model without"
        )
